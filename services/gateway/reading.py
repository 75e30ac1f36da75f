"""Reads a request's body within its bounds: bytes, seconds, and the type that its head says."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from pydantic_core import from_json
from starlette.requests import Request

from moonpool.errors import InvalidRequest
from services.gateway.bounds import UNCHECKED_BYTES, check_parts
from services.gateway.errors import HttpError
from services.gateway.fields import BodyT, validated

JSON_TYPE = "application/json"


async def read_body(request: Request, cls: type[BodyT], max_bytes: int, timeout_s: float) -> BodyT:
    """Read and check a body.

    Raises:
        HttpError: it is of another type than JSON, too large, or too slow.
        InvalidRequest: it is no JSON, or a field is wrong; names it.
        ClientDisconnect: the client has gone.
    """
    _check_type(request)
    if _length(request) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return validated(cls, await _json(await _read(request, max_bytes)))
    except TimeoutError:
        raise HttpError(
            HTTPStatus.REQUEST_TIMEOUT, "timeout", f"the body did not come within {timeout_s:g} s", close=True
        ) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


async def _json(raw: bytes) -> object:
    """What JSON says. Of what is large each step has a turn of the event loop of its own."""
    large = len(raw) > UNCHECKED_BYTES
    check_parts(raw)
    if large:
        await asyncio.sleep(0)
    try:
        content: object = from_json(raw)
    except ValueError as error:
        raise InvalidRequest("", f"invalid JSON: {error}") from None
    if large:
        await asyncio.sleep(0)
    return content


def _check_type(request: Request) -> None:
    """Refuse what a web page of another site can send without being asked."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != JSON_TYPE:
        raise HttpError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            f"Content-Type must be {JSON_TYPE}",
            parameter="content-type",
            close=True,
        )


def _length(request: Request) -> int:
    """The length that the head says; 0 = it does not. The HTTP parser has refused what is no number."""
    return int(request.headers.get("content-length", "0"))


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "request_too_large",
        f"a body has at most {max_bytes} bytes",
        close=True,
    )
