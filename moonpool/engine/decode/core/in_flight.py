"""I/O in flight, with the block tables that each pins.

A run in flight pins no table: a request that ends during the run keeps its tables until the run is over, so that a step
costs the same for any number of sequences.
"""

from moonpool.base.frozen import frozen
from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence
from moonpool.engine.scheduler.block_table import BlockTable


@frozen
class SwapFlight:
    """A request's blocks being swapped out or in."""

    request: DecodeRequest
    out: bool
    blocks: tuple[int, ...]
    tables: tuple[BlockTable, ...]


@frozen
class BlockWriteFlight:
    """A full block being written to one of the request's kvstores; the request may have ended.

    Attributes:
        table: the block; the slices of layers with a window are written if the block is not `past`.
    """

    request: DecodeRequest
    sequence: RequestSequence
    index: int
    store: int
    table: BlockTable

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        return (self.table,)

    @property
    def windowed(self) -> bool:
        """Whether the slices of layers with a window are written, too."""
        return not self.table.past


@frozen
class ReceiveFlight:
    """A transfer that may still write into the blocks of a request that has ended."""

    request: DecodeRequest
    tables: tuple[BlockTable, ...]


@frozen
class PromptLoadFlight:
    """A read of `wanted` blocks of a prompt's prefix, from one of the request's sources."""

    request: DecodeRequest
    source: int
    wanted: int
    tables: tuple[BlockTable, ...]


IoInFlight = SwapFlight | BlockWriteFlight | ReceiveFlight | PromptLoadFlight
