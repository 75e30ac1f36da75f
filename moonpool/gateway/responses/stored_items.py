"""Ids in paths, and pages of stored items: what the handlers of responses and conversations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moonpool.base.errors import InvalidRequest, NotFound
from moonpool.gateway.responses.context import ResponsesContext
from moonpool.gateway.responses.store import Item
from moonpool.gateway.serving.json_response import json_response

MAX_LISTED, DEFAULT_LISTED = 100, 20
"""Items in a page of a list."""


async def list_page(gateway: ResponsesContext, request: Request, prefix: str) -> Response:
    """A page of a record's items, by the query's `order`, `after` and `limit`.

    Raises:
        NotFound: the record is not stored.
        InvalidRequest: the query is wrong; names the parameter.
    """
    tenant, name = owner_and_name(gateway, request, prefix)
    query = request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", str(DEFAULT_LISTED)), query.get("after", "")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", "must be asc or desc")
    if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED:
        raise InvalidRequest("limit", f"must be 1 to {MAX_LISTED}")
    items, more = await gateway.responses.page(tenant, name, int(limit), after, descending=order == "desc")
    return json_response(item_page(items, has_more=more))


def item_page(items: Sequence[Item], *, has_more: bool) -> dict[str, Any]:
    """Return a page of a list of items, as OpenAI writes pages."""
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": list(items), **ends, "has_more": has_more}


def owner_and_name(gateway: ResponsesContext, request: Request, prefix: str) -> tuple[str, str]:
    """The caller's tenant, and the id in the path.

    Raises:
        NotFound: no object of this kind has such an id.
    """
    return gateway.auth.tenant(request), name_in_path(request, prefix)


def name_in_path(request: Request, prefix: str) -> str:
    """The id in the path.

    Raises:
        NotFound: no object of this kind has such an id.
    """
    name: str = request.path_params["name"]
    if not name.startswith(prefix):
        raise NotFound(f"{name!r} is not stored: ids begin with {prefix}")
    return name
