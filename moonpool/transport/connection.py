"""An open connection of a transport: messages of one stream with payloads, over a socket and shared regions.

Payloads are sent from where they lie (`MessageSender`). The receiver copies a payload into memory of its own before
anything looks at it (`MessageReceiver`): in one pass with the hash at its destination, or, if it is borrowed, whoever
gets it copies it. So what is verified is what is used, whatever the peer writes meanwhile.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from moonpool.errors import FrameError, InvalidRequest, MoonpoolError, StreamBroken
from moonpool.kv.frames import MAX_FRAME_SLICES
from moonpool.kv.pool import BytesLike, Iovec, new_bytes
from moonpool.rpc.messages import MESSAGE_BYTES, check_message, plain_deserializer
from moonpool.transport.base import (
    BorrowedBuffer,
    FilledBuffer,
    OutgoingItem,
    PendingPayload,
    ReceiveBuffer,
    ReceiveCallbacks,
    ReceivedPayload,
    UnsentRest,
)
from moonpool.transport.fault_injection import CONNECTION_BROKEN, ConnectionBreaker, breaker
from moonpool.transport.framing import (
    LENGTH_PREFIX,
    ONE_SHOT_FLAG,
    OneShotAnswer,
    OneShotMessage,
    PayloadExtent,
    decode_one_shot,
)
from moonpool.transport.shared_memory import ExportedRegions, MailboxRing, MappedRegion, unmap_regions
from moonpool.transport.tcp import BUFFER_BYTES, FramedSocket
from moonpool.v1 import kv_pb2


class MessageSender:
    """The sending half of a lane."""

    def __init__(
        self,
        sock: FramedSocket,
        own: ExportedRegions,
        lent: tuple[int, MappedRegion] | None,
        take_pulls: Callable[[], int],
        breaks: ConnectionBreaker | None,
    ) -> None:
        """Takes the lane's socket; our regions; the one that the peer lends; what the peer is to be told of; faults."""
        self._sock = sock
        self._own = own
        self._lent = lent
        self._ring = MailboxRing(lent[1].nbytes) if lent else None
        self._take_pulls = take_pulls
        self._breaks = breaks
        self._unpulled: collections.deque[PendingPayload | None] = collections.deque()  # None: a piece of the ring
        self._unsent: list[PendingPayload] = []  # their sending failed; they are told when the lane is closed

    def start(self, item: OutgoingItem) -> UnsentRest | None:
        """Sends what the system takes at once; what it does not take must be given to `finish` before anything else."""
        held = item if isinstance(item, PendingPayload) else None
        try:
            if isinstance(item, OneShotAnswer):
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
            return UnsentRest([], held, error)

    async def finish(self, unsent: UnsentRest) -> None:
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

    def _start_held(self, item: PendingPayload) -> UnsentRest | None:
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

    def _send(self, frame: kv_pb2.LaneFrame, parts: list[memoryview], held: PendingPayload | None) -> UnsentRest | None:
        data = frame.SerializeToString()
        left = self._sock.send_now([LENGTH_PREFIX.pack(len(data), sum(part.nbytes for part in parts)) + data, *parts])
        return UnsentRest(left, held) if left else None

    def _break_perhaps(self) -> None:
        if self._breaks is not None and self._breaks():
            self._sock.close(StreamBroken(CONNECTION_BROKEN))

    def _start_answer(self, item: OneShotAnswer) -> UnsentRest | None:
        message, pieces = item
        nbytes = sum([piece.nbytes for piece in pieces])
        self._break_perhaps()
        place = self._mailed(pieces, nbytes)
        follow = nbytes if place is None else 0
        left = self._sock.send_now([message.encoded(follow, place), *(pieces if follow else ())])
        return UnsentRest(left) if left else None

    def _posted(self, item: PendingPayload, frame: kv_pb2.LaneFrame) -> bool:
        """Whether the payload was copied to the region that the peer lends, and `frame` says where."""
        place = self._mailed(item.parts, item.nbytes)
        if place is None:
            return False
        frame.extents.add(**place._asdict())
        return True

    def _mailed(self, parts: Sequence[memoryview], nbytes: int) -> PayloadExtent | None:
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
        return PayloadExtent(number, nbytes, offset)

    def _shown(self, item: PendingPayload, frame: kv_pb2.LaneFrame) -> list[memoryview] | None:
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


M = TypeVar("M", bound=Message)


PULLS_PER_REPORT = 2
"""Payloads that are pulled before their sender is told, while there are more."""


RECEIVE_TURN_BYTES = 1 << 20
"""After so many bytes that were there at once, others get a turn of the event loop."""


MESSAGE_COST = 4 << 10
"""What a message counts for in a turn besides its bytes: small ones take their time too."""


_NO_PAYLOAD = memoryview(b"")


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


class MessageReceiver(Generic[M]):
    """The receiving half of a lane."""

    def __init__(
        self,
        sock: FramedSocket,
        cls: type[M],
        readable: dict[int, MappedRegion],
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
        self._taker: ReceiveCallbacks | None = None
        self._over: asyncio.Future[Exception] | None = None
        self._paused = False
        self._continues = False  # with the next turn of the event loop
        self._lands = False  # a payload does, beside the loop
        self._incoming: _Incoming | None = None

    async def run(self, taker: ReceiveCallbacks) -> Exception:
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
        end = self._taken + RECEIVE_TURN_BYTES
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
        lengths = sock.peek(LENGTH_PREFIX.size)
        if lengths is None:
            return False
        size, follow = LENGTH_PREFIX.unpack(lengths)
        brief, size = size & ONE_SHOT_FLAG, size & ~ONE_SHOT_FLAG
        if size + follow > MESSAGE_BYTES or (brief and LENGTH_PREFIX.size + size > BUFFER_BYTES):
            raise FrameError(f"a message of {size} bytes with {follow} bytes of payload")
        if LENGTH_PREFIX.size + size > BUFFER_BYTES:
            sock.skip(LENGTH_PREFIX.size)
            memory = new_bytes(size)
            self._await([memory], lambda _: self._message(bytes(memory), follow))
            return True
        data = sock.peek(LENGTH_PREFIX.size + size)
        if data is None:
            return False
        sock.skip(data.nbytes)
        (self._brief if brief else self._message)(bytes(data[LENGTH_PREFIX.size :]), follow)
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
        frame = _parse_frame(text)
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
        message = decode_one_shot(text)
        if message.pulled:
            self._pulled(message.pulled)
        if not follow:
            self._briefly(message, _NO_PAYLOAD)
            return
        memory = new_bytes(follow)
        self._await([memory], lambda _: self._briefly(message, memory))

    def _briefly(self, message: OneShotMessage, payload: BytesLike) -> None:
        if message.extents:
            assert isinstance(payload, memoryview), "what follows a message is in one piece"
            parts = self._parts(message.extents, payload)
            payload = parts[0] if len(parts) == 1 else Iovec(parts)
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
                self._hand(message, FilledBuffer(landing, 0))

        self._await(landing.targets, landed, landing.live)

    def _pull(self, frame: kv_pb2.LaneFrame, message: M, follow: memoryview) -> None:
        """Copies a payload from where it lies, or lends it."""
        parts = self._parts(frame.extents, follow)
        awaited = self._mailbox is None or any(extent.region != self._mailbox for extent in frame.extents)
        nbytes = sum([part.nbytes for part in parts])
        self._work += nbytes
        landing = self._place(message, nbytes)
        if landing is not None:
            self._land(message, landing, Iovec(parts), lambda: self._was_pulled(awaited))
        elif self._taker is not None and self._taker.lend:
            data = parts[0] if len(parts) == 1 else Iovec(parts)
            self._hand(message, BorrowedBuffer(data, lambda: self._was_pulled(awaited)))
        else:
            payload = memoryview(b"".join(parts))
            self._was_pulled(awaited)
            self._hand(message, payload)

    def _land(
        self, message: M, landing: ReceiveBuffer, data: BytesLike | None, pulled: Callable[[], None] = lambda: None
    ) -> None:
        """Lets a payload land, perhaps beside the loop: then nothing more is taken until it has, so order stays."""

        def over(landed: FilledBuffer) -> None:
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

    def _place(self, message: M, nbytes: int) -> ReceiveBuffer | None:
        assert self._taker is not None, "nothing is read for nobody"
        return self._taker.place(message, nbytes)

    def _hand(self, message: M, payload: ReceivedPayload) -> None:
        assert self._taker is not None, "nothing is read for nobody"
        try:
            self._taker.take(message, payload)
        except Exception as error:
            self._fail(error)
            return
        self._tell_pulled()

    def _tell_pulled(self) -> None:
        """Tells the peer what it waits for, several at once while more is there: each word may wake it."""
        if self._awaited and (self._awaited >= PULLS_PER_REPORT or not self._sock.has_more):
            self._tell(self.take_pulls())

    def _parts(self, extents: Iterable[kv_pb2.Extent | PayloadExtent], follow: memoryview) -> list[memoryview]:
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

    def _region(self, number: int) -> MappedRegion:
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


def _parse_frame(data: bytes) -> kv_pb2.LaneFrame:
    try:
        check_message(kv_pb2.LaneFrame, data)
        return kv_pb2.LaneFrame.FromString(data)
    except (DecodeError, InvalidRequest) as error:
        raise FrameError(f"malformed LaneFrame: {error}") from error


def _own_memory(message: Message, nbytes: int) -> None:
    """Payloads get memory of their own."""


class TransportConnection(Generic[M]):
    """One open lane.

    Attributes:
        name: "local" or "tcp".
    """

    def __init__(
        self,
        name: str,
        sock: FramedSocket,
        cls: type[M],
        *,
        own: ExportedRegions | None = None,
        readable: dict[int, MappedRegion] | None = None,
        mailbox: int | None = None,
        lent: tuple[int, MappedRegion] | None = None,
        acknowledge: Callable[[Message], None],
        breaks: ConnectionBreaker | None = breaker,
    ) -> None:
        """Takes what has been agreed on.

        Args:
            name: Of its kind.
            sock: Connected; the lane closes it.
            cls: Messages that come.
            own: Where payloads may lie that this side sends from its own memory.
            readable: Regions in which the peer's payloads may lie.
            mailbox: Number of the one among them that this side has lent.
            lent: Number and memory of the region to which this side may write its payloads.
            acknowledge: Sends a message to the peer, in its turn.
            breaks: Breaks the lane on purpose.
        """
        self.name = name
        self._sock = sock
        self._regions = [*(readable or {}).values(), *((lent[1],) if lent else ())]
        self._out = MessageSender(sock, own or ExportedRegions(()), lent, lambda: self._in.take_pulls(), breaks)
        self._in: MessageReceiver[M] = MessageReceiver(
            sock,
            cls,
            readable or {},
            mailbox,
            self._out.pulled,
            lambda pulls: acknowledge(kv_pb2.LaneFrame(pulled=pulls)),
        )
        self._error: Exception | None = None

    @property
    def closed(self) -> bool:
        """It has ended."""
        return self._error is not None

    async def run(
        self,
        take: Callable[[M, ReceivedPayload], None],
        place: Callable[[M, int], ReceiveBuffer | None] = _own_memory,
        *,
        lend: bool = False,
        brief: Callable[[OneShotMessage, BytesLike], int] | None = None,
    ) -> Exception:
        """Hands over what comes, in order, until the lane ends; returns why it has. To be called once at a time.

        Args:
            take: Gets each message with its payload, which is nobody else's; or where the payload has landed. Must not
                wait.
            place: Says where the payload of a message, of so many bytes, is to land; None for memory of its own.
            lend: Payloads that lie in regions and land nowhere are lent.
            brief: Gets brief messages, and tells how many bytes it has answered with; None where there are none.

        Raises:
            Exception: What `take` raised, or what `place` did that is no MoonpoolError.
        """
        if self._error is not None:
            return self._error
        return await self._in.run(ReceiveCallbacks(take, place, lend, brief))

    def pause(self) -> None:
        """Hands over nothing until `resume`: what comes stays with the system."""
        self._in.pause()

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._in.resume()

    def start(self, item: OutgoingItem) -> UnsentRest | None:
        """Sends what an outbox gives, as far as the system takes it at once.

        Returns what is left, or what broke the lane. It must be given to `write` before anything else is sent.
        """
        unsent = self._out.start(item)
        if unsent is not None and unsent.error is not None and self._error is not None:
            self._out.fail(self._error)
        return unsent

    async def write(self, item: OutgoingItem | UnsentRest) -> None:
        """Sends all of what an outbox gives, or of what `start` has left. Not to be cancelled.

        Raises:
            StreamBroken: The lane has ended.
        """
        unsent = item if isinstance(item, UnsentRest) else self.start(item)
        if unsent is None:
            return
        try:
            await self._out.finish(unsent)
        except BaseException:
            if self._error is not None:
                self._out.fail(self._error)
            raise

    def close(self, error: Exception) -> None:
        """Ends the lane; payloads that are still held fail with `error`. Idempotent."""
        if self._error is not None:
            return
        self._error = error
        self._sock.close(error)
        self._in.end(error)
        self._out.fail(error)
        unmap_regions(self._regions)
