"""The gateway's benchmark: its HTTP clients at a gateway in memory, and its arithmetic."""

import argparse

import pytest

from benchmarks.gateway import Pair, added_ttft, rates
from benchmarks.gateway_load import Found, http, prompts
from moonpool.base.errors import Overloaded
from moonpool.client.testing import FakeConductor
from tests.unit.gateway.fakes import ready
from tests.unit.gateway.test_http_server import serving


def options(port: int) -> argparse.Namespace:
    given = {"streams": 2, "requests": 4, "prompt_tokens": 5, "answer_tokens": 3, "seed": 1}
    return argparse.Namespace(address=f"127.0.0.1:{port}", **given)


async def test_clients() -> None:
    """Each prompt is sent once, the first of each client beside them, and read to its end."""
    fake = ready(FakeConductor())
    async with serving(fake.async_client()) as (_, port):
        found = await http(options(port))
    assert (found.requests, found.tokens, len(found.ttft_s)) == (4, 12, 4)
    asked = [tuple(request.tokens.token_ids) for request in fake.requests]
    expected = [*prompts(4, 5, 1), *prompts(2, 5, -2)]
    assert sorted(asked) == sorted(map(tuple, expected))


async def test_a_refusal_is_no_figure() -> None:
    overloaded = Overloaded("busy", reason="queue_full", retry_after_s=2.0)
    async with serving(ready(FakeConductor(lambda _: [overloaded])).async_client()) as (_, port):
        with pytest.raises(AssertionError):
            await http(options(port))


def test_rows() -> None:
    """Rates beside rates, processor time per token with the first requests of the clients, and what TTFT gains."""
    through = Found(8, 800, 4.0, 0.0, [0.010 + number / 1000 for number in range(8)])
    alone = Found(8, 800, 2.0, 0.08, [0.005] * 8)
    pairs = [Pair(through, 0.2, alone)]
    requests, tokens, cost = rates(pairs, 8)
    assert (requests.value, requests.limit_value, requests.ratio, requests.met) == (2.0, 4.0, 0.5, False)
    assert (tokens.value, tokens.limit_value, tokens.ratio) == (200.0, 400.0, 0.5)
    assert (round(cost.value, 6), round(cost.limit_value, 6), round(cost.ratio, 6)) == (125.0, 100.0, 0.8)
    p50, p99 = added_ttft(pairs, 8)
    assert (round(p50.value, 6), round(p99.value, 6)) == (9.0, 12.0)
    assert round(p50.ratio, 6) == round(5 / 14, 6)
