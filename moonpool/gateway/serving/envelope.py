"""What holds for every HTTP request: ids, the size of the head, and paths with a slash at the end."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection
from contextlib import ExitStack
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moonpool.base import world
from moonpool.gateway.serving.body_reader import CLEANUP
from moonpool.gateway.serving.errors import HttpError, error_response
from moonpool.gateway.serving.json_response import JSON_TYPE, to_json_bytes
from moonpool.gateway.serving.served_request import Ended, ServedRequest

REQUEST_ID_HEADER = "x-request-id"
MAX_HEAD_BYTES = 16 << 10
"""Maximum size for a request's head: the path, and the headers' names and values."""
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._:-]{1,96}")


class AllowedHosts:
    """The hosts under which a gateway answers.

    Without API keys, a web page may not reach the gateway: neither by a name that the page's owner points at this
    machine (DNS rebinding), nor from another origin.
    """

    def __init__(self, names: Collection[str], origins: Collection[str] = (), *, addresses: bool = False) -> None:
        """Allow hosts.

        Args:
            names: host names; "*" allows all.
            origins: with `addresses`, the origins whose web pages are allowed beside the gateway's own; "*" allows all.
            addresses: IP addresses are allowed as well, and the origin of a request is checked.
        """
        self._names = frozenset(name.lower() for name in names)
        self._origins = origins
        self._addresses = addresses

    def check(self, host: str, origin: str) -> None:
        """Check the Host and the Origin that a request names; "" for none.

        Raises:
            HttpError: the host or the origin is not allowed; names the setting.
        """
        name = urlsplit(f"//{host}").hostname or ""
        known = not self._names.isdisjoint((name, "*")) or (self._addresses and _is_address(name))
        if not known:
            raise _forbidden(f"the host {name[:64]!r} is not served without API keys; see the setting allowed_hosts")
        own = not origin or origin.partition("://")[2].lower() == host.lower()
        if self._addresses and not own and {origin, "*"}.isdisjoint(self._origins):
            raise _forbidden(f"the origin {origin[:64]!r} is not allowed; see the setting allowed_origins")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _forbidden(message: str) -> HttpError:
    return HttpError(HTTPStatus.FORBIDDEN, "host_not_allowed", message, close=True)


class RequestEnvelope:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, ended: Ended, clock: Callable[[], float]) -> None:
        """Serve `hosts` with `app`; `ended` is called for each request, `clock` returns seconds."""
        self._app = app
        self._hosts = hosts
        self._ended = ended
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. The response has the id of the request, whatever the response says."""
        began = self._clock()
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID_HEADER.encode()), b"")
        own = bool(_CLIENT_ID.fullmatch(given))
        request = ServedRequest(given.decode() if own else world.random_hex(8), own, scope["method"])
        inner = request.within(scope)
        try:
            await self._serve(request, inner, receive, send)
        except Exception as error:  # a defect, which is answered outside
            request.status = HTTPStatus.INTERNAL_SERVER_ERROR
            request.notes.update(error_response(error).notes())
            raise
        finally:
            if (route := inner.get("route")) is not None:
                request.handler = route.path
            request.duration_s = self._clock() - began
            self._ended(request)

    async def _serve(self, request: ServedRequest, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        stripped = path.rstrip("/") or "/"
        scope["path"], scope["raw_path"] = stripped, stripped.encode()
        unread = scope.get("moonpool.unread", bool)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                headers = list(message["headers"])
                if unread():  # the server reads no further; see `HttpConnection.close_after_response`
                    headers = [pair for pair in headers if pair[0] != b"connection"] + [(b"connection", b"close")]
                if not any(header == REQUEST_ID_HEADER.encode() for header, _ in headers):
                    headers.append((REQUEST_ID_HEADER.encode(), request.id.encode()))
                message = {**message, "headers": headers}
            await send(message)

        size = len(scope.get("query_string", b"")) + len(path.encode())
        if size + sum(len(header) + len(value) + 4 for header, value in scope["headers"]) > MAX_HEAD_BYTES:
            message = f"the head of a request has at most {MAX_HEAD_BYTES} bytes"
            refused = HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", message, close=True)
            await _refuse(refused, request, send_with_id)
            return
        given_headers = dict(scope["headers"])
        host, origin = (given_headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        try:
            self._hosts.check(host, origin)
        except HttpError as error:
            await _refuse(error, request, send_with_id)
        else:
            with ExitStack() as cleanup:
                scope[CLEANUP] = cleanup
                await self._app(scope, receive, send_with_id)


async def _refuse(refused: HttpError, request: ServedRequest, send: Send) -> None:
    error = error_response(refused)
    request.notes.update(error.notes())
    headers = {"content-type": JSON_TYPE, **error.headers}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": to_json_bytes(error.body())})
