"""What holds for every HTTP request: ids, the size of the head, and paths with a slash at the end."""

from __future__ import annotations

import re
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moonpool import world
from services.gateway.serving.errors import HttpError, error_response
from services.gateway.serving.json_body import JSON_TYPE, to_json_bytes

REQUEST_ID_HEADER = "x-request-id"
MAX_HEAD_BYTES = 16 << 10
"""Maximum size of a request's head: the path, and names and values of the headers."""
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._:-]{1,96}")


def request_id_of(scope: Scope) -> tuple[str, bool]:
    """Id of a request, and whether the client chose the id."""
    name, own = scope["moonpool.request_id"]
    return name, own


class RequestEnvelope:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. The response has the id of the request, whatever the response says."""
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID_HEADER.encode()), b"")
        own = bool(_CLIENT_ID.fullmatch(given))
        name = given.decode() if own else world.random_hex(8)
        path: str = scope["path"]
        stripped = path.rstrip("/") or "/"
        scope = {**scope, "moonpool.request_id": (name, own), "path": stripped, "raw_path": stripped.encode()}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                if not any(each == REQUEST_ID_HEADER.encode() for each, _ in headers):
                    headers.append((REQUEST_ID_HEADER.encode(), name.encode()))
                message = {**message, "headers": headers}
            await send(message)

        size = len(scope.get("query_string", b"")) + len(path.encode())
        if size + sum(len(each) + len(value) + 4 for each, value in scope["headers"]) > MAX_HEAD_BYTES:
            await _refuse_head(send_with_id)
        else:
            await self._app(scope, receive, send_with_id)


async def _refuse_head(send: Send) -> None:
    message = f"the head of a request has at most {MAX_HEAD_BYTES} bytes"
    refused = HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", message, close=True)
    error = error_response(refused)
    headers = {"content-type": JSON_TYPE, **error.headers}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": to_json_bytes(error.body())})
