"""Reading pieces of blocks from the SSD tier, one after the other in one thread, and the bands that they belong to."""

import asyncio
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future

from moonpool.errors import MoonpoolError
from services.kvstore.core.reads import LeasedBlock

Bad = dict[int, Exception]
"""Blocks that could not be read, and why."""

Piece = tuple[int, LeasedBlock, int, list[memoryview]]
"""Index of the block, the block, first layer, memory for it and those after it."""


@dataclasses.dataclass(slots=True, eq=False)
class Fetch:
    """Pieces of some blocks that one thread reads.

    Attributes:
        future: which blocks could not be read.
        blocks: which blocks it reads.
        settled: its result has been taken note of.
    """

    future: "Future[Bad]"
    blocks: list[int]
    settled: bool = False

    async def result(self) -> Bad:
        """Waits for the thread; returns blocks that could not be read."""
        return self.future.result() if self.future.done() else await asyncio.wrap_future(self.future)


@dataclasses.dataclass(slots=True)
class Band:
    """Consecutive layers of all blocks.

    Attributes:
        layers: which.
        blocks: how many blocks.
        paid: the read-ahead counts all of it from the beginning.
        started: blocks before this one are in DRAM, or being read.
        slices: memory of those that are read, by block.
        fetches: who reads a block.
        counted: blocks whose slices the read-ahead counts.
    """

    layers: range
    blocks: int
    paid: bool
    started: int = 0
    slices: dict[int, list[memoryview]] = dataclasses.field(default_factory=dict)
    fetches: dict[int, Fetch] = dataclasses.field(default_factory=dict)
    counted: set[int] = dataclasses.field(default_factory=set)


def read(pieces: Sequence[Piece]) -> Bad:
    """Blocking. Reads pieces; returns which blocks could not be read. Blocks after a bad one are not read."""
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
