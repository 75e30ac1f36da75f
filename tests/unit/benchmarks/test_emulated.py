"""When the requests of a trace come."""

import pytest

from benchmarks.emulated import apart, at_rate
from moonpool.simulator.traces.mooncake import TraceRequest


def test_requests_of_one_instant_come_one_after_the_other() -> None:
    assert apart([0.0, 0.0, 0.0, 3.0, 6.0, 6.0]) == [0.0, 1.0, 2.0, 3.0, 6.0, 7.5]
    assert apart([5.0, 5.0]) == [5.0, 5.5]


def test_they_come_at_a_rate_as_unevenly_as_in_the_trace() -> None:
    trace = [TraceRequest(1000.0 * at, 512, 32, (number,)) for number, at in enumerate((1, 1, 5, 9, 9))]
    found = at_rate(trace, 2.0)
    assert [request.timestamp for request in found] == [pytest.approx(200 * at) for at in (0, 2, 4, 8, 10)]
    assert [request.hash_ids for request in found] == [request.hash_ids for request in trace]
    assert [request.timestamp for request in at_rate(trace[:2], 2.0)] == [0.0, pytest.approx(500.0)], (
        "also of one instant"
    )
