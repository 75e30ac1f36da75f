"""Full blocks of answers go to the kvstores."""

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.keys import block_keys
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.fakes import LAYOUT, ROOT, STORE, FakeStore, served
from tests.unit.engine.decode.calls import conducting, reserve, transfer
from tests.unit.fakes.engine import continuation, slice_of_tokens
from tests.unit.instances import BLOCK, decoding, prompt, spec


@pytest.mark.parametrize("length", [5, BLOCK - 1, BLOCK + 4])
async def test_answer_goes_to_the_store(length: int) -> None:
    """All full blocks with tokens of the answer are stored, also behind a prompt shorter than a block."""
    tokens, store = prompt(length), FakeStore()
    answer = continuation(tokens, 2 * BLOCK)
    async with served((STORE, store)) as (_, address), decoding() as decode, conducting(decode) as conductor:
        place = kv_pb2.Instance(id="store", epoch=1, address=address)
        target = await reserve(decode, spec("a", tokens, max_tokens=2 * BLOCK), write_back=place)
        await transfer(decode, target, tokens)
        await conductor.start("a", target, answer[0])
        await conductor.until(lambda: "a" in conductor.reasons)
        await decode.rest()
        everything = [*tokens, *answer]
        keys = [ROOT, *block_keys(ROOT, everything[:-1], BLOCK)]
        new = range(length // BLOCK, len(everything[:-1]) // BLOCK)
        assert len(new) == 2
        assert store.parents == {keys[index + 1]: keys[index] for index in new}
        assert set(store.blocks) == set(store.parents)
        for index in new:
            for layer in range(LAYOUT.layers):
                assert store.blocks[keys[index + 1]][layer] == bytes(slice_of_tokens(everything, index, layer))
        assert decode.service.write_back.blocks_stored == 2


async def test_answer_goes_to_every_copy() -> None:
    """A store that cannot be reached costs the other one nothing."""
    tokens, store = prompt(BLOCK), FakeStore()
    async with served((STORE, store)) as (_, address), decoding() as decode, conducting(decode) as conductor:
        lost = kv_pb2.Instance(id="lost", epoch=1, address="127.0.0.1:1")
        place = kv_pb2.Instance(id="store", epoch=1, address=address)
        target = await reserve(decode, spec("a", tokens, max_tokens=BLOCK + 2), write_back=lost, replicas=[place])
        await transfer(decode, target, tokens)
        await conductor.start("a", target, 9)
        await conductor.until(lambda: "a" in conductor.reasons)
        await decode.rest()
        assert (decode.service.write_back.blocks_stored, decode.service.write_back.blocks_dropped) == (1, 1)
        with pytest.raises(InvalidRequest, match=r"replicas\[0\]\.address"):
            await reserve(decode, spec("b", tokens), replicas=[kv_pb2.Instance(id="x", epoch=1)])


async def test_a_store_that_cannot_be_reached_costs_dropped_blocks_only() -> None:
    tokens = prompt(BLOCK)
    async with decoding() as decode, conducting(decode) as conductor:
        place = kv_pb2.Instance(id="store", epoch=1, address="127.0.0.1:1")
        target = await reserve(decode, spec("a", tokens, max_tokens=BLOCK + 2), write_back=place)
        await transfer(decode, target, tokens)
        await conductor.start("a", target, 9)
        await conductor.until(lambda: "a" in conductor.reasons)
        await decode.rest()
        assert decode.service.write_back.blocks_dropped == 1
