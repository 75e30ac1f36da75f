"""Histories that a store may have, and some that none may have."""

import math

import pytest

from tests.world.history import Histories, Operation, linearisable

PUT = Operation("put", "t/a", 0.0, 1.0, True)
DELETED = Operation("delete", "", 2.0, 3.0, True)
FAILED_PUT = Operation("put", "t/a", 0.0, math.inf)


@pytest.mark.parametrize(
    ("operations", "right"),
    [
        ([PUT, Operation("get", "t/a", 2.0, 3.0)], True),
        ([PUT, Operation("get", "", 2.0, 3.0)], True),
        ([PUT, DELETED, Operation("get", "", 4.0, 5.0)], True),
        ([PUT, DELETED, Operation("get", "t/a", 2.5, 2.6)], True),
        ([PUT, DELETED, Operation("get", "t/a", 4.0, 5.0)], False),
        ([Operation("get", "t/a", 0.0, 1.0)], False),
        ([FAILED_PUT, DELETED, Operation("get", "t/a", 4.0, 5.0)], False),
        ([FAILED_PUT, Operation("delete", "", 2.0, 3.0, False), Operation("get", "t/a", 4.0, 5.0)], True),
        ([PUT, Operation("put", "t/b", 2.0, 3.0, True), Operation("get", "t/a", 4.0, 5.0)], False),
        ([PUT, Operation("put", "t/b", 2.0, 3.0, False), Operation("get", "t/a", 4.0, 5.0)], True),
        ([PUT, Operation("put", "t/b", 2.0, 3.0, False), Operation("get", "t/b", 4.0, 5.0)], False),
        ([Operation("put", "t/a", 0.0, 1.0, False)], False),
        ([PUT, Operation("delete", "", 2.0, math.inf), Operation("get", "t/a", 4.0, 5.0)], True),
        ([PUT, DELETED, Operation("put", "t/a", 4.0, 5.0, True), Operation("get", "t/a", 6.0, 7.0)], True),
    ],
)
def test_a_history_is_of_a_store_or_not(operations: list[Operation], right: bool) -> None:
    assert linearisable(operations) is right


def test_a_value_of_another_tenant_is_named() -> None:
    histories = Histories()
    histories.add("kvstore-0", "ann", b"k", Operation("put", "ann/1", 0.0, 1.0, True))
    assert not list(histories.faults())
    histories.add("kvstore-0", "bob", b"k", Operation("get", "ann/1", 2.0, 3.0))
    assert "bob has read a value of ann from kvstore-0" in list(histories.faults())
