"""Reading values: what is asked for, and what has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.base import world
from moonpool.base.errors import InvalidRequest, TransferFailed
from moonpool.base.kv.frames import DamagedSliceError
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.values import ValueTarget
from moonpool.base.kv_transfer.prefix_reader import PrefixLost
from moonpool.client.kv.connection import KVConnection


@dataclass(slots=True, eq=False)
class ValueRead:
    """One value to read.

    Attributes:
        key: the block's key.
        memory: where to put the value; None for new memory.
        target: the bytes so far; complete once `found` is set.
        found: whether the value is complete.
    """

    key: BlockKey
    memory: memoryview | None = None
    target: ValueTarget | None = None
    found: bool = False

    def value(self) -> bytearray | None:
        """The value; None after a miss."""
        return self.target.value() if self.found and self.target is not None else None

    def length(self) -> int | None:
        """Size of the value in `memory`, in bytes; None after a miss.

        Raises:
            InvalidRequest: `memory` is too small for the value.
        """
        nbytes = self.target.length() if self.found and self.target is not None else None
        if nbytes is not None and self.memory is not None and nbytes > self.memory.nbytes:
            raise InvalidRequest("buffer", f"has {self.memory.nbytes} bytes, the value {nbytes}")
        return nbytes


async def read_values(connection: KVConnection, layout: KVLayout, wanted: Sequence[ValueRead], deadline: float) -> int:
    """Read values with one layout.

    Returns the index of the first missing value; the values before that index are `found`.

    A value that was lost or damaged counts as missing. `deadline`: as of `remaining_s`.

    Raises:
        MoonpoolError: as `KVConnection.read`.
    """
    for read in wanted:
        read.target = ValueTarget(layout, read.memory)

    def take(layer: int, index: int, data: memoryview, value: int) -> None:
        target = wanted[index].target
        assert target is not None, "set above"
        target.take(layer, data)

    def into(layer: int, index: int) -> memoryview | None:
        target = wanted[index].target
        assert target is not None, "set above"
        return target.place(layer)

    keys = [read.key for read in wanted]
    try:
        count = await connection.read(layout, keys, on_slice=take, into=into, timeout_s=remaining_s(deadline))
    except PrefixLost as lost:
        return await read_values(connection, layout, wanted[: lost.blocks], deadline) if lost.blocks else 0
    except DamagedSliceError as damaged:
        return await read_values(connection, layout, wanted[: damaged.block], deadline) if damaged.block else 0
    for read in wanted[:count]:
        read.found = True
    return count


def remaining_s(deadline: float) -> float:
    """Seconds deadline `deadline`, on the clock `world.monotonic`.

    Raises:
        TransferFailed: the deadline has passed.
    """
    seconds = deadline - world.monotonic()
    if seconds <= 0:
        raise TransferFailed("the call took too long")
    return seconds
