"""A message whose payload lies in its sender's memory until a lane is done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from google.protobuf.message import Message

from moonpool.rpc.wire import Payload, payload_bytes


class Held:
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
