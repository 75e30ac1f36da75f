"""The slices of the benchmark that compares the simulator with stacks."""

from dataclasses import replace

import pytest

from benchmarks.frame import Skipped
from benchmarks.simulated import KINDS, shrunk, slices, stacked
from moonpool.simulator.experiments.report import Chart
from moonpool.simulator.traces.mooncake import TraceRequest

REAL = replace(KINDS["real"], requests=2)


def test_a_shrunk_request_keeps_its_blocks() -> None:
    found = shrunk(TraceRequest(5.0, 1030, 160, (7, 8, 9)), REAL)
    assert (found.input_length, found.output_length, found.hash_ids) == (64, 10, (7, 8))
    assert REAL.block_size == 32
    longest = shrunk(TraceRequest(5.0, 512 * 100, 1, tuple(range(100))), REAL)
    assert (longest.input_length, longest.output_length, len(longest.hash_ids)) == (1400, 8, 44)


def test_slices_come_at_the_wanted_rate_and_begin_again() -> None:
    trace = [TraceRequest(1000.0 * at * at, 512, 32, (at,)) for at in range(9)]
    first = slices(trace, REAL, 0)
    assert [request.hash_ids[0] for request in first] == [0, 1, 2, 3]
    assert first[-1].timestamp == pytest.approx(1000 * 3 / REAL.rate), "three intervals"
    assert first[1].timestamp == pytest.approx(first[-1].timestamp / 9), "as uneven as in the trace"
    second = slices(trace, REAL, 1)
    assert (second[0].timestamp, second[0].hash_ids) == (0.0, (4,))
    assert slices(trace, REAL, 2) == first
    with pytest.raises(Skipped, match="two slices are 4"):
        slices(trace[:3], REAL, 0)


def test_pictures_stand_below_each_other() -> None:
    chart = Chart("one", "x", "y", {"line": [(0.0, 1.0), (1.0, 2.0)]})
    drawn = stacked([chart, chart])
    assert drawn.count("translate(0 360)") == 1
    assert 'height="720"' in drawn
