"""How many calls one host may have open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moonpool.base.errors import Overloaded

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Bounds for each peer, that is, for each host, and for connections.

    Attributes:
        calls: all kinds together.
        streams: long-lived calls on which the peer may send many messages.
        connection_calls: of one connection, also those that the peer has reset and gRPC has not handed over yet. Beyond
            them gRPC refuses.
        handshake_s: seconds in which a new connection must have said what HTTP/2 and TLS begin with, and then those in
            which it must have confirmed the server's settings.
        connections: open connections of a port; further ones are closed. None = all ports of a server together have
            half of the files that this process may have open: a service keeps descriptors for files and connections.
    """

    calls: int = 8192
    streams: int = 1024
    connection_calls: int = 4096
    handshake_s: float = 20.0
    connections: int | None = None


DEFAULT_LIMITS = CallLimits()


class PeerCalls:
    """Counts each peer's open calls."""

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self._calls: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()

    @property
    def open(self) -> int:
        return self._calls.total()

    @contextmanager
    def call(self, peer: str, *, stream: bool) -> Iterator[None]:
        """Count a call from `peer` ("ipv4:host:port", as gRPC names the peer) while the body runs.

        Raises:
            Overloaded: The peer has too many open calls already.
        """
        host = peer.rpartition(":")[0]
        counted = [(self._calls, self._limits.calls, "calls")]
        if stream:
            counted.append((self._streams, self._limits.streams, "streams"))
        for counts, limit, what in counted:
            if counts[host] >= limit:
                raise Overloaded(f"{limit} {what} of {host} are open", reason="peer_calls", retry_after_s=RETRY_AFTER_S)
        for counts, _, _ in counted:
            counts[host] += 1
        try:
            yield
        finally:
            for counts, _, _ in counted:
                counts[host] -= 1
                if not counts[host]:
                    del counts[host]
