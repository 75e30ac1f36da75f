"""Log probabilities in columns: rows, parts, and the way through the contract."""

import copy
import pickle
from array import array

import pytest

from moonpool.base.contracts import (
    add_logprobs,
    are_logprobs_of,
    copy_logprobs,
    cut_logprobs,
    logprobs_from_proto,
    logprobs_to_proto,
)
from moonpool.base.logprobs import LogprobRows, Logprobs, PromptLogprobRows, TokenLogprobs
from moonpool.v1 import kv_pb2


def scores(*values: float, top: int = 2) -> Logprobs:
    """Of a token for each value; the likely ones are 100, 101, ... in each row."""
    count = len(values)
    likely = [100 + place for place in range(top)] * count
    return Logprobs(
        array("f", values),
        array("I", range(1, count + 1)),
        array("i", likely),
        array("f", [-0.25 * token for token in likely]),
    )


def test_rows() -> None:
    assert list(scores(-0.5, -1.5).of([7, 8])) == [
        TokenLogprobs(7, -0.5, 1, ((100, -25.0), (101, -25.25))),
        TokenLogprobs(8, -1.5, 2, ((100, -25.0), (101, -25.25))),
    ]
    with pytest.raises(ValueError, match="zip"):
        list(scores(-0.5).of([7, 8]))


def test_rows_that_are_made_where_they_are_read() -> None:
    rows = tuple(scores(-0.5, -1.5, -2.5).of([7, 8, 9]))
    found = LogprobRows([7, 8, 9], scores(-0.5, -1.5, -2.5))
    assert (len(found), tuple(found), found[1], found[-1], found[1:], found[::-1]) == (
        3, rows, rows[1], rows[2], rows[1:], rows[::-1],
    )  # fmt: skip
    assert found == rows
    assert rows == found
    assert found != rows[:2]
    assert found != [*rows[:2], rows[0]]
    assert repr(rows[0]) in repr(found)
    with pytest.raises(IndexError):
        found[3]


def test_rows_of_a_prompt_begin_with_none() -> None:
    rows = (None, *scores(-0.5, -1.5).of([7, 8]))
    found = PromptLogprobRows(LogprobRows([7, 8], scores(-0.5, -1.5)))
    assert (len(found), tuple(found), found[0], found[1], found[-1], found[1:], found[::-1]) == (
        3, rows, None, rows[1], rows[2], rows[1:], rows[::-1],
    )  # fmt: skip
    assert found == rows
    assert found != rows[1:]
    assert repr(rows[1]) in repr(found)
    assert found.scores == 2 * (1 + 2)
    with pytest.raises(IndexError):
        found[3]


@pytest.mark.parametrize("top", [0, 3])
def test_parts_put_together_are_the_whole(top: int) -> None:
    whole, again = scores(-1.0, -2.0, -4.0, top=top), Logprobs()
    for begin, end in ((0, 1), (1, 1), (1, None)):
        again.extend(whole.part(begin, end))
    assert again == whole
    assert (len(whole.part(3)), whole.part(5).top, whole.part(1, 2).top) == (0, 0, top)


@pytest.mark.parametrize("top", [0, 3])
def test_through_the_contract(top: int) -> None:
    whole = scores(-1.0, -2.0, top=top)
    assert logprobs_from_proto(logprobs_to_proto(whole)) == whole
    assert whole.consistent
    assert [are_logprobs_of(logprobs_to_proto(whole), tokens) for tokens in (1, 2, 3)] == [False, True, False]


@pytest.mark.parametrize("top", [0, 3])
def test_the_contract_by_parts(top: int) -> None:
    whole, message, copy = scores(-1.0, -2.0, -4.0, top=top), kv_pb2.Logprobs(), kv_pb2.Logprobs()
    cut_logprobs(message, 0)
    for begin, end in ((0, 1), (1, 1), (1, None)):
        add_logprobs(message, whole.part(begin, end))
    assert message == logprobs_to_proto(whole)
    cut_logprobs(message, 3)
    copy_logprobs(copy, message)
    cut_logprobs(message, 1)
    assert message == logprobs_to_proto(whole.part(0, 1))
    copy_logprobs(message, logprobs_to_proto(whole.part(1)))
    assert message == copy == logprobs_to_proto(whole)


@pytest.mark.parametrize("top", [0, 3])
def test_rows_of_the_contract(top: int) -> None:
    whole = scores(-1.0, -2.0, -4.0, top=top)
    found, rows = LogprobRows([7, 8, 9], logprobs_to_proto(whole)), LogprobRows([7, 8, 9], whole)
    assert (found, list(found), found[-1], found[1:], found.scores) == (
        rows,
        list(rows),
        rows[2],
        rows[1:],
        3 + 3 * top,
    )
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == rows


def test_columns_that_do_not_fit() -> None:
    for column in ("ranks", "top_token_ids", "top_logprobs"):
        message = logprobs_to_proto(scores(-1.0, -2.0))
        del getattr(message, column)[-1]
        assert not logprobs_from_proto(message).consistent
        assert not are_logprobs_of(message, 2)


def test_no_token_has_no_log_probabilities() -> None:
    assert are_logprobs_of(logprobs_to_proto(Logprobs()), 0)
    likely = logprobs_to_proto(Logprobs())
    likely.top_token_ids.append(7)
    likely.top_logprobs.append(-1.0)
    assert not are_logprobs_of(likely, 0)
