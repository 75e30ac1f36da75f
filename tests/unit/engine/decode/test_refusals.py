"""Requests that are refused."""

import math

import pytest

from moonpool.base.errors import InvalidRequest, Overloaded
from moonpool.v1 import kv_pb2
from tests.unit.engine.decode.calls import conducting, reserve
from tests.unit.instances import BLOCK, decoding, prompt, spec


async def test_refuses_when_promised_out() -> None:
    """A promise is a number: it counts against the pool before any block is bound."""
    async with decoding(blocks=4) as decode, conducting(decode) as conductor:
        target = await reserve(decode, spec("a", prompt(2 * BLOCK), max_tokens=BLOCK))
        with pytest.raises(Overloaded) as refused:
            await reserve(decode, spec("b", prompt(BLOCK), max_tokens=BLOCK))
        assert refused.value.reason == "no_decode_room"
        assert refused.value.retry_after_s > 0
        await conductor.cancel("a", target)
        await conductor.until(lambda: conductor.outcomes == {"a": kv_pb2.CANCEL_OUTCOME_BEFORE_START})
        assert decode.service.core.budget.promised == 0
        await conductor.cancel("a", await reserve(decode, spec("a", prompt(BLOCK), max_tokens=BLOCK)))
        await conductor.until(lambda: not decode.restless)


@pytest.mark.parametrize("max_tokens", [0, 1000])
async def test_refuses_what_generates_nothing_or_never_fits(max_tokens: int) -> None:
    async with decoding(blocks=4) as decode:
        with pytest.raises(InvalidRequest) as refused:
            await reserve(decode, spec("a", prompt(20), max_tokens=max_tokens))
        assert refused.value.field == "sequence.sampling.max_tokens"


@pytest.mark.parametrize("starts_in_s", [-1.0, math.inf, math.nan])
async def test_refuses_a_start_that_is_no_time(starts_in_s: float) -> None:
    async with decoding() as decode:
        with pytest.raises(InvalidRequest) as refused:
            await reserve(decode, spec("a", prompt(4)), starts_in_s=starts_in_s)
        assert refused.value.field == "starts_in_s"


async def test_refuses_by_predicted_tbt() -> None:
    async with decoding() as decode:
        with pytest.raises(Overloaded) as refused:
            await reserve(decode, spec("a", prompt(4)), tbt_slo_s=1e-4)
        assert refused.value.reason == "tbt_slo"
        assert refused.value.predicted_tbt_s == pytest.approx(1e-3)
