"""Graphs of decode steps: which are captured, when, and what becomes of the rest."""

import pytest

from moonpool.engine.cuda_graphs import MAX_GRAPH_ROWS, GraphCache, GraphMode, GraphShape

ONE = GraphShape(1, 1024)


def test_steps_are_padded_to_the_next_shape() -> None:
    captures = GraphCache(10_000)
    found = {rows: captures.shape(rows, 10) for rows in (1, 3, 5, 33, 65, 97, MAX_GRAPH_ROWS)}
    assert {rows: shape.rows for rows, shape in found.items() if shape} == {
        1: 1, 3: 4, 5: 8, 33: 40, 65: 96, 97: 128, MAX_GRAPH_ROWS: MAX_GRAPH_ROWS,
    }  # fmt: skip
    assert captures.shape(MAX_GRAPH_ROWS + 1, 10) is None
    contexts = {tokens: captures.shape(1, tokens) for tokens in (1, 1024, 1025, 4097, 10_000)}
    assert [shape.context for shape in contexts.values() if shape] == [1024, 1024, 4096, 10_000, 10_000]
    assert captures.shape(1, 10_001) is None


@pytest.mark.parametrize("longest", [1, 100, 1024, 1025])
def test_no_shape_is_longer_than_the_longest_sequence(longest: int) -> None:
    captures = GraphCache(longest)
    assert captures.shape(1, 1) == GraphShape(1, min(longest, 1024))
    assert captures.shape(1, longest) == GraphShape(1, longest)


def test_the_second_step_of_a_shape_is_captured_and_further_ones_are_replayed() -> None:
    captures = GraphCache(1024)
    assert [captures.mode(ONE), captures.mode(ONE)] == [GraphMode.EAGER, GraphMode.CAPTURE]
    assert captures.captured(ONE, 100)
    assert captures.mode(ONE) is GraphMode.REPLAY
    assert captures.mode(GraphShape(2, 1024)) is GraphMode.EAGER
    assert captures.nbytes == 100


@pytest.mark.parametrize(
    ("most_graphs", "most_bytes", "kept"), [(2, 1000, [100, 100]), (9, 250, [100, 100]), (9, 99, [])]
)
def test_captures_are_bounded_and_what_is_there_is_replayed(most_graphs: int, most_bytes: int, kept: list[int]) -> None:
    captures = GraphCache(1024, most_graphs=most_graphs, most_bytes=most_bytes)
    for rows in (1, 2, 4, 8):
        shape = captures.shape(rows, 1)
        if shape is not None and [captures.mode(shape), captures.mode(shape)] == [GraphMode.EAGER, GraphMode.CAPTURE]:
            captures.captured(shape, 100)
    assert captures.nbytes == sum(kept)
    assert captures.stopped
    held = [captures.shape(rows, 1) for rows in (1, 2, 4, 8)]
    assert [shape is not None for shape in held] == [True] * len(kept) + [False] * (4 - len(kept))
    assert all(captures.mode(shape) is GraphMode.REPLAY for shape in held if shape)
    assert captures.mode(GraphShape(8, 1024)) is GraphMode.EAGER


def test_after_a_failure_nothing_more_is_captured() -> None:
    captures = GraphCache(1024)
    captures.mode(ONE)
    captures.failed("no memory")
    assert (captures.mode(ONE), captures.shape(1, 1), captures.stopped) == (GraphMode.EAGER, None, "no memory")
