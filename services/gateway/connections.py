"""HTTP connections with bounds: how many, how long a head may take, how long an answer may stay unread."""

from __future__ import annotations

import asyncio

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol


class HttpConfig(uvicorn.Config):
    """uvicorn's settings, and the bound that it lacks."""

    max_connections: int = 0
    """Connections open at once; 0 = any number."""


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 over h11, which notes since when it waits for what; `sweep` ends what waits too long."""

    _waits_since: float | None = None
    _blocked_since: float | None = None
    _closing_since: float | None = None

    @property
    def waits(self) -> bool:
        """Whether it is open and waits for the head of a request."""
        return self._waits_since is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        limit = self.config.max_connections if isinstance(self.config, HttpConfig) else 0
        if limit and len(self.connections) > limit:
            self._least_missed().transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._between_requests():
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = self.loop.time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._between_requests():
            self._waits_since = self.loop.time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._blocked_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._blocked_since = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless an answer has begun already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def sweep(self, now: float, read_timeout_s: float, write_timeout_s: float) -> None:
        """End this connection if it has waited too long for the head of a request or for its client to read."""
        if self.transport.is_closing():
            if self._closing_since is None:
                self._closing_since = now
            elif now - self._closing_since > write_timeout_s:
                self.transport.abort()
        elif self._blocked_since is not None and now - self._blocked_since > write_timeout_s:
            self.transport.abort()
        elif self._waits_since is not None and now - self._waits_since > read_timeout_s:
            self.transport.close()

    def _least_missed(self) -> Connection:
        """A connection without a request, so that idle ones cannot keep others out; this one when all have some."""
        others = (one for one in self.connections if isinstance(one, Connection) and one is not self)
        return next((one for one in others if one.waits), self)

    def _between_requests(self) -> bool:
        """No request is being answered: the next one's head, or the rest of an answered one's body, is coming."""
        return self.cycle is None or self.cycle.response_complete
