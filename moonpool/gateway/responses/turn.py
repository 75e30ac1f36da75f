"""A request in a conversation: what it refers to, and what is stored of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from moonpool.base.errors import InvalidRequest, NotFound
from moonpool.client import Message
from moonpool.gateway.responses.body import ResponsesBody
from moonpool.gateway.responses.context import ResponsesContext
from moonpool.gateway.responses.items import ResponsesItem
from moonpool.gateway.responses.pins import PinnedTurn, ResponsePins
from moonpool.gateway.responses.response_object import UNDER_WAY
from moonpool.gateway.responses.store import Item, ResponseStore, StoredRecord
from moonpool.gateway.serving.auth import CheckedRequest
from moonpool.gateway.serving.errors import HttpError
from moonpool.gateway.serving.tolerance import PassedOver, known


@dataclass(frozen=True, slots=True)
class ResponsesTurn:
    """A request in a conversation: the earlier items, and the request's own.

    Attributes:
        store: where responses and conversations are.
        pins: KV pins for conversations.
        tenant: the caller's.
        request_id: id of the request.
        body: the request.
        past: items of the responses or the conversation that the request continues.
        given: items of the request, references resolved.
        model: name of the model or LoRA adapter, as the conductor knows the name; "" for the model.
    """

    store: ResponseStore
    pins: ResponsePins
    tenant: str
    request_id: str
    body: ResponsesBody
    past: Sequence[ResponsesItem]
    given: Sequence[ResponsesItem | PassedOver]
    model: str

    @classmethod
    async def of(cls, gateway: ResponsesContext, checked: CheckedRequest[ResponsesBody], model: str) -> ResponsesTurn:
        """Look up what a request refers to.

        Raises:
            HttpError: a response or the conversation is not stored; names the field.
            InvalidRequest: an item is not stored, or the items are too many or too large; names the field.
        """
        body, tenant, past = checked.body, checked.caller.tenant, list[Item]()
        store = gateway.responses
        kind = "previous_response_id" if body.previous_response_id else "conversation"
        try:
            if body.previous_response_id:
                before = await store.get(tenant, body.previous_response_id)
                if before.body["status"] in UNDER_WAY:
                    raise InvalidRequest("previous_response_id", "has no answer yet")
                past = await store.history(tenant, body.previous_response_id)
            elif body.conversation_id:
                past = await store.items(tenant, body.conversation_id)
        except NotFound as error:
            code = f"{kind.removesuffix('_id')}_not_found"
            status = HTTPStatus.BAD_REQUEST if body.previous_response_id else HTTPStatus.NOT_FOUND
            raise HttpError(status, code, str(error), parameter=kind) from None
        except InvalidRequest as error:
            raise InvalidRequest(error.field or kind, error.message) from None
        given = body.items()
        earlier = list[ResponsesItem]()
        if past:  # may be much more than the body: a thread's work, by turns of tenants
            checks = gateway.turns.threads.run(tenant, lambda: [ResponsesItem.model_validate(item) for item in past])
            earlier = await checks
        await _resolve(store, tenant, given)
        return cls(store, gateway.pins, tenant, checked.request_id, body, earlier, given, model)

    @property
    def is_stored(self) -> bool:
        """Whether the response can be asked for later."""
        return self.body.store is not False and self.store.enabled

    def messages(self) -> list[Message]:
        """The prompt for the SDK.

        Raises:
            InvalidRequest: an item is wrong; names the field.
        """
        return self.body.to_messages(self.past, self.given)

    async def keep(self, response: Mapping[str, Any]) -> None:
        """Store the response, and add the response's items to the conversation.

        Raises:
            Unavailable: there is no room for them.
        """
        given = self._items()
        if self.is_stored:
            await self.put(response)
        if self.body.conversation_id:
            with suppress(NotFound):  # the conversation was deleted meanwhile
                await self.store.append(self.tenant, self.body.conversation_id, [*given, *response["output"]])
        self._pin(response)

    def _pin(self, response: Mapping[str, Any]) -> None:
        """Pin a conversation's KV once the conversation has shown that it continues."""
        before = self.body.previous_response_id or self.body.conversation_id
        kept = self.is_stored or self.body.conversation_id
        if not before or not kept:
            return
        messages, tools = self.messages(), self.body.tool_set()
        if any("parts" in message for message in messages):
            return  # contexts take no pictures
        for item in response["output"]:
            ResponsesItem.model_validate(item).add_to(messages, "output")
        name = self.body.conversation_id or response["id"]
        shown, salt = tools.definitions if tools else (), self.body.cache_salt or ""
        self.pins.keep(PinnedTurn(self.tenant, name, before, messages, shown, salt, self.model))

    async def put(self, response: Mapping[str, Any]) -> None:
        """Store the response, replacing a response with the same id.

        Raises:
            Unavailable: no room for the response.
        """
        record = StoredRecord(response["id"], without_output(response), self.body.previous_response_id or "")
        await self.store.put(self.tenant, record, self._items(), response["output"])

    def _items(self) -> list[Item]:
        return [item.stored(f"{self.request_id}_in_{index}") for index, item in known(self.given)]


def without_output(response: Mapping[str, Any]) -> dict[str, Any]:
    """A response without the output, whose items are stored one by one."""
    return {name: value for name, value in response.items() if name != "output"}


async def _resolve(store: ResponseStore, tenant: str, items: list[ResponsesItem | PassedOver]) -> None:
    """Put stored items in the place of references to them.

    Raises:
        InvalidRequest: an item is not stored, or the items are too many or too large; names the field.
    """
    places = [place for place, item in enumerate(items) if item.type == "item_reference"]
    names = [item.id or "" for _, item in known(items) if item.type == "item_reference"]
    try:
        found = await store.find_items(tenant, names) if names else []
    except InvalidRequest as error:
        raise InvalidRequest("input", error.message) from None
    for place, name, item in zip(places, names, found, strict=True):
        if item is None:
            raise InvalidRequest(f"input.{place}.id", store.missing(name))
        items[place] = ResponsesItem.model_validate(item)
