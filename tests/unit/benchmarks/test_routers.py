"""The race of routers: its servers cache as vLLM does and tell so, its requests are the trace's, its rows are right."""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.emulated_vllm import BLOCK_SIZE, EmulatedVllm, PrefixCache, Request, words
from benchmarks.frame import Absent, Row, Skipped
from benchmarks.routers import BESIDE, OURS, Figures, prompts, rows
from moonpool.base.bundled import model_dir
from moonpool.base.scheduling.latency import Speeds
from moonpool.interop.kv_events.events import BlockHash, BlockRemoved, BlockStored, EngineEvent

OPTIONS = {"requests": 3, "rate": 2.0, "token_scale": 32, "time_scale": 4.0, "answer_tokens": 16, "trace": ""}


def ran(cache: PrefixCache, tokens: list[int], wanted: int) -> Request:
    """A request from its begin to its end."""
    request = Request([*tokens], len(tokens), wanted, "")
    assert cache.admit(request)
    request.tokens += range(wanted)
    request.computed = len(request.tokens) - 1
    cache.filled(request)
    cache.release(request)
    return request


def test_events_tell_what_a_cache_holds() -> None:
    draw, cache, told = random.Random(4), PrefixCache(20), dict[BlockHash, list[int]]()
    asked = [[draw.randrange(100) for _ in range(draw.randrange(20, 100))] for _ in range(8)]
    hits = 0
    for _ in range(300):
        prompt = [*draw.choice(asked)[: draw.randrange(16, 100)], *draw.choices(range(100), k=draw.randrange(1, 40))]
        hits += ran(cache, prompt, draw.randrange(1, 20)).cached
        for event in cache.events:
            if isinstance(event, BlockStored):
                assert event.parent is None or event.parent in told
                for at, block_hash in enumerate(event.hashes):
                    told[block_hash] = [*event.token_ids[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]]
            elif isinstance(event, BlockRemoved):
                for block_hash in event.hashes:
                    del told[block_hash]
        cache.events.clear()
        assert told.keys() == cache.held.keys()
        assert all(len(tokens) == BLOCK_SIZE for tokens in told.values())
        assert len(cache.held) <= cache.capacity
        assert cache.used == 0
    assert hits > 0


def test_blocks_that_are_used_are_not_evicted() -> None:
    cache = PrefixCache(6)
    first = Request(list(range(70)), 70, 10, "")
    assert cache.admit(first)
    assert not cache.admit(Request([1, 2], 2, 16, ""))
    cache.release(first)
    ran(cache, list(range(64)), 1)
    again = Request(list(range(64)), 64, 1, "")
    assert cache.admit(again)
    assert again.cached == 48  # the last token is computed in any case
    assert not cache.admit(Request(list(range(100, 150)), 50, 1, ""))


async def test_answers_share_steps_and_prompts_wait_for_their_turn() -> None:
    speeds = Speeds(prefill_per_token_s=1e-5, decode_base_s=1e-4)
    told = list[EngineEvent]()

    async def publish(events: Sequence[EngineEvent]) -> None:
        told.extend(events)

    engine = EmulatedVllm(speeds, 1, 64, 32, [7, 8], publish)
    running = asyncio.create_task(engine.run())

    async def ask(tokens: list[int]) -> tuple[list[int], int]:
        found = [(token, request.cached) async for token, request in engine.answer(tokens, 5, "")]
        return [token for token, _ in found], found[-1][1]

    try:
        answers = await asyncio.gather(ask(list(range(100))), ask([5] * 40))
        assert [len(tokens) for tokens, _ in answers] == [5, 5]
        assert (await ask(list(range(100))))[1] == 96
        assert (engine.counts["requests"], engine.counts["cached_tokens"]) == (3, 96)
        blocks = sum([len(event.hashes) for event in told if isinstance(event, BlockStored)])
        assert blocks == len(engine.cache.held) == (100 + 4) // BLOCK_SIZE + (40 + 4) // BLOCK_SIZE
    finally:
        running.cancel()


def test_prompts_are_the_traces_and_their_text_is_their_tokens(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000 * at, "input_length": 1100 + at, "output_length": 5 + at * 50, "hash_ids": [1, 2, 3 + at]}
        for at in range(3)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    asked = prompts(argparse.Namespace(**OPTIONS | {"trace": str(path)}))
    assert [request.due_s for request in asked] == pytest.approx([0.0, 0.125, 0.25])
    assert [request.answer_tokens for request in asked] == [5, 16, 16]
    assert asked[0].tokens[: 1 + 2 * BLOCK_SIZE] == asked[1].tokens[: 1 + 2 * BLOCK_SIZE]
    assert asked[0].tokens != asked[1].tokens
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    assert all(set(request.tokens[1:]) <= set(words(tokenizer)) for request in asked)
    assert all(len(request.tokens) == 1 + 1100 // 32 for request in asked)
    with pytest.raises(Skipped):
        prompts(argparse.Namespace(**OPTIONS | {"trace": str(path), "requests": 4}))


def test_rows_are_beside_round_robin() -> None:
    slow, fast = Figures([2.0] * 10, 10.0, 1.0, 1.1), Figures([1.0] * 10, 30.0, 1.0, 1.1)
    found = rows({OURS: [fast, fast], BESIDE: [slow, slow]}, {"other": "not installed"})
    absent, p50, p90, hit, late = found
    assert absent == Absent("other", BESIDE, "not installed")
    assert isinstance(p50, Row)
    assert isinstance(p90, Row)
    assert isinstance(hit, Row)
    assert isinstance(late, Row)
    assert (p50.value, p50.ratio, p90.ratio, hit.value, hit.ratio) == (1.0, 2.0, 2.0, 30.0, 3.0)
    assert late.met
