"""What load programs share: which loop runs, what does not count, what is kept, and the exit code."""

import argparse
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest

from moonpool.base.errors import Overloaded, TransferFailed
from moonpool.base.kv.layout import KVLayout
from moonpool.cli.load_generator.loops import RequestOutcome, SendRequest
from moonpool.cli.load_generator.summary import summarize
from moonpool.simulator.traces.mooncake import TraceRequest, write_trace
from tests.load.kvstore import Chains, content
from tests.load.program import Program, main

LAYOUT = KVLayout.uniform(2, 1, 16, 64, "bfloat16")


class Fake:
    """A program whose requests take no time; what was sent is remembered."""

    def __init__(self, failures: dict[int, Exception] | None = None) -> None:
        self.sent: list[int] = []
        self.addresses: list[str] = []
        self.failures = failures or {}
        self.program = Program("fake", "about", lambda parser: None, self._target, self._sending, generates=False)

    @contextlib.contextmanager
    def _target(self, options: argparse.Namespace) -> Iterator[str]:
        yield options.address or "own:1"

    @contextlib.asynccontextmanager
    async def _sending(
        self, options: argparse.Namespace, address: str, trace: Sequence[TraceRequest]
    ) -> AsyncIterator[SendRequest]:
        self.addresses.append(address)

        async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
            self.sent.append(index)
            if index in self.failures:
                raise self.failures[index]
            outcome.first, outcome.tokens, outcome.nbytes = clock(), 3, 100

        yield send


def test_a_closed_loop_is_the_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fake = Fake()
    out, drawn = tmp_path / "out.json", tmp_path / "pictures" / "out.svg"
    flags = ["--requests", "6", "--warmup", "2", "--json", "--out", str(out), "--picture", str(drawn)]
    assert main(fake.program, flags) == 0
    assert sorted(fake.sent) == list(range(6))
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["loop"] == "closed"
    assert printed["summary"]["requests"] == 4
    assert printed["summary"]["bytes_per_s"] > 0
    assert printed["summary"]["tpot_s"] == {}
    assert printed["flags"]["ttft_slo_s"] is None
    assert printed["flags"]["address"] == "own"
    assert str(tmp_path) not in json.dumps(printed)
    assert drawn.read_text().startswith("<svg")


def test_a_rate_and_a_trace_open_the_loop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TraceRequest(1000.0 + 2 * i, 512, 1, (i,)) for i in range(5)])
    for flags, loop in ((["--request-rate", "1000"], "open"), (["--trace", str(trace)], "trace")):
        fake = Fake()
        assert main(fake.program, [*flags, "--requests", "4", "--warmup", "0", "--address", "a:1", "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert (printed["loop"], printed["summary"]["requests"]) == (loop, 4)
        assert fake.addresses == ["a:1"]
        assert sorted(fake.sent) == [0, 1, 2, 3]


def test_failures_end_with_1_and_refusals_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    refused = Overloaded("full", reason="queue_full", retry_after_s=1.0)
    assert main(Fake({1: refused}).program, ["--requests", "3", "--warmup", "0"]) == 0
    assert "{'Overloaded': 1}" in capsys.readouterr().out
    assert main(Fake({1: TransferFailed("lost")}).program, ["--requests", "3", "--warmup", "0"]) == 1


def test_a_bare_grpc_failure_has_our_name(capsys: pytest.CaptureFixture[str]) -> None:
    metadata = grpc.aio.Metadata()
    failure = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "gone")
    assert main(Fake({0: failure}).program, ["--requests", "1", "--warmup", "0"]) == 1
    assert "{'Unavailable': 1}" in capsys.readouterr().out


def test_bytes_count_like_tokens_those_of_requests_that_succeeded() -> None:
    outcomes = [
        RequestOutcome(due=0.0, first=1.0, ended=2.0, tokens=1, nbytes=100),
        RequestOutcome(due=0.0, ended=2.0, nbytes=900, error="StreamBroken"),
    ]
    assert summarize(outcomes).bytes_per_s == 50.0


def test_a_store_is_read_only_where_it_was_written() -> None:
    options = argparse.Namespace(seed=1, put_share=0.0, blocks=2)
    chains = Chains(options, [], LAYOUT)
    puts, keys = chains.next(0)
    assert puts
    assert len(keys) == 2
    chains.stored(keys)
    assert chains.next(1) == (False, keys)
    assert Chains(options, [], LAYOUT).next(0) == (True, keys)
    assert Chains(options, [TraceRequest(0.0, 512, 1, (7,))], LAYOUT).next(0)[1] == keys[:1]
    assert len(content(keys[0], 0, LAYOUT)) == LAYOUT.slice_bytes(0)
    assert content(keys[0], 0, LAYOUT) != content(keys[0], 1, LAYOUT)
