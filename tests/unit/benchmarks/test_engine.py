"""Engines beside ours: a peer that ends is a named failure of its own, and its tokens are compared with ours."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.ceilings import Limits
from benchmarks.engine import PROMPT, TASKS, Answers, Beside, Subject, same_tokens
from benchmarks.frame import Absent, Row, Skipped
from benchmarks.peers.engines import Environment, Peer

ECHO = """
import json, sys
print('{"ready": "peer 1"}', flush=True)
for number, line in enumerate(sys.stdin):
    if number == int(sys.argv[1]):
        sys.exit(3)
    asked = json.loads(line)
    answers = [[7] * asked["tokens"] for _ in asked["prompts"]]
    print(json.dumps({"seconds": 2.0, "token_ids": answers}), flush=True)
"""
TINY = Subject("tiny", Path("tiny"), "bfloat16")
LIMITS = Limits(parameters=1, head_parameters=1, flops=1e9, read_bytes_per_s=1e9)


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def peer(processes: ExitStack, dies_at: int) -> Peer:
    """Answers with sevens, until the question of a number."""
    argv = [sys.executable, "-S", "-c", ECHO, str(dies_at)]
    process = processes.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    processes.callback(process.kill)
    return Peer("transformers", process)


def ours(prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, Answers]:
    """Sevens too, but for the last token of an answer of several; a half of its time is that of the first one."""
    seconds = 0.5 if tokens == 1 and len(prompts[0]) < PROMPT else 1.0
    return seconds, [[7] * (tokens - 1) + [7 if tokens == 1 else 8] for _ in prompts]


def test_a_peer_that_dies_fails_in_its_own_rows_only(processes: ExitStack) -> None:
    runs, said = 1, list[str]()
    lost, lives = peer(processes, dies_at=runs + 2), peer(processes, dies_at=-1)  # in the second task's second run
    rows = Beside(TINY, ours, [lost, lives], lambda: LIMITS, said.append).rows(runs)
    absent = [row for row in rows if isinstance(row, Absent)]
    assert [(row.name, row.reason) for row in absent] == [
        (f"tiny, {task.name}", "transformers ended with 3") for task in TASKS[1:]
    ]
    measured = [row for row in rows if isinstance(row, Row) and row.limit_name == "peer 1" and row.unit]
    assert [row.name for row in measured] == [f"tiny, {TASKS[0].name}", *(f"tiny, {task.name}" for task in TASKS)]
    assert {row.ratio for row in measured} == {2.0}
    assert sum("ended with 3" in line for line in said) == 1


def test_equal_tokens_count_up_to_the_first_other_one(processes: ExitStack) -> None:
    assert same_tokens([[1, 2, 3], [4, 5, 6]], [[1, 9, 3], [4, 5, 6]]) == pytest.approx(4 / 6)
    assert same_tokens([[1], [2]], [[1], [3]]) == 0.5
    rows = Beside(TINY, ours, [peer(processes, dies_at=-1)], lambda: LIMITS, list[str]().append).rows(1)
    (share,) = [row.value for row in rows if isinstance(row, Row) and "ours too" in row.name]
    assert share == pytest.approx((1 + 3 * 63 / 64) / 4)


def test_only_figures_of_bfloat16_are_wanted(processes: ExitStack) -> None:
    other = replace(TINY, dtype="float32")
    for subject, name, wanted in ((TINY, "tiny", [1.0, 1.2, 0.85, 1.2, 1.0]), (other, "tiny, float32", [])):
        beside = Beside(subject, ours, [peer(processes, dies_at=-1)], lambda: LIMITS, list[str]().append)
        rows = [row for row in beside.rows(1) if isinstance(row, Row)]
        assert [row.target for row in rows if row.target] == wanted
        assert all(row.name.startswith(f"{name}, {TASKS[0].name}") for row in rows[:2])


def test_beside_the_limit_count_tokens_behind_the_first_ones() -> None:
    rows = [row for row in Beside(TINY, ours, [], lambda: LIMITS, list[str]().append).rows(1) if isinstance(row, Row)]
    name = f"tiny, {TASKS[1].name}, behind the first tokens"
    assert [(row.value, row.limit_value) for row in rows if row.name == name] == [
        (63 / 0.5, LIMITS.decode_tokens_per_s(1))
    ]


def test_vllm_is_what_the_tests_of_engines_installed(tmp_path: Path) -> None:
    said = list[str]()
    environment = Environment(tmp_path, said.append, installed={"vllm": tmp_path / "python"})
    with pytest.raises(Skipped, match="`make test-engines` installs it"):
        environment.python("vllm")
    (tmp_path / "python").touch()
    assert environment.python("vllm") == tmp_path / "python"
    assert not said
