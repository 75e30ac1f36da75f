"""`moonpool bench serve` against a gateway in front of a conductor in memory."""

import contextlib
import functools
import json
import math
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.base.bundled import model_dir
from moonpool.base.errors import ConfigError, Internal, MoonpoolError, Overloaded
from moonpool.base.rpc.api_keys import hash_key
from moonpool.cli import bench_serve
from moonpool.cli.bench_serve import BenchPlan, PromptShape, exit_status, json_report, send_load, summary_table
from moonpool.cli.load_generator import RequestOutcome, summarize
from moonpool.client import AsyncClient
from moonpool.client.testing import FakeConductor, answer
from tests.unit.gateway.fakes import ready
from tests.unit.gateway.test_http_server import serving

PLAN = BenchPlan((), model_dir(), 4, 1000.0, None, 1.0, PromptShape(20, 8, 2, 3), 0, math.inf, math.inf, 5)


def at(port: int, plan: BenchPlan = PLAN) -> BenchPlan:
    return replace(plan, addresses=[f"http://127.0.0.1:{port}"])


async def test_requests() -> None:
    """Prompts of a conversation have a beginning in common; each answer is timed token by token."""
    fake = ready(FakeConductor())
    async with serving(fake.async_client()) as (_, port):
        outcomes = await send_load(at(port, replace(PLAN, ttft_slo_s=9.0)))
    assert [(one.error, one.tokens, len(one.gaps)) for one in outcomes] == [("", 3, 2)] * 4
    assert all(one.first is not None and one.due <= one.first <= one.last <= one.ended for one in outcomes)
    prompts = sorted(list(request.tokens.token_ids) for request in fake.requests)
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 4
    sampling = fake.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos) == (3, 0.0, True)
    assert fake.requests[0].slo.ttft_s == 9.0


async def test_several_gateways_are_asked_in_turn() -> None:
    one, two = ready(FakeConductor()), ready(FakeConductor())
    async with serving(one.async_client()) as (_, first), serving(two.async_client()) as (_, second):
        plan = replace(PLAN, addresses=[f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}"])
        assert {outcome.error for outcome in await send_load(plan)} == {""}
    assert (len(one.requests), len(two.requests)) == (2, 2)


async def test_several_conductors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is asked when one cannot be reached."""
    monkeypatch.setattr(bench_serve, "AsyncClient", functools.partial(AsyncClient, connect_timeout_s=0.1))
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        free = [one.getsockname()[1] for one in taken]
    plan = replace(PLAN, requests=1, addresses=[f"127.0.0.1:{port}" for port in free])
    (outcome,) = await send_load(plan)
    assert outcome.error == "NotConnected"


async def test_a_trace(tmp_path: Path) -> None:
    """Its times, lengths and shared blocks, cut to what is asked for."""
    lines = [
        {"block_tokens": 16},
        {"timestamp": 0, "input_length": 20, "output_length": 9, "hash_ids": [1, 2]},
        {"timestamp": 50, "input_length": 30, "output_length": 1, "hash_ids": [1, 3]},
    ]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, lines)))
    fake = ready(FakeConductor())
    plan = replace(PLAN, trace=tmp_path / "trace", rate=0.0, time_scale=10.0, shape=PromptShape(24, 0, 1, 2))
    async with serving(fake.async_client()) as (_, port):
        outcomes = await send_load(at(port, plan))
    assert [one.due for one in outcomes] == [0.0, 0.005]
    first, second = sorted((request.tokens.token_ids for request in fake.requests), key=len)
    assert (len(first), len(second)) == (20, 24)
    assert first[:16] == second[:16]
    assert sorted(request.sampling.max_tokens for request in fake.requests) == [1, 2]


@pytest.mark.parametrize(
    ("raised", "named"),
    [
        (Overloaded("busy", reason="queue_full", retry_after_s=2.0), "Overloaded"),
        (Internal("lost"), "Internal"),
    ],
)
async def test_failures_are_counted_by_name(raised: MoonpoolError, named: str) -> None:
    async with serving(ready(FakeConductor(lambda _: [raised])).async_client()) as (_, port):
        outcomes = await send_load(at(port))
    assert {one.error for one in outcomes} == {named}
    assert exit_status(outcomes) == (0 if named == "Overloaded" else 1)


async def test_what_breaks_on_the_way(tmp_path: Path) -> None:
    """A stream that ends with an error, a server that is not there, a key that is missing and then given."""
    broken = FakeConductor(lambda _: [*answer()[:2], Internal("lost")])
    async with serving(ready(broken).async_client()) as (_, port):
        assert {one.error for one in await send_load(at(port))} == {"StreamBroken"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    assert {one.error for one in await send_load(at(free))} == {"Unavailable"}
    (tmp_path / "keys").write_text(f"sha256:{hash_key('ann-key')} ann\n")
    async with serving(api_keys=tmp_path / "keys") as (_, port):
        assert {one.error for one in await send_load(at(port))} == {"InvalidRequest"}
        assert {one.error for one in await send_load(at(port, replace(PLAN, api_key="ann-key")))} == {""}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rate": 0.0}, "rate"),
        ({"trace": Path("x")}, "rate"),
        ({"time_scale": 0.0}, "time_scale"),
        ({"shape": PromptShape(8, 8, 1, 1)}, "shared_tokens"),
        ({"requests": 0}, "requests"),
        ({"shape": PromptShape(8, 0, 1, 0)}, "requests"),
    ],
)
def test_flags_that_do_not_fit(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(PLAN, **changes).check()  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("address", ["http://x:1,x:2", "https://x:1", "ftp://x", "http://x:port", "http://"])
async def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await send_load(replace(PLAN, addresses=address.split(",")))
    assert caught.value.field == "address"


def test_report() -> None:
    """All figures by their names; no key, no infinity."""
    outcome = RequestOutcome(0.0)
    for tokens, now in ((1, 1.0), (2, 2.0), (1, 4.0)):
        outcome.note(tokens, now)
    outcome.ended = 4.0
    assert (outcome.first, outcome.tokens, outcome.gaps) == (1.0, 4, [0.5, 0.5, 2.0])
    summary = summarize([outcome, RequestOutcome(0.0, error="Overloaded", ended=1.0)], ttft_slo_s=1.0, tpot_slo_s=0.9)
    assert (summary.ttft_s["p50"], summary.tpot_s["p50"], summary.itl_s["p99"], summary.e2e_s["p90"]) == (1, 1, 2, 4)
    assert summary.goodput_per_s == 0
    text = json.dumps(json_report(replace(PLAN, api_key="secret"), summary), allow_nan=False)
    assert "secret" not in text
    assert [line.split()[0] for line in summary_table(summary).splitlines()[2:]] == ["ms", "TTFT", "TPOT", "ITL", "E2E"]
