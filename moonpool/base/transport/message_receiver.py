"""The receiving half of a connection over a socket.

The receiver copies a payload into separate memory before reading the payload: in one pass with the hash at the
destination. If the payload is borrowed, the stream copies the bytes. So what is verified is what is used, whatever the
peer writes meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple

from google.protobuf.message import DecodeError

from moonpool.base.errors import FrameError, InvalidRequest, MoonpoolError
from moonpool.base.kv.iovec import BytesLike, Iovec, new_bytes
from moonpool.base.rpc.messages import MESSAGE_BYTES, check_message, plain_deserializer
from moonpool.base.transport.connection import M, ReceiveCallbacks
from moonpool.base.transport.framed_socket import BUFFER_BYTES, FramedSocket
from moonpool.base.transport.framing import (
    LENGTH_PREFIX,
    ONE_SHOT_FLAG,
    OneShotMessage,
    decode_one_shot,
)
from moonpool.base.transport.payloads import BorrowedBuffer, FilledBuffer, ReceiveBuffer, ReceivedPayload
from moonpool.base.transport.region_payloads import RegionReader
from moonpool.base.transport.regions import (
    FetchedParts,
)
from moonpool.v1 import kv_pb2

READS_PER_REPORT = 2
"""Payloads that are read before their sender gets a report, while there are more."""
RECEIVE_TURN_BYTES = 1 << 20
"""After so many bytes that were there at once, others get a turn of the event loop."""
MESSAGE_COST = 4 << 10
"""What a message counts for in a turn besides the bytes: small messages take time too."""
_NO_PAYLOAD = memoryview(b"")


class MessageReceiver(Generic[M]):
    """A connection's receiving half."""

    def __init__(
        self,
        sock: FramedSocket,
        cls: type[M],
        regions: RegionReader,
        on_reads: Callable[[int], None],
        report: Callable[[int], None],
    ) -> None:
        """Does not read yet.

        Args:
            sock: Of the connection.
            cls: Messages that come.
            regions: Finds payloads that lie in regions.
            on_reads: Called with the number of payloads that the peer has read.
            report: Sends the waiting peer the number of the peer's payloads that were read.
        """
        self._sock = sock
        self._parse = plain_deserializer(cls)
        self._regions = regions
        self._on_reads = on_reads
        self._report = report
        self._work = 0  # so far, besides received bytes: bytes out of regions and answers, and message costs
        self._callbacks: ReceiveCallbacks | None = None
        self._over: asyncio.Future[Exception] | None = None
        self._paused = False
        self._continues = False  # with the next turn of the event loop
        self._filling = False  # a thread fills a buffer, or a payload is fetched
        self._fetching: asyncio.Task[None] | None = None
        self._incoming: _Incoming | None = None

    async def run(self, callbacks: ReceiveCallbacks) -> Exception:
        """Hand over what comes, in order, until the connection ends; return the cause.

        Raises:
            Exception: What a callback raised.
        """
        self._callbacks = callbacks
        self._over = asyncio.get_running_loop().create_future()
        try:
            self._go_on()
            return await self._over
        finally:
            self._callbacks = None
            self._sock.unwatch()

    def pause(self) -> None:
        """Take no more until `resume`."""
        self._paused = True
        self._sock.unwatch()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        self._go_on()

    def end(self, error: Exception) -> None:
        """The connection has ended with `error`."""
        if self._over is not None and not self._over.done():
            self._over.set_result(error)

    @property
    def _goes_on(self) -> bool:
        """Whether the messages are wanted."""
        return not self._paused and not self._filling and self._is_read

    @property
    def _is_read(self) -> bool:
        return self._callbacks is not None and self._over is not None and not self._over.done()

    def _go_on(self) -> None:
        if self._goes_on:
            self._sock.watch(self._receive)
            self._receive()

    def _receive(self) -> None:
        """Take all that is there, or as much as a turn of the event loop may take."""
        if self._continues or not self._goes_on:
            return
        end = self._work_done + RECEIVE_TURN_BYTES
        try:
            while self._next() if self._incoming is None else self._receive_more(self._incoming):
                if not self._goes_on:
                    return
                # Other streams get their turn of the event loop (ADR 37).
                if self._work_done >= end:
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
        """Whoever runs this gets an error that is not the connection's."""
        self._sock.unwatch()
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    @property
    def _work_done(self) -> int:
        return self._sock.received_bytes + self._work

    def _next(self) -> bool:
        """Take the next message; False if the message is not complete yet."""
        sock = self._sock
        lengths = sock.peek(LENGTH_PREFIX.size)
        if lengths is None:
            return False
        size, follow = LENGTH_PREFIX.unpack(lengths)
        one_shot, size = size & ONE_SHOT_FLAG, size & ~ONE_SHOT_FLAG
        if size + follow > MESSAGE_BYTES or (one_shot and LENGTH_PREFIX.size + size > BUFFER_BYTES):
            raise FrameError(f"a message of {size} bytes with {follow} bytes of payload")
        if LENGTH_PREFIX.size + size > BUFFER_BYTES:
            sock.skip(LENGTH_PREFIX.size)
            memory = new_bytes(size)
            self._expect([memory], lambda _: self._message(bytes(memory), follow))
            return True
        data = sock.peek(LENGTH_PREFIX.size + size)
        if data is None:
            return False
        sock.skip(data.nbytes)
        (self._one_shot if one_shot else self._message)(bytes(data[LENGTH_PREFIX.size :]), follow)
        return True

    def _receive_more(self, incoming: _Incoming) -> bool:
        """Take more of what is being received; False if none is there."""
        if incoming.is_live is not None and not incoming.is_live():
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

    def _expect(
        self, targets: list[memoryview], then: Callable[[bool], None], is_live: Callable[[], bool] | None = None
    ) -> None:
        """Receive the next bytes into targets."""
        left = [target for target in targets if target.nbytes]
        if left:
            self._incoming = _Incoming(left, then, is_live)
        else:
            then(True)

    def _message(self, text: bytes, follow: int) -> None:
        """A message is there; the payload follows, or lies somewhere."""
        self._work += MESSAGE_COST
        frame = _parse_frame(text)
        if frame.pulled:
            self._on_reads(frame.pulled)
        if not frame.message:
            if follow or frame.extents:
                raise FrameError("a payload without a message")
            self._report_reads()
            return
        message = self._parsed(frame.message)
        if frame.extents:
            if follow:
                memory = new_bytes(follow)
                self._expect([memory], lambda _: self._read_payload(frame, message, memory))
            else:
                self._read_payload(frame, message, _NO_PAYLOAD)
        elif follow:
            self._receive_payload(message, follow)
        else:
            self._deliver(message, _NO_PAYLOAD)

    def _one_shot(self, text: bytes, follow: int) -> None:
        """Take a one-shot message; the payload follows, or lies in a region."""
        self._work += MESSAGE_COST
        message = decode_one_shot(text)
        if message.pulled:
            self._on_reads(message.pulled)
        if not follow:
            self._deliver_one_shot(message, _NO_PAYLOAD)
            return
        memory = new_bytes(follow)
        self._expect([memory], lambda _: self._deliver_one_shot(message, memory))

    def _deliver_one_shot(self, message: OneShotMessage, payload: BytesLike) -> None:
        if message.extents:
            assert isinstance(payload, memoryview), "what follows a message is in one piece"
            parts = self._regions.parts(message.extents, payload)
            payload = parts[0] if len(parts) == 1 else Iovec(parts)
            self._work += payload.nbytes
        if self._callbacks is None or self._callbacks.on_one_shot is None:
            raise FrameError("one-shot messages are not taken here")
        try:
            self._work += self._callbacks.on_one_shot(message, payload)
        except Exception as error:
            self._fail(error)

    def _receive_payload(self, message: M, nbytes: int) -> None:
        buffer = self._receive_into(message, nbytes)
        if buffer is None:
            memory = new_bytes(nbytes)
            self._expect([memory], lambda _: self._deliver(message, memory))
            return

        def received(whole: bool) -> None:
            assert buffer is not None
            if whole:
                self._fill(message, buffer, None)
            else:
                self._deliver(message, FilledBuffer(buffer, 0))

        self._expect(buffer.targets, received, buffer.is_live)

    def _read_payload(self, frame: kv_pb2.TransportFrame, message: M, follow: memoryview) -> None:
        """Take a payload from its place; a payload in a remote region is fetched first."""
        places = self._regions.remote_places(frame.extents)
        if places:
            self._regions.check_size(frame.extents)
            # Nothing else is received while a payload is fetched, so messages stay in order.
            self._filling = True
            self._sock.unwatch()
            self._fetching = asyncio.get_running_loop().create_task(self._fetch(places, frame, message, follow))
            return
        awaited = self._regions.is_awaited(frame.extents)
        parts = self._regions.parts(frame.extents, follow)
        self._use(message, parts, lambda: self._regions.count_read(awaited=awaited))

    async def _fetch(
        self,
        places: Mapping[int, Sequence[tuple[int, int]]],
        frame: kv_pb2.TransportFrame,
        message: M,
        follow: memoryview,
    ) -> None:
        """Fetch a payload's remote parts, by region, then take the payload. Nothing else is received meanwhile."""
        found: list[FetchedParts] = []
        try:
            fetched: dict[int, Iterator[memoryview]] = {}
            for number, wanted in places.items():
                found.append(await self._regions.fetch(number, wanted))
                fetched[number] = iter(found[-1].parts)
            parts = self._regions.parts(frame.extents, follow, fetched)
        except Exception as error:
            for part in found:
                part.release()
            self._filling = False
            if isinstance(error, MoonpoolError):
                self.end(error)
            else:
                self._fail(error)
            return

        def read() -> None:
            for part in found:
                part.release()
            self._regions.count_read(awaited=True)

        self._filling = False
        if self._is_read:
            self._use(message, parts, read)
        else:
            read()
        self._go_on()

    def _use(self, message: M, parts: list[memoryview], on_read: Callable[[], None]) -> None:
        """Copy a payload from its place, or hand the payload over as borrowed."""
        nbytes = sum([part.nbytes for part in parts])
        self._work += nbytes
        buffer = self._receive_into(message, nbytes)
        if buffer is not None:
            self._fill(message, buffer, Iovec(parts), on_read)
        elif self._callbacks is not None and self._callbacks.borrow:
            # The user copies, then verifies the copy: the peer can still write here (ADR 25).
            data = parts[0] if len(parts) == 1 else Iovec(parts)
            self._deliver(message, BorrowedBuffer(data, on_read))
        else:
            payload = memoryview(b"".join(parts))
            on_read()
            self._deliver(message, payload)

    def _fill(
        self, message: M, buffer: ReceiveBuffer, data: BytesLike | None, on_read: Callable[[], None] = lambda: None
    ) -> None:
        """Fill a buffer, perhaps on a thread: no more is received until then, so order stays."""

        def over(filled: FilledBuffer) -> None:
            on_read()
            was, self._filling = self._filling, False
            if self._is_read:
                self._deliver(message, filled)
            if was:
                self._go_on()

        if not buffer.take(data, over):
            self._filling = True
            self._sock.unwatch()

    def _receive_into(self, message: M, nbytes: int) -> ReceiveBuffer | None:
        assert self._callbacks is not None, "nothing is read for nobody"
        return self._callbacks.receive_into(message, nbytes)

    def _deliver(self, message: M, payload: ReceivedPayload) -> None:
        assert self._callbacks is not None, "nothing is read for nobody"
        try:
            self._callbacks.take(message, payload)
        except Exception as error:
            self._fail(error)
            return
        self._report_reads()

    def _report_reads(self) -> None:
        """Report reads that the peer waits for, several at once while more come: each report may wake the peer."""
        awaited = self._regions.awaited
        if awaited and (awaited >= READS_PER_REPORT or not self._sock.has_more):
            self._report(self._regions.take_reads())

    def _parsed(self, data: bytes) -> M:
        try:
            message: Any = self._parse(data)
        except (DecodeError, InvalidRequest) as error:
            raise FrameError(f"malformed message: {error}") from error
        parsed: M = message
        return parsed


class _Incoming(NamedTuple):
    """What is being received.

    Attributes:
        left: where the next bytes go, one after the other.
        then: called when all bytes are there; the argument says whether all are in the intended place.
        is_live: called before each write: whether the memory may still be written. Later bytes are dropped.
    """

    left: list[memoryview]
    then: Callable[[bool], None]
    is_live: Callable[[], bool] | None = None


def _parse_frame(data: bytes) -> kv_pb2.TransportFrame:
    try:
        check_message(kv_pb2.TransportFrame, data)
        return kv_pb2.TransportFrame.FromString(data)
    except (DecodeError, InvalidRequest) as error:
        raise FrameError(f"malformed TransportFrame: {error}") from error
