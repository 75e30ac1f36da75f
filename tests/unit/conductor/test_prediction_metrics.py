"""Predicted times are kept beside the measured ones: in histograms, in placements, for `explain`."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moonpool.base.cluster.proto_conversion import speeds_to_proto
from moonpool.base.errors import Unavailable
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.telemetry.prometheus import PrometheusMetrics

from .fakes import ScriptedPrefill, decode, prefill
from .stack import WAIT_S, Stack, stack

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
ONE = SamplingParams(max_tokens=1)
TTFT, TPOT = "moonpool_conductor_ttft_over_predicted", "moonpool_conductor_tpot_over_predicted"


@asynccontextmanager
async def slow_stack(*prefills: ScriptedPrefill) -> AsyncIterator[Stack]:
    """A cluster that knows how slow its members are."""
    for member in prefills:
        member.load.speed.CopyFrom(speeds_to_proto(Speeds(prefill_per_token_s=0.01)))
    async with stack(*prefills, decode(predicted_tbt_s=0.25)) as s:
        registry = s.cluster.registry
        await s.until(lambda: sum(m.load.speed.prefill_per_token_s > 0 for m in registry) == len(prefills))
        yield s


async def samples(metrics: PrometheusMetrics) -> dict[str, float]:
    """Everything that is exported, by name and the labels' values; read on a thread, as by a scrape."""
    families = await asyncio.to_thread(lambda: list(metrics.registry.collect()))
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


async def counts(metrics: PrometheusMetrics) -> tuple[float, float]:
    """Requests observed, of TTFT and of TPOT."""
    found = await samples(metrics)
    return found[f"{TTFT}_count"], found[f"{TPOT}_count"]


async def test_each_request_is_observed_once_with_its_ratio() -> None:
    async with slow_stack(prefill()) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY, request_id="r")
        assert result.placement.predicted_tbt_s == 0.25
        assert await counts(s.metrics) == (1.0, 1.0)
        found = await samples(s.metrics)
        assert found[f"{TTFT}_sum"] * result.placement.predicted_ttft_s == pytest.approx(result.timing.ttft_s)
        assert found[f"{TPOT}_sum"] * result.placement.predicted_tpot_s == pytest.approx(result.timing.tpot_s)
        assert found[f"{TPOT}_bucket +Inf"] == 1.0

        explanation = await s.client.explain("r")
        assert explanation.measured_tpot_s == result.timing.tpot_s > 0
        assert explanation.placement is not None
        assert explanation.placement.predicted_tbt_s == 0.25


async def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    async with slow_stack(prefill()) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=ONE, request_id="r")
        assert result.placement.predicted_tbt_s == 0.0
        assert await counts(s.metrics) == (1.0, 0.0)
        assert (await s.client.explain("r")).measured_tpot_s == 0.0


async def test_a_request_that_was_placed_again_is_not_observed() -> None:
    async with slow_stack(prefill(0, before=[Unavailable("gone")]), prefill(1)) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert len(result.placements) == 2
        assert await counts(s.metrics) == (0.0, 0.0)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 1e308])
async def test_times_that_no_clock_gives_spoil_no_prediction(seconds: float) -> None:
    """Of an instance that is out of order: its own requests are served, and so are those after them."""
    p, d = prefill(took_s=seconds), decode(predicted_tbt_s=seconds, lease_s=seconds)
    async with stack(p, d) as s, asyncio.timeout(WAIT_S):
        for _ in range(20):
            result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
            assert (len(result.token_ids), len(result.placements)) == (8, 1)
            assert 0.0 <= result.placement.predicted_ttft_s < WAIT_S
            if seconds != 1e308:  # which may be promised
                assert result.placement.predicted_tbt_s == result.placement.predicted_tpot_s == 0.0
