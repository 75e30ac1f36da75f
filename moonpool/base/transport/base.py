"""The contract for KV transports and connections: buffers, messages, regions.

`Transport` finds a peer; `Connection` carries one stream's messages. Credits, channels, reconnection and the choice of
a transport stand above both, once for all transports.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from google.protobuf.message import Message

from moonpool.base.config import ServiceConfig
from moonpool.base.errors import FrameError, MoonpoolError
from moonpool.base.kv.native_copy import copy_verified, count_verified
from moonpool.base.kv.pool import BytesLike
from moonpool.base.rpc.messages import Payload, payload_bytes
from moonpool.base.rpc.tls import Tls
from moonpool.base.transport.async_utils import ThreadOffload
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.framed_socket import FramedSocket
from moonpool.base.transport.framing import OneShotAnswer, OneShotMessage
from moonpool.base.transport.regions import ExportedRegions, Mailbox, MappedRegion, RemoteRegion, SharedRegion
from moonpool.v1 import kv_pb2


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
        """Size of the payload."""
        return sum([target.nbytes for target in self.targets])

    def take(self, data: BytesLike | None, done: Callable[[FilledBuffer], None]) -> bool:
        """Copies a payload to the targets and verifies the copies; None: the targets hold the payload already.

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
        """Size of the payload."""
        return self.buffer.nbytes

    def report(self) -> None:
        """Calls the buffer's `on_filled`."""
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
        """Hands over what comes, in order, until the connection ends; returns the cause.

        To be called once at a time.

        Raises:
            Exception: What a callback raised.
        """

    @abstractmethod
    def pause(self) -> None:
        """Stops handing over until `resume`: new messages stay with the system, and the peer is slowed down."""

    @abstractmethod
    def resume(self) -> None:
        """Goes on after `pause`."""

    @abstractmethod
    async def write(self, item: OutgoingItem | UnsentRest) -> None:
        """Sends a whole send queue item. Not to be cancelled.

        Raises:
            MoonpoolError: The connection has ended.
        """

    @abstractmethod
    def close(self, error: Exception) -> None:
        """Ends the connection with `error`. Idempotent."""


class ZeroCopyConnection(Connection[M]):
    """A connection that sends payloads from where they lie.

    A payload (`PendingPayload`) stays in the sender's memory until the connection calls `finish` or `fail`.
    """

    @abstractmethod
    def start(self, item: OutgoingItem) -> UnsentRest | None:
        """Sends an item of the send queue as far as the system takes bytes at once, without waiting.

        Returns None if all is sent, else the rest, which must be given to `write` before anything else.
        """


class TransportUnavailableError(MoonpoolError):
    """This machine lacks what a transport needs."""


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where and how a transport listens.

    Attributes:
        config: Of the service; says at which host to listen, and which address to advertise.
        epoch: Of this process.
        backlog: Connections that may wait to be accepted.
    """

    config: ServiceConfig
    epoch: int
    backlog: int


@dataclass(frozen=True, slots=True)
class OfferedRegions:
    """What the opening side shows to the accepting side.

    Attributes:
        shared: The peer may read these regions.
        mailbox: The peer may write payloads here; None if the peer sends none.
        by_address: The peer reads `shared` by address, for example by RDMA, and gets addresses in place of descriptors.
        description: The transport's description of this process, for the peer's `Transport.accept_regions`.
    """

    shared: Sequence[SharedRegion] = ()
    mailbox: Mailbox | None = None
    by_address: bool = False
    description: bytes = b""


@dataclass(frozen=True, slots=True)
class AcceptedRegions:
    """What the accepting side makes of the peer's `OfferedRegions`, and shows in turn.

    Attributes:
        readable: The peer's regions that this process may read, by number.
        borrowed: Number and memory of the region that the peer lends to this process.
        description: The transport's description of this process, for the peer's `ConnectionEnd`.
    """

    readable: Mapping[int, MappedRegion | RemoteRegion] = field(default_factory=dict)
    borrowed: tuple[int, MappedRegion] | None = None
    description: bytes = b""


@dataclass(frozen=True, slots=True)
class ConnectionEnd:
    """One end of a connection after the handshake.

    Attributes:
        transport: Carries the connection.
        sock: Connected; the handshake ran here.
        own: This process's regions that the peer may read.
        readable: The peer's regions that this process may read, by number; and the mailbox, if there is one.
        mailbox: Number of the region in `readable` that this process lends to the peer.
        borrowed: Number and memory of the region that the peer lends to this process.
        peer_description: The description that the transport gave of the peer, in the peer's process.
    """

    transport: Transport
    sock: FramedSocket
    own: ExportedRegions = field(default_factory=lambda: ExportedRegions(()))
    readable: Mapping[int, MappedRegion | RemoteRegion] = field(default_factory=dict)
    mailbox: int | None = None
    borrowed: tuple[int, MappedRegion] | None = None
    peer_description: bytes = b""

    @property
    def name(self) -> str:
        """Name of the transport."""
        return self.transport.name

    def open(self, cls: type[M], acknowledge: Callable[[Message], None]) -> ZeroCopyConnection[M]:
        """As `Transport.open_connection`."""
        return self.transport.open_connection(self, cls, acknowledge)


class Transport(ABC):
    """A way to move KV between two processes beside gRPC; one object per process.

    A server listens, and offers an address in a stream's welcome. The client connects and shows the offer's token
    (handshake.py). Then both sides open their `Connection`, which carries all further messages of the stream.

    Attributes:
        name: As flags, logs and gauges name the transport.
        kind: The transport's number in messages: from TransportKind, or a free number from 100 on.
        scope: Only processes with the same scope can use the transport together; "" for all. The scope travels in
            `StreamHello.transport_place`: at most one of a process's transports has a scope.
        takes_one_shot: Connections carry one-shot messages (framing.py), also from a blocking client.
        encrypted_as: Transport to use instead if the process has certificates: the same transport if no other machine
            can read or change the bytes; None if there is none. With None, the transport needs `kv_transports_trusted`.
    """

    name: ClassVar[str]
    kind: ClassVar[int]
    scope: str = ""
    takes_one_shot: ClassVar[bool] = False
    encrypted_as: ClassVar[str | None] = None

    @classmethod
    @abstractmethod
    def create(cls, config: TransportConfig, tls: Tls | None) -> Self:
        """The transport as the flags say, for a process with these certificates, if any.

        Raises:
            ConfigError: A flag asks for what this machine lacks.
            TransportUnavailableError: This machine cannot use the transport, and no flag insists.
        """

    @abstractmethod
    def listen(self, stack: contextlib.ExitStack, options: ListenOptions) -> tuple[socket.socket, str]:
        """A listening stream socket, and the address to which clients connect; `stack` closes what is opened.

        Raises:
            ConfigError: The transport cannot listen.
        """

    @abstractmethod
    async def connect(self, address: str) -> socket.socket:
        """A non-blocking socket, connected to an address that `listen` gave in another process.

        Raises:
            OSError: No process listens there.
        """

    @abstractmethod
    def check_peer(self, sock: socket.socket) -> None:
        """Looks at a new connection, on both sides, and sets the socket up.

        Raises:
            PermissionDenied: This peer must not use the transport.
        """

    def frame(self, sock: socket.socket, *, server: bool) -> FramedSocket:
        """A new connection's socket for framed messages; no byte is sent or received yet.

        Args:
            sock: Of the connection; belongs to the result.
            server: Whether this process has accepted the connection.
        """
        return FramedSocket(sock)

    def can_use(self, hello: kv_pb2.StreamHello) -> bool:
        """Whether a hello's sender and this process can use the transport together."""
        return not self.scope or hello.transport_place == self.scope

    def offer_regions(self, share: Sequence[SharedRegion], mailbox_bytes: int) -> OfferedRegions:
        """What the opening side shows to the accepting side; nothing unless a subclass shows something.

        Args:
            share: This process's memory that the peer may read, if payloads go to the peer.
            mailbox_bytes: Payload bytes that the peer may be ahead in sending; 0 if payloads go to the peer.
        """
        return OfferedRegions()

    def accept_regions(self, fds: Sequence[int], opening: kv_pb2.TransportOpen) -> AcceptedRegions:
        """What the accepting side takes of an opening, and shows in turn; nothing unless a subclass takes something.

        Args:
            fds: Descriptors of the regions, closed after the call.
            opening: The peer's regions, and the peer's description.

        Raises:
            FrameError: The regions are not what the peer says, or the transport has none.
        """
        if fds or opening.regions:
            raise FrameError(f"{len(fds)} descriptors came for {len(opening.regions)} regions, {self.name} has none")
        return AcceptedRegions()

    @abstractmethod
    def open_connection(
        self, end: ConnectionEnd, cls: type[M], acknowledge: Callable[[Message], None]
    ) -> ZeroCopyConnection[M]:
        """The connection for one end.

        Args:
            end: What the handshake agreed on.
            cls: Class for incoming messages.
            acknowledge: Sends a message to the peer, in turn.
        """
