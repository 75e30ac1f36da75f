"""Payloads in memory: on the sender's side until they are sent, on the receiver's side where they land."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.message import Message

from moonpool.base.kv.iovec import BytesLike
from moonpool.base.kv.native_copy import copy_verified, count_verified
from moonpool.base.rpc.messages import Payload, payload_bytes
from moonpool.base.transport.async_utils import ThreadOffload


class PendingPayload:
    """A message with a payload that stays in the sender's memory until the message is finished or has failed.

    Attributes:
        parts: the payload.
        unsent: called on cancellation.
        started: the writer has the message.
        cancelled: the message is not to be written any more.
        done: set when the memory is the sender's again.
    """

    __slots__ = ("cancelled", "done", "message", "nbytes", "parts", "started", "unsent")

    def __init__(self, message: Message, payload: Payload, unsent: Callable[[], None] = lambda: None) -> None:
        self.message = message
        self.unsent = unsent
        pieces = (payload,) if isinstance(payload, bytes | memoryview) else payload
        self.parts = [memoryview(piece) for piece in pieces]
        self.nbytes = payload_bytes(payload)
        self.started = self.cancelled = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self) -> None:
        """The memory is the sender's again. Idempotent."""
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """The stream has ended. Idempotent."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # retrieved here: the sender may have left


def _ignore(_: bool) -> None:
    """No thread writes to the buffer."""


@dataclass(frozen=True, slots=True)
class ReceiveBuffer:
    """Memory into which a payload is received.

    Attributes:
        targets: where the payload's slices go, in order; together as long as the payload.
        hashes: each slice's hash.
        is_live: called before each write: whether the memory may still be written. Later bytes are dropped.
        on_filled: called when the whole payload has come, with the number of leading targets that match their hash, and
            the defect if any.
        offload: copies on threads; None: the event loop copies.
        on_writing: called with True before a thread begins to use the memory, and with False once the thread has ended,
            even if the stream has ended meanwhile. The memory must stay in between. `on_filled` comes later, and only
            while the stream lives.
    """

    targets: list[memoryview]
    hashes: Sequence[int]
    is_live: Callable[[], bool]
    on_filled: Callable[[int, Exception | None], None]
    offload: ThreadOffload | None = None
    on_writing: Callable[[bool], None] = _ignore

    @property
    def nbytes(self) -> int:
        return sum([target.nbytes for target in self.targets])

    def take(self, data: BytesLike | None, done: Callable[[FilledBuffer], None]) -> bool:
        """Copy a payload to the targets and verify the copies; None: the targets hold the payload already.

        Returns:
            Whether `done` was called, with the result. If not, the event loop calls `done` later.
        """
        if self.offload is None or self.nbytes < self.offload.least_bytes:
            intact = (
                copy_verified(self.targets, data, self.hashes)
                if data is not None
                else count_verified(self.targets, self.hashes)
            )
            done(FilledBuffer(self, intact))
            return True
        loop = asyncio.get_running_loop()
        work = copy_verified.later(self.targets, data, self.hashes)

        def over(future: Future[int]) -> None:
            self.on_writing(False)
            error = future.exception()
            done(FilledBuffer(self, 0, error) if isinstance(error, Exception) else FilledBuffer(self, future.result()))

        self.on_writing(True)
        try:
            future = self.offload.executor.submit(work)
        except BaseException:
            self.on_writing(False)
            raise
        future.add_done_callback(lambda future: loop.call_soon_threadsafe(over, future))
        return False

    async def receive(self, data: BytesLike) -> FilledBuffer:
        """As `take`; returns the result."""
        result: asyncio.Future[FilledBuffer] = asyncio.get_running_loop().create_future()
        self.take(data, lambda filled: None if result.done() else result.set_result(filled))
        return await result


class FilledBuffer(NamedTuple):
    """A buffer that has received the payload: how many leading targets have their hash, and the defect, if any."""

    buffer: ReceiveBuffer
    intact: int
    error: Exception | None = None

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def report(self) -> None:
        self.buffer.on_filled(self.intact, self.error)


class BorrowedBuffer(NamedTuple):
    """A payload in memory that the sender can still write, until `return_buffer`.

    The user first copies the payload to separate memory, and then verifies the copy.
    """

    data: BytesLike
    return_buffer: Callable[[], None]


ReceivedPayload = memoryview | FilledBuffer | BorrowedBuffer


def own_memory(message: Any, nbytes: int) -> ReceiveBuffer | None:
    """Payloads get separate memory."""
    return None
