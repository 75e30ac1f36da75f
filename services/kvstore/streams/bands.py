"""What is read together: bands, jobs and pieces.

Owns what these are, and the reading of pieces one behind the other in one thread. Must not know in which order they
are wanted, who waits for them, or how much may be read ahead (layers.py).
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future

from moonpool.errors import MoonpoolError
from services.kvstore.core.reads import Source

Bad = dict[int, Exception]
"""Blocks that could not be read, and why."""

Piece = tuple[int, Source, int, list[memoryview]]
"""Index of the block, the block, first layer, memory for it and those after it."""


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """Pieces of some blocks that one thread reads, one after the other."""

    future: "Future[Bad]"
    blocks: list[int]
    settled: bool = False


@dataclasses.dataclass(slots=True)
class Band:
    """Consecutive layers of all blocks.

    Attributes:
        layers: which.
        blocks: how many blocks.
        paid: the read-ahead counts all of it from the beginning.
        started: blocks before this one are in DRAM, or being read.
        slices: memory of those that are read, by block.
        jobs: who reads a block.
        counted: blocks whose slices the read-ahead counts.
    """

    layers: range
    blocks: int
    paid: bool
    started: int = 0
    slices: dict[int, list[memoryview]] = dataclasses.field(default_factory=dict)
    jobs: dict[int, Job] = dataclasses.field(default_factory=dict)
    counted: set[int] = dataclasses.field(default_factory=set)


async def result_of(future: "Future[Bad]") -> Bad:
    """Waits for a job.

    Returns:
        Blocks that could not be read.
    """
    return future.result() if future.done() else await asyncio.wrap_future(future)


def read(pieces: Sequence[Piece]) -> Bad:
    """Blocking. Reads pieces; returns which blocks could not be read. Behind one that could not, nothing is read."""
    bad: Bad = {}
    for block, source, first, outs in pieces:
        if bad and block >= min(bad):
            continue
        assert source.reader is not None
        try:
            source.reader.read_layers(first, outs)
        except (MoonpoolError, OSError) as error:
            bad[block] = error
    return bad
