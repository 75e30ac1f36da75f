"""A client's HTTP connection: uvicorn's protocol with bounds and timeouts.

llhttp, a native parser, reads the requests. A connection's data is read in bounded pieces, and no data is parsed after
a response that came before the request's end.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from moonpool.base import world
from moonpool.gateway.serving.envelope import MAX_HEAD_BYTES

MAX_BODY_PIECES = 1 << 14
"""Chunks per body: a body with 8 MiB in chunks of 512 bytes. Reading a chunk takes as long as reading some KiB."""
MAX_PIPELINED = 64
"""Requests that a connection may send while a request is answered."""
PARSED_BYTES = 4 << 10
"""Bytes that a connection parses before others have their turn: in chunks of one byte they take about a millisecond."""
LINGER_S = 2.0
"""Seconds for which a closing connection takes what the client still sends, unread, so that the client sees the
response before the connection ends.
"""
FIRST_REQUEST_S = 0.5
"""Seconds for which a connection without a request stays once the server ends: its client could not know."""
PROBE_S = (0.02, 0.1, 0.4)
"""Times at which a connection that sends no more is checked, in seconds after the end; later, each sweep checks the
connection.
"""


# uvicorn has no settings for these bounds and timeouts (ADR 10). They must act between a read and the application, so
# this class overrides uvicorn's protocol and uses its internals: `cycle`, `pipeline`, `flow`, `connections`. If a
# release of uvicorn changes them, the tests of this folder fail.
class HttpConnection(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 over llhttp, with bounds and timeouts.

    `sweep` closes a connection that has waited too long.
    """

    config: HttpConfig
    flow: PacedFlow
    _waits_since: float | None = None
    _blocked_since: float | None = None
    _closing_since: float | None = None
    _half_closed = False
    _asked_to_close = False
    _lingers = False
    _in_head = False
    _in_message = False
    _message_began = 0.0
    _unparsed_bytes = 0
    _body_pieces = 0
    _more_than_head = False
    _is_last = False

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open and waits for the head of a request."""
        return self._waits_since is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PacedFlow(transport)
        self._waits_since = self.loop.time()
        limit = self.config.max_connections
        if limit and len(self.connections) > limit:
            self._least_useful().transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request, too. What knows this connection is let go: a reference cycle keeps its request for long."""
        super().connection_lost(exc)
        self.cycle = self.scope = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Parse what has come, piece by piece. Meanwhile nothing more is read. A closing connection drops the data."""
        unparsed = self.flow.unparsed
        if not unparsed and len(data) <= PARSED_BYTES:
            self._parse(data)
            return
        if not unparsed:
            self.config.turns.add(self._take_piece)
        unparsed += data
        self.flow.pause_reading()

    def _take_piece(self) -> int:
        """Parse a piece, or drop all if the connection closes. Returns the number of bytes."""
        unparsed = self.flow.unparsed
        if self._lingers or self.transport.is_closing():
            taken = len(unparsed)
            unparsed.clear()
        else:
            piece = bytes(memoryview(unparsed)[:PARSED_BYTES])
            taken = len(piece)
            del unparsed[:taken]
            self._parse(piece)
        if unparsed:
            self.config.turns.add(self._take_piece)
        else:
            self.flow.resume_reading()
        return taken

    def _parse(self, data: bytes) -> None:
        if self._lingers:
            return
        self._unset_keepalive_if_required()
        self._more_than_head = False
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade:  # HTTP/1.1 is answered; what follows is of another protocol
            self.cycle.keep_alive = False
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._in_message and not self._more_than_head:
            self._unparsed_bytes += len(data)  # the parser keeps a value until the value's end
            if self._unparsed_bytes > MAX_HEAD_BYTES:
                part = "head" if self._in_head else "trailer"
                self.send_400_response(f"The {part} of the request is too large.")
        if not self._between_requests():
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = self.loop.time()

    # What follows is called by the parser. An exception there becomes an `HttpParserError`.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = self._in_head = True
        self._message_began = self.loop.time()
        self._unparsed_bytes = self._body_pieces = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the head; those of a trailer, behind the body, are left out."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            raise ValueError("a request has one Host")
        self._in_head, self._unparsed_bytes = False, 0
        super().on_headers_complete()
        self.cycle.keep_alive &= not self._is_last
        self._asked_to_close = not self.cycle.keep_alive
        self.cycle.transport = ResponseTransport(self)  # type: ignore[assignment]
        cycle = weakref.ref(self.cycle)  # which has this scope
        self.scope["moonpool.unread"] = lambda: self._in_message and self.cycle is cycle()  # type: ignore[typeddict-unknown-key]

    def on_body(self, body: bytes) -> None:
        self._more_than_head, self._unparsed_bytes = True, 0
        self._body_pieces += 1
        if self._body_pieces > MAX_BODY_PIECES:
            raise ValueError("too many chunks")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message, self._more_than_head = False, True
        super().on_message_complete()

    # --- the response and the end -----------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        if self._lingers:
            return
        super().on_response_complete()
        if self._between_requests():
            self._waits_since = self.loop.time()

    def shutdown(self) -> None:
        """The server ends: so does this connection, after the answer; a new connection's first request is answered."""
        if self.cycle is None:
            self._is_last = True
            self.loop.call_later(FIRST_REQUEST_S, self._close_unless_asked)
        else:
            super().shutdown()

    def _close_unless_asked(self) -> None:
        if self.cycle is None:
            self.transport.close()

    def close_after_response(self) -> None:
        """Close the connection. A client that still sends first gets a while to see the response; no data is parsed."""
        if not self._in_message:
            self.transport.close()
            return
        self._lingers = True
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Go on answering a client that has only finished sending. True keeps the connection open for the response.

        A client that has closed the connection looks the same. If the request has no response yet, an interim response
        tells both apart: the closed connection answers with a reset. HTTP/1.0 has no interim responses, so there the
        connection ends: else a client could leave any number of requests behind. A GET costs little, and gets none.
        """
        if self._lingers or self._between_requests() or self._in_message or self.scheme == "https":
            return None
        if self.scope["method"] != "GET":
            if self.scope["http_version"] == "1.0" or (self.cycle.response_started and not self._asked_to_close):
                return None
            if not self.cycle.response_started:
                self._tell_apart()
        self._half_closed = True
        self.cycle.keep_alive = False
        return True

    def _tell_apart(self) -> None:
        """Send an interim response, and look whether the connection is reset."""
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        for delay_s in PROBE_S:
            self.loop.call_later(delay_s, self._end_if_gone)

    def _end_if_gone(self) -> None:
        """Abort a half-closed connection that the client has reset."""
        found: socket.socket | None = self.transport.get_extra_info("socket")
        if found is None or self.transport.is_closing():
            return
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._blocked_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._blocked_since = None

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP, and close. If a response has started, close the connection only."""
        self._lingers = True
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing() or self.pipeline or (answering and self.cycle.response_started):
            self.transport.close()
        elif self.cycle is not None and not answering and self._in_message and not self._in_head:
            self.transport.close()  # the rest of a request that has a response
        else:
            super().send_400_response(msg)

    def sweep(self, now: float, read_timeout_s: float, write_timeout_s: float) -> None:
        """Close this connection if it has waited too long for a request, or for the client to read."""
        if self.transport.is_closing():
            if self._closing_since is None:
                self._closing_since = now
            elif now - self._closing_since > write_timeout_s:
                self.transport.abort()
        elif self._blocked_since is not None and now - self._blocked_since > write_timeout_s:
            self.transport.abort()
        elif self._waits_since is not None and now - self._waits_since > read_timeout_s:
            self.transport.close()
        elif self._half_closed:
            self._end_if_gone()

    def _least_useful(self) -> HttpConnection:
        """A connection whose client keeps others out by doing nothing.

        One that is idle, else the one whose body has been coming for longest; this connection if all others have sent
        their requests.
        """
        others = [other for other in self.connections if isinstance(other, HttpConnection) and other is not self]
        if idle := next((other for other in others if other.is_idle), None):
            return idle
        slow = (other for other in others if other._in_message and not other.transport.is_closing())
        return min(slow, key=lambda other: other._message_began, default=self)

    def _between_requests(self) -> bool:
        """Whether no request is being answered. The client may still send the rest of a body."""
        return self.cycle is None or self.cycle.response_complete


class ResponseTransport:
    """A connection's transport, for a response."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        """Send a part of the response."""
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        """Whether the connection is closed or about to be."""
        return self._connection.transport.is_closing()

    def close(self) -> None:
        """Close the connection after the response."""
        self._connection.close_after_response()


class PacedFlow(FlowControl):
    """uvicorn's flow control, which reads no more before all that was read is parsed.

    Attributes:
        unparsed: what was read and is not parsed yet; at most two reads.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.unparsed = bytearray()

    def resume_reading(self) -> None:
        """Read again, unless something is not parsed yet."""
        if not self.unparsed:
            super().resume_reading()


TURNS_S, TURNS_BYTES = 0.001, 256 << 10
"""For so long, and so much, all connections together parse or drop data before answers in progress go on."""


class ParseTurns:
    """The turns of connections with unparsed data: hundreds of bodies hold the event loop no longer than a few."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], int]] = deque()
        self._scheduled = False

    def add(self, take_piece: Callable[[], int]) -> None:
        """Call `take_piece` once, after all that wait already; the function returns the bytes that it has taken."""
        self._waiting.append(take_piece)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._scheduled = False
        until, taken = world.monotonic() + TURNS_S, 0
        try:
            while self._waiting and taken < TURNS_BYTES and world.monotonic() < until:
                taken += self._waiting.popleft()()
        finally:
            self._schedule()


class HttpConfig(uvicorn.Config):
    """uvicorn's settings, and what uvicorn does not have: a limit on connections, and turns of parsing.

    Attributes:
        max_connections: maximum number of open connections; 0 for no limit.
        turns: of all connections that have something to parse.
    """

    def __init__(self, app: ASGIApp, *, max_connections: int = 0, **settings: Any) -> None:
        super().__init__(app, **settings)
        self.max_connections = max_connections
        self.turns = ParseTurns()
