"""A stream whose decode instance drains goes on there until another instance has it. Each token comes once."""

import asyncio
from collections.abc import AsyncIterator

from moonpool.base.sampling_params import SamplingParams
from moonpool.client import TokenEvent

from .fakes import ScriptedDecode, decode, expected, prefill
from .stack import Stack, stack

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = list(range(30, 50))


async def first(events: AsyncIterator[TokenEvent], count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += (await anext(events)).token_ids
    return tokens


async def drained(s: Stack, instance: ScriptedDecode) -> None:
    """An instance has told that it drains."""
    assert instance.agent is not None
    instance.load.draining = True
    instance.agent.notify()
    await s.until(lambda: bool(s.servicer.core.cluster.decodes.draining_mask))


async def test_the_old_place_is_left_when_the_new_one_speaks() -> None:
    p, old, new = prefill(), decode(0, hold_at=3), decode(1)
    async with stack(p, old, new) as s:
        stream = s.client.stream(token_ids=PROMPT, sampling=GREEDY)
        events = aiter(stream)
        tokens = await first(events, 3)
        await drained(s, old)
        async for event in events:
            tokens += event.token_ids
        assert tokens == expected(20, 8)
        assert stream.result is not None
        assert [placement.decode for placement in stream.result.placements] == ["decode-0", "decode-1"]
        await s.rest()
        assert old.cancelled == old.history


async def test_what_is_made_meanwhile_is_told_and_made_again() -> None:
    ready = asyncio.Event()
    p, old, new = prefill(), decode(0, hold_at=3), decode(1)
    async with stack(p, old, new) as s:
        stream = s.client.stream(token_ids=PROMPT, sampling=GREEDY)
        events = aiter(stream)
        tokens = await first(events, 3)
        p.before.append(ready)
        await drained(s, old)
        await p.until(lambda: len(p.requests) == 2)
        go, old.go, old.hold_at = old.go, asyncio.Event(), 6
        go.set()
        tokens += await first(events, 3)
        assert (tokens, old.cancelled) == (expected(20, 6), [])
        ready.set()
        async for event in events:
            tokens += event.token_ids
        assert tokens == expected(20, 8)
        await s.rest()
        assert old.cancelled == old.history


async def test_what_was_made_meanwhile_is_told_to_the_new_place_which_goes_on_behind_it() -> None:
    ready = asyncio.Event()
    p, old, new = prefill(), decode(0, hold_at=3), decode(1)
    async with stack(p, old, new) as s:
        stream = s.client.stream(
            token_ids=PROMPT, sampling=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        )
        events = aiter(stream)
        tokens = await first(events, 3)
        p.before.append(ready)
        await drained(s, old)
        await p.until(lambda: len(p.requests) == 2)
        go, old.go, old.hold_at = old.go, asyncio.Event(), 9
        go.set()
        tokens += await first(events, 6)
        ready.set()
        async for event in events:
            tokens += event.token_ids
        assert tokens == expected(20, 12)
        assert (old.known, new.known) == ([[[]]], [[expected(20, 12)[4:9]]])
        await s.rest()
        assert old.cancelled == old.history


async def test_an_answer_that_ends_meanwhile_is_whole() -> None:
    ready = asyncio.Event()
    p, old, new = prefill(), decode(0, hold_at=3), decode(1)
    async with stack(p, old, new) as s:
        stream = s.client.stream(token_ids=PROMPT, sampling=GREEDY)
        events = aiter(stream)
        tokens = await first(events, 3)
        p.before.append(ready)
        await drained(s, old)
        await p.until(lambda: len(p.requests) == 2)
        old.go.set()
        async for event in events:
            tokens += event.token_ids
        assert tokens == expected(20, 8)
        await s.rest()
        assert (old.cancelled, new.cancelled) == ([], new.history)


async def test_tokens_before_and_after_a_move_count_once_though_both_places_fail() -> None:
    """The core hears of tokens in groups: of those that the keys told already, the old place says nothing more."""
    ready = asyncio.Event()
    p, old, new, last = prefill(), decode(0, hold_at=8, fail_at=[9]), decode(1, fail_at=[12]), decode(2)
    async with stack(p, old, new, last) as s:
        sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        events = aiter(s.client.stream(token_ids=PROMPT, sampling=sampling))
        tokens = await first(events, 8)
        p.before.append(ready)
        await drained(s, old)
        await p.until(lambda: len(p.requests) == 2)
        old.go.set()
        tokens += await first(events, 1)
        await s.until(lambda: not old.reserved)
        ready.set()
        async for event in events:
            tokens += event.token_ids
        assert tokens == expected(20, 16)
        await s.rest()
        assert not new.fail_at
