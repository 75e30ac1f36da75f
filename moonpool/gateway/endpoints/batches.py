"""`/v1/batches`: the requests of a file, whose answers nobody waits for."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from moonpool.base import world
from moonpool.base.errors import InvalidRequest
from moonpool.gateway.batches.lines import ENDPOINTS
from moonpool.gateway.batches.store import UNDER_WAY, FullError, StoredBatch
from moonpool.gateway.endpoints.files import LEAST_KEPT_S, MOST_KEPT_S, batch_runner
from moonpool.gateway.responses.context import ResponsesContext
from moonpool.gateway.serving.body import Body
from moonpool.gateway.serving.errors import HttpError
from moonpool.gateway.serving.json_response import json_response

LIST_MOST = 100
WINDOW_S = 86_400
"""Seconds of "24h", the one completion window."""


_HIDDEN = ("expired", "output_expires_after")
"""What is kept with a batch, and is not OpenAI's."""


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
"""As at OpenAI."""


class OutputExpiry(Body):
    """How long a batch's output files are kept, from when they are written."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_KEPT_S, le=MOST_KEPT_S)


class BatchBody(Body):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: Literal[ENDPOINTS]  # type: ignore[valid-type]
    completion_window: Literal["24h"]
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)
    output_expires_after: OutputExpiry | None = None


async def create_batch(gateway: ResponsesContext, request: Request) -> Response:
    """`POST /v1/batches`.

    Raises:
        NotFound: there is no such file.
        HttpError: the tenant has too many batches under way, or no room for their answers.
    """
    runner, checked = batch_runner(gateway), await gateway.auth.read_body(request, BatchBody, uses_budget=False)
    store, tenant, body = runner.store, checked.caller.tenant, checked.body
    file = await store.file(tenant, body.input_file_id)
    now = store.now()
    batch = StoredBatch(tenant, "validating", {
        "id": f"batch_{world.random_hex(16)}", "object": "batch", "endpoint": body.endpoint, "errors": None,
        "input_file_id": file.id, "completion_window": body.completion_window, "status": "validating",
        "output_file_id": None, "error_file_id": None, "created_at": now, "in_progress_at": None,
        "expires_at": now + WINDOW_S, "finalizing_at": None, "completed_at": None, "failed_at": None,
        "expired_at": None, "cancelling_at": None, "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": body.metadata,
        "output_expires_after": body.output_expires_after.seconds if body.output_expires_after else None,
    })  # fmt: skip
    try:
        await store.add_batch(batch)
    except FullError as error:
        raise HttpError(HTTPStatus.TOO_MANY_REQUESTS, "too_many_batches", str(error)) from None
    runner.start(batch)
    return json_response(_shown(batch), checked.warning_headers)


async def get_batch(gateway: ResponsesContext, request: Request) -> Response:
    """`GET /v1/batches/ID`."""
    return json_response(_shown(await _found(gateway, request)))


async def cancel_batch(gateway: ResponsesContext, request: Request) -> Response:
    """`POST /v1/batches/ID/cancel`.

    Raises:
        HttpError: the batch is over.
    """
    batch = await _found(gateway, request)
    if batch.status in UNDER_WAY and batch.status != "cancelling":
        batch = await batch_runner(gateway).cancel(batch)
    if batch.status not in UNDER_WAY:
        raise HttpError(HTTPStatus.CONFLICT, "batch_over", f"batch {batch.id} is {batch.status}")
    return json_response(_shown(batch))


async def list_batches(gateway: ResponsesContext, request: Request) -> Response:
    """`GET /v1/batches`, with `after` and `limit`."""
    asked = request.query_params
    try:
        limit = int(asked.get("limit", "20"))
    except ValueError:
        limit = 0
    if not 1 <= limit <= LIST_MOST:
        raise InvalidRequest("limit", f"must be a number from 1 to {LIST_MOST}")
    found, more = await batch_runner(gateway).store.batches(gateway.auth.tenant(request), asked.get("after", ""), limit)
    data = [_shown(batch) for batch in found]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": data, **ends, "has_more": more})


async def _found(gateway: ResponsesContext, request: Request) -> StoredBatch:
    return await batch_runner(gateway).store.batch(gateway.auth.tenant(request), request.path_params["name"])


def _shown(batch: StoredBatch) -> dict[str, Any]:
    """A batch in OpenAI's form."""
    return {name: value for name, value in batch.body.items() if name not in _HIDDEN}
