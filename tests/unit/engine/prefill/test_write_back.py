"""New full blocks go to the kvstores."""

import asyncio

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.keys import block_keys
from moonpool.base.scheduling.steps import Step
from moonpool.v1 import kv_pb2, prefill_pb2
from tests.unit.base.transport.fakes import LAYOUT, ROOT
from tests.unit.engine.prefill.calls import begin, source, storing
from tests.unit.fakes.engine import slice_of_tokens
from tests.unit.instances import BLOCK, prefilling, prompt, spec


async def test_new_blocks_are_stored() -> None:
    """What was computed goes to the store, what was loaded or cached does not."""
    tokens = prompt(4 * BLOCK + 3)
    keys = block_keys(ROOT, tokens, BLOCK)
    async with storing(tokens[: 2 * BLOCK]) as (store, place), prefilling() as prefill:
        story = await begin(prefill, spec("a", tokens, max_tokens=1), source=source(place, 2), write_back=place)
        assert (await story.to_the_end()).loaded_tokens == 2 * BLOCK
        await prefill.rest()
        assert set(store.blocks) == set(keys)
        assert store.parents == {keys[2]: keys[1], keys[3]: keys[2]}
        for index in (2, 3):
            for layer in range(LAYOUT.layers):
                assert store.blocks[keys[index]][layer] == bytes(slice_of_tokens(tokens, index, layer))


async def test_every_copy_is_filled_up_from_what_its_store_holds() -> None:
    """The source gets what was computed; a store that holds less gets what was loaded, too, and what was cached."""
    tokens = prompt(4 * BLOCK + 3)
    keys = block_keys(ROOT, tokens, BLOCK)
    async with (
        storing(tokens[: 2 * BLOCK]) as (store, place),
        storing(tokens[:BLOCK]) as (other, replica),
        storing() as (late, new),
        prefilling() as prefill,
    ):
        replica.id, new.id = "replica", "new"
        copies = [prefill_pb2.StoreReplica(instance=replica, held_blocks=1)]
        sequence = spec("a", tokens, max_tokens=1)
        story = await begin(
            prefill, sequence, source=source(place, 2), write_back=place, write_back_held=2, replicas=copies
        )
        assert (await story.to_the_end()).loaded_tokens == 2 * BLOCK
        await prefill.rest()
        assert set(store.blocks) == set(other.blocks) == set(keys)
        assert store.parents == {keys[2]: keys[1], keys[3]: keys[2]}
        assert other.parents == {keys[1]: keys[0], **store.parents}
        assert prefill.service.write_back.blocks_stored == 5
        story = await begin(prefill, spec("b", tokens, max_tokens=1), write_back=new, write_back_held=0)
        assert (await story.to_the_end()).local_tokens == 4 * BLOCK
        await prefill.rest()
        assert set(late.blocks) == set(keys)


async def test_it_begins_with_the_first_full_blocks() -> None:
    """While the second step of a prompt waits, the blocks of the first one are in the store."""
    tokens = prompt(4 * BLOCK + 3)
    keys = block_keys(ROOT, tokens, BLOCK)
    async with storing() as (store, place), prefilling() as prefill:
        reached, go = asyncio.Event(), asyncio.Event()

        async def before(step: Step, layer: int) -> None:
            if step.sequences[0].start:
                reached.set()
                await go.wait()

        prefill.engine.before_layer = before
        story = await begin(prefill, spec("a", tokens, max_tokens=1), write_back=place)
        await reached.wait()
        await store.until(lambda: set(store.blocks) == set(keys[:2]))
        assert story.token is None
        go.set()
        await story.to_the_end()
        await prefill.rest()
        assert set(store.blocks) == set(keys)
        assert prefill.service.write_back.blocks_stored == 4


async def test_too_many_stores_and_stores_without_address_are_refused() -> None:
    async with prefilling() as prefill:
        place = kv_pb2.Instance(id="store", epoch=1, address="127.0.0.1:1")
        sequence = spec("a", prompt(5), max_tokens=1)
        with pytest.raises(InvalidRequest, match="replicas: at most 16"):
            await begin(prefill, sequence, replicas=[prefill_pb2.StoreReplica(instance=place)] * 17)
        with pytest.raises(InvalidRequest, match=r"other_sources\[1\]\.instance\.address"):
            await begin(
                prefill, sequence, other_sources=[source(place, 1), source(kv_pb2.Instance(id="x", epoch=1), 1)]
            )


async def test_write_back_is_bounded() -> None:
    """A store that does not answer costs dropped blocks, nothing else."""
    async with storing() as (store, place), prefilling(write_back_blocks=2) as prefill:
        store.acks = False
        for number in range(3):
            await (
                await begin(prefill, spec("a", prompt(2 * BLOCK, number), max_tokens=1), write_back=place)
            ).to_the_end()
        assert prefill.service.write_back.blocks_held == 2
        assert prefill.service.write_back.blocks_dropped == 4
        store.break_now.set()
        await prefill.rest()
        assert prefill.service.write_back.blocks_dropped == 6
