"""Waits are counted from the fault on, and what is shown of them."""

import pytest

from benchmarks.failover import Wait, growth, longest_wait_s, quantile, rows_of


@pytest.mark.parametrize(
    ("times", "wait"),
    [
        ([1.0, 2.0, 3.0], 0.0),  # all before it
        ([9.0, 9.9, 10.4, 10.5], 0.4),  # of the wait that it fell into, the part after it
        ([9.9, 10.1, 11.3, 11.4], 1.2),  # what was under way came, and then nothing
        ([10.5], 0.0),
        ([], 0.0),
    ],
)
def test_waits_count_from_the_fault_on(times: list[float], wait: float) -> None:
    assert longest_wait_s(times, 10.0) == pytest.approx(wait)


def test_quantiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert [quantile([3.0, 1.0], share) for share in (0.5, 0.99)] == [1.0, 3.0]


def test_rows_say_whether_limits_are_kept() -> None:
    waits = [Wait(200, 0.2), Wait(400, 0.3), Wait(2000, 0.4), Wait(4000, 0.8)]
    median, last = rows_of("a case", waits, 0.5)
    assert [(row.value, row.met) for row in (median, last)] == [(0.3, True), (0.8, False)]
    assert [row.ratio for row in (median, last)] == pytest.approx([0.5 / 0.3, 0.5 / 0.8])
    calm = [Wait(200, 0.05), Wait(400, 0.25), Wait(2000, 0.25), Wait(4000, 0.9)]
    beside = list(rows_of("a case", waits, 0.1, calm))
    assert [(row.limit_value, row.met) for row in beside] == [(0.25, False), (0.9, True)], "each beside its own"
    slower = [Wait(wait.context, 2 * wait.seconds) for wait in waits]
    row = growth("a case", [waits, slower, [Wait(200, 0.1), Wait(4000, 0.1)], [Wait(200, 0.1)], []])
    assert row.value == pytest.approx(0.6 / 0.25)
    assert not row.met
