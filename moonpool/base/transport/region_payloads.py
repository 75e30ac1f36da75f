"""Payloads that lie in memory that both sides use: `PlacedPayloads` places them, `RegionReader` finds and counts them.

For connections over a socket whose transport shows regions (shared_memory.py, nixl.py). A connection of another kind
needs neither.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from moonpool.base.errors import FrameError
from moonpool.base.kv.frames import MAX_FRAME_SLICES
from moonpool.base.rpc.messages import MESSAGE_BYTES
from moonpool.base.transport.framing import PayloadExtent
from moonpool.base.transport.payloads import PendingPayload
from moonpool.base.transport.regions import ExportedRegions, FetchedParts, MailboxRing, MappedRegion, RemoteRegion
from moonpool.v1 import kv_pb2


class PlacedPayloads:
    """The sender's payloads in own regions, or in the mailbox that the receiver lends, until they have been read."""

    def __init__(self, own: ExportedRegions, borrowed: tuple[int, MappedRegion] | None) -> None:
        """Take the sender's regions; number and memory of the mailbox, if the receiver lends a mailbox."""
        self._own = own
        self._borrowed = borrowed
        self._ring = MailboxRing(borrowed[1].nbytes) if borrowed else None
        self._unread: collections.deque[PendingPayload | None] = collections.deque()  # None: a piece of the mailbox

    def copy(self, parts: Sequence[memoryview], nbytes: int) -> PayloadExtent | None:
        """Copy a payload to the mailbox. Return the place; None if there is no room."""
        offset = self._ring.take(nbytes) if self._ring is not None and nbytes else None
        if offset is None or self._borrowed is None:
            return None
        number, region = self._borrowed
        at = offset
        for part in parts:
            region.part(at, part.nbytes)[:] = part
            at += part.nbytes
        self._unread.append(None)
        return PayloadExtent(number, nbytes, offset)

    def point_to(self, item: PendingPayload, frame: kv_pb2.TransportFrame) -> list[memoryview] | None:
        """Say in `frame` which parts of a payload lie in own regions, and where; `item` is held until they are read.

        Returns:
            The parts that must follow the message; None if no part lies in a region.
        """
        found = [self._own.find(part) for part in item.parts]
        if not any(region for region, _ in found):
            return None
        extents: list[tuple[int, int, int]] = []
        for (region, offset), part in zip(found, item.parts, strict=True):
            # Neighbours become one extent: a block's slices often lie side by side, and extents cost bytes and time.
            if extents and extents[-1][0] == region and (not region or extents[-1][1] + extents[-1][2] == offset):
                offset, nbytes = extents[-1][1], extents[-1][2] + part.nbytes
                extents[-1] = region, offset, nbytes
            else:
                extents.append((region, offset, part.nbytes))
        for region, offset, nbytes in extents:
            frame.extents.add(region=region, offset=offset, length=nbytes)
        self._unread.append(item)
        return [part for (region, _), part in zip(found, item.parts, strict=True) if not region]

    def on_reads(self, count: int) -> None:
        """Free the oldest placed payloads: the receiver has read so many."""
        if count > len(self._unread):
            raise FrameError(f"{count} payloads were read, {len(self._unread)} lay there")
        for _ in range(count):
            held = self._unread.popleft()
            if held is not None:
                held.finish()
            elif self._ring is not None:
                self._ring.free()

    def fail(self, error: Exception) -> None:
        """Fail the payloads that are still held."""
        for held in self._unread:
            if held is not None:
                held.fail(error)
        self._unread.clear()


class RegionReader:
    """The receiver's look into the sender's regions and into its own mailbox; counts the payloads read there.

    Attributes:
        awaited: Payloads read, not reported, and awaited by the sender.
    """

    def __init__(self, readable: Mapping[int, MappedRegion | RemoteRegion], mailbox: int | None) -> None:
        """Take the regions by number; the number of the lent region, None for no mailbox."""
        self._readable = readable
        self._remote = {number: region for number, region in readable.items() if isinstance(region, RemoteRegion)}
        self._mailbox = mailbox
        self._reads = 0  # payloads read that were not reported to the sender
        self.awaited = 0

    def is_awaited(self, extents: Iterable[kv_pb2.Extent]) -> bool:
        """Whether the sender waits until the payload is read.

        The sender does not wait for a payload in the mailbox: the next message reports the read, with the credits at
        the latest.
        """
        return self._mailbox is None or any(extent.region != self._mailbox for extent in extents)

    def count_read(self, *, awaited: bool) -> None:
        """Note that a payload has been read."""
        self._reads += 1
        self.awaited += awaited

    def take_reads(self) -> int:
        """Return the number of payloads read and not reported; the caller reports this number."""
        reads, self._reads, self.awaited = self._reads, 0, 0
        return reads

    def remote_places(self, extents: Iterable[kv_pb2.Extent]) -> dict[int, list[tuple[int, int]]]:
        """Offset and length of the parts that must be fetched before they are read, by region."""
        places: dict[int, list[tuple[int, int]]] = {}
        for extent in extents:
            if extent.region in self._remote:
                places.setdefault(extent.region, []).append((extent.offset, extent.length))
        return places

    async def fetch(self, region: int, places: Sequence[tuple[int, int]]) -> FetchedParts:
        """Copy parts of a remote region; raises as `RemoteRegion.fetch`."""
        return await self._remote[region].fetch(places)

    def check_size(self, extents: Iterable[kv_pb2.Extent | PayloadExtent]) -> None:
        """Raise FrameError if a payload has too many parts or bytes."""
        lengths = [extent.length for extent in extents]
        if len(lengths) > MAX_FRAME_SLICES or sum(lengths) > MESSAGE_BYTES:
            raise FrameError("the payload of a message is too large")

    def parts(
        self,
        extents: Iterable[kv_pb2.Extent | PayloadExtent],
        follow: memoryview,
        fetched: Mapping[int, Iterator[memoryview]] = MappingProxyType({}),
    ) -> list[memoryview]:
        """Return a payload's parts in order.

        Args:
            extents: Where the parts lie.
            follow: The bytes that follow the message.
            fetched: Parts of remote regions, in order, by region.

        Raises:
            FrameError: There are no such bytes, or `follow` has bytes that no extent names.
        """
        self.check_size(extents)
        parts: list[memoryview] = []
        at = 0
        for extent in extents:
            if extent.region in fetched:
                parts.append(next(fetched[extent.region]))
            elif extent.region:
                parts.append(self._region(extent.region).part(extent.offset, extent.length))
            else:
                parts.append(follow[at : at + extent.length])
                at += extent.length
        if at != follow.nbytes:
            raise FrameError(f"{follow.nbytes} bytes follow a message, its extents need {at}")
        return parts

    def _region(self, number: int) -> MappedRegion:
        region = self._readable.get(number)
        if region is None or isinstance(region, RemoteRegion):
            raise FrameError(f"there is no region {number} to be read")
        return region
