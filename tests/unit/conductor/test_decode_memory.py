"""Requests that are refused or wait: no memory at decode, an SLO that cannot be kept, a full queue."""

import asyncio

import pytest

from moonpool.base.cluster.proto_conversion import speeds_to_proto
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.latency import Speeds
from moonpool.client import Overloaded, Slo, Unavailable

from .fakes import decode, expected, no_room, prefill
from .stack import stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


async def test_the_next_decode_is_asked_when_the_first_has_no_room() -> None:
    engines = prefill(), decode(0, refusals=[no_room()]), decode(1)
    async with stack(*engines) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert result.placement.decode == "decode-1"
        await s.rest()


async def test_no_room_anywhere_is_overloaded() -> None:
    engines = prefill(), decode(0, refusals=[no_room()])
    async with stack(*engines, admission="none") as s:
        with pytest.raises(Overloaded) as caught:
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY, slo=Slo(ttft_s=0.05))
        assert (caught.value.reason, caught.value.retry_after_s) == ("no_decode_room", 1.0)
        assert engines[0].requests == []
        await s.rest()


async def test_a_request_without_limit_waits_for_room() -> None:
    p, d = prefill(), decode(refusals=[no_room()])
    async with stack(p, d) as s:
        waiting = asyncio.create_task(s.client.generate(token_ids=PROMPT, sampling=GREEDY))
        assert (await waiting).token_ids == expected(40, 8)
        await s.rest()


async def test_requests_wait_for_room_in_turn_and_within_their_limit() -> None:
    p, d = prefill(), decode(refusals=[no_room() for _ in range(200)])
    async with stack(p, d, admission="none") as s:
        waiting = [s.client.generate(token_ids=PROMPT, sampling=GREEDY, slo=Slo(ttft_s=0.2)) for _ in range(3)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [Overloaded] * 3
        assert p.requests == []
        await s.rest()
        d.refusals.clear()
        assert (await s.client.generate(token_ids=PROMPT, sampling=GREEDY)).token_ids == expected(40, 8)


async def test_a_promise_that_comes_too_late_is_given_back() -> None:
    told = asyncio.Event()
    p, slow, quick = prefill(), decode(0, slow=[told]), decode(1)
    async with stack(p, slow, quick, reserve_timeout_s=1.0) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert result.placement.decode == "decode-1"
        told.set()
        await slow.until(lambda: len(slow.cancelled) == 1)
        assert slow.reserved == {}
        await s.rest()


async def test_the_session_that_keeps_a_promise_is_there_while_its_prompt_waits_at_prefill() -> None:
    hold = asyncio.Event()
    p, d = prefill(before=[hold]), decode(lease_s=0.1)
    async with stack(p, d) as s:
        asked = asyncio.create_task(s.client.generate(token_ids=PROMPT, sampling=GREEDY, request_id="r"))
        await d.until(lambda: d.streams == 1)
        assert d.requests[0].conductor.id == "conductor-0"
        d.end_streams()
        await d.until(lambda: d.streams == 2)  # it is opened again within the lease
        hold.set()
        assert (await asked).token_ids == expected(40, 8)
        await s.rest()


async def test_overloaded_by_prediction_carries_its_reason() -> None:
    p, d = prefill(), decode()
    p.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=1.0)))
    async with stack(p, d) as s:
        registry = s.cluster.registry
        await s.until(lambda: any(m.load.speed.prefill_per_token_s == 1.0 for m in registry))
        with pytest.raises(Overloaded) as caught:
            await s.client.generate(token_ids=PROMPT, slo=Slo(ttft_s=2.0), request_id="r")
        error = caught.value
        assert (error.reason, error.slo_s) == ("ttft_slo", 2.0)
        assert error.predicted_ttft_s >= 40.0
        assert error.retry_after_s > 0
        explanation = await s.client.explain("r")
        assert explanation.placement is None
        assert explanation.refused.startswith("ttft_slo") or "exceeds" in explanation.refused
        assert [candidate.instance for candidate in explanation.candidates] == ["prefill-0"]
        await s.rest()


async def test_the_queue_is_bounded() -> None:
    hold = asyncio.Event()
    p, d = prefill(before=[hold]), decode()
    async with stack(p, d, max_queue=1) as s:
        stream = s.client.stream(token_ids=PROMPT, sampling=GREEDY)
        first = asyncio.ensure_future(anext(aiter(stream)))
        await p.until(lambda: p.running == 1)
        with pytest.raises(Overloaded) as caught:
            await s.client.generate(token_ids=PROMPT)
        assert caught.value.reason == "queue_full"
        hold.set()
        await first
        await stream.aclose()
        await s.rest()


async def test_no_engines_is_unavailable() -> None:
    async with stack() as s:
        with pytest.raises(Unavailable, match="joined"):
            await s.client.generate(prompt="hi")
        state = await s.client.cluster_state()
        assert (state.ready, state.instances, state.model) == (False, (), "")
