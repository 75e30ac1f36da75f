"""Requests to the gateway's own application, without a connection and for a tenant that was checked before."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from moonpool.base.telemetry.logs import get_logger
from moonpool.gateway.serving.auth import TENANT_SCOPE

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class InProcessResponse:
    """A whole response."""

    status: int
    body: bytes
    request_id: str


@dataclass(frozen=True, slots=True)
class InProcessClient:
    """Sends requests to an ASGI application."""

    app: ASGIApp

    async def post(self, path: str, body: bytes, tenant: str) -> InProcessResponse:
        """Send a JSON body as a tenant. Cancelling the call is what a client does that disconnects."""
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": None,
            "server": None,
            TENANT_SCOPE: tenant,
        }
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, parts, request_id = 500, list[bytes](), ""

        async def receive() -> Message:
            if waiting:
                return waiting.pop()
            await asyncio.Event().wait()  # the client stays
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
                request_id = headers.get("x-request-id", "")
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        try:
            await self.app(scope, receive, send)
        except Exception:  # a defect of a handler, which the application has answered with 500 before
            log.exception("a request failed", path=path)
        return InProcessResponse(status, b"".join(parts), request_id)
