"""An HTTP response over ASGI, sent while the client is connected."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Message, Send

from moonpool.gateway.serving.json_response import JSON_TYPE

SSE_MEDIA_TYPE = "text/event-stream; charset=utf-8"


class AsgiReply:
    """Sends one HTTP response over ASGI."""

    def __init__(self, send: Send, headers: Mapping[str, str], stream_type: str = "") -> None:
        """`headers` may be extended until the response starts.

        `stream_type` is the media type of a stream, "" = server-sent events.
        """
        self._send = send
        self.headers = dict(headers)
        self.started = False
        self._stream_type = stream_type or SSE_MEDIA_TYPE

    async def send_json(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole JSON response."""
        length = {"content-length": str(len(content))}
        await self._start(status, {"content-type": JSON_TYPE, **length, **self.headers, **(headers or {})})
        await self._send({"type": "http.response.body", "body": content})

    async def send_events(self, content: bytes) -> None:
        """Send server-sent events, and the head of the response before the first."""
        if not self.started:
            # Without the last header, a proxy that buffers responses holds back the first tokens.
            plain = {
                "content-type": self._stream_type,
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
            await self._start(200, {**plain, **self.headers})
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes = b"") -> None:
        """Send the last events and end the response."""
        await self._send({"type": "http.response.body", "body": content})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


async def to_nobody(message: Message) -> None:
    """Send a part of a response that has no client."""
