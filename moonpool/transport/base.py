"""What all transports share: payload buffers that avoid copies, and what a connection sends and receives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.message import Message

from moonpool.kv.native_copy import copy_verified, count_verified
from moonpool.kv.pool import BytesLike
from moonpool.rpc.messages import Payload, payload_bytes
from moonpool.transport.async_utils import ThreadOffload
from moonpool.transport.framing import OneShotAnswer, OneShotMessage


class PendingPayload:
    """A message whose payload stays in its sender's memory until it is finished or has failed.

    Attributes:
        parts: the payload.
        unsent: called when it is withdrawn.
        begun: the writer has it.
        withdrawn: it is not to be written any more.
        done: set when the memory is the sender's again.
    """

    __slots__ = ("begun", "done", "message", "nbytes", "parts", "unsent", "withdrawn")

    def __init__(self, message: Message, payload: Payload, unsent: Callable[[], None] = lambda: None) -> None:
        self.message = message
        self.unsent = unsent
        pieces = (payload,) if isinstance(payload, bytes | memoryview) else payload
        self.parts = [memoryview(piece) for piece in pieces]
        self.nbytes = payload_bytes(payload)
        self.begun = self.withdrawn = False
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


def _ignore_writing(writing: bool) -> None:
    """Nothing lands beside the loop."""


@dataclass(frozen=True, slots=True)
class ReceiveBuffer:
    """Memory that takes a payload as it comes.

    Attributes:
        targets: the payload's slices go there, in order; together as long as it is.
        hashes: of each.
        live: asked before each write: whether the memory may still be written. What comes later is dropped.
        landed: to be called when all of the payload has come, whatever has become of it, with the number of leading
            targets that have their hash, and the defect that it has met, if any.
        beside: where it may land beside the loop; None: it lands on the loop.
        writing: told True before a thread begins to use the memory, and False once it does not any more, whatever has
            become of the stream meanwhile. The memory must stay as it is in between. What has landed is told later, and
            only while the stream lives.
    """

    targets: list[memoryview]
    hashes: Sequence[int]
    live: Callable[[], bool]
    landed: Callable[[int, Exception | None], None]
    beside: ThreadOffload | None = None
    writing: Callable[[bool], None] = _ignore_writing

    @property
    def nbytes(self) -> int:
        """Of the payload."""
        return sum([target.nbytes for target in self.targets])

    def take(self, data: BytesLike | None, done: Callable[[FilledBuffer], None]) -> bool:
        """Copies a payload to where it belongs and verifies it there; None: it lies there, and is only verified.

        Returns:
            Whether `done` was called, which gets what has landed. If not it is called later, by the loop.
        """
        if self.beside is None or self.nbytes < self.beside.least_bytes:
            found = (
                copy_verified(self.targets, data, self.hashes)
                if data is not None
                else count_verified(self.targets, self.hashes)
            )
            done(FilledBuffer(self, found))
            return True
        loop = asyncio.get_running_loop()
        work = copy_verified.later(self.targets, data, self.hashes)

        def over(future: Future[int]) -> None:
            self.writing(False)
            error = future.exception()
            done(FilledBuffer(self, 0, error) if isinstance(error, Exception) else FilledBuffer(self, future.result()))

        self.writing(True)
        try:
            future = self.beside.executor.submit(work)
        except BaseException:
            self.writing(False)
            raise
        future.add_done_callback(lambda future: loop.call_soon_threadsafe(over, future))
        return False

    async def taken(self, data: BytesLike) -> FilledBuffer:
        """As `take`; returns what has landed."""
        found: asyncio.Future[FilledBuffer] = asyncio.get_running_loop().create_future()
        self.take(data, lambda landed: None if found.done() else found.set_result(landed))
        return await found


class FilledBuffer(NamedTuple):
    """A payload that has landed: where, how many leading targets have their hash, and the defect that it has met."""

    landing: ReceiveBuffer
    intact: int
    error: Exception | None = None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.landing.nbytes

    def tell(self) -> None:
        """Tells whoever gave the memory."""
        self.landing.landed(self.intact, self.error)


class BorrowedBuffer(NamedTuple):
    """A payload in memory that its sender can still write, until `give_back`.

    Whoever uses it copies it to memory of its own first, and then verifies the copy.
    """

    data: BytesLike
    give_back: Callable[[], None]


ReceivedPayload = memoryview | FilledBuffer | BorrowedBuffer


class ReceiveCallbacks(NamedTuple):
    """Who takes what comes.

    Attributes:
        take: gets each message with its payload, which is nobody else's; or what says where the payload has landed.
            What it raises ends the reading.
        place: says where the payload of a message, of so many bytes, is to land; None for memory of its own.
        lend: payloads that lie in regions and land nowhere are lent.
        brief: gets brief messages, each with its payload, which is lent until it returns; tells how many bytes it has
            answered with. None where there are none.
    """

    take: Callable[[Any, ReceivedPayload], None]
    place: Callable[[Any, int], ReceiveBuffer | None] = lambda message, nbytes: None
    lend: bool = False
    brief: Callable[[OneShotMessage, BytesLike], int] | None = None


OutgoingItem = Message | bytes | PendingPayload | OneShotAnswer
"""What an outbox gives: a message, an encoded message, one whose payload is held, or a brief one."""


class UnsentRest(NamedTuple):
    """What the system has not taken at once.

    Attributes:
        parts: bytes that must go out next, in order.
        held: whose payload is among them, and free when they have gone.
        error: what broke the lane.
    """

    parts: list[memoryview]
    held: PendingPayload | None = None
    error: Exception | None = None

    def kept(self) -> UnsentRest:
        """The same with bytes of its own, for who does not wait until they have gone."""
        return self._replace(parts=[memoryview(b"".join(self.parts))])
