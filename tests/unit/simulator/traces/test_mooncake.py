"""Traces: read as they were written, generated alike for equal seeds, and tokens by hash id alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.simulator.traces.mooncake import (
    BLOCK_SIZE,
    Trace,
    TraceError,
    TraceRequest,
    block_of,
    read_trace,
    reusable_share,
    trace_path,
    write_trace,
)
from moonpool.simulator.traces.workload import CHAT, Workload, WorkloadMix


def test_tokens_follow_from_hash_ids() -> None:
    first, second = TraceRequest(0, 700, 1, (3, 4)), TraceRequest(0, 1024, 1, (3, 5))
    assert len(first.tokens(4096)) == 700
    assert first.tokens(4096)[:512] == second.tokens(4096)[:512] == block_of(3, 4096)
    assert first.tokens(4096)[512:] != second.tokens(4096)[512:700]
    assert block_of(0, 4096)[:4].tolist() == [112, 1049, 2950, 732]
    assert 16 <= min(block_of(7, 4096)) <= max(block_of(7, 4096)) < 4096
    with pytest.raises(AssertionError):
        TraceRequest(0, 513, 1, (3,)).tokens(4096)


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = Workload(1).requests(20)
    write_trace(path, trace)
    assert read_trace(path) == trace
    assert read_trace(path, limit=3) == trace[:3]
    assert Trace(path).block_size == BLOCK_SIZE


def test_tenants_and_several_answers(tmp_path: Path) -> None:
    """They change nothing else of a generated trace, and are read as they were written."""
    mix = WorkloadMix(tenants=3, several=0.3)
    trace, plain = Workload(1, mix).requests(300), Workload(1).requests(300)
    assert [replace(each, tenant="", choices=1) for each in trace] == plain
    share = {name: sum(each.tenant == name for each in trace) / 300 for name in ("t0", "t1", "t2")}
    assert share["t0"] > share["t1"] > share["t2"] > 0.1
    assert {each.choices for each in trace} == {1, 2, 3, 4}
    path = tmp_path / "trace.jsonl"
    write_trace(path, trace)
    assert read_trace(path) == trace


@pytest.mark.parametrize("name", ["block_size", "block_tokens"])
def test_a_header_says_how_long_blocks_are(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"{name}": 64}}\n' + line(input_length=100, hash_ids=[7, 8]))
    assert Trace(path).block_size == 64
    assert read_trace(path) == [TraceRequest(5, 100, 2, (7, 8))]
    assert len(read_trace(path)[0].tokens(4096, 64)) == 100


def test_generated_trace() -> None:
    """Equal seeds, equal traces; conversations share beginnings, incomplete blocks are not shared."""
    trace = Workload(0, CHAT).requests(200)
    assert trace == Workload(0, CHAT).requests(200) != Workload(1, CHAT).requests(200)
    assert [request.timestamp for request in trace] == sorted(request.timestamp for request in trace)
    tails: list[int] = []
    for request in trace:
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_SIZE)
        assert request.output_length >= 1
        tails += request.hash_ids[request.input_length // BLOCK_SIZE :]
    assert len(set(tails)) == len(tails)
    assert 0.3 < reusable_share(trace) < 0.95


def test_bursts_bring_more_requests() -> None:
    mix = WorkloadMix(conversations=0.0, burst_factor=10.0, burst_s=20.0, burst_every_s=120.0)
    times = [request.timestamp / 1000 for request in Workload(1, mix).requests(1000)]
    inside = sum(time % 120 < 20 for time in times)
    assert 0.55 < inside / 1000 < 0.8  # 200 of 300 that are expected in each period


def line(**changed: object) -> str:
    """A good line of a trace, with fields changed; None leaves one out."""
    fields = {"timestamp": 5, "input_length": 600, "output_length": 2, "hash_ids": [3, 4]} | changed
    return json.dumps({name: value for name, value in fields.items() if value is not None}) + "\n"


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (line(n=0), "n must be a whole number from 1 to 64, is 0"),
        (line(tenant=7), "tenant must be a text, is 7"),
        (line(timestamp=4), "timestamp 4 is before that of the request before, 5: not sorted"),
        (line(timestamp=-1), "timestamp must be a number of at least 0, is -1"),
        (line(timestamp=float("nan")), "timestamp must be a number of at least 0, is nan"),
        (line(timestamp=True), "timestamp must be a number of at least 0, is True"),
        (line(timestamp=None, output_length=None), "output_length missing"),
        (line(input_length=-600), "input_length must be a whole number of at least 1, is -600"),
        (line(output_length=0), "output_length must be a whole number of at least 1, is 0"),
        (line(input_length="600"), "input_length must be a whole number of at least 1, is '600'"),
        (line(hash_ids=[3]), "600 tokens are 2 blocks of 512, hash_ids has 1"),
        (line(hash_ids=[3, -4]), "hash_ids must be a list of whole numbers of at least 0"),
        (line(hash_ids=3), "hash_ids must be a list of whole numbers of at least 0"),
        (line(hash_ids=[9, 4]), "hash id 4 follows 9 here and 3 earlier"),
        (line(hash_ids=[4, 5]), "hash id 4 follows nothing here and 3 earlier"),
        (line(hash_ids=[5, 5]), "hash id 5 follows 5 here and nothing earlier"),
        ("[1, 2]\n", "not a JSON object"),
        ("nonsense\n", "not JSON (Expecting value: line 1 column 1 (char 0))"),
        ("\n", "not JSON (Expecting value: line 2 column 1 (char 1))"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_line(bad: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line() + bad + line())
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert str(refused.value) == f"{path}, line 2: {what}"
    assert len(read_trace(path, limit=1)) == 1  # what is not read is not judged


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere"):
        Trace(tmp_path / "nowhere")
    path = tmp_path / "trace.jsonl"
    path.write_text('{"block_size": 0}\n')
    with pytest.raises(TraceError, match="line 1: block_size must be a positive whole number, is 0"):
        Trace(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(TraceError, match="utf-8"):
        Trace(path)


def test_reusable_share() -> None:
    trace = [
        TraceRequest(0, 1024, 1, (0, 1)),
        TraceRequest(1, 1536, 1, (0, 1, 2)),  # two of three blocks
        TraceRequest(2, 1024, 1, (9, 1)),  # known, but not from the start
        TraceRequest(3, 600, 1, (0, 3)),  # one block and 88 tokens
    ]
    assert reusable_share(trace) == (1024 + 512) / (1024 + 1536 + 1024 + 600)


def test_tenants_share_nothing_that_could_be_reused() -> None:
    trace = [TraceRequest(0, 1024, 1, (0, 1), tenant) for tenant in ("", "ann", "ann")]
    assert reusable_share(trace) == 1 / 3


def test_where_a_trace_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONPOOL_TRACE", raising=False)
    assert trace_path("") is None
    monkeypatch.setenv("MOONPOOL_TRACE", "a")
    assert trace_path("") == Path("a")
    assert trace_path("b") == Path("b")
