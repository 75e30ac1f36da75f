"""What the simulator takes: its rows, and a small run of the benchmark."""

import argparse
from pathlib import Path

import pytest

from benchmarks.eviction import SHIPPED
from benchmarks.frame import Absent, Row
from benchmarks.simulator import NO_TRACE, Cost, Size, flags, measure, rows
from moonpool.simulator.experiments.frame import RequestSource

MIB = 2**20


def told(path: Path | None) -> list[Row | Absent]:
    runs = [
        (Cost(70.0, 110 * MIB, 3600.0), Cost(30.0, 100 * MIB, 1800.0), Cost(40.0, 900 * MIB, 60.0)),
        (Cost(50.0, 120 * MIB, 3600.0), Cost(30.0, 100 * MIB, 1800.0), Cost(40.0, 900 * MIB, 60.0)),
        (Cost(90.0, 105 * MIB, 3600.0), Cost(30.0, 100 * MIB, 1800.0), Cost(20.0, 900 * MIB, 60.0)),
    ]
    return rows(RequestSource(path), Size(16, 12_031), Size(1000, 3000, 62.5), runs)


def test_rows_say_how_quick_the_simulator_is_and_whether_its_memory_is_flat() -> None:
    taken, pace, memory = told(Path("talk.jsonl"))
    assert isinstance(taken, Row)
    assert taken.name == "talk.jsonl, 12,031 requests, 16 + 16 instances: simulated on one core in"
    assert (taken.value, taken.limit_value, taken.met) == (70.0, 60.0, False)
    assert isinstance(pace, Row)
    assert pace.name == "talk.jsonl, 3,000 requests, 1,000 + 1,000 instances: virtual seconds per second of one core"
    assert (pace.value, pace.limit_value, pace.met) == (1.5, 1.0, True)
    assert isinstance(memory, Row)
    assert (memory.value, memory.limit_value) == (110.0, 100.0)
    assert memory.ratio == pytest.approx(100 / 110)
    assert memory.met


def test_without_the_trace_its_figure_is_not_measured_and_the_others_have_another_name() -> None:
    taken, pace, memory = told(None)
    assert isinstance(taken, Absent)
    assert taken.reason == NO_TRACE
    assert pace.name.startswith("generated, 3,000 requests")
    assert memory.name.startswith("generated, 12,031 requests")
    assert isinstance(memory, Row)
    assert memory.met is None


@pytest.mark.slow
@pytest.mark.parametrize("trace", [str(SHIPPED), ""])
def test_a_small_run(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONPOOL_TRACE", raising=False)
    parser = argparse.ArgumentParser()
    flags(parser)
    small = ["--requests", "6", "--instances", "2", "--many", "4", "--many-requests", "5"]
    options = parser.parse_args([*small, *(("--trace", trace) if trace else ())])
    options.runs = 1
    said: list[str] = []
    taken, pace, memory = measure(options, said.append)
    assert isinstance(taken, Row if trace else Absent)
    assert len(said) == 1
    assert isinstance(pace, Row)
    assert ", 5 requests, 4 + 4 instances" in pace.name
    assert isinstance(memory, Row)
    assert ", 6 requests, 2 + 2 instances" in memory.name
    assert min(memory.value, memory.limit_value, pace.value) > 0
