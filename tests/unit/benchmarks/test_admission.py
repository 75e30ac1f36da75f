"""The comparison of what is admitted to the SSD tier."""

import argparse
from pathlib import Path

import pytest

from benchmarks.admission import measure, replay, sizes
from benchmarks.frame import Absent, Row
from moonpool.kvstore.ssd.admission import ADMIT_ALL, ADMIT_REUSED, SsdAdmission
from moonpool.simulator.traces.mooncake import write_trace
from moonpool.simulator.traces.workload import Workload
from tests.unit.kvstore.helpers import keys_of

KEYS = keys_of(40)


def test_a_block_that_is_read_once_is_written_by_one_rule_only(tmp_path: Path) -> None:
    """Four blocks asked for thrice among others asked for once; two fit into DRAM."""
    chains = [KEYS[:4], KEYS[4:12], KEYS[:4], KEYS[12:20], KEYS[:4]]
    every = replay(chains, SsdAdmission(ADMIT_ALL), 4, 400, tmp_path / "all")
    assert (every.hit_share, every.written_share) == (8 / 28, 1.0)
    reused = replay(chains, SsdAdmission(ADMIT_REUSED), 4, 400, tmp_path / "reused")
    assert (reused.hit_share, reused.written_share) == (4 / 28, 4 / 24)


def test_both_rules_stand_beside_each_other_and_a_trace_that_is_not_there_is_shown(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, Workload(1).requests(60))
    options = argparse.Namespace(trace=trace, blocks="full", sizes=[(20, 200)], folder=tmp_path)
    options.traces = ("conversation",)
    shares, written = (row for row in measure(options, lambda words: None) if isinstance(row, Row))
    assert shares.value > 0 < shares.limit_value
    assert 0 < written.value < written.limit_value / 2
    options.trace = tmp_path / "none"
    (absent,) = measure(options, lambda words: None)
    assert isinstance(absent, Absent)


def test_sizes_are_pairs() -> None:
    assert sizes("1/2,3/4") == [(1, 2), (3, 4)]
    with pytest.raises(argparse.ArgumentTypeError, match="DRAM/SSD"):
        sizes("1,2")
