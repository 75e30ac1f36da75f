"""Orders what many tasks send on one gRPC stream.

A gRPC stream takes one write at a time, and cancelling a task within a write cancels the whole call. So tasks only
queue here, and one task writes. Payloads are encoded when they are queued: after `put` nothing refers to the memory
of the caller, who may free its blocks at once even when cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from moonpool.errors import StreamBroken
from moonpool.rpc.codec import has_payload
from moonpool.rpc.wire import Payload, PayloadMessage, payload_bytes, serialize
from moonpool.rpc.writing import write_each
from moonpool.streams.credits import ByteCredits, CreditReturn

ROOM_BYTES = 4 << 20
AHEAD_BYTES = 256 << 10
"""A task that puts so many bytes lets the writer go on before it puts more."""
MAX_MESSAGES = 4096
STALL_S = 30.0


class Outbox:
    """Bounded queue of messages for one stream, written in order by `drain`.

    What `drain` hands to the stream's write is what our serialisers take (moonpool/rpc/codec.py): messages of classes
    without a payload as they are, others encoded.
    """

    def __init__(self, *, room_bytes: int = ROOM_BYTES, max_messages: int = MAX_MESSAGES) -> None:
        self._room = ByteCredits(room_bytes)
        self._freed = CreditReturn(room_bytes)  # in batches, so that a sender is not woken for every small frame
        self._max_messages = max_messages
        self._queue: deque[tuple[Message | bytes, int]] = deque()
        self._written = 0  # payload bytes of the message that is being written, whose room is not free yet
        self._ahead = 0  # bytes put since the writer had a turn
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._finished = False
        self._closed: Exception | None = None

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._queue)

    def post(self, message: Message) -> None:
        """Queues a small message without waiting. The message must not be changed afterwards.

        Raises:
            StreamBroken: The outbox is closed, or the peer reads nothing and too many messages wait.
        """
        self._append(serialize(PayloadMessage(message)) if has_payload(type(message)) else message, 0)

    async def put(self, message: Message, payload: Payload, *, timeout_s: float) -> None:
        """Queues a message with a payload once there is room.

        Raises:
            StreamBroken: The outbox is or becomes closed.
            TransferFailed: There was no room for `timeout_s`.
        """
        size = payload_bytes(payload)
        self._ahead += size
        if self._queue and self._ahead >= AHEAD_BYTES:
            self._ahead = 0
            await asyncio.sleep(0)  # what waits goes out before this is copied, not after all that still comes
        await self._room.acquire(size, timeout_s=timeout_s)
        self._put(message, payload, size)

    def offer(self, message: Message, payload: Payload) -> bool:
        """Queues a message with a payload if the outbox is open and there is room at once; whether it was done.

        Raises:
            StreamBroken: The peer reads nothing and too many messages wait.
        """
        size = payload_bytes(payload)
        if not self._room.take(size):
            return False
        self._put(message, payload, size)
        return True

    def _put(self, message: Message, payload: Payload, size: int) -> None:
        try:
            self._append(serialize(PayloadMessage(message, payload)), size)
        except BaseException:
            self._room.grant(size)
            raise

    async def at_most(self, messages: int) -> None:
        """Waits until no more than so many messages wait. The caller sets the deadline, or knows that `drain` does.

        Raises:
            Exception: The error given to `close`.
        """
        while len(self._queue) > messages and self._closed is None:
            self._taken.clear()
            await self._taken.wait()
        if self._closed is not None:
            raise self._closed

    def finish(self) -> None:
        """Lets `drain` return when everything queued has been written."""
        self._finished = True
        self._wake.set()

    def close(self, error: Exception) -> None:
        """Drops everything queued; present and later senders get `error`. Idempotent."""
        if self._closed is None:
            self._closed = error
            self._queue.clear()
            self._room.close(error)
            self._wake.set()
            self._taken.set()

    async def drain(self, write: Callable[[Any], Awaitable[None]], *, stall_s: float = STALL_S) -> None:
        """Writes what is queued, in order, until `finish` or `close`. To be run by one task per stream.

        Args:
            write: The stream's write.
            stall_s: Longest time one write may take.

        Raises:
            StreamBroken: A write took longer than `stall_s`.
            Exception: Whatever `write` raises.

        Cancelled, it lets the write that is under way finish first (for a short time at most).
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

    async def _take(self) -> Message | bytes | None:
        """The next message, once there is one; the one before has been written. None after the last."""
        if self._written:
            self._room.grant(self._freed.consumed(self._written, idle=not self._queue))
            self._written = 0
        while not self._queue:
            if self._closed is not None or self._finished:
                return None
            self._wake.clear()
            await self._wake.wait()
        data, self._written = self._queue.popleft()
        self._taken.set()
        return data

    def _append(self, data: Message | bytes, size: int) -> None:
        if self._closed is not None:
            raise self._closed
        if len(self._queue) >= self._max_messages:
            raise StreamBroken(f"{len(self._queue)} messages wait and the peer takes none")
        self._queue.append((data, size))
        self._wake.set()
