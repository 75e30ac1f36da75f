"""Named contexts and deletion of KV: the calls for asyncio and for blocking code, and their results."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, cast

from google.protobuf.message import Message as Protobuf

from moonpool.base import world
from moonpool.base.contracts import assign
from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.keys import pack_keys, unpack_keys
from moonpool.client.background import BlockingFacade, blocking
from moonpool.client.translate import generate_request
from moonpool.client.types import GenerateArguments, Message
from moonpool.v1 import conductor_pb2 as pb

CREATE_TIMEOUT_S = 30.0
DELETE_TIMEOUT_S = 120.0
"""Long, because KV is overwritten on disk before the answer."""

Status = Literal["pending", "ready", "error", "inactive"]
_STATUS: dict[int, Status] = {
    pb.CONTEXT_STATUS_PENDING: "pending",
    pb.CONTEXT_STATUS_READY: "ready",
    pb.CONTEXT_STATUS_ERROR: "error",
    pb.CONTEXT_STATUS_INACTIVE: "inactive",
}
Query = Callable[[Protobuf, float], Awaitable[Any]]
"""Calls the conductor with a request and a timeout in seconds; returns the response."""
_PROMPT = ("messages", "token_ids", "tools")
_PLAIN = ("name", "ttl_s", "tenant", "description", "model", "pin_only", "cache_salt")


@dataclass(frozen=True, slots=True)
class Context:
    """A named context: a beginning for prompts, with KV that is kept.

    Attributes:
        id: unique id.
        name: a name for people.
        status: "pending" while the KV is computed, "ready", "error" if the KV could not be kept (`error` has the
            reason), or "inactive" after the time to live. You can use a context unless the context is inactive.
        created_at: creation time, in seconds since 1970.
        expires_at: end of the time to live, in seconds since 1970.
        tokens: number of tokens in the prompt.
        blocks: number of full KV blocks in the prompt.
        pinned_blocks: blocks that are pinned, which means that they are not evicted.
        pinned_bytes: the pinned blocks' size.
        hits: requests that used the context.
        saved_tokens: tokens that these requests did not compute.
        messages: the conversation, if the context has messages.
        token_ids: the tokens, if the context has tokens.
        keys: the blocks' keys.
    """

    id: str
    name: str
    status: Status
    tenant: str
    model: str
    created_at: float
    expires_at: float
    tokens: int
    blocks: int
    pinned_blocks: int
    pinned_bytes: int
    kvstore: str
    hits: int
    saved_tokens: int
    tags: tuple[str, ...]
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    description: str
    metadata: Mapping[str, str]
    error: str
    keys: tuple[bytes, ...] = ()
    tools: str = ""
    """JSON of the functions that the model may call; "" for none."""

    @property
    def tools_offered(self) -> list[dict[str, Any]]:
        """Definitions of the functions that the model may call."""
        found: list[dict[str, Any]] = json.loads(self.tools) if self.tools else []
        return found


@dataclass(frozen=True, slots=True)
class InstanceDeletion:
    """What one instance deleted.

    `error`: why the outcome is unknown; "" if the outcome is known.
    """

    instance: str
    blocks: int
    bytes: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class DeletedKV:
    """Result of deleting KV.

    Attributes:
        id: the deletion's name in logs.
        instances: what each instance deleted. If the conductor had to repeat the call, the counts are the last call's.
        recorded: kvstores that keep a record of the deletion for instances that are away.
    """

    id: str
    instances: tuple[InstanceDeletion, ...]
    recorded: int

    @property
    def blocks(self) -> int:
        """Deleted copies of blocks, on all instances."""
        return sum(instance.blocks for instance in self.instances)

    @property
    def bytes(self) -> int:
        """The deleted copies' size, in bytes."""
        return sum(instance.bytes for instance in self.instances)

    @property
    def complete(self) -> bool:
        """Whether every joined instance has deleted its copies."""
        return not any(instance.error for instance in self.instances)


class CreateContextArguments(TypedDict, total=False):
    """Keyword arguments for `create`: give exactly one of `messages` and `token_ids`.

    Attributes:
        messages: a conversation.
        token_ids: tokens.
        tools: functions that the model may call, with `messages`.
        name: a name for people.
        ttl_s: time to live in seconds; 0: one hour.
        tenant: the context's owner.
        tags: further names that requests may use.
        description: for people.
        metadata: any texts, by name.
        model: the model's name; "" for the model that is served.
        pin_only: the context only pins KV: no request can name the context, no list has the context, and the pin ends
            with the time to live.
        cache_salt: the context pins KV for requests with this salt; only with `pin_only`.
    """

    messages: Sequence[Message] | None
    token_ids: Sequence[int] | None
    tools: Sequence[Mapping[str, Any]] | None
    name: str
    ttl_s: float
    tenant: str
    tags: Sequence[str]
    description: str
    metadata: Mapping[str, str] | None
    model: str
    pin_only: bool
    cache_salt: str


class AsyncContexts:
    """The calls for contexts, at `AsyncClient.contexts`. Every call takes `timeout_s` and raises MoonpoolError."""

    def __init__(self, query: Query) -> None:
        self._query = query

    async def create(
        self, *, timeout_s: float = CREATE_TIMEOUT_S, **arguments: Unpack[CreateContextArguments]
    ) -> Context:
        """Create a context from a conversation (`messages` and `tools`) or from tokens.

        The context can be used at once; the KV is computed afterwards.

        Args:
            timeout_s: time limit for the call, in seconds.
            arguments: see `CreateContextArguments`.

        Raises:
            InvalidRequest: a field is wrong; names the field.
            Overloaded: the tenant has too many contexts.
            Unavailable: the cluster has no engine instance or no kvstore.
        """
        unknown = set(arguments) - set(CreateContextArguments.__annotations__)
        if unknown:
            raise TypeError(f"unexpected arguments: {', '.join(sorted(unknown))}")
        given: dict[str, Any] = dict(arguments)
        prompt = generate_request(cast("GenerateArguments", {name: given[name] for name in _PROMPT if name in given}))
        request = pb.CreateContextRequest()
        for field in (name for name in _PLAIN if name in given):
            assign(field, partial(setattr, request, field, given[field]))
        assign("tags", lambda: request.tags.extend(arguments.get("tags", ())))
        assign("metadata", lambda: request.metadata.update(arguments.get("metadata") or {}))
        if prompt.HasField("chat"):
            request.chat.CopyFrom(prompt.chat)
        else:
            request.prompt.CopyFrom(prompt.tokens)
        return context((await self._query(request, timeout_s)).context)

    async def list(self, *, tenant: str = "", timeout_s: float = CREATE_TIMEOUT_S) -> tuple[Context, ...]:
        """Return a tenant's contexts, newest first."""
        answer = await self._query(pb.ListContextsRequest(tenant=tenant), timeout_s)
        return tuple(map(context, answer.contexts))

    async def get(self, name: str, *, tenant: str = "", timeout_s: float = CREATE_TIMEOUT_S) -> Context:
        """Return the context with an id or tag.

        Raises:
            NotFound: the tenant has no such context.
        """
        request = pb.ListContextsRequest(tenant=tenant, id=_checked_name(name))
        return context((await self._query(request, timeout_s)).contexts[0])

    async def update(
        self,
        name: str,
        *,
        ttl_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        add_tags: Sequence[str] = (),
        remove_tags: Sequence[str] = (),
        tenant: str = "",
        timeout_s: float = CREATE_TIMEOUT_S,
    ) -> Context:
        """Change a context's time to live (from now on), metadata or tags."""
        request = pb.UpdateContextRequest(
            id=_checked_name(name), tenant=tenant, add_tags=add_tags, remove_tags=remove_tags
        )
        if ttl_s is not None:
            request.ttl_s = ttl_s
        assign("metadata", lambda: request.metadata.update(metadata or {}))
        return context((await self._query(request, timeout_s)).context)

    async def delete(
        self, name: str, *, tenant: str = "", timeout_s: float = DELETE_TIMEOUT_S
    ) -> tuple[str, DeletedKV]:
        """Delete a context and the context's KV on every instance. Returns the id and the deleted KV.

        If a conductor ends before answering, another conductor goes on, and the id is `name` as given.
        """
        request = pb.DeleteContextRequest(name=_checked_name(name), tenant=tenant, id=world.random_hex(16))
        answer = await self._query(request, timeout_s)
        return answer.id, deleted_kv(answer.deleted)


class Contexts(BlockingFacade[AsyncContexts]):
    """The calls for contexts, at `Client.contexts`, for blocking code. See `AsyncContexts`."""

    create = blocking(AsyncContexts.create)
    list = blocking(AsyncContexts.list)
    get = blocking(AsyncContexts.get)
    update = blocking(AsyncContexts.update)
    delete = blocking(AsyncContexts.delete)


def delete_request(keys: Sequence[bytes], tenants: Sequence[str], namespaces: Sequence[bytes]) -> pb.DeleteKVRequest:
    """Build a request to delete KV. The request's id lets conductors run a repeated request once."""
    request = pb.DeleteKVRequest(id=world.random_hex(16))
    assign("keys", lambda: setattr(request.selection, "keys", pack_keys(keys)))
    assign("tenants", lambda: request.selection.tenants.extend(tenants))
    assign("namespaces", lambda: request.selection.namespaces.extend(namespaces))
    return request


def deleted_kv(message: pb.DeleteKVResponse) -> DeletedKV:
    """Translate a deletion's result."""
    instances = (
        InstanceDeletion(instance.instance, instance.blocks, instance.bytes, instance.error)
        for instance in message.instances
    )
    return DeletedKV(message.id, tuple(instances), message.recorded)


def context(message: pb.Context) -> Context:
    """Translate a context."""
    same = (
        "id", "model", "created_at", "expires_at", "tokens", "blocks", "pinned_blocks", "pinned_bytes", "kvstore",
        "hits", "saved_tokens", "error",
    )  # fmt: skip
    made = message.made
    return Context(
        **{name: getattr(message, name) for name in same},
        name=made.name,
        status=_STATUS.get(message.status, "error"),
        tenant=made.tenant,
        tags=tuple(made.tags),
        messages=tuple(map(_chat_message, made.chat.messages)),
        token_ids=tuple(made.prompt.token_ids),
        description=made.description,
        metadata=dict(made.metadata),
        keys=tuple(unpack_keys(message.keys)),
        tools=made.chat.tools,
    )


def _chat_message(given: pb.ChatMessage) -> Message:
    message: Message = {"role": given.role, "content": given.content}
    if given.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in given.tool_calls
        ]
    if given.tool_call_id:
        message["tool_call_id"] = given.tool_call_id
    if given.reasoning_content:
        message["reasoning_content"] = given.reasoning_content
    if given.parts:
        message["parts"] = [{"text": part.text} for part in given.parts]
    return message


def _checked_name(name: str) -> str:
    """Check an id or tag. The contract takes "" for all contexts."""
    if not name:
        raise InvalidRequest("context", "must not be empty")
    return name
