"""I/O in flight: steps, loads, transfers and writes, with the block tables that each pins."""

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_manager import KVOwner
from moonpool.engine.scheduler.block_table import BlockTable
from moonpool.engine.scheduler.prefix_sources import KVSource


@dataclass(slots=True, eq=False)
class SequenceSlice:
    """A request's part of a step in flight: tokens [start, end).

    Attributes:
        first: this is the request's first slice.
        last: the prompt ends with this slice.
        loading: tokens before `start` arrive through the step's KV gates.
        full_hit: the tokens have KV, or get KV through the gates: the slice writes no KV.
        live: the slice counts; False after the slice was dropped.
    """

    request: int
    start: int
    end: int
    first: bool
    last: bool
    loading: bool
    full_hit: bool
    live: bool = True


@dataclass(slots=True, eq=False)
class StepFlight:
    """A step in flight.

    Attributes:
        progressed_at: when the last layer was computed, or the step came to the front of the engine, seconds.
        began_at: when the step was started, seconds.
        opened: highest layer with an open gate.
        layers: leading layers that are computed.
    """

    slices: list[SequenceSlice]
    tables: tuple[BlockTable, ...]
    gated: bool
    progressed_at: float
    began_at: float
    opened: int = -1
    layers: int = 0


@dataclass(slots=True, eq=False)
class LoadFlight:
    """A read of `wanted` blocks from a kvstore, or from another instance's pool."""

    request: int
    source: KVSource
    nbytes: int
    wanted: int
    tables: tuple[BlockTable, ...]


@dataclass(slots=True, eq=False)
class ReplicaFlight:
    """A chain's blocks being replicated here since `began_at`, seconds; the table's `past` blocks were cached."""

    number: int
    keys: tuple[BlockKey, ...]
    owner: KVOwner
    table: BlockTable
    source: KVSource
    nbytes: int
    began_at: float

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        return (self.table,)


@dataclass(slots=True, eq=False)
class TransferFlight:
    """Opening a transfer, or waiting for decode's verdict; pins no blocks."""

    request: int
    opens: bool
    tables: tuple[BlockTable, ...] = ()


@dataclass(slots=True, eq=False)
class SendFlight:
    """Slices being sent out of the pool."""

    request: int
    tables: tuple[BlockTable, ...]


@dataclass(slots=True, eq=False)
class WriteBackFlight:
    """Blocks being written to a kvstore; the table's `past` blocks are written without their windowed slices."""

    table: BlockTable

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        return (self.table,)


IoInFlight = StepFlight | LoadFlight | ReplicaFlight | TransferFlight | SendFlight | WriteBackFlight


def requests_of(flight: IoInFlight) -> Sequence[int]:
    """Return the ids of the requests that the I/O is for."""
    match flight:
        case SendFlight() | LoadFlight() | TransferFlight():
            return (flight.request,)
        case StepFlight():
            return [part.request for part in flight.slices]
        case WriteBackFlight() | ReplicaFlight():
            return ()
