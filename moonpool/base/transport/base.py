"""The contract for transports: how a process finds a peer, and what both sides show each other.

Credits, channels, reconnection and the choice of a transport stand above, once for all transports.
"""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from google.protobuf.message import Message

from moonpool.base.config import ServiceConfig
from moonpool.base.errors import FrameError, MoonpoolError
from moonpool.base.rpc.tls import Tls
from moonpool.base.transport.config import TransportConfig
from moonpool.base.transport.connection import M, ZeroCopyConnection
from moonpool.base.transport.framed_socket import FramedSocket
from moonpool.base.transport.regions import ExportedRegions, Mailbox, MappedRegion, RemoteRegion, SharedRegion
from moonpool.v1 import kv_pb2


class Transport(ABC):
    """A way to move KV between two processes beside gRPC; one object per process.

    A server listens, and offers an address in a stream's welcome. The client connects and shows the offer's token
    (listener.py, dialer.py). Then both sides open their `Connection`, which carries all further messages of the stream.

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
        """Look at a new connection, on both sides, and set the socket up.

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
        return self.transport.name

    def open(self, cls: type[M], acknowledge: Callable[[Message], None]) -> ZeroCopyConnection[M]:
        """As `Transport.open_connection`."""
        return self.transport.open_connection(self, cls, acknowledge)
