"""Handlers of `/v1/conversations`."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from moonpool.base import world
from moonpool.base.errors import NotFound
from moonpool.gateway.responses.context import ResponsesContext
from moonpool.gateway.responses.items import ResponsesItem
from moonpool.gateway.responses.store import Item, StoredRecord
from moonpool.gateway.responses.stored_items import item_page, list_page, name_in_path, owner_and_name
from moonpool.gateway.serving.body import Body, FailFastList, SmallObject
from moonpool.gateway.serving.json_response import json_response

MAX_NEW_ITEMS = 20
"""Items that one request may add to a conversation, as with OpenAI."""


class MetadataBody(Body):
    """Body of `POST /v1/conversations/ID`."""

    metadata: SmallObject[str] | None = None


class NewConversationBody(MetadataBody):
    """Body of `POST /v1/conversations`."""

    items: FailFastList[ResponsesItem] | None = Field(None, max_length=MAX_NEW_ITEMS)


class NewItemsBody(Body):
    """Body of `POST /v1/conversations/ID/items`."""

    items: FailFastList[ResponsesItem] = Field(min_length=1, max_length=MAX_NEW_ITEMS)


async def create_conversation(gateway: ResponsesContext, request: Request) -> Response:
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


async def get_conversation(gateway: ResponsesContext, request: Request) -> Response:
    """A conversation, without items."""
    record = await gateway.responses.get(*owner_and_name(gateway, request, "conv_"))
    return json_response(dict(record.body))


async def update_conversation(gateway: ResponsesContext, request: Request) -> Response:
    """Change the metadata of a conversation."""
    checked = await gateway.auth.read_body(request, MetadataBody, uses_budget=False)
    record = await gateway.responses.get(checked.caller.tenant, name_in_path(request, "conv_"))
    conversation = {**record.body, "metadata": checked.body.metadata or {}}
    await gateway.responses.replace_body(checked.caller.tenant, StoredRecord(record.id, conversation))
    return json_response(conversation)


async def delete_conversation(gateway: ResponsesContext, request: Request) -> Response:
    """Delete a conversation and the conversation's items."""
    tenant, name = owner_and_name(gateway, request, "conv_")
    await gateway.responses.delete(tenant, name)
    gateway.pins.release(tenant, name)
    return json_response({"id": name, "object": "conversation.deleted", "deleted": True})


async def list_items(gateway: ResponsesContext, request: Request) -> Response:
    """Items of a conversation, the last first."""
    return await list_page(gateway, request, "conv_")


async def add_items(gateway: ResponsesContext, request: Request) -> Response:
    """Add items to a conversation."""
    checked = await gateway.auth.read_body(request, NewItemsBody, uses_budget=False)
    items = _new_items(checked.body.items, checked.request_id)
    await gateway.responses.append(checked.caller.tenant, name_in_path(request, "conv_"), items)
    return json_response(item_page(items, has_more=False))


async def get_item(gateway: ResponsesContext, request: Request) -> Response:
    """One item in a conversation."""
    tenant, name = owner_and_name(gateway, request, "conv_")
    wanted = request.path_params["item"]
    [item] = await gateway.responses.find_items(tenant, [wanted], name)
    if item is None:
        raise NotFound(f"{name!r} has no item {wanted!r}")
    return json_response(item)


async def delete_item(gateway: ResponsesContext, request: Request) -> Response:
    """Remove an item from a conversation."""
    tenant, name = owner_and_name(gateway, request, "conv_")
    await gateway.responses.delete_item(tenant, name, request.path_params["item"])
    gateway.pins.release(tenant, name)
    return json_response(dict((await gateway.responses.get(tenant, name)).body))


def _new_items(given: Sequence[ResponsesItem], request_id: str) -> list[Item]:
    """Items as they are stored.

    Raises:
        InvalidRequest: an item refers to another one; names the item.
    """
    for index, item in enumerate(given):
        item.add_to([], f"items.{index}")
    return [item.stored(f"{request_id}_{index}") for index, item in enumerate(given)]
