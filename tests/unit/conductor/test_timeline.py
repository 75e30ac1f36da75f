"""What a request has gone through, as `Explain` tells it; and what the cluster's state tells of those that ended."""

import asyncio
from typing import Any

import pytest

from moonpool.base.errors import DeadlineExceeded
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import MoonpoolError, NotFound, Overloaded, Slo, Unavailable
from moonpool.client.explain import request_phases
from moonpool.conductor import servicer
from moonpool.conductor.decision_log import DecisionLog
from moonpool.conductor.recent_requests import MAX_LISTED, MAX_REMEMBERED, RecentRequests, quantiles
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import prefill_pb2

from .fakes import decode, prefill
from .stack import WAIT_S, stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
CHUNK = prefill_pb2.TimedTokens(tokens=24, begin_s=0.25, end_s=0.5)


async def test_timeline_of_a_request_that_ended() -> None:
    p, d = prefill(cached_tokens=16, chunks=[CHUNK]), decode()
    async with stack(p, d) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY, request_id="r", tenant="ann")
        line = (await s.client.explain("r")).timeline
        assert (line.tenant, line.usage, line.timing) == ("ann", result.usage, result.timing)
        assert line.local_tokens == 16
        assert [(chunk.tokens, chunk.begin_s, chunk.end_s) for chunk in line.chunks] == [(24, 0.25, 0.5)]
        assert line.arrived_at > 0
        assert 1 <= len(line.token_s) <= 8
        assert list(line.token_s) == sorted(line.token_s)

        (ended,) = (await s.client.cluster_state()).recent.last
        assert (ended.request_id, ended.tenant, ended.usage) == ("r", "ann", result.usage)


async def test_every_placement_is_told_with_its_cause_and_what_was_computed() -> None:
    """The first decode instance dies after three tokens: the second placement computes prompt and answer so far."""
    p, old, new = prefill(cached_tokens=16, chunks=[CHUNK]), decode(0, fail_at=[3]), decode(1)
    async with stack(p, old, new) as s, asyncio.timeout(WAIT_S):
        await s.client.generate(token_ids=PROMPT, sampling=GREEDY, request_id="r")
        found = await s.client.explain("r")
        first, second = found.attempts
        assert [attempt.placement.decode for attempt in found.attempts] == ["decode-0", "decode-1"]
        assert (first.cause, "decode-0" in second.cause) == ("", True)
        assert [attempt.prompt_tokens for attempt in found.attempts] == [len(PROMPT), len(PROMPT) + 3]
        assert [attempt.tokens for attempt in found.attempts] == [3, 5]
        assert [len(attempt.chunks) for attempt in found.attempts] == [1, 1]
        assert 0 <= first.placed_s < first.last_token_s <= first.ended_s <= second.placed_s < second.first_token_s
        phases = request_phases(found)
        assert {phase.attempt for phase in phases} == {1, 2}
        assert "gap" in {phase.name for phase in phases}
        assert all(phase.begin_s <= phase.end_s for phase in phases)
        assert found.timeline.timing.ttft_s == pytest.approx(first.first_token_s)


async def test_a_refused_request_is_told_by_its_id() -> None:
    """Refused by the core, and before it comes there."""
    held = prefill(before=[asyncio.Event()])
    async with stack(held, decode(), max_queue=1) as s, asyncio.timeout(WAIT_S):
        with pytest.raises(Overloaded):
            await s.client.generate(token_ids=PROMPT, request_id="core", tenant="ann", slo=Slo(ttft_s=1e-9, queue_s=0))
        running = asyncio.create_task(s.client.generate(token_ids=PROMPT, sampling=GREEDY, tenant="ann"))
        await held.until(lambda: len(held.requests) == 1)
        with pytest.raises(Overloaded):
            await s.client.generate(token_ids=PROMPT, request_id="full", tenant="ann")
        for name in ("core", "full"):
            found = await s.client.explain(name)
            assert (found.placement, found.timeline.tenant) == (None, "ann")
            assert found.refused
        last = (await s.client.cluster_state()).recent.last
        assert {request.request_id: bool(request.refused) for request in last} == {"core": True, "full": True}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_request_whose_client_leaves_is_told() -> None:
    """While it waits for its limit, before its first token, and within its answer."""
    p, d = prefill(after=[asyncio.Event()]), decode(hold_at=2)
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):

        async def leave(name: str, **request: Any) -> None:
            running = asyncio.create_task(s.client.generate(token_ids=PROMPT, request_id=name, tenant="ann", **request))
            if "slo" in request:
                while (await s.look())["waiting_for_limits"] == 0:
                    pass
                assert (await s.client.explain(name)).timeline.timing.e2e_s == 0.0
            else:
                await p.until(lambda: bool(p.requests))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await s.rest()

        await leave("placed", sampling=GREEDY)
        p.after.clear()
        await leave("waiting", slo=Slo(ttft_s=1e-9, queue_s=WAIT_S))
        stream = s.client.stream(token_ids=PROMPT, sampling=GREEDY, request_id="begun", tenant="ann")
        async for _ in stream:
            break
        await s.rest()
        found = {name: await s.client.explain(name) for name in ("placed", "waiting", "begun")}
        assert {(request.failed, request.cancelled) for request in found.values()} == {("", True)}
        assert {request.timeline.tenant for request in found.values()} == {"ann"}
        assert all(request.timeline.timing.e2e_s > 0 for request in found.values())
        assert [len(request.attempts) for request in found.values()] == [1, 0, 1]
        recent = (await s.client.cluster_state()).recent
        assert [request.request_id for request in recent.last if request.cancelled] == ["begun", "waiting", "placed"]
        assert recent.requests == 0


async def test_a_request_whose_time_runs_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the conductor, 2 s after the request and 10 s before the client's own time is over."""
    monkeypatch.setattr(servicer, "TELL_MARGIN_S", 10.0)
    monkeypatch.setattr(servicer, "TELL_MARGIN", 1.0)
    async with stack(prefill(before=[asyncio.Event()]), decode()) as s, asyncio.timeout(WAIT_S):
        with pytest.raises(DeadlineExceeded, match="waited for the first token from prefill-0"):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY, request_id="r", timeout_s=12.0)
        await s.rest()
        found = await s.client.explain("r")
        assert "waited for the first token from prefill-0" in found.failed
        assert len(found.attempts) == 1


async def test_a_timeout_at_an_instance_is_not_the_clients() -> None:
    """The client's time is not over: another try may succeed, and the error says what took too long."""
    slow = DeadlineExceeded("the call took too long")
    async with stack(prefill(before=[slow, slow]), decode(), retries=1) as s, asyncio.timeout(WAIT_S):
        with pytest.raises(Unavailable, match="given up after 2 placements; the last failed: the call took too long"):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY, timeout_s=WAIT_S)


async def test_a_request_that_fails_for_good_is_told_with_every_placement() -> None:
    broken = prefill(before=[Unavailable("broken"), Unavailable("broken again")])
    async with stack(broken, decode(), retries=1) as s, asyncio.timeout(WAIT_S):
        with pytest.raises(MoonpoolError):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY, request_id="r", timeout_s=WAIT_S)
        found = await s.client.explain("r")
        assert "broken again" in found.failed
        assert [attempt.cause for attempt in found.attempts] == ["", "broken"]


async def test_timeline_while_it_runs() -> None:
    """The prompt's part is known with the first token; there is no end yet, and nobody was answered."""
    after = asyncio.Event()
    p, d = prefill(after=[after], chunks=[CHUNK]), decode(hold_at=2)
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        stream = s.client.stream(token_ids=PROMPT, sampling=GREEDY, request_id="r", tenant="ann")
        events = aiter(stream)
        await anext(events)
        line = (await s.client.explain("r")).timeline
        assert (line.tenant, line.timing.e2e_s, len(line.chunks)) == ("ann", 0.0, 1)
        assert line.timing.ttft_s > 0
        assert (await s.client.cluster_state()).recent.requests == 0
        after.set()
        d.go.set()
        async for _ in events:
            pass
        assert stream.result is not None
        assert (await s.client.explain("r")).timeline.timing == stream.result.timing


async def test_kv_that_arrives_behind_the_answer() -> None:
    """Prefill tells of its transfer when a short answer has ended already."""
    after = asyncio.Event()
    p, d = prefill(after=[after], chunks=[CHUNK], sent_bytes=4096), decode()
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        await s.client.generate(token_ids=PROMPT, sampling=GREEDY, request_id="r")
        assert (await s.client.explain("r")).timeline.sent_bytes == 0
        after.set()
        await s.rest()
        assert (await s.client.explain("r")).timeline.sent_bytes == 4096


async def test_a_request_is_known_by_the_id_that_the_client_gave_to_the_gateway() -> None:
    """The gateway makes the id unique; the last request with the client's id counts."""
    async with stack(prefill(), decode()) as s:
        for request_id in ("mine-00000001", "mine-00000002"):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY, request_id=request_id)
        last = await s.client.explain("mine-00000002")
        assert await s.client.explain("mine") == last != await s.client.explain("mine-00000001")


def test_ids_of_forgotten_requests_are_forgotten() -> None:
    log = DecisionLog(1, "social")
    log.refused("mine-00000001", "", "full")
    log.refused("yours-00000001", "", "full")
    assert (log.full_id("mine"), log.full_id("yours")) == ("mine", "yours-00000001")


async def test_a_request_that_is_not_known() -> None:
    async with stack(prefill(), decode()) as s:
        with pytest.raises(NotFound, match="'r'"):
            await s.client.explain("r")


def ended(ttft_s: float, tpot_s: float, prompt: int = 10, cached: int = 4) -> pb.Finished:
    usage = pb.Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=2)
    return pb.Finished(usage=usage, timing=pb.Timing(ttft_s=ttft_s, tpot_s=tpot_s))


def test_only_the_last_minute_counts() -> None:
    now = 100.0
    recent = RecentRequests(lambda: now)
    assert recent.state() == pb.RecentState()
    recent.add("old", "ann", ended(9.0, 9.0))
    now = 130.0
    recent.add("one", "ann", ended(0.5, 0.0))
    recent.add("two", "ann", ended(0.7, 0.1))
    assert recent.state().requests == 3
    now = 161.0
    state = recent.state()
    assert (state.window_s, state.requests) == (60.0, 2)
    assert (state.usage.prompt_tokens, state.usage.cached_tokens, state.usage.completion_tokens) == (20, 8, 4)
    assert (state.ttft_s.p50, state.ttft_s.p99) == (0.7, 0.7)
    assert (state.tpot_s.p50, state.tpot_s.p99) == (0.1, 0.1)  # an answer of one token has none
    assert [request.request_id for request in state.last] == ["two", "one", "old"]


def test_memory_is_bounded() -> None:
    recent = RecentRequests(lambda: 1.0)
    for number in range(MAX_REMEMBERED + 10):
        recent.add(str(number), "ann", ended(0.1, 0.1))
    state = recent.state()
    assert state.requests == MAX_REMEMBERED
    assert [request.request_id for request in state.last] == [
        str(MAX_REMEMBERED + 9 - back) for back in range(MAX_LISTED)
    ]


def test_quantiles() -> None:
    found = quantiles([float(value) for value in range(100, 0, -1)])
    assert (found.p50, found.p99) == (51.0, 100.0)
    assert quantiles([]) == pb.Quantiles()
