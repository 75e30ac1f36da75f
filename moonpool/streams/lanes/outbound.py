"""What goes out on a lane: messages, and payloads from where they lie.

A payload's memory is its sender's again when it is *held* no longer: the system has taken it (over a socket), or the
peer says that it has pulled it (out of a region).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

from google.protobuf.message import Message

from moonpool.errors import FrameError, StreamBroken
from moonpool.streams.lanes.brief import Answer, Place
from moonpool.streams.lanes.faults import LANE_BROKEN, Breaker
from moonpool.streams.lanes.held import Held
from moonpool.streams.lanes.regions import Mapped, OwnRegions, Ring
from moonpool.streams.lanes.sockets import LENGTHS, LaneSocket
from moonpool.v1 import kv_pb2

Item = Message | bytes | Held | Answer
"""What an outbox gives: a message, an encoded message, one whose payload is held, or a brief one."""


class Unsent(NamedTuple):
    """What the system has not taken at once.

    Attributes:
        parts: bytes that must go out next, in order.
        held: whose payload is among them, and free when they have gone.
        error: what broke the lane.
    """

    parts: list[memoryview]
    held: Held | None = None
    error: Exception | None = None

    def kept(self) -> Unsent:
        """The same with bytes of its own, for who does not wait until they have gone."""
        return self._replace(parts=[memoryview(b"".join(self.parts))])


class Outbound:
    """The sending half of a lane."""

    def __init__(
        self,
        sock: LaneSocket,
        own: OwnRegions,
        lent: tuple[int, Mapped] | None,
        take_pulls: Callable[[], int],
        breaks: Breaker | None,
    ) -> None:
        """Takes the lane's socket; our regions; the one that the peer lends; what the peer is to be told of; faults."""
        self._sock = sock
        self._own = own
        self._lent = lent
        self._ring = Ring(lent[1].nbytes) if lent else None
        self._take_pulls = take_pulls
        self._breaks = breaks
        self._unpulled: collections.deque[Held | None] = collections.deque()  # None: a piece of the ring
        self._unsent: list[Held] = []  # their sending failed; they are told when the lane is closed

    def start(self, item: Item) -> Unsent | None:
        """Sends what the system takes at once; what it does not take must be given to `finish` before anything else."""
        held = item if isinstance(item, Held) else None
        try:
            if isinstance(item, Answer):
                return self._start_answer(item)
            if isinstance(item, kv_pb2.LaneFrame):
                return self._send(item, [], None)
            if held is None:
                data = item if isinstance(item, bytes) else item.SerializeToString()  # type: ignore[union-attr]
                return self._send(self._frame(data), [], None)
            self._break_perhaps()
            return self._start_held(held)
        except Exception as error:  # whoever writes next meets it
            if held is not None:
                self._unsent.append(held)
            return Unsent([], held, error)

    async def finish(self, unsent: Unsent) -> None:
        """Sends what was left. Not to be cancelled.

        Raises:
            StreamBroken: The lane has ended.
        """
        if unsent.error is not None:
            raise unsent.error
        try:
            await self._sock.send(unsent.parts)
        except BaseException:
            if unsent.held is not None:
                self._unsent.append(unsent.held)
            raise
        if unsent.held is not None:
            unsent.held.finish()

    def pulled(self, count: int) -> None:
        """The peer has read so many payloads out of regions."""
        if count > len(self._unpulled):
            raise FrameError(f"{count} payloads were pulled, {len(self._unpulled)} lay there")
        for _ in range(count):
            held = self._unpulled.popleft()
            if held is not None:
                held.finish()
            elif self._ring is not None:
                self._ring.free()

    def fail(self, error: Exception) -> None:
        """Payloads that are still held fail with `error`."""
        for held in (*self._unpulled, *self._unsent):
            if held is not None:
                held.fail(error)
        self._unpulled.clear()
        self._unsent.clear()

    def _frame(self, data: bytes) -> kv_pb2.LaneFrame:
        """Around a message; tells the peer what was pulled on the way."""
        pulls = self._take_pulls()
        return kv_pb2.LaneFrame(message=data, pulled=pulls) if pulls else kv_pb2.LaneFrame(message=data)

    def _start_held(self, item: Held) -> Unsent | None:
        frame = self._frame(item.message.SerializeToString())
        if self._posted(item, frame):
            unsent = self._send(frame, [], None)
            item.finish()
            return unsent
        rest = self._shown(item, frame)
        if rest is not None:
            self._unpulled.append(item)
            return self._send(frame, rest, None)
        unsent = self._send(frame, item.parts, item)
        if unsent is None:
            item.finish()
        return unsent

    def _send(self, frame: kv_pb2.LaneFrame, parts: list[memoryview], held: Held | None) -> Unsent | None:
        data = frame.SerializeToString()
        left = self._sock.send_now([LENGTHS.pack(len(data), sum(part.nbytes for part in parts)) + data, *parts])
        return Unsent(left, held) if left else None

    def _break_perhaps(self) -> None:
        if self._breaks is not None and self._breaks():
            self._sock.close(StreamBroken(LANE_BROKEN))

    def _start_answer(self, item: Answer) -> Unsent | None:
        message, pieces = item
        nbytes = sum([piece.nbytes for piece in pieces])
        self._break_perhaps()
        place = self._mailed(pieces, nbytes)
        follow = nbytes if place is None else 0
        left = self._sock.send_now([message.encoded(follow, place), *(pieces if follow else ())])
        return Unsent(left) if left else None

    def _posted(self, item: Held, frame: kv_pb2.LaneFrame) -> bool:
        """Whether the payload was copied to the region that the peer lends, and `frame` says where."""
        place = self._mailed(item.parts, item.nbytes)
        if place is None:
            return False
        frame.extents.add(**place._asdict())
        return True

    def _mailed(self, parts: Sequence[memoryview], nbytes: int) -> Place | None:
        """Where in the region that the peer lends a payload was copied to; None where it has no room."""
        offset = self._ring.take(nbytes) if self._ring is not None and nbytes else None
        if offset is None or self._lent is None:
            return None
        number, region = self._lent
        at = offset
        for part in parts:
            region.part(at, part.nbytes)[:] = part
            at += part.nbytes
        self._unpulled.append(None)
        return Place(number, nbytes, offset)

    def _shown(self, item: Held, frame: kv_pb2.LaneFrame) -> list[memoryview] | None:
        """If some of the payload lies in our regions: says in `frame` where all of it is; parts that must follow."""
        found = [self._own.find(part) for part in item.parts]
        if not any(region for region, _ in found):
            return None
        extents: list[tuple[int, int, int]] = []
        for (region, offset), part in zip(found, item.parts, strict=True):
            if extents and extents[-1][0] == region and (not region or extents[-1][1] + extents[-1][2] == offset):
                offset, nbytes = extents[-1][1], extents[-1][2] + part.nbytes
                extents[-1] = region, offset, nbytes
            else:
                extents.append((region, offset, part.nbytes))
        for region, offset, nbytes in extents:
            frame.extents.add(region=region, offset=offset, length=nbytes)
        return [part for (region, _), part in zip(found, item.parts, strict=True) if not region]
