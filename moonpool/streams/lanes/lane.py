"""A lane that is open: messages of one stream, each with its payload, over a socket and shared regions.

Payloads are sent from where they lie. Who sends one may use its memory again when it is *held* no longer: the system
has taken it (over a socket), or the peer says that it has pulled it (out of a region). Who receives one copies it into
memory of its own before anything looks at it: here, in one pass with the hash where it lands, or, where it is lent,
whoever gets it. So what is verified is what is used, whatever the peer writes meanwhile.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from moonpool.errors import FrameError, InvalidRequest, StreamBroken
from moonpool.kv.frames import MAX_FRAME_SLICES
from moonpool.kv.landing import land
from moonpool.kv.scattered import Scattered
from moonpool.rpc.codec import plain_deserializer
from moonpool.rpc.limits import MESSAGE_BYTES
from moonpool.streams.lanes.faults import LANE_BROKEN, Breaker, breaker
from moonpool.streams.lanes.held import Held
from moonpool.streams.lanes.landing import Landed, Landing, Lent
from moonpool.streams.lanes.regions import Mapped, OwnRegions, Ring
from moonpool.streams.lanes.sockets import LENGTHS, LaneSocket
from moonpool.v1 import kv_pb2

M = TypeVar("M", bound=Message)

PULLS_AT_ONCE = 2
"""Payloads that are pulled before their sender is told, while there are more."""


def _nowhere(message: Message, nbytes: int) -> None:
    """Payloads get memory of their own."""


class Lane(Generic[M]):
    """One open lane.

    Attributes:
        name: "local" or "tcp".
    """

    def __init__(
        self,
        name: str,
        sock: LaneSocket,
        cls: type[M],
        *,
        own: OwnRegions | None = None,
        readable: dict[int, Mapped] | None = None,
        lent: tuple[int, Mapped] | None = None,
        acknowledge: Callable[[Message], None],
        breaks: Breaker | None = breaker,
    ) -> None:
        """Takes what has been agreed on.

        Args:
            name: Of its kind.
            sock: Connected; the lane closes it.
            cls: Messages that come.
            own: Where payloads may lie that this side sends from its own memory.
            readable: Regions in which the peer's payloads may lie.
            lent: Number and memory of the region to which this side may write its payloads.
            acknowledge: Sends a message to the peer, in its turn.
            breaks: Breaks the lane on purpose.
        """
        self._breaks = breaks
        self.name = name
        self._sock = sock
        self._parse = plain_deserializer(cls)
        self._own = own or OwnRegions(())
        self._readable = readable or {}
        self._lent = lent
        self._ring = Ring(lent[1].nbytes) if lent else None
        self._acknowledge = acknowledge
        self._pulls = 0  # payloads that the peer has not been told of
        self._told = False  # of some, since the last turn of the event loop
        self._unpulled: collections.deque[Held | None] = collections.deque()  # None: a piece of the ring
        self._unsent: list[Held] = []  # their sending failed; they are told when the lane is closed
        self._error: Exception | None = None

    @property
    def closed(self) -> bool:
        """It has ended."""
        return self._error is not None

    async def read(
        self, place: Callable[[M, int], Landing | None] = _nowhere, *, lend: bool = False
    ) -> tuple[M, memoryview | Landed | Lent]:
        """The next message and its payload, which is nobody else's; or where the payload has landed.

        Args:
            place: Says where the payload of a message, of so many bytes, is to land; None for memory of its own.
            lend: Payloads that lie in regions and land nowhere are lent.

        Raises:
            StreamBroken: The lane has ended.
            FrameError: What came is not proper; nothing more can be read.
        """
        while True:
            self._tell_pulled()
            if self._told:
                self._told = False
                await asyncio.sleep(0)  # that goes out before more is pulled
            size, follow = LENGTHS.unpack(await self._sock.receive(LENGTHS.size))
            if size + follow > MESSAGE_BYTES:
                raise FrameError(f"a message of {size} bytes with {follow} bytes of payload")
            frame = self._frame(bytes(await self._sock.receive(size)))
            if frame.pulled:
                self._pulled(frame.pulled)
            message = self._message(frame.message)
            if frame.extents:
                parts = self._parts(frame, await self._sock.receive(follow))
                return message, self._pull(parts, partial(place, message), lend=lend)
            landing = place(message, follow) if follow else None
            if landing is not None:
                whole = await self._sock.receive_onto(landing.targets, landing.live)
                return message, Landed(landing, landing.intact() if whole else 0)
            payload = await self._sock.receive(follow)
            if frame.message:
                return message, payload

    async def write(self, item: Message | bytes | Held) -> None:
        """Sends what an outbox gives: a message, an encoded message, or one whose payload is held. Not to be cancelled.

        Raises:
            StreamBroken: The lane has ended.
        """
        if isinstance(item, kv_pb2.LaneFrame):
            await self._send(item, [])
        elif isinstance(item, Held):
            await self._write_held(item)
        else:
            data = item if isinstance(item, bytes) else item.SerializeToString()
            await self._send(kv_pb2.LaneFrame(message=data), [])

    def close(self, error: Exception) -> None:
        """Ends the lane; payloads that are still held fail with `error`. Idempotent."""
        if self._error is not None:
            return
        self._error = error
        self._sock.close(error)
        self._fail(error)
        for region in (*self._readable.values(), *((self._lent[1],) if self._lent else ())):
            region.close()

    def _fail(self, error: Exception) -> None:
        for held in (*self._unpulled, *self._unsent):
            if held is not None:
                held.fail(error)
        self._unpulled.clear()
        self._unsent.clear()

    async def _send(self, frame: kv_pb2.LaneFrame, parts: list[memoryview]) -> None:
        data = frame.SerializeToString()
        await self._sock.send([LENGTHS.pack(len(data), sum(part.nbytes for part in parts)) + data, *parts])

    async def _write_held(self, item: Held) -> None:
        frame = kv_pb2.LaneFrame(message=item.message.SerializeToString())
        if self._breaks is not None and self._breaks():
            self._sock.close(StreamBroken(LANE_BROKEN))
        try:
            if self._posted(item, frame):
                await self._send(frame, [])
                item.finish()
            elif (rest := self._shown(item, frame)) is not None:
                self._unpulled.append(item)
                await self._send(frame, rest)
            else:
                await self._send(frame, item.parts)
                item.finish()
        except BaseException:
            self._unsent.append(item)
            if self._error is not None:
                self._fail(self._error)
            raise

    def _posted(self, item: Held, frame: kv_pb2.LaneFrame) -> bool:
        """Whether the payload was copied to the region that the peer lends, and `frame` says where."""
        offset = self._ring.take(item.nbytes) if self._ring is not None and item.nbytes else None
        if offset is None or self._lent is None:
            return False
        number, region = self._lent
        at = offset
        for part in item.parts:
            region.part(at, part.nbytes)[:] = part
            at += part.nbytes
        frame.extents.add(region=number, offset=offset, length=item.nbytes)
        self._unpulled.append(None)
        return True

    def _shown(self, item: Held, frame: kv_pb2.LaneFrame) -> list[memoryview] | None:
        """If some of the payload lies in our regions: says in `frame` where all of it is; parts that must follow."""
        found = [self._own.find(part) for part in item.parts]
        if not any(region for region, _ in found):
            return None
        last = kv_pb2.Extent()
        for (region, offset), part in zip(found, item.parts, strict=True):
            if last.length and last.region == region and (not region or last.offset + last.length == offset):
                last.length += part.nbytes
            else:
                last = frame.extents.add(region=region, offset=offset, length=part.nbytes)
        return [part for (region, _), part in zip(found, item.parts, strict=True) if not region]

    def _pulled(self, count: int) -> None:
        if count > len(self._unpulled):
            raise FrameError(f"{count} payloads were pulled, {len(self._unpulled)} lay there")
        for _ in range(count):
            held = self._unpulled.popleft()
            if held is not None:
                held.finish()
            elif self._ring is not None:
                self._ring.free()

    def _pull(
        self, parts: list[memoryview], place: Callable[[int], Landing | None], *, lend: bool
    ) -> memoryview | Landed | Lent:
        """Copies a payload from where it lies, and tells the peer; or lends it."""
        landing = place(sum(part.nbytes for part in parts))
        if landing is None and lend:
            return Lent(parts[0] if len(parts) == 1 else Scattered(parts), self._was_pulled)
        if landing is not None:
            payload: memoryview | Landed = Landed(landing, land(landing.targets, Scattered(parts), landing.hashes))
        else:
            payload = memoryview(b"".join(parts))
        self._was_pulled()
        return payload

    def _was_pulled(self) -> None:
        self._pulls += 1
        self._tell_pulled()

    def _tell_pulled(self) -> None:
        """Tells the peer what was pulled, several at once while more is there: each word may wake it."""
        if self._pulls >= PULLS_AT_ONCE or (self._pulls and not self._sock.has_more):
            pulls, self._pulls = self._pulls, 0
            self._told = True
            self._acknowledge(kv_pb2.LaneFrame(pulled=pulls))

    def _parts(self, frame: kv_pb2.LaneFrame, follow: memoryview) -> list[memoryview]:
        """Where the extents of a payload say that it lies."""
        if len(frame.extents) > MAX_FRAME_SLICES or sum(extent.length for extent in frame.extents) > MESSAGE_BYTES:
            raise FrameError("the payload of a message is too large")
        parts: list[memoryview] = []
        at = 0
        for extent in frame.extents:
            if extent.region:
                parts.append(self._region(extent.region).part(extent.offset, extent.length))
            else:
                parts.append(follow[at : at + extent.length])
                at += extent.length
        if at != follow.nbytes:
            raise FrameError(f"{follow.nbytes} bytes follow a message, its extents need {at}")
        return parts

    def _region(self, number: int) -> Mapped:
        region = self._readable.get(number)
        if region is None:
            raise FrameError(f"there is no region {number} to be read")
        return region

    @staticmethod
    def _frame(data: bytes) -> kv_pb2.LaneFrame:
        try:
            return kv_pb2.LaneFrame.FromString(data)
        except DecodeError as error:
            raise FrameError(f"malformed LaneFrame: {error}") from error

    def _message(self, data: bytes) -> M:
        try:
            message: Any = self._parse(data)
        except (DecodeError, InvalidRequest) as error:
            raise FrameError(f"malformed message: {error}") from error
        parsed: M = message
        return parsed
