"""A few of many times."""

from moonpool.base.scheduling.state_machine import thin_out


def test_few_are_all_of_them_in_order() -> None:
    assert thin_out([3.0, 1.0, 2.0, 1.0], 4) == [1.0, 2.0, 3.0]
    assert thin_out([], 4) == []


def test_many_are_spread_and_the_last_is_among_them() -> None:
    assert thin_out([float(time) for time in range(100)], 4) == [24.0, 49.0, 74.0, 99.0]
    assert thin_out([5.0, 7.0, 6.0], 1) == [7.0]
