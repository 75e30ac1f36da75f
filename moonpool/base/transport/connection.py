"""The contract for connections: one stream's messages, in order, with or without payload.

Credits, channels and reconnection stand above, once for all transports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from moonpool.base.kv.iovec import BytesLike
from moonpool.base.transport.framing import OneShotAnswer, OneShotMessage
from moonpool.base.transport.payloads import PendingPayload, ReceiveBuffer, ReceivedPayload, own_memory

M = TypeVar("M", bound=Message)


class Connection(ABC, Generic[M]):
    """An open connection: one stream's messages, in order, with or without payload.

    Attributes:
        name: Name of the transport.
    """

    name: str

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True once the connection has ended."""

    @abstractmethod
    async def run(self, callbacks: ReceiveCallbacks) -> Exception:
        """Hand over what comes, in order, until the connection ends; return the cause.

        To be called once at a time.

        Raises:
            Exception: What a callback raised.
        """

    @abstractmethod
    def pause(self) -> None:
        """Stop handing over until `resume`: new messages stay with the system, and the peer is slowed down."""

    @abstractmethod
    def resume(self) -> None:
        """Go on after `pause`."""

    @abstractmethod
    async def write(self, item: OutgoingItem | UnsentRest) -> None:
        """Send a whole send queue item. Not to be cancelled.

        Raises:
            MoonpoolError: The connection has ended.
        """

    @abstractmethod
    def close(self, error: Exception) -> None:
        """End the connection with `error`. Idempotent."""


class ZeroCopyConnection(Connection[M]):
    """A connection that sends payloads from where they lie.

    A payload (`PendingPayload`) stays in the sender's memory until the connection calls `finish` or `fail`.
    """

    @abstractmethod
    def start(self, item: OutgoingItem) -> UnsentRest | None:
        """Send an item of the send queue as far as the system takes bytes at once, without waiting.

        Returns None if all is sent, else the rest, which must be given to `write` before anything else.
        """


class ReceiveCallbacks(NamedTuple):
    """Functions that take what a connection receives.

    Attributes:
        take: gets each message with the payload: separate memory, a filled buffer or a borrowed one. Must not wait.
            An error ends the reading.
        receive_into: gives the buffer for a message's payload with that many bytes; None for separate memory.
        borrow: whether payloads that lie in regions are borrowed if `receive_into` gives no buffer.
        on_one_shot: gets one-shot messages, each with the payload, borrowed until the call returns; returns the bytes
            of the answers. None if the stream takes no one-shot messages.
    """

    take: Callable[[Any, ReceivedPayload], None]
    receive_into: Callable[[Any, int], ReceiveBuffer | None] = own_memory
    borrow: bool = False
    on_one_shot: Callable[[OneShotMessage, BytesLike], int] | None = None


OutgoingItem = Message | bytes | PendingPayload | OneShotAnswer
"""Item from a `SendQueue`: a message, an encoded message, a message with a held payload, or a one-shot answer."""


class UnsentRest(NamedTuple):
    """What the system has not taken at once.

    Attributes:
        parts: bytes that must go out next, in order.
        held: the message whose payload is among the parts; free once the parts are sent.
        error: what broke the connection.
    """

    parts: list[memoryview]
    held: PendingPayload | None = None
    error: Exception | None = None

    def kept(self) -> UnsentRest:
        """The same with a copy of the bytes, for callers that do not wait until the bytes are sent."""
        return self._replace(parts=[memoryview(b"".join(self.parts))])
