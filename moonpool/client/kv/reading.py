"""Values that are being read: each asks for its block and collects its slices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.client.kv.connection import Connection
from moonpool.errors import InvalidRequest, TransferFailed
from moonpool.kv.frames import DamagedSliceError
from moonpool.kv.keys import BlockKey
from moonpool.kv.layout import KVLayout
from moonpool.kv.values import ValueTarget
from moonpool.streams.prefix_read import PrefixLost


@dataclass(slots=True, eq=False)
class Wanted:
    """One value that a caller asks for.

    Attributes:
        key: of its block.
        memory: where it is to lie; None for memory of its own.
        target: what has come of it; complete once it is `found`.
    """

    key: BlockKey
    memory: memoryview | None = None
    target: ValueTarget | None = None
    found: bool = False

    def value(self) -> bytearray | None:
        """The value; None when there is none."""
        return self.target.value() if self.found and self.target is not None else None

    def length(self) -> int | None:
        """Bytes of the value in `memory`; None when there is none; raises InvalidRequest when it has no room there."""
        nbytes = self.target.length() if self.found and self.target is not None else None
        if nbytes is not None and self.memory is not None and nbytes > self.memory.nbytes:
            raise InvalidRequest("buffer", f"has {self.memory.nbytes} bytes, the value {nbytes}")
        return nbytes


def remaining(until: float) -> float:
    """Seconds until then, by `time.monotonic`; raises TransferFailed when there are none."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TransferFailed("it took too long")
    return seconds


async def read_some(connection: Connection, layout: KVLayout, wanted: Sequence[Wanted], until: float) -> int:
    """Reads values of one layout up to the first that is not there; returns its index.

    Values before it are `found`. A block that was lost or damaged counts as not there. `until`: see `remaining`.

    Raises:
        MoonpoolError: as `Connection.read`.
    """
    for one in wanted:
        one.target = ValueTarget(layout, one.memory)

    def take(layer: int, index: int, data: memoryview, value: int) -> None:
        target = wanted[index].target
        assert target is not None, "each has one"
        target.take(layer, data)

    def into(layer: int, index: int) -> memoryview | None:
        target = wanted[index].target
        assert target is not None, "each has one"
        return target.place(layer)

    keys = [one.key for one in wanted]
    try:
        count = await connection.read(layout, keys, on_slice=take, into=into, timeout_s=remaining(until))
    except PrefixLost as lost:
        return await read_some(connection, layout, wanted[: lost.blocks], until) if lost.blocks else 0
    except DamagedSliceError as damaged:
        return await read_some(connection, layout, wanted[: damaged.block], until) if damaged.block else 0
    for one in wanted[:count]:
        one.found = True
    return count
