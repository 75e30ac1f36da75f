"""Reads bodies within limits, and checks the headers before a body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, TypeVar

from pydantic_core import from_json
from starlette.requests import Request

from moonpool.base.errors import InvalidRequest
from moonpool.base.json_parts import UNCHECKED_BYTES, check_json_parts
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.gateway.serving.body import Body, BodyT, validate_body
from moonpool.gateway.serving.body_limits import BodyMemory, BodyPace
from moonpool.gateway.serving.client_watch import while_connected
from moonpool.gateway.serving.errors import HttpError
from moonpool.gateway.serving.json_response import JSON_TYPE

CLEANUP = "moonpool.cleanup"
"""Key of a request's scope: an `ExitStack` that is closed after the response."""
MAX_WARNED_FIELDS = 16
"""Ignored fields that the warning header names."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


T = TypeVar("T")


class BodyWork:
    """Work on a body, of a cost that follows the body's size: at once, or on a thread if the body is large."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """Return the result of `work`.

        Raises:
            ClientDisconnect: the client has closed the connection.
        """
        return work()


class ThreadWork(BodyWork):
    """Work on a large body, by turns of tenants."""

    def __init__(self, request: Request, threads: TenantTurns, tenant: str) -> None:
        self._request, self._threads, self._tenant = request, threads, tenant

    async def __call__(self, work: Callable[[], T]) -> T:
        return await while_connected(self._request.receive, self._threads.run(self._tenant, work))


@dataclass(frozen=True, slots=True)
class ParsedBody(Generic[BodyT]):
    """A body that was read.

    Attributes:
        body: the body, checked.
        warning: a response header that names ignored fields; empty if there are none.
        work: does what else is to be done with the body.
    """

    body: BodyT
    warning: dict[str, str]
    work: BodyWork


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Reads and parses bodies.

    Attributes:
        max_bytes: maximum size of a body.
        timeout_s: seconds in which a body must arrive.
        memory: the memory of all bodies.
        threads: parse bodies of more than `UNCHECKED_BYTES`, by turns of tenants.
        pace: how fast bodies are read.
    """

    max_bytes: int
    timeout_s: float
    memory: BodyMemory
    threads: TenantTurns
    pace: BodyPace

    async def read(self, request: Request, cls: type[BodyT], tenant: str) -> ParsedBody[BodyT]:
        """Read, parse and check the body of a tenant's request. The body's memory is held until the response has ended.

        Raises:
            HttpError: the body has another content type than JSON, is too large, or does not arrive in time.
            Unavailable: the memory of all bodies is used up.
            InvalidRequest: the body is not JSON, or a field is wrong; names the field.
            ClientDisconnect: the client has closed the connection.
        """
        _check_content_type(request)
        _check_content_encoding(request)
        told = _content_length(request)
        if told > self.max_bytes:
            raise _body_too_large(self.max_bytes)
        take = request.scope[CLEANUP].enter_context(self.memory.hold(tenant))
        take(told)  # before the first byte: bytes that wait to be read take memory, too
        try:
            async with asyncio.timeout(self.timeout_s):
                raw = await self._read_raw(request, tenant, take, told)
        except TimeoutError:
            message = f"the body did not arrive within {self.timeout_s:g} s"
            raise HttpError(HTTPStatus.REQUEST_TIMEOUT, "timeout", message, close=True) from None
        work = BodyWork() if len(raw) <= UNCHECKED_BYTES else ThreadWork(request, self.threads, tenant)
        body, warning = await work(lambda: _parse_body(cls, raw))
        return ParsedBody(body, warning, work)

    async def _read_raw(self, request: Request, tenant: str, take: Callable[[int], None], taken: int) -> bytes:
        body, clock = bytearray(), asyncio.get_running_loop().time
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_bytes:
                raise _body_too_large(self.max_bytes)
            if len(body) > taken:
                take(len(body) - taken)
                taken = len(body)
            wait_s = self.pace.wait_s(tenant, len(chunk), clock())
            if wait_s > 0.0 and len(body) > UNCHECKED_BYTES:  # small bodies do not wait behind large ones
                await asyncio.sleep(wait_s)  # the connection is not read meanwhile
        return bytes(body)


def _parse_body(cls: type[BodyT], raw: bytes) -> tuple[BodyT, dict[str, str]]:
    raw = raw.removeprefix(_BYTE_ORDER_MARK)
    check_json_parts(raw)
    try:
        content: object = from_json(raw, cache_strings="keys")
    except ValueError as error:
        raise InvalidRequest("", f"invalid JSON: {error}") from None
    body = validate_body(cls, content)
    body.check()
    return body, _ignored_fields_warning(body)


def _ignored_fields_warning(body: Body) -> dict[str, str]:
    """A warning header with the names of ignored fields. A name with other than plain characters becomes "?"."""
    names = list(dict.fromkeys(name if _PLAIN_NAME.fullmatch(name) else "?" for name in body.ignored_fields()))
    if not names:
        return {}
    listed = ", ".join(names[:MAX_WARNED_FIELDS]) + (", ..." if len(names) > MAX_WARNED_FIELDS else "")
    return {"warning": f'299 moonpool "ignored fields: {listed}"'}


def _check_content_type(request: Request) -> None:
    """Refuse content types that a web page of another site can send without a CORS preflight."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != JSON_TYPE:
        raise HttpError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            f"Content-Type must be {JSON_TYPE}",
            parameter="content-type",
            close=True,
        )


def _check_content_encoding(request: Request) -> None:
    """Refuse compressed bodies, whose size is unknown before they are unpacked."""
    given = request.headers.get("content-encoding", "identity").strip().lower()
    if given not in ("", "identity"):
        raise HttpError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            f"a body must not be compressed: Content-Encoding {given[:32]!r} is not supported",
            parameter="content-encoding",
            close=True,
        )


def _content_length(request: Request) -> int:
    """Value of the header Content-Length; 0 without one. The HTTP parser has refused values that are not numbers."""
    return int(request.headers.get("content-length", "0"))


def _body_too_large(max_bytes: int) -> HttpError:
    return HttpError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "request_too_large",
        f"a body has at most {max_bytes} bytes",
        close=True,
    )
