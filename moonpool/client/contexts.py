"""Named contexts and deleted KV in the SDK: what callers pass in and get back, and the calls, asyncio and blocking."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.message import Message as Protobuf

from moonpool.client.background import BackgroundLoop
from moonpool.client.translate import generate_request
from moonpool.client.types import GenerateArguments, Message
from moonpool.contracts import assign
from moonpool.errors import InvalidRequest
from moonpool.kv.keys import pack_keys, unpack_keys
from moonpool.v1 import conductor_pb2 as pb

CREATE_TIMEOUT_S = 30.0
DELETE_TIMEOUT_S = 120.0
"""KV is overwritten on disk before the answer."""

Status = Literal["pending", "ready", "error", "inactive"]
_STATUS: dict[int, Status] = {
    pb.CONTEXT_STATUS_PENDING: "pending",
    pb.CONTEXT_STATUS_READY: "ready",
    pb.CONTEXT_STATUS_ERROR: "error",
    pb.CONTEXT_STATUS_INACTIVE: "inactive",
}
Ask = Callable[[Protobuf, float], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Context:
    """A beginning of prompts that is kept, with its KV.

    Attributes:
        id: unique.
        name: for people.
        status: "pending" while its KV is being computed, "inactive" when its time is over, "error" when `error` says
            why its KV could not be kept; it may be used in any state but "inactive".
        created_at: seconds since 1970.
        expires_at: seconds since 1970.
        tokens: of its prompt.
        blocks: full KV blocks of it; `pinned_blocks` of them, of `pinned_bytes`, are kept from eviction.
        hits: requests that used it.
        saved_tokens: tokens of it that these did not have to compute.
        messages: the conversation that it is made of, or none.
        token_ids: the tokens that it is made of, or none.
        keys: of its blocks.
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
    """JSON of the functions that the model may call, as they were given; "" for none."""

    @property
    def tools_offered(self) -> list[dict[str, Any]]:
        """Definitions of the functions that the model may call."""
        found: list[dict[str, Any]] = json.loads(self.tools) if self.tools else []
        return found


@dataclass(frozen=True, slots=True)
class InstanceDeletion:
    """What one instance deleted; `error` says why it is not known to have done so."""

    instance: str
    blocks: int
    bytes: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class DeletedKV:
    """KV that was deleted.

    Attributes:
        id: names the deletion in logs.
        instances: what each of them did.
            Where the order had to be repeated because no answer came, what the first one deleted is not in the counts.
        recorded: kvstores that remember the deletion for instances that are away.
    """

    id: str
    instances: tuple[InstanceDeletion, ...]
    recorded: int

    @property
    def blocks(self) -> int:
        """Copies of blocks, over all instances."""
        return sum(one.blocks for one in self.instances)

    @property
    def bytes(self) -> int:
        """Their bytes."""
        return sum(one.bytes for one in self.instances)

    @property
    def complete(self) -> bool:
        """Whether every instance that is joined has done it."""
        return not any(one.error for one in self.instances)


class AsyncContexts:
    """The calls about contexts, as `AsyncClient.contexts`; all take `timeout_s`, and raise `moonpool.errors`."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def create(
        self,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        name: str = "",
        ttl_s: float = 0.0,
        tenant: str = "",
        tags: Sequence[str] = (),
        description: str = "",
        metadata: Mapping[str, str] | None = None,
        model: str = "",
        timeout_s: float = CREATE_TIMEOUT_S,
    ) -> Context:
        """Keep the beginning of prompts: of conversations (`messages`, and `tools`) or of tokens.

        Its KV is computed afterwards, and it may be used at once. `ttl_s` 0 = an hour.

        Raises:
            InvalidRequest: names the field that is wrong.
            Overloaded: the tenant has too many.
            Unavailable: no engine or no kvstore is there.
        """
        given: GenerateArguments = {"messages": messages, "token_ids": token_ids}
        if tools is not None:
            given["tools"] = tools
        prompt = generate_request(given)
        request = pb.CreateContextRequest()
        for field, value in (("name", name), ("ttl_s", ttl_s), ("tenant", tenant), ("description", description)):
            assign(field, lambda field=field, value=value: setattr(request, field, value))  # type: ignore[misc]
        assign("model", lambda: setattr(request, "model", model))
        assign("tags", lambda: request.tags.extend(tags))
        assign("metadata", lambda: request.metadata.update(metadata or {}))
        if prompt.HasField("chat"):
            request.chat.CopyFrom(prompt.chat)
        else:
            request.prompt.CopyFrom(prompt.tokens)
        return context((await self._ask(request, timeout_s)).context)

    async def list(self, *, tenant: str = "", timeout_s: float = CREATE_TIMEOUT_S) -> tuple[Context, ...]:
        """Return a tenant's contexts, the newest first."""
        answer = await self._ask(pb.ListContextsRequest(tenant=tenant), timeout_s)
        return tuple(map(context, answer.contexts))

    async def get(self, name: str, *, tenant: str = "", timeout_s: float = CREATE_TIMEOUT_S) -> Context:
        """Return the context of an id or tag.

        Raises:
            NotFound: the tenant has none.
        """
        request = pb.ListContextsRequest(tenant=tenant, id=_named(name))
        return context((await self._ask(request, timeout_s)).contexts[0])

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
        """Let a context live `ttl_s` from now on, or change its metadata or tags."""
        request = pb.UpdateContextRequest(id=_named(name), tenant=tenant, add_tags=add_tags, remove_tags=remove_tags)
        if ttl_s is not None:
            request.ttl_s = ttl_s
        assign("metadata", lambda: request.metadata.update(metadata or {}))
        return context((await self._ask(request, timeout_s)).context)

    async def delete(
        self, name: str, *, tenant: str = "", timeout_s: float = DELETE_TIMEOUT_S
    ) -> tuple[str, DeletedKV]:
        """End a context and delete its KV everywhere; its id, and what was deleted."""
        answer = await self._ask(pb.DeleteContextRequest(name=_named(name), tenant=tenant), timeout_s)
        return answer.id, deleted_kv(answer.deleted)


class Contexts:
    """The same calls, blocking, as `Client.contexts`; see `AsyncContexts`."""

    def __init__(self, contexts: AsyncContexts, loop: BackgroundLoop) -> None:
        self._contexts = contexts
        self._loop = loop

    def create(self, **arguments: Any) -> Context:
        """Keep the beginning of prompts; see `AsyncContexts.create`."""
        return self._loop.run(self._contexts.create(**arguments))

    def list(self, **arguments: Any) -> tuple[Context, ...]:
        """Return a tenant's contexts; see `AsyncContexts.list`."""
        return self._loop.run(self._contexts.list(**arguments))

    def get(self, name: str, **arguments: Any) -> Context:
        """Return the context of an id or tag; see `AsyncContexts.get`."""
        return self._loop.run(self._contexts.get(name, **arguments))

    def update(self, name: str, **arguments: Any) -> Context:
        """Change a context; see `AsyncContexts.update`."""
        return self._loop.run(self._contexts.update(name, **arguments))

    def delete(self, name: str, **arguments: Any) -> tuple[str, DeletedKV]:
        """End a context and delete its KV; see `AsyncContexts.delete`."""
        return self._loop.run(self._contexts.delete(name, **arguments))


def delete_request(keys: Sequence[bytes], tenants: Sequence[str], namespaces: Sequence[bytes]) -> pb.DeleteKVRequest:
    """Build a request to delete KV; it has a name, so that it is carried out once if it has to be asked again."""
    request = pb.DeleteKVRequest(id=secrets.token_hex(16))
    assign("keys", lambda: setattr(request.selection, "keys", pack_keys(keys)))
    assign("tenants", lambda: request.selection.tenants.extend(tenants))
    assign("namespaces", lambda: request.selection.namespaces.extend(namespaces))
    return request


def deleted_kv(message: pb.DeleteKVResponse) -> DeletedKV:
    """Translate what was deleted."""
    instances = (InstanceDeletion(one.instance, one.blocks, one.bytes, one.error) for one in message.instances)
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
        messages=tuple(map(_turn, made.chat.messages)),
        token_ids=tuple(made.prompt.token_ids),
        description=made.description,
        metadata=dict(made.metadata),
        keys=tuple(unpack_keys(message.keys)),
        tools=made.chat.tools,
    )


def _turn(turn: pb.ChatMessage) -> Message:
    message: Message = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    return message


def _named(name: str) -> str:
    """An id or tag; an empty one would mean all of them."""
    if not name:
        raise InvalidRequest("context", "must not be empty")
    return name
