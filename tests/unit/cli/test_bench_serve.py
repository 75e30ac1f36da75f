"""`moonpool bench serve` against a gateway in front of a conductor in memory."""

import contextlib
import functools
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.base.bundled import model_dir
from moonpool.base.errors import ConfigError, Internal, MoonpoolError, Overloaded
from moonpool.base.rpc.api_keys import hash_key
from moonpool.cli import bench_serve
from moonpool.cli.bench_serve import check_options, exit_status, json_report, send_load, summary_table
from moonpool.cli.load_generator.loops import RequestOutcome
from moonpool.cli.load_generator.summary import summarize
from moonpool.cli.predict_options import BenchServeOptions
from moonpool.client import AsyncClient
from moonpool.client.testing import FakeConductor, answer
from tests.unit.gateway.fakes import ready
from tests.unit.gateway.test_http_server import serving

OPTIONS = BenchServeOptions(
    requests=4, rate=1000.0, prompt_tokens=20, shared_tokens=8, conversations=2, output_tokens=3, seed=5
)


async def sent(options: BenchServeOptions) -> list[RequestOutcome]:
    return await send_load(options, model_dir())


def at(port: int, options: BenchServeOptions = OPTIONS) -> BenchServeOptions:
    return replace(options, address=f"http://127.0.0.1:{port}")


async def test_requests() -> None:
    """Prompts of a conversation have a beginning in common; each answer is timed token by token."""
    fake = ready(FakeConductor())
    async with serving(fake.async_client()) as (_, port):
        outcomes = await sent(at(port, replace(OPTIONS, ttft_slo_s=9.0)))
    assert [(outcome.error, outcome.tokens, len(outcome.gaps)) for outcome in outcomes] == [("", 3, 2)] * 4
    assert all(
        outcome.first is not None and outcome.due <= outcome.first <= outcome.last <= outcome.ended
        for outcome in outcomes
    )
    prompts = sorted(list(request.tokens.token_ids) for request in fake.requests)
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 4
    sampling = fake.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos) == (3, 0.0, True)
    assert fake.requests[0].slo.ttft_s == 9.0


async def test_several_gateways_are_asked_in_turn() -> None:
    near, two = ready(FakeConductor()), ready(FakeConductor())
    async with serving(near.async_client()) as (_, first), serving(two.async_client()) as (_, second):
        options = replace(OPTIONS, address=f"http://127.0.0.1:{first},http://127.0.0.1:{second}")
        assert {outcome.error for outcome in await sent(options)} == {""}
    assert (len(near.requests), len(two.requests)) == (2, 2)


async def test_several_conductors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is asked when one cannot be reached."""
    monkeypatch.setattr(bench_serve, "AsyncClient", functools.partial(AsyncClient, connect_timeout_s=0.1))
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        free = [held.getsockname()[1] for held in taken]
    options = replace(OPTIONS, requests=1, address=",".join(f"127.0.0.1:{port}" for port in free))
    (outcome,) = await sent(options)
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
    options = replace(
        OPTIONS, trace=tmp_path / "trace", rate=0.0, time_scale=10.0, prompt_tokens=24, shared_tokens=0, output_tokens=2
    )
    async with serving(fake.async_client()) as (_, port):
        outcomes = await sent(at(port, options))
    assert [outcome.due for outcome in outcomes] == [0.0, 0.005]
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
        outcomes = await sent(at(port))
    assert {outcome.error for outcome in outcomes} == {named}
    assert exit_status(outcomes) == (0 if named == "Overloaded" else 1)


async def test_what_breaks_on_the_way(tmp_path: Path) -> None:
    """A stream that ends with an error, a server that is not there, a key that is missing and then given."""
    broken = FakeConductor(lambda _: [*answer()[:2], Internal("lost")])
    async with serving(ready(broken).async_client()) as (_, port):
        assert {outcome.error for outcome in await sent(at(port))} == {"StreamBroken"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    assert {outcome.error for outcome in await sent(at(free))} == {"Unavailable"}
    (tmp_path / "keys").write_text(f"sha256:{hash_key('ann-key')} ann\n")
    async with serving(api_keys=tmp_path / "keys") as (_, port):
        assert {outcome.error for outcome in await sent(at(port))} == {"InvalidRequest"}
        assert {outcome.error for outcome in await sent(at(port, replace(OPTIONS, api_key="ann-key")))} == {""}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rate": 0.0}, "rate"),
        ({"trace": Path("x")}, "rate"),
        ({"time_scale": 0.0}, "time_scale"),
        ({"prompt_tokens": 8, "shared_tokens": 8}, "shared_tokens"),
        ({"requests": 0}, "requests"),
        ({"output_tokens": 0}, "requests"),
    ],
)
def test_flags_that_do_not_fit(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(replace(OPTIONS, **changes))  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("address", ["http://x:1,x:2", "https://x:1", "ftp://x", "http://x:port", "http://"])
async def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await sent(replace(OPTIONS, address=address))
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
    text = json.dumps(json_report(replace(OPTIONS, api_key="secret"), model_dir(), summary), allow_nan=False)
    assert "secret" not in text
    assert [line.split()[0] for line in summary_table(summary).splitlines()[2:]] == ["ms", "TTFT", "TPOT", "ITL", "E2E"]
