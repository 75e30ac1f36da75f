"""Which graph a decode step takes, and when one is captured. Plain code: the GPU's part is in `moonpool.engine.graphs`.

A graph is captured for a shape: so many rows, and contexts up to a length, which the kernels' launches depend on. Steps
are padded to the next shape. A shape's first step runs eagerly, as it compiles kernels; with its second one it is
captured, as what comes once is not worth it. Captures are bounded in number and in memory; what has no graph by then
runs eagerly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

MOST_ROWS = 256
"""Rows of a decode step that has a graph."""
MOST_GRAPHS = 64
MOST_BYTES = 512 << 20
"""Of the device's memory, for all graphs of a stage."""
_ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, MOST_ROWS + 1, 32))
_LEAST_CONTEXT, _WIDER = 1024, 4


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a graph computes: `rows` sequences with a token each, of up to `context` tokens."""

    rows: int
    context: int


class Way(Enum):
    """How a step is computed."""

    EAGER = auto()
    CAPTURE = auto()
    """Its graph is captured, and then replayed."""
    REPLAY = auto()


def least(values: Sequence[int], at_least: int) -> int | None:
    """The first of rising values that is not less; None when all are."""
    return next((value for value in values if value >= at_least), None)


class Captures:
    """What is captured of one stage.

    Args:
        longest: tokens of the longest sequence.
        most_graphs: captured at most.
        most_bytes: of memory that they hold together.
    """

    def __init__(self, longest: int, *, most_graphs: int = MOST_GRAPHS, most_bytes: int = MOST_BYTES) -> None:
        self._contexts = [_LEAST_CONTEXT]
        while self._contexts[-1] < longest:
            self._contexts.append(self._contexts[-1] * _WIDER)
        self._contexts[-1] = longest
        self._most_graphs, self._most_bytes = most_graphs, most_bytes
        self._held: dict[GraphShape, int] = {}
        self._seen: set[GraphShape] = set()
        self.stopped = ""
        """Why nothing more is captured; empty = more may be."""

    @property
    def nbytes(self) -> int:
        """Memory that the graphs hold."""
        return sum(self._held.values())

    def shape(self, rows: int, context: int) -> GraphShape | None:
        """The least shape that a step of so many sequences fits, the longest of `context` tokens; None without any.

        Once nothing more is captured, only shapes with a graph are fitted.
        """
        found_rows, found_context = least(_ROWS, rows), least(self._contexts, context)
        if found_rows is None or found_context is None:
            return None
        shape = GraphShape(found_rows, found_context)
        return shape if not self.stopped or shape in self._held else None

    def way(self, shape: GraphShape) -> Way:
        """How the next step of a shape is computed; told once for each step."""
        if shape in self._held:
            return Way.REPLAY
        if self.stopped:
            return Way.EAGER
        if shape in self._seen:
            return Way.CAPTURE
        self._seen.add(shape)
        return Way.EAGER

    def captured(self, shape: GraphShape, nbytes: int) -> bool:
        """A graph was captured; returns whether it may be kept."""
        if self.nbytes + nbytes > self._most_bytes:
            self.stopped = f"graphs would hold more than {self._most_bytes >> 20} MiB"
            return False
        self._held[shape] = nbytes
        if len(self._held) == self._most_graphs:
            self.stopped = f"{self._most_graphs} graphs are captured"
        return True

    def failed(self, why: str) -> None:
        """A graph could not be captured."""
        self.stopped = why
