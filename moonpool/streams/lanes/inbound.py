"""What comes on a lane: messages, and payloads out of the socket or out of regions, without a task that waits.

The event loop calls when there is something to be received. All of it that is there is taken then, and handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from moonpool.errors import FrameError, InvalidRequest, MoonpoolError
from moonpool.kv.frames import MAX_FRAME_SLICES
from moonpool.kv.scattered import Bytes, Scattered, new_bytes
from moonpool.rpc.codec import plain_deserializer
from moonpool.rpc.limits import MESSAGE_BYTES, check_message
from moonpool.streams.lanes.brief import BRIEF, Brief, Place, decoded
from moonpool.streams.lanes.landing import Landed, Landing, Lent
from moonpool.streams.lanes.regions import Mapped
from moonpool.streams.lanes.sockets import BUFFER_BYTES, LENGTHS, LaneSocket
from moonpool.v1 import kv_pb2

M = TypeVar("M", bound=Message)
Came = memoryview | Landed | Lent

PULLS_AT_ONCE = 2
"""Payloads that are pulled before their sender is told, while there are more."""
TURN_BYTES = 1 << 20
"""After so many bytes that were there at once, others get a turn of the event loop."""
MESSAGE_COST = 4 << 10
"""What a message counts for in a turn besides its bytes: small ones take their time too."""

_NO_PAYLOAD = memoryview(b"")


class Taker(NamedTuple):
    """Who takes what comes.

    Attributes:
        take: gets each message with its payload, which is nobody else's; or what says where the payload has landed.
            What it raises ends the reading.
        place: says where the payload of a message, of so many bytes, is to land; None for memory of its own.
        lend: payloads that lie in regions and land nowhere are lent.
        brief: gets brief messages, each with its payload, which is lent until it returns; tells how many bytes it has
            answered with. None where there are none.
    """

    take: Callable[[Any, Came], None]
    place: Callable[[Any, int], Landing | None] = lambda message, nbytes: None
    lend: bool = False
    brief: Callable[[Brief, Bytes], int] | None = None


class _Incoming(NamedTuple):
    """What is being received.

    Attributes:
        left: where the next bytes go, one after the other.
        then: called when all of it is there, with whether all of it is where it was to go.
        live: asked before each write: whether it may still be written. What comes later is dropped.
    """

    left: list[memoryview]
    then: Callable[[bool], None]
    live: Callable[[], bool] | None = None


class Inbound(Generic[M]):
    """The receiving half of a lane."""

    def __init__(
        self,
        sock: LaneSocket,
        cls: type[M],
        readable: dict[int, Mapped],
        mailbox: int | None,
        pulled: Callable[[int], None],
        tell: Callable[[int], None],
    ) -> None:
        """Reads nothing yet.

        Args:
            sock: The lane's.
            cls: Messages that come.
            readable: Regions in which the peer's payloads may lie.
            mailbox: Number of the one among them that this side has lent; None for none. Who writes to it does not wait
                until it was read: it hears of that with the next message, which comes with its credits at the latest.
            pulled: Told how many payloads the peer has pulled.
            tell: Tells the peer, who waits for it, how many of its payloads have been pulled.
        """
        self._sock = sock
        self._parse = plain_deserializer(cls)
        self._readable = readable
        self._mailbox = mailbox
        self._pulled = pulled
        self._tell = tell
        self._pulls = 0  # payloads that the peer has not been told of
        self._work = 0  # so far, besides what was received: bytes out of regions and of answers, the cost of messages
        self._awaited = 0  # those among them for which it waits
        self._taker: Taker | None = None
        self._over: asyncio.Future[Exception] | None = None
        self._paused = False
        self._continues = False  # with the next turn of the event loop
        self._lands = False  # a payload does, beside the loop
        self._incoming: _Incoming | None = None

    async def run(self, taker: Taker) -> Exception:
        """Hands over what comes, in order, until the lane ends; returns why it has.

        Raises:
            Exception: What `take` raised, or what `place` did that is no MoonpoolError.
        """
        self._taker = taker
        self._over = asyncio.get_running_loop().create_future()
        try:
            self._go_on()
            return await self._over
        finally:
            self._taker = None
            self._sock.unwatch()

    def pause(self) -> None:
        """Takes nothing more until `resume`."""
        self._paused = True
        self._sock.unwatch()

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._paused = False
        self._go_on()

    def end(self, error: Exception) -> None:
        """The lane has ended with `error`."""
        if self._over is not None and not self._over.done():
            self._over.set_result(error)

    def take_pulls(self) -> int:
        """How many pulled payloads the peer has not been told of; the caller tells it."""
        pulls, self._pulls, self._awaited = self._pulls, 0, 0
        return pulls

    @property
    def _goes_on(self) -> bool:
        """Somebody takes what comes."""
        return not self._paused and not self._lands and self._is_read

    @property
    def _is_read(self) -> bool:
        return self._taker is not None and self._over is not None and not self._over.done()

    def _go_on(self) -> None:
        if self._goes_on:
            self._sock.watch(self._receive)
            self._receive()

    def _receive(self) -> None:
        """Takes all that is there, or as much as a turn of the event loop may take."""
        if self._continues or not self._goes_on:
            return
        end = self._taken + TURN_BYTES
        try:
            while self._next() if self._incoming is None else self._more(self._incoming):
                if not self._goes_on:
                    return
                if self._taken >= end:
                    if self._sock.has_more:  # what is still in the socket has the event loop call again
                        self._continues = True
                        asyncio.get_running_loop().call_soon(self._continue)
                    return
        except MoonpoolError as error:
            self._sock.unwatch()
            self.end(error)
        except Exception as error:
            self._fail(error)

    def _continue(self) -> None:
        self._continues = False
        self._receive()

    def _fail(self, error: Exception) -> None:
        """Whoever runs this gets an error that is not the lane's."""
        self._sock.unwatch()
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    @property
    def _taken(self) -> int:
        return self._sock.received_bytes + self._work

    def _next(self) -> bool:
        """Takes the next message; False when not all of it is there."""
        sock = self._sock
        lengths = sock.peek(LENGTHS.size)
        if lengths is None:
            return False
        size, follow = LENGTHS.unpack(lengths)
        brief, size = size & BRIEF, size & ~BRIEF
        if size + follow > MESSAGE_BYTES or (brief and LENGTHS.size + size > BUFFER_BYTES):
            raise FrameError(f"a message of {size} bytes with {follow} bytes of payload")
        if LENGTHS.size + size > BUFFER_BYTES:
            sock.skip(LENGTHS.size)
            memory = new_bytes(size)
            self._await([memory], lambda _: self._message(bytes(memory), follow))
            return True
        data = sock.peek(LENGTHS.size + size)
        if data is None:
            return False
        sock.skip(data.nbytes)
        (self._brief if brief else self._message)(bytes(data[LENGTHS.size :]), follow)
        return True

    def _more(self, incoming: _Incoming) -> bool:
        """Takes more of what is being received; False when nothing is there."""
        if incoming.live is not None and not incoming.live():
            then = incoming.then
            rest = new_bytes(sum(target.nbytes for target in incoming.left))
            self._incoming = incoming = _Incoming([rest], lambda _: then(False))
        left = self._sock.fill(incoming.left)
        if left is None:
            return False
        self._incoming = incoming._replace(left=left) if left else None
        if not left:
            incoming.then(True)
        return True

    def _await(
        self, targets: list[memoryview], then: Callable[[bool], None], live: Callable[[], bool] | None = None
    ) -> None:
        """Receives the next bytes into targets."""
        left = [target for target in targets if target.nbytes]
        if left:
            self._incoming = _Incoming(left, then, live)
        else:
            then(True)

    def _message(self, text: bytes, follow: int) -> None:
        """A message is there; its payload follows, or lies somewhere."""
        self._work += MESSAGE_COST
        frame = _frame(text)
        if frame.pulled:
            self._pulled(frame.pulled)
        if not frame.message:
            if follow or frame.extents:
                raise FrameError("a payload without a message")
            self._tell_pulled()
            return
        message = self._parsed(frame.message)
        if frame.extents:
            if follow:
                memory = new_bytes(follow)
                self._await([memory], lambda _: self._pull(frame, message, memory))
            else:
                self._pull(frame, message, _NO_PAYLOAD)
        elif follow:
            self._follows(message, follow)
        else:
            self._hand(message, _NO_PAYLOAD)

    def _brief(self, text: bytes, follow: int) -> None:
        """A brief message is there; its payload follows, or lies somewhere."""
        self._work += MESSAGE_COST
        message = decoded(text)
        if message.pulled:
            self._pulled(message.pulled)
        if not follow:
            self._briefly(message, _NO_PAYLOAD)
            return
        memory = new_bytes(follow)
        self._await([memory], lambda _: self._briefly(message, memory))

    def _briefly(self, message: Brief, payload: Bytes) -> None:
        if message.extents:
            assert isinstance(payload, memoryview), "what follows a message is in one piece"
            parts = self._parts(message.extents, payload)
            payload = parts[0] if len(parts) == 1 else Scattered(parts)
            self._work += payload.nbytes
        if self._taker is None or self._taker.brief is None:
            raise FrameError("brief messages are not taken here")
        try:
            self._work += self._taker.brief(message, payload)
        except Exception as error:
            self._fail(error)

    def _follows(self, message: M, nbytes: int) -> None:
        landing = self._place(message, nbytes)
        if landing is None:
            memory = new_bytes(nbytes)
            self._await([memory], lambda _: self._hand(message, memory))
            return

        def landed(whole: bool) -> None:
            assert landing is not None
            if whole:
                self._land(message, landing, None)
            else:
                self._hand(message, Landed(landing, 0))

        self._await(landing.targets, landed, landing.live)

    def _pull(self, frame: kv_pb2.LaneFrame, message: M, follow: memoryview) -> None:
        """Copies a payload from where it lies, or lends it."""
        parts = self._parts(frame.extents, follow)
        awaited = self._mailbox is None or any(extent.region != self._mailbox for extent in frame.extents)
        nbytes = sum([part.nbytes for part in parts])
        self._work += nbytes
        landing = self._place(message, nbytes)
        if landing is not None:
            self._land(message, landing, Scattered(parts), lambda: self._was_pulled(awaited))
        elif self._taker is not None and self._taker.lend:
            data = parts[0] if len(parts) == 1 else Scattered(parts)
            self._hand(message, Lent(data, lambda: self._was_pulled(awaited)))
        else:
            payload = memoryview(b"".join(parts))
            self._was_pulled(awaited)
            self._hand(message, payload)

    def _land(
        self, message: M, landing: Landing, data: Bytes | None, pulled: Callable[[], None] = lambda: None
    ) -> None:
        """Lets a payload land, perhaps beside the loop: then nothing more is taken until it has, so order stays."""

        def over(landed: Landed) -> None:
            pulled()
            was, self._lands = self._lands, False
            if self._is_read:
                self._hand(message, landed)
            if was:
                self._go_on()

        if not landing.take(data, over):
            self._lands = True
            self._sock.unwatch()

    def _was_pulled(self, awaited: bool) -> None:
        self._pulls += 1
        self._awaited += awaited

    def _place(self, message: M, nbytes: int) -> Landing | None:
        assert self._taker is not None, "nothing is read for nobody"
        return self._taker.place(message, nbytes)

    def _hand(self, message: M, payload: Came) -> None:
        assert self._taker is not None, "nothing is read for nobody"
        try:
            self._taker.take(message, payload)
        except Exception as error:
            self._fail(error)
            return
        self._tell_pulled()

    def _tell_pulled(self) -> None:
        """Tells the peer what it waits for, several at once while more is there: each word may wake it."""
        if self._awaited and (self._awaited >= PULLS_AT_ONCE or not self._sock.has_more):
            self._tell(self.take_pulls())

    def _parts(self, extents: Iterable[kv_pb2.Extent | Place], follow: memoryview) -> list[memoryview]:
        """Where the extents of a payload say that it lies."""
        lengths = [extent.length for extent in extents]
        if len(lengths) > MAX_FRAME_SLICES or sum(lengths) > MESSAGE_BYTES:
            raise FrameError("the payload of a message is too large")
        parts: list[memoryview] = []
        at = 0
        for extent in extents:
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

    def _parsed(self, data: bytes) -> M:
        try:
            message: Any = self._parse(data)
        except (DecodeError, InvalidRequest) as error:
            raise FrameError(f"malformed message: {error}") from error
        parsed: M = message
        return parsed


def _frame(data: bytes) -> kv_pb2.LaneFrame:
    try:
        check_message(kv_pb2.LaneFrame, data)
        return kv_pb2.LaneFrame.FromString(data)
    except (DecodeError, InvalidRequest) as error:
        raise FrameError(f"malformed LaneFrame: {error}") from error
