"""`/v1/files`: input and output of batches."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from typing import Any

from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.gateway.batches.runner import BatchRunner
from moonpool.gateway.batches.store import BatchStore, FullError, StoredFile
from moonpool.gateway.responses.context import ResponsesContext
from moonpool.gateway.serving.errors import HttpError
from moonpool.gateway.serving.json_response import json_response

UPLOAD_S = 600.0
"""Seconds in which a file must arrive."""
LEAST_KEPT_S, MOST_KEPT_S = 3600, 2_592_000
"""Seconds for which a file may be kept: an hour to thirty days, as at OpenAI."""
FIELD_BYTES = 1024
"""Bytes of a form's field at most; the file has a bound of its own."""
_COPIED_BYTES = 1 << 20


def batch_runner(gateway: ResponsesContext) -> BatchRunner:
    """What runs this gateway's batches, with the store of files.

    Raises:
        Unavailable: the gateway has no folder for them.
    """
    if gateway.batches is None:
        raise Unavailable("this gateway keeps no files and batches: its setting batch_dir names no folder")
    return gateway.batches


async def upload_file(gateway: ResponsesContext, request: Request) -> Response:
    """`POST /v1/files`, a form with `purpose` and `file`, and maybe `expires_after`.

    Raises:
        HttpError: the files of the tenant take as much as `batch_bytes` allows, or the file takes too long to come.
        InvalidRequest: the form is not as it must be; names the field.
    """
    store, tenant = batch_runner(gateway).store, gateway.auth.tenant(request)
    with store.receiving(tenant, await store.room(tenant) + FIELD_BYTES * 8) as take:
        return await _received(gateway, request, tenant, take)


async def _received(gateway: ResponsesContext, request: Request, tenant: str, take: Callable[[int], None]) -> Response:
    """Take a file whose bytes are counted by `take`."""
    store = batch_runner(gateway).store
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequest("file", "must be sent as multipart/form-data, with purpose")
    try:
        async with asyncio.timeout(UPLOAD_S):
            parser = MultiPartParser(
                request.headers, _paced(gateway, request, tenant, take), max_files=1, max_fields=8,
                max_part_size=FIELD_BYTES,
            )  # fmt: skip
            form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise InvalidRequest("file", f"the form cannot be read: {error}") from None
    except TimeoutError:
        raise HttpError(HTTPStatus.REQUEST_TIMEOUT, "upload_timeout", "the file took too long to come") from None
    try:
        purpose, sent = form.get("purpose"), form.get("file")
        if not isinstance(purpose, str) or not purpose:
            raise InvalidRequest("purpose", "must be given, for example batch")
        if sent is None or isinstance(sent, str):
            raise InvalidRequest("file", "must be given as a file")
        kept_s = _kept_s(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"))
        file_id = store.new_file_id()
        num_bytes = await asyncio.to_thread(_keep, sent.file, store, file_id)
    finally:
        await form.close()
    now = store.now()
    file = StoredFile(file_id, sent.filename or file_id, purpose, num_bytes, now, kept_s and now + kept_s)
    await store.add_file(tenant, file)
    return json_response(file.to_json())


def _kept_s(anchor: object, seconds: object) -> int | None:
    """How long a file is kept, as the form says; None = always."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest("expires_after.anchor", "must be created_at")
    kept_s = int(seconds) if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() else 0
    if not LEAST_KEPT_S <= kept_s <= MOST_KEPT_S:
        raise InvalidRequest("expires_after.seconds", f"must be a number from {LEAST_KEPT_S} to {MOST_KEPT_S}")
    return kept_s


async def _paced(
    gateway: ResponsesContext, request: Request, tenant: str, take: Callable[[int], None]
) -> AsyncGenerator[bytes, None]:
    """A request's body, as fast as a tenant's bodies are read, and of as many bytes as may be taken."""
    async for part in request.stream():
        try:
            take(len(part))
        except FullError as error:
            raise HttpError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "file_too_large", str(error), parameter="file", close=True
            ) from None
        await gateway.auth.pace(tenant, len(part))
        yield part


def _keep(sent: Any, store: BatchStore, file_id: str) -> int:
    """Copy a file that came into the store; return its bytes. Blocking."""
    sent.seek(0)
    path = store.path(file_id)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as kept:
            while part := sent.read(_COPIED_BYTES):
                kept.write(part)
            return kept.tell()
    except OSError as error:
        path.unlink(missing_ok=True)
        raise Unavailable(f"the file cannot be kept: {error}") from error


async def list_files(gateway: ResponsesContext, request: Request) -> Response:
    """`GET /v1/files`."""
    found = await batch_runner(gateway).store.files(gateway.auth.tenant(request), request.query_params.get("purpose"))
    return json_response({"object": "list", "data": [file.to_json() for file in found], "has_more": False})


async def get_file(gateway: ResponsesContext, request: Request) -> Response:
    """`GET /v1/files/ID`."""
    file = await batch_runner(gateway).store.file(gateway.auth.tenant(request), request.path_params["name"])
    return json_response(file.to_json())


async def get_file_content(gateway: ResponsesContext, request: Request) -> Response:
    """`GET /v1/files/ID/content`."""
    store = batch_runner(gateway).store
    file = await store.file(gateway.auth.tenant(request), request.path_params["name"])
    headers = {"x-content-type-options": "nosniff"}
    return FileResponse(
        store.path(file.id), headers=headers, media_type="application/octet-stream", filename=file.filename
    )


async def delete_file(gateway: ResponsesContext, request: Request) -> Response:
    """`DELETE /v1/files/ID`."""
    name = request.path_params["name"]
    await batch_runner(gateway).store.delete_file(gateway.auth.tenant(request), name)
    return json_response({"id": name, "object": "file", "deleted": True})
