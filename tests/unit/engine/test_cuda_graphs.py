"""Graphs of decode steps: which are captured, in which order, and what becomes of the rest."""

from typing import Any

import pytest

from moonpool.engine.cuda_graphs import MAX_GRAPH_ROWS, MAX_GRAPHS, GraphCache, GraphShape

ONE = GraphShape(1, 1024)


def captured(longest: int, **how: Any) -> GraphCache:
    """With all graphs that may be, of 100 bytes each."""
    graphs = GraphCache(longest, **how)
    for shape in graphs.shapes:
        if not graphs.holds(100):
            break
        graphs.captured(shape)
    return graphs


def test_steps_with_adapters_have_graphs_of_their_own() -> None:
    graphs, plain = captured(5000, adapters=True), captured(5000)
    assert graphs.shapes[: len(plain.shapes)] == plain.shapes
    assert graphs.shape(3, 900) == GraphShape(4, 1024)
    assert graphs.shape(3, 900, adapted=True) == GraphShape(4, 1024, adapted=True)
    assert plain.shape(3, 900, adapted=True) is None


def test_steps_are_padded_to_the_next_shape() -> None:
    graphs = captured(1000)
    found = {rows: graphs.shape(rows, 10) for rows in (1, 3, 5, 33, 65, 97, MAX_GRAPH_ROWS)}
    assert {rows: shape.rows for rows, shape in found.items() if shape} == {
        1: 1, 3: 4, 5: 8, 33: 40, 65: 96, 97: 128, MAX_GRAPH_ROWS: MAX_GRAPH_ROWS,
    }  # fmt: skip
    assert graphs.shape(MAX_GRAPH_ROWS + 1, 10) is None
    graphs = captured(10_000)
    contexts = {tokens: graphs.shape(1, tokens) for tokens in (1, 1024, 1025, 4097, 10_000)}
    assert [shape.context for shape in contexts.values() if shape] == [1024, 1024, 4096, 10_000, 10_000]
    assert graphs.shape(1, 10_001) is None


@pytest.mark.parametrize("longest", [1, 100, 1024, 1025])
def test_no_shape_is_longer_than_the_longest_sequence(longest: int) -> None:
    graphs = captured(longest)
    assert graphs.shape(1, 1) == GraphShape(1, min(longest, 1024))
    assert graphs.shape(1, longest) == GraphShape(1, longest)


@pytest.mark.parametrize("most_rows", [1, 3, 64, 100, 256, 1000])
@pytest.mark.parametrize("longest", [1024, 32_768, 131_072, 1 << 20])
def test_all_steps_of_a_service_have_a_graph(longest: int, most_rows: int) -> None:
    """As many graphs as may be, the largest first: later ones use its memory."""
    graphs = captured(longest, most_rows=most_rows)
    assert graphs.nbytes == 100 * len(graphs.shapes)
    assert len(graphs.shapes) == len(set(graphs.shapes)) <= MAX_GRAPHS
    assert graphs.shapes[0].rows == max(shape.rows for shape in graphs.shapes)
    assert not graphs.stopped
    for rows in range(1, min(most_rows, MAX_GRAPH_ROWS) + 1):
        shape = graphs.shape(rows, longest)
        assert shape is not None
        assert shape.rows >= rows
    assert graphs.shape(2 * MAX_GRAPH_ROWS, 1) is None


def test_a_shape_is_found_once_its_graph_is_captured() -> None:
    graphs = GraphCache(1024)
    assert graphs.shape(1, 1) is None
    graphs.captured(ONE)
    assert graphs.shape(1, 1) == ONE
    assert graphs.shape(2, 1) is None


def test_where_memory_ends_a_larger_graph_is_taken() -> None:
    graphs = captured(1024, most_rows=8, most_bytes=250)
    assert [shape.rows for shape in graphs.shapes] == [8, 4, 2, 1]
    assert graphs.nbytes == 200
    assert graphs.stopped
    assert [graphs.shape(rows, 1) for rows in (1, 2, 4, 5)] == [GraphShape(rows, 1024) for rows in (4, 4, 4, 8)]
    assert captured(1024, most_bytes=99).shape(1, 1) is None


def test_after_a_failure_what_is_captured_stays() -> None:
    graphs = GraphCache(1024)
    graphs.captured(ONE)
    graphs.failed("no memory")
    assert (graphs.shape(1, 1), graphs.shape(2, 1), graphs.stopped) == (ONE, None, "no memory")
