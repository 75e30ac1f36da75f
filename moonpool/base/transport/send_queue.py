"""A stream's send queue: many tasks' messages, in order.

Tasks only queue here, and one task writes: a stream takes one write at a time, and cancelling a task within a write may
break the stream. A connection that holds payloads (`SendQueue.hold`) sends a message at once if no other waits. After
`put` the caller's memory is unreferenced, so the caller may free blocks at once, even if cancelled. Payloads are
encoded when they are queued; on a connection that holds payloads they stay in place, and `put` waits until the
connection is done with them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import Message

from moonpool.base.errors import StreamBroken, TransferFailed
from moonpool.base.rpc.messages import Payload, PayloadMessage, has_payload, payload_bytes, serialize_payload
from moonpool.base.rpc.stream_writes import CANCEL_GRACE_S, write_each
from moonpool.base.transport.connection import OutgoingItem, UnsentRest
from moonpool.base.transport.flow_control import ByteCredits, CreditReturn
from moonpool.base.transport.framing import OneShotAnswer
from moonpool.base.transport.payloads import PendingPayload

QUEUE_BYTES = 4 << 20
BURST_BYTES = 256 << 10
"""A task that puts this many bytes lets the writer go on before putting more."""
TURN_BYTES = 4 << 20
"""After so many bytes that went out at once, others get a turn of the event loop."""
MAX_MESSAGES = 4096
STALL_S = 30.0


class SendQueue:
    """Bounded message queue for one stream, written in order by `drain`.

    `drain` hands the stream's write what our serialisers take (moonpool/base/rpc/messages.py): messages of classes
    without a payload unchanged, others encoded; after `hold` also `PendingPayload` and `UnsentRest`.
    """

    def __init__(self, *, room_bytes: int = QUEUE_BYTES, max_messages: int = MAX_MESSAGES) -> None:
        self._room = ByteCredits(room_bytes)
        self._freed = CreditReturn(room_bytes)  # in batches, so that a sender is not woken for every small frame
        self._max_messages = max_messages
        self._queue: deque[tuple[OutgoingItem | UnsentRest, int]] = deque()
        self._stuck: Callable[[Exception], None] | None = None
        self._start: Callable[[OutgoingItem], UnsentRest | None] | None = None
        self._writing = False  # the writer has an unwritten message
        self._written = 0  # payload bytes in the message being written, whose room is not free yet
        self._ahead = 0  # bytes put since the writer had a turn
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._finished = False
        self._closed: Exception | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def post(self, message: Message) -> None:
        """Queue a small message without waiting. The message must not be changed afterwards.

        Raises:
            StreamBroken: The send_queue is closed, or the peer does not read and too many messages wait.
        """
        self._append(serialize_payload(PayloadMessage(message)) if has_payload(type(message)) else message, 0)

    def answer(self, item: OneShotAnswer) -> None:
        """Queue a one-shot message without waiting. Keep the payload until sent. Raises as `post`."""
        self._append(item, 0)

    def hold(self, stuck: Callable[[Exception], None], start: Callable[[OutgoingItem], UnsentRest | None]) -> None:
        """From now on payloads are held.

        Args:
            stuck: Ends the stream if a payload is not done with in time.
            start: Sends something as far as that goes at once; the stream's write gets the rest.
        """
        self._stuck, self._start = stuck, start

    async def put(
        self, message: Message, payload: Payload, *, timeout_s: float, unsent: Callable[[], None] = lambda: None
    ) -> None:
        """As `begin` and `done_with`: when the call returns or raises, the payload's memory is unreferenced."""
        held = await self.begin(message, payload, timeout_s=timeout_s, unsent=unsent)
        if held is not None:
            await self.done_with(held, timeout_s)

    async def begin(
        self, message: Message, payload: Payload, *, timeout_s: float, unsent: Callable[[], None] = lambda: None
    ) -> PendingPayload | None:
        """Queue a message with a payload once there is room.

        Returns None when the payload's memory is free. On a connection beside gRPC, returns what must be `done_with`,
        or given to `abandon`, before the memory is free. `unsent` is called if no part of the message has left, or
        will leave: then this call raises, or those raise.

        Raises:
            StreamBroken: The send_queue is or becomes closed.
            TransferFailed: There was no room for `timeout_s`.
        """
        size = payload_bytes(payload)
        try:
            self._ahead += size
            if self._ahead >= (BURST_BYTES if self._queue else TURN_BYTES):
                self._ahead = 0
                await asyncio.sleep(0)  # what waits goes out before this is copied, not after all that still comes
            await self._room.acquire(size, timeout_s=timeout_s)
            return self._put(message, payload, size, unsent)
        except BaseException:
            unsent()
            raise

    def offer(self, message: Message, payload: Payload) -> bool:
        """Queue a message with a payload if the send_queue is open and there is room at once; return whether queued.

        Raises:
            StreamBroken: The peer does not read and too many messages wait.
        """
        size = payload_bytes(payload)
        if not self._room.take(size):
            return False
        clear = self.is_clear
        if self._stuck is not None and not clear and not isinstance(payload, bytes | memoryview):
            payload = b"".join(payload)  # no task waits for the connection here
        self._put(message, payload, size)
        if clear and self._queue and isinstance(unsent := self._queue[0][0], UnsentRest):
            # The caller's memory is free on return, so the unsent rest is copied.
            self._queue[0] = unsent.kept(), size
        return True

    def _put(
        self, message: Message, payload: Payload, size: int, unsent: Callable[[], None] = lambda: None
    ) -> PendingPayload | None:
        try:
            if self._stuck is None:
                self._append(serialize_payload(PayloadMessage(message, payload)), size)
                return None
            held = PendingPayload(message, payload, unsent)
            self._append(held, size)
            return held
        except BaseException:
            self._room.grant(size)
            raise

    async def done_with(self, held: PendingPayload, timeout_s: float) -> None:
        """Wait until the connection is done with a payload.

        If cancelled, or too late, the connection ends what the connection began.

        Raises:
            StreamBroken: The send_queue becomes closed.
            TransferFailed: The connection was not done with the payload for `timeout_s`.
        """
        if held.done.done():
            held.done.result()
            return
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(held.done)
        except BaseException as error:
            await self.abandon([held])
            if isinstance(error, TimeoutError):
                raise TransferFailed(f"a payload was not taken within {timeout_s:g} s") from None
            raise

    async def abandon(self, items: Iterable[PendingPayload]) -> None:
        """Withdraw payloads that the connection has not started, and end the others. Their memory is free then."""
        started = []
        for held in items:
            if held.done.done() or held.cancelled:
                continue
            # The connection may be reading the memory: only the connection can say when it is free.
            if held.started:
                started.append(held.done)
                continue
            held.cancelled = True
            self._room.grant(held.nbytes)
            held.unsent()
        if started:
            await self._wait_for_started(started)

    async def _wait_for_started(self, started: Sequence[asyncio.Future[None]]) -> None:
        try:
            await asyncio.wait(started, timeout=CANCEL_GRACE_S)
        finally:
            if not all(done.done() for done in started) and self._stuck is not None:
                self._stuck(StreamBroken("the peer does not take what it was sent"))

    async def at_most(self, messages: int) -> None:
        """Wait until no more than so many messages wait. The caller sets the deadline, or knows that `drain` does.

        Raises:
            Exception: The error given to `close`.
        """
        while len(self._queue) > messages and self._closed is None:
            self._taken.clear()
            await self._taken.wait()
        if self._closed is not None:
            raise self._closed

    def finish(self) -> None:
        """Let `drain` return when everything queued has been written."""
        self._finished = True
        self._wake.set()

    def close(self, error: Exception) -> None:
        """Drop everything queued; present and later senders get `error`. Idempotent."""
        if self._closed is None:
            self._closed = error
            for item, _ in self._queue:
                held = item.held if isinstance(item, UnsentRest) else item
                if isinstance(held, PendingPayload):
                    held.fail(error)
            self._queue.clear()
            self._room.close(error)
            self._wake.set()
            self._taken.set()

    async def drain(self, write: Callable[[Any], Awaitable[None]], *, stall_s: float = STALL_S) -> None:
        """Write queued items, in order, until `finish` or `close`. To be run by one task per stream.

        Args:
            write: The stream's write.
            stall_s: Longest time one write may take.

        Raises:
            StreamBroken: A write took longer than `stall_s`.
            Exception: Whatever `write` raises.

        If cancelled, `drain` lets the current write finish first (for a short time at most).
        """
        try:
            await write_each(write, self._take, stall_s)
        except TimeoutError:
            error = StreamBroken(f"the peer took nothing for {stall_s:g} s")
            self.close(error)
            raise error from None
        except BaseException as failure:
            self.close(StreamBroken(f"writing ended: {failure!r}"))
            raise

    async def _take(self) -> OutgoingItem | UnsentRest | None:
        """Wait for the next message, after the message before has been written. None after the last."""
        self._writing = False
        if self._written:
            self._room.grant(self._freed.consumed(self._written, idle=not self._queue))
            self._written = 0
        while True:
            while not self._queue:
                if self._closed is not None or self._finished:
                    return None
                self._wake.clear()
                await self._wake.wait()
            data, size = self._queue.popleft()
            self._taken.set()
            if not isinstance(data, PendingPayload):
                break
            if not data.cancelled:
                data.started = True
                break
        self._written = size
        self._writing = True
        return data

    @property
    def is_clear(self) -> bool:
        """Whether no earlier item is waiting to go out."""
        return not self._queue and not self._writing

    def _append(self, data: OutgoingItem, size: int) -> None:
        if self._closed is not None:
            raise self._closed
        # Nothing waits: the message goes at once, without waking the writer (ADR 37).
        if self._start is not None and self.is_clear:
            if isinstance(data, PendingPayload):
                data.started = True
            unsent = self._start(data)
            if unsent is None:
                if size:
                    self._room.grant(size)
            else:
                self._queue.append((unsent, size))
                self._wake.set()
            return
        if len(self._queue) >= self._max_messages:
            raise StreamBroken(f"{len(self._queue)} messages wait and the peer takes none")
        self._queue.append((data, size))
        self._wake.set()
