"""Requests that wait for a placement within their SLO, by priority and fair share."""

import asyncio

import pytest

from moonpool.base.cluster.proto_conversion import speeds_to_proto
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.latency import Speeds
from moonpool.client import InvalidRequest, Overloaded, Slo

from .fakes import ScriptedPrefill, decode, expected, prefill
from .stack import Stack, stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


async def told(s: Stack, p: ScriptedPrefill, per_token_s: float) -> None:
    """The conductor learns that a prompt of 40 tokens takes so many times 40 seconds."""
    p.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=per_token_s)))
    await s.until(lambda: any(m.load.speed.prefill_per_token_s == per_token_s for m in s.cluster.registry))


async def test_a_request_waits_until_its_limit_can_be_kept() -> None:
    p, d = prefill(), decode()
    async with stack(p, d, queue_deadline_s=60.0) as s:
        await told(s, p, 1.0)
        asked = asyncio.create_task(
            s.client.generate(token_ids=PROMPT, sampling=GREEDY, slo=Slo(ttft_s=30.0), tenant="ann", request_id="r")
        )
        await s.until(lambda: len(s.servicer.core.scheduler.slo_queue) == 1)
        state = (await s.client.cluster_state()).queue
        assert (state.for_limits, state.for_room, state.prompt_bytes) == (1, 0, 160)
        assert [(tenant.tenant, tenant.weight, tenant.requests, tenant.waiting) for tenant in state.tenants] == [
            ("ann", 1.0, 1, 1)
        ]
        gauges = await s.gauges()
        assert (gauges["waiting_for_limits"], gauges["waiting_for_limits_bytes"]) == (1, 160)
        await told(s, p, 0.001)
        assert (await asked).token_ids == expected(40, 8)
        assert (await s.client.explain("r")).waited_s > 0
        await s.rest()


async def test_a_request_says_how_long_it_waits_and_is_refused_then() -> None:
    p, d = prefill(), decode()
    async with stack(p, d) as s:
        await told(s, p, 1.0)
        with pytest.raises(Overloaded) as caught:
            await s.client.generate(token_ids=PROMPT, slo=Slo(ttft_s=2.0, queue_s=0.1))
        error = caught.value
        assert (error.reason, error.slo_s) == ("ttft_slo", 2.0)
        assert error.predicted_ttft_s >= 40.0
        assert error.retry_after_s > 0
        assert "s in the queue: predicted time to first token" in str(error)
        assert p.requests == []
        await s.rest()


async def test_a_request_may_refuse_to_wait() -> None:
    p, d = prefill(), decode()
    async with stack(p, d, queue_deadline_s=60.0) as s:
        await told(s, p, 1.0)
        with pytest.raises(Overloaded, match=r"^predicted time to first token"):
            await s.client.generate(token_ids=PROMPT, slo=Slo(ttft_s=2.0, queue_s=0.0))
        await s.rest()


async def test_who_leaves_the_queue_holds_nothing() -> None:
    p, d = prefill(), decode()
    async with stack(p, d, queue_deadline_s=60.0) as s:
        await told(s, p, 1.0)
        asked = asyncio.create_task(s.client.generate(token_ids=PROMPT, slo=Slo(ttft_s=2.0)))
        await s.until(lambda: len(s.servicer.core.scheduler.slo_queue) == 1)
        asked.cancel()
        await asyncio.wait({asked})
        await s.rest()
        assert p.requests == []


async def test_a_full_conductor_has_room_for_who_has_less_than_its_share() -> None:
    hold = asyncio.Event()
    p, d = prefill(before=[hold] * 3), decode()
    async with stack(p, d, max_queue=2, tenant_weights={"ann": 2.0}) as s:
        asked = [asyncio.create_task(s.client.generate(token_ids=PROMPT, tenant="ben")) for _ in range(2)]
        await p.until(lambda: p.running == 2)
        asked.append(asyncio.create_task(s.client.generate(token_ids=PROMPT, tenant="ann")))
        await p.until(lambda: p.running == 3)
        for tenant in ("ben", "ann"):
            with pytest.raises(Overloaded) as caught:
                await s.client.generate(token_ids=PROMPT, tenant=tenant)
            assert caught.value.reason == "queue_full"
        hold.set()
        await asyncio.gather(*asked)
        await s.rest()


async def test_priority_and_share_reach_the_instances() -> None:
    p, d = prefill(), decode()
    async with stack(p, d, tenant_weights={"ann": 2.5, "*": 0.5}) as s:
        for tenant in ("ann", "ben"):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY, tenant=tenant, priority=-3)
        specs = [request.sequence for request in p.requests] + [request.sequence for request in d.requests]
        found = [(spec.tenant, spec.priority, spec.weight) for spec in specs]
        assert found == [("ann", -3, 2.5), ("ben", -3, 0.5)] * 2
        await s.rest()


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("priority", {"priority": 101}),
        ("priority", {"priority": 1 << 40}),
        ("slo.queue_s", {"slo": Slo(queue_s=-1.0)}),
        ("slo.queue_s", {"slo": Slo(queue_s=float("nan"))}),
    ],
)
async def test_wrong_values_are_refused_by_name(field: str, asked: dict[str, object]) -> None:
    async with stack(prefill(), decode()) as s:
        with pytest.raises(InvalidRequest) as caught:
            await s.client.generate(token_ids=PROMPT, **asked)  # type: ignore[arg-type]
        assert caught.value.field == field
        await s.rest()
