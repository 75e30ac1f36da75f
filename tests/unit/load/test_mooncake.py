"""Traces: read as they were written, generated alike for equal seeds, and tokens by hash id alone."""

from pathlib import Path

import pytest

from tests.load.mooncake import (
    BLOCK_TOKENS,
    TraceRequest,
    block_of,
    generate_trace,
    read_trace,
    reusable_share,
    trace_path,
    write_trace,
)


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
    trace = generate_trace(20, seed=1)
    write_trace(path, trace)
    assert read_trace(path) == trace
    assert read_trace(path, limit=3) == trace[:3]


def test_generated_trace() -> None:
    """Equal seeds, equal traces; conversations share beginnings, incomplete blocks are not shared."""
    trace = generate_trace(200, seed=0)
    assert trace == generate_trace(200, seed=0) != generate_trace(200, seed=1)
    assert [request.timestamp for request in trace] == sorted(request.timestamp for request in trace)
    tails: list[int] = []
    for request in trace:
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)
        assert request.output_length >= 1
        tails += request.hash_ids[request.input_length // BLOCK_TOKENS :]
    assert len(set(tails)) == len(tails)
    assert 0.3 < reusable_share(trace) < 0.95


def test_reusable_share() -> None:
    trace = [
        TraceRequest(0, 1024, 1, (0, 1)),
        TraceRequest(1, 1536, 1, (0, 1, 2)),  # two of three blocks
        TraceRequest(2, 1024, 1, (9, 1)),  # known, but not from the start
        TraceRequest(3, 600, 1, (0, 3)),  # one block and 88 tokens
    ]
    assert reusable_share(trace) == (1024 + 512) / (1024 + 1536 + 1024 + 600)


def test_where_a_trace_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONPOOL_TRACE", raising=False)
    assert trace_path("") is None
    monkeypatch.setenv("MOONPOOL_TRACE", "a")
    assert trace_path("") == Path("a")
    assert trace_path("b") == Path("b")
