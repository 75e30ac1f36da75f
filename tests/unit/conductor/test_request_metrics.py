"""Each request is in the metrics once: as answered, refused, failed or cancelled."""

import asyncio

import pytest

from moonpool.base.errors import DeadlineExceeded
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import InvalidRequest, MoonpoolError, Overloaded, Slo, Unavailable

from .fakes import decode, prefill
from .stack import WAIT_S, stack
from .test_prediction_metrics import samples

PROMPT = list(range(30, 70))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PREFIX = "moonpool_conductor_"


async def test_an_answered_request_is_in_every_histogram() -> None:
    async with stack(prefill(cached_tokens=16, loaded_tokens=8), decode()) as s:
        result = await s.client.generate(token_ids=PROMPT, sampling=GREEDY)
        assert (result.usage.cached_tokens, result.usage.loaded_tokens) == (24, 8)
        found = await samples(s.metrics)
        for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds", "queue_seconds", "transfer_tail_seconds"):
            assert found[f"{PREFIX}{name}_count"] == 1.0, name
        assert found[f"{PREFIX}ttft_seconds_sum"] == pytest.approx(result.timing.ttft_s)
        tokens = {source: found[f"{PREFIX}prompt_tokens_total {source}"] for source in ("own", "loaded", "computed")}
        assert tokens == {"own": 16.0, "loaded": 8.0, "computed": 16.0}


async def test_refusals_count_by_reason_and_in_no_histogram() -> None:
    async with stack(prefill(), decode(), max_queue=1) as s, asyncio.timeout(WAIT_S):
        with pytest.raises(InvalidRequest):
            await s.client.generate(token_ids=[-1], sampling=GREEDY, request_id="wrong")
        with pytest.raises(Overloaded):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY, slo=Slo(ttft_s=1e-9), request_id="slow")
        assert (await s.client.explain("wrong")).refused
        found = await samples(s.metrics)
        assert found[f"{PREFIX}refused_total invalid"] == 1.0
        assert found[f"{PREFIX}refused_total ttft_slo"] == 1.0
        assert found[f"{PREFIX}e2e_seconds_count"] == found[f"{PREFIX}ttft_seconds_count"] == 0.0


async def test_failures_count_by_kind_and_clients_that_leave_count_as_cancelled() -> None:
    held = prefill(before=[asyncio.Event()])
    async with stack(held, decode(), retries=1) as s, asyncio.timeout(WAIT_S):
        with pytest.raises(DeadlineExceeded):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY, timeout_s=0.3)
        await s.rest()
        held.before[:] = [Unavailable("broken"), Unavailable("broken"), asyncio.Event()]  # the first may wait unasked
        with pytest.raises(MoonpoolError):
            await s.client.generate(token_ids=PROMPT, sampling=GREEDY, timeout_s=WAIT_S)
        left = asyncio.create_task(s.client.generate(token_ids=PROMPT, sampling=GREEDY))
        await s.until(lambda: len(s.servicer.dispatcher) == 1)
        left.cancel()
        await s.rest()
        found = await samples(s.metrics)
        assert found[f"{PREFIX}failed_total deadline"] == 1.0
        assert found[f"{PREFIX}failed_total unavailable"] == 1.0
        assert found[f"{PREFIX}cancelled_total"] == 1.0
