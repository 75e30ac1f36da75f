"""OpenAI's stored responses and conversations: to read, list, change and delete what the gateway has stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from moonpool.base import world
from moonpool.base.errors import InvalidRequest, NotFound
from moonpool.gateway.endpoints.base import GatewayContext
from moonpool.gateway.endpoints.openai_responses import UNDER_WAY, ResponsesItem
from moonpool.gateway.serving.background_responses import EventLogResponse
from moonpool.gateway.serving.body import Body, FailFastList, SmallObject
from moonpool.gateway.serving.json_response import json_response
from moonpool.gateway.serving.response_store import Item, StoredRecord

MAX_NEW_ITEMS = 20
"""Items that one request may add to a conversation, as with OpenAI."""
MAX_LISTED, DEFAULT_LISTED = 100, 20
"""Items in a page of a list."""


class MetadataBody(Body):
    """Body of `POST /v1/conversations/ID`."""

    metadata: SmallObject[str] | None = None


class NewConversationBody(MetadataBody):
    """Body of `POST /v1/conversations`."""

    items: FailFastList[ResponsesItem] | None = Field(None, max_length=MAX_NEW_ITEMS)


class NewItemsBody(Body):
    """Body of `POST /v1/conversations/ID/items`."""

    items: FailFastList[ResponsesItem] = Field(min_length=1, max_length=MAX_NEW_ITEMS)


# --- responses --------------------------------------------------------------------------------------------------------


async def get_response(gateway: GatewayContext, request: Request) -> Response | EventLogResponse:
    """A stored response; with `stream`, the response's events after the number `starting_after`."""
    tenant, name = _asked(gateway, request, "resp_")
    streamed, after = request.query_params.get("stream", "false"), request.query_params.get("starting_after")
    if streamed not in ("true", "false"):
        raise InvalidRequest("stream", "must be true or false")
    if after is not None and (streamed == "false" or not after.isdecimal()):
        raise InvalidRequest("starting_after", "must be the number of an event, with stream=true")
    response = await _response(gateway, tenant, name)
    if streamed == "false":
        return json_response(response)
    events = gateway.background.events(tenant, name)
    if events is None:
        message = "only background responses that were created with stream: true have events, at their own gateway and "
        raise InvalidRequest("stream", message + "for some time after their end; read the response without stream")
    return EventLogResponse(events, 0 if after is None else int(after) + 1, {})


async def cancel_response(gateway: GatewayContext, request: Request) -> Response:
    """End a background response that has no answer yet. An ended response stays unchanged."""
    tenant, name = _asked(gateway, request, "resp_")
    if not (await gateway.responses.get(tenant, name)).body["background"]:
        raise InvalidRequest("", f"{name} is no background response, and only these can be cancelled")
    await gateway.background.cancel(tenant, name)
    record = await gateway.responses.get(tenant, name)
    if record.body["status"] in UNDER_WAY:  # not begun yet, or another gateway's, which has ended
        await gateway.responses.replace_body(tenant, replace(record, body={**record.body, "status": "cancelled"}))
    return json_response(await _response(gateway, tenant, name))


async def delete_response(gateway: GatewayContext, request: Request) -> Response:
    """Delete a stored response. Responses after the deleted response can no longer be continued."""
    tenant, name = _asked(gateway, request, "resp_")
    await gateway.background.delete(tenant, name)
    await gateway.responses.delete(tenant, name)
    gateway.pins.release(tenant, name)
    return json_response({"id": name, "object": "response", "deleted": True})


async def list_input_items(gateway: GatewayContext, request: Request) -> Response:
    """Items of the request that a stored response answered, the last first."""
    return await _listed(gateway, request, "resp_")


async def _response(gateway: GatewayContext, tenant: str, name: str) -> dict[str, Any]:
    """A stored response, with the current status.

    Raises:
        NotFound: the response is not stored.
    """
    body = (await gateway.responses.get(tenant, name)).body
    response = {**body, "output": await gateway.responses.items(tenant, name, output=True)}
    if response["status"] not in UNDER_WAY:
        return response
    phase = gateway.background.phase(tenant, name)
    if phase is None and gateway.wall_clock() > response["created_at"] + gateway.background.timeout_s:
        lost = {"code": "server_error", "message": "the gateway that computed the response has ended"}
        return {**response, "status": "failed", "error": lost}
    return {**response, "status": phase or response["status"]}


# --- conversations ----------------------------------------------------------------------------------------------------


async def create_conversation(gateway: GatewayContext, request: Request) -> Response:
    """Begin a conversation, with or without items."""
    checked = await gateway.auth.read_body(request, NewConversationBody, uses_budget=False)
    if not gateway.responses.enabled:
        raise NotFound("this gateway stores nothing (response_store_bytes is 0)")
    name = f"conv_{checked.request_id}"
    conversation = {
        "id": name,
        "object": "conversation",
        "created_at": int(world.unix_time()),
        "metadata": checked.body.metadata or {},
    }
    items = _new_items(checked.body.items or (), checked.request_id)
    await gateway.responses.put(checked.caller.tenant, StoredRecord(name, conversation), items)
    return json_response(conversation)


async def get_conversation(gateway: GatewayContext, request: Request) -> Response:
    """A conversation, without items."""
    record = await gateway.responses.get(*_asked(gateway, request, "conv_"))
    return json_response(dict(record.body))


async def update_conversation(gateway: GatewayContext, request: Request) -> Response:
    """Change the metadata of a conversation."""
    checked = await gateway.auth.read_body(request, MetadataBody, uses_budget=False)
    record = await gateway.responses.get(checked.caller.tenant, _name(request, "conv_"))
    conversation = {**record.body, "metadata": checked.body.metadata or {}}
    await gateway.responses.replace_body(checked.caller.tenant, StoredRecord(record.id, conversation))
    return json_response(conversation)


async def delete_conversation(gateway: GatewayContext, request: Request) -> Response:
    """Delete a conversation and the conversation's items."""
    tenant, name = _asked(gateway, request, "conv_")
    await gateway.responses.delete(tenant, name)
    gateway.pins.release(tenant, name)
    return json_response({"id": name, "object": "conversation.deleted", "deleted": True})


async def list_items(gateway: GatewayContext, request: Request) -> Response:
    """Items of a conversation, the last first."""
    return await _listed(gateway, request, "conv_")


async def add_items(gateway: GatewayContext, request: Request) -> Response:
    """Add items to a conversation."""
    checked = await gateway.auth.read_body(request, NewItemsBody, uses_budget=False)
    items = _new_items(checked.body.items, checked.request_id)
    await gateway.responses.append(checked.caller.tenant, _name(request, "conv_"), items)
    return json_response(_page(items, has_more=False))


async def get_item(gateway: GatewayContext, request: Request) -> Response:
    """One item in a conversation."""
    tenant, name = _asked(gateway, request, "conv_")
    wanted = request.path_params["item"]
    [item] = await gateway.responses.find_items(tenant, [wanted], name)
    if item is None:
        raise NotFound(f"{name!r} has no item {wanted!r}")
    return json_response(item)


async def delete_item(gateway: GatewayContext, request: Request) -> Response:
    """Remove an item from a conversation."""
    tenant, name = _asked(gateway, request, "conv_")
    await gateway.responses.delete_item(tenant, name, request.path_params["item"])
    gateway.pins.release(tenant, name)
    return json_response(dict((await gateway.responses.get(tenant, name)).body))


def _asked(gateway: GatewayContext, request: Request, prefix: str) -> tuple[str, str]:
    """The caller's tenant, and the id in the path.

    Raises:
        NotFound: no object of this kind has such an id.
    """
    return gateway.auth.tenant(request), _name(request, prefix)


def _name(request: Request, prefix: str) -> str:
    """The id in the path.

    Raises:
        NotFound: no object of this kind has such an id.
    """
    name: str = request.path_params["name"]
    if not name.startswith(prefix):
        raise NotFound(f"{name!r} is not stored: ids begin with {prefix}")
    return name


def _new_items(given: Sequence[ResponsesItem], request_id: str) -> list[Item]:
    """Items as they are stored.

    Raises:
        InvalidRequest: an item refers to another one; names the item.
    """
    for index, item in enumerate(given):
        item.add_to([], f"items.{index}")
    return [item.stored(f"{request_id}_{index}") for index, item in enumerate(given)]


async def _listed(gateway: GatewayContext, request: Request, prefix: str) -> Response:
    """A page of a record's items, by the query's `order`, `after` and `limit`.

    Raises:
        NotFound: the record is not stored.
        InvalidRequest: the query is wrong; names the parameter.
    """
    tenant, name = _asked(gateway, request, prefix)
    query = request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", str(DEFAULT_LISTED)), query.get("after", "")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", "must be asc or desc")
    if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED:
        raise InvalidRequest("limit", f"must be 1 to {MAX_LISTED}")
    items, more = await gateway.responses.page(tenant, name, int(limit), after, descending=order == "desc")
    return json_response(_page(items, has_more=more))


def _page(items: Sequence[Item], *, has_more: bool) -> dict[str, Any]:
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": list(items), **ends, "has_more": has_more}
