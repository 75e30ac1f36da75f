"""Whole prompts at decode: what is loaded, written back and told beside the tokens."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from moonpool.base.contracts import logprobs_from_proto
from moonpool.base.kv.keys import block_keys, tokens_to_bytes
from moonpool.v1 import kv_pb2
from tests.unit.base.transport.fakes import ROOT
from tests.unit.engine.decode.calls import Conductor, conducting, reserve
from tests.unit.engine.decode.test_resume import SECRET, resume
from tests.unit.engine.prefill.calls import source, storing
from tests.unit.fakes.engine import continuation, scores_of
from tests.unit.instances import BLOCK, WAIT_S, Decode, decoding, prompt, spec

BOTH: dict[str, Any] = {"computes_prompts": True}


async def answered(decode: Decode, conductor: Conductor, name: str, tokens: Sequence[int], **fields: Any) -> None:
    """A request from its reservation to its end; the answer is the right one."""
    stores = {"write_back": fields.pop("write_back")} if "write_back" in fields else {}
    target = await reserve(decode, spec(name, tokens, max_tokens=3), computes_prompt=True, **stores)
    await conductor.compute(name, target, **fields)
    await conductor.until(lambda: name in conductor.reasons)
    assert conductor.tokens[name] == continuation(tokens, 3)


async def test_a_prefix_comes_from_the_store() -> None:
    tokens = prompt(4 * BLOCK + 3)
    async with storing(tokens) as (_, place), decoding(**BOTH) as decode, conducting(decode) as conductor:
        await answered(decode, conductor, "a", tokens, sources=[source(place, 4)])
        told = conductor.prompts["a"]
        assert (told.local_tokens, told.loaded_tokens, told.computed_tokens) == (0, 4 * BLOCK, 3)
        [load], [chunk], [read] = told.loads, told.chunks, told.reads
        assert (load.tokens, chunk.tokens, read.blocks, read.source.id) == (4 * BLOCK, 3, 4, place.id)
        assert 0 <= load.begin_s <= load.end_s <= chunk.end_s
        await decode.rest()
        assert decode.service.core.planner.loads.loaded_blocks == 4


async def test_what_the_store_has_lost_is_computed_and_told() -> None:
    tokens = prompt(4 * BLOCK + 3)
    async with storing(tokens[: 2 * BLOCK]) as (_, place), decoding(**BOTH) as decode, conducting(decode) as conductor:
        await answered(decode, conductor, "a", tokens, sources=[source(place, 4)])
        told = conductor.prompts["a"]
        assert told.loaded_tokens + told.computed_tokens == len(tokens)
        assert [(miss.store.id, miss.block) for miss in told.misses] == [(place.id, 2)]
        await decode.rest()


async def test_a_store_that_is_gone_costs_nothing_but_time() -> None:
    tokens = prompt(4 * BLOCK + 3)
    nobody = kv_pb2.Instance(id="gone", epoch=1, kind=kv_pb2.INSTANCE_KIND_KVSTORE, address="127.0.0.1:1")
    async with decoding(**BOTH) as decode, conducting(decode) as conductor:
        await answered(decode, conductor, "a", tokens, sources=[source(nobody, 4)])
        assert conductor.prompts["a"].computed_tokens == len(tokens)
        assert decode.service.core.planner.loads.sources.failures == 1
        await decode.rest()


async def test_a_prefix_comes_from_another_instances_pool() -> None:
    tokens = prompt(4 * BLOCK + 3)
    async with decoding(**BOTH) as peer, conducting(peer) as first:
        await answered(peer, first, "a", tokens)
        async with decoding(epoch=12, **BOTH) as decode, conducting(decode) as conductor:
            await answered(decode, conductor, "b", tokens, sources=[source(peer.instance, 4)])
            told = conductor.prompts["b"]
            assert (told.loaded_tokens, told.computed_tokens) == (4 * BLOCK, 3)
            await decode.rest()
        await peer.rest()


async def test_a_cancelled_load_gives_its_blocks_back() -> None:
    tokens = prompt(4 * BLOCK + 3)
    async with storing(tokens) as (store, place), decoding(**BOTH) as decode, conducting(decode) as conductor:
        asked, go = asyncio.Event(), asyncio.Event()

        async def before(_: int) -> None:
            asked.set()
            await go.wait()

        store.before_layer = before
        target = await reserve(decode, spec("a", tokens), computes_prompt=True)
        await conductor.compute("a", target, sources=[source(place, 4)])
        await asked.wait()
        await conductor.cancel("a", target)
        await conductor.until(lambda: "a" in conductor.outcomes)
        await decode.rest()
        go.set()
        assert decode.service.manager.num_used == 0


@pytest.mark.parametrize(("held", "written"), [([], 2), ([2], 2), ([0], 4), ([4], 2)])
async def test_blocks_go_to_the_store_that_lacks_them(held: list[int], written: int) -> None:
    """What was cached here is presumed to be there where nobody knows; what is computed always goes there."""
    tokens = prompt(4 * BLOCK + 3)
    async with storing() as (store, place), decoding(**BOTH) as decode, conducting(decode) as conductor:
        await answered(decode, conductor, "warm", tokens[: 2 * BLOCK + 1])
        await answered(decode, conductor, "a", tokens, write_back=place, held_blocks=held)
        await decode.rest()
        await decode.service.write_back.idle(WAIT_S)
        keys = block_keys(ROOT, tokens, BLOCK)
        assert store.blocks.keys() & set(keys) == set(keys[4 - written :])


@pytest.mark.parametrize("flags", [{}, {"chunked_prefill_size": 7}])
async def test_log_probabilities_of_the_prompt(flags: dict[str, Any]) -> None:
    """Each token is computed, whatever is cached, in small chunks beside an answer."""
    tokens = prompt(3 * BLOCK + 2)
    async with decoding(**BOTH, **flags) as decode, conducting(decode) as conductor:
        await answered(decode, conductor, "warm", tokens)
        for name in ("running", "a"):
            asked = spec(name, prompt(9, 5) if name == "running" else tokens, max_tokens=40 if name == "running" else 3)
            if name == "a":
                asked.sampling.prompt_logprobs = 0
            target = await reserve(decode, asked, computes_prompt=True)
            await conductor.compute(name, target)
            await conductor.until(lambda name=name: name in conductor.tokens)  # type: ignore[misc]
        await conductor.until(lambda: {"a", "running"} <= conductor.reasons.keys())
        assert conductor.tokens["a"] == continuation(tokens, 3)
        told = conductor.prompts["a"]
        assert (told.local_tokens, told.computed_tokens) == (0, len(tokens))
        assert logprobs_from_proto(told.prompt_logprobs) == scores_of(tokens_to_bytes(tokens[1:]))
        await decode.rest()


async def test_an_embedding_comes_with_the_one_token() -> None:
    tokens = prompt(2 * BLOCK)
    async with decoding(**BOTH) as decode, conducting(decode) as conductor:
        found = []
        for name in "ab":
            asked = spec(name, tokens, max_tokens=1)
            asked.sampling.embedding = True
            target = await reserve(decode, asked, computes_prompt=True)
            await conductor.compute(name, target)
            await conductor.until(lambda name=name: name in conductor.reasons)  # type: ignore[misc]
            found.append(conductor.prompts[name].embedding)
        assert found[0] == found[1] != b""
        await decode.rest()


async def test_the_next_conductor_hears_how_the_prompt_was_computed() -> None:
    """The first one is lost before the first token."""
    tokens = prompt(3 * BLOCK)
    async with decoding(**BOTH) as decode:
        reached, go = decode.engine.hold()
        async with conducting(decode, "first") as first:
            who = kv_pb2.Instance(id="first")
            fields = {"conductor": who, "resume_secret": SECRET, "computes_prompt": True}
            target = await reserve(decode, spec("a", tokens, max_tokens=3), **fields)
            await first.compute("a", target)
            await reached.wait()
        await decode.until(lambda: len(decode.service.core.orphans) == 1)
        async with conducting(decode, "second") as second:
            await resume(second, target, [])
            await decode.until(lambda: not len(decode.service.core.orphans))
            go.set()
            await second.until(lambda: "a" in second.reasons)
            assert second.tokens["a"] == continuation(tokens, 3)
            assert second.prompts["a"].computed_tokens == len(tokens)
        await decode.rest()
