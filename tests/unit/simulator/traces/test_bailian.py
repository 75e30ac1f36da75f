"""Bailian's published traces: conversations, and blocks whose hashes are of their own tokens alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.simulator.traces.bailian import read_bailian
from moonpool.simulator.traces.mooncake import Trace, TraceError


def line(chat: int, parent: int, at_s: float, tokens: int, ids: list[int]) -> str:
    data = {"chat_id": chat, "parent_chat_id": parent, "timestamp": at_s, "input_length": tokens, "output_length": 3}
    return json.dumps(data | {"type": "text", "turn": 1, "hash_ids": ids}) + "\n"


LINES = (
    line(7, -1, 0.5, 40, [1, 2, 9])
    + line(8, -1, 1.0, 33, [2, 2, 9])
    + line(9, 7, 2.25, 64, [1, 2, 3, 4])
    + line(4, 77, 3.0, 16, [1])
)


def test_a_conversation_is_a_session_and_prefixes_are_chains(tmp_path: Path) -> None:
    path = tmp_path / "bailian.jsonl"
    path.write_text(LINES)
    first, other, second, late = read_bailian(path)
    assert [each.timestamp for each in (first, other, second, late)] == [500.0, 1000.0, 2250.0, 3000.0]
    assert [each.session for each in (first, other, second, late)] == ["7", "8", "7", "4"]
    assert first.hash_ids[:2] == second.hash_ids[:2]
    assert late.hash_ids == first.hash_ids[:1]
    assert len(set(other.hash_ids)) == 3, "equal blocks after different prefixes"
    assert first.hash_ids[2] != second.hash_ids[2], "a block that is not full"
    assert not {each for request in (first, other, second, late) for each in request.wait_for}


def test_what_is_written_is_a_trace(tmp_path: Path) -> None:
    path, out = tmp_path / "bailian.jsonl", tmp_path / "trace.jsonl"
    path.write_text(LINES)
    subprocess.run(
        [sys.executable, "-m", "moonpool.simulator.traces.bailian", str(path), "--out", str(out)], check=True
    )
    trace = Trace(out)
    assert trace.block_size == 16
    assert [each.session for each in trace] == ["7", "8", "7", "4"]


@pytest.mark.parametrize("wrong", ["[]", "{}", '{"chat_id": 1}', "x"])
def test_wrong_lines_are_named(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "bailian.jsonl"
    path.write_text(line(7, -1, 0.5, 16, [1]) + wrong + "\n")
    with pytest.raises(TraceError, match=r"bailian\.jsonl, line 2: no request"):
        list(read_bailian(path))
    with pytest.raises(TraceError, match=r"none: no request \(FileNotFoundError"):
        list(read_bailian(tmp_path / "none"))
