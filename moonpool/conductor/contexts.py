"""Named contexts: prompt prefixes with KV computed once, pinned at a kvstore and kept for a time (ADR 22).

The conductor knows this module only through `servicer.NamedContexts`, and provides `ContextServices`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moonpool.base import world
from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import KEY_BYTES, BlockKey, pack_keys, unpack_keys
from moonpool.base.rpc.channels import Channels
from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.chain_pins import ChainPins
from moonpool.conductor.context_index import ContextKey
from moonpool.conductor.context_records import ContextRecords, context_key, prefix_request
from moonpool.conductor.core.retention import RetainedChain
from moonpool.conductor.deletion import KVDeletions
from moonpool.conductor.records import RecordSync
from moonpool.conductor.valid_request import ValidRequest
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

log = get_logger(__name__)

STORED_TIMEOUT_S = 20.0
"""Longest wait for a new context's blocks to get from prefill to a kvstore."""

STORED_POLL_S = 0.05

LIST_BYTES = 4 << 20

HITS_FLUSH_S = 1.0
"""Shortest pause between two writes of hit counts."""


@dataclass(frozen=True, slots=True)
class ContextServices:
    """What named contexts need from their conductor.

    Attributes:
        sync: the records that conductors share.
        deletions: deletes KV.
        channels: to kvstores.
        stores: the kvstores that have joined.
        conductor: this conductor's id.
        model: the name of the served model or LoRA adapter that a client names; "" names the model. Raises
            InvalidRequest for others, Unavailable before the first engine.
        read: checks and tokenises a request.
        compute: serves a request and drops the output.
        held: number of a chain's leading blocks that each instance holds.
    """

    sync: RecordSync
    deletions: KVDeletions
    channels: Channels
    stores: Callable[[], Sequence[kv_pb2.Instance]]
    conductor: str
    model: Callable[[str], str]
    read: Callable[[pb.GenerateRequest], Awaitable[ValidRequest]]
    compute: Callable[[pb.GenerateRequest], Awaitable[None]]
    held: Callable[[Sequence[BlockKey]], Mapping[str, int]]


class NamedContextManager:
    """Serves the calls about contexts, and the requests that begin with one; see `servicer.NamedContexts`.

    Args:
        services: the conductor's.
    """

    def __init__(self, services: ContextServices) -> None:
        self._services = services
        self._sync = services.sync
        self._contexts = ContextRecords(services.sync, services.conductor)
        self._pins = ChainPins(services.stores, services.held, services.channels, self._start_task)
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._uncounted: list[tuple[pb.Context, int]] = []  # contexts and saved tokens of requests

    def __len__(self) -> int:
        """Number of contexts."""
        return len(self._contexts)

    @property
    def tasks(self) -> int:
        """Number of background tasks."""
        return len(self._tasks)

    async def aclose(self) -> None:
        """Cancel the background tasks; hits that are not written yet are lost."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- calls -----------------------------------------------------------------------------------------------------

    async def create(self, request: pb.CreateContextRequest) -> pb.Context:
        """Create a context; the KV is computed in the background.

        Raises:
            InvalidRequest: names the field that is wrong.
            Overloaded: the tenant has too many contexts.
            Unavailable: no engine or no kvstore has joined.
        """
        model = self._services.model(request.model)
        if not self._services.stores():
            raise Unavailable("contexts are kept by kvstores, and none has joined")
        await self._sync.pull()
        context, tags = self._contexts.new(request, model)
        prefix = await self._prefix(context)
        keys = list(prefix.prompt_keys)
        if context.made.pin_only and not keys:
            return context
        context.tokens, context.blocks, context.keys = len(prefix.prompt), len(keys), pack_keys(keys)
        await self._sync.push([self._contexts.record(context), *tags])
        if keys:
            self._start_task(self._fill(context, prefix, keys))
        return self._contexts.find(request.tenant, context.id)

    async def update(self, request: pb.UpdateContextRequest) -> pb.Context:
        """Change a context. A new TTL applies to the pin, too."""
        await self._sync.pull()
        context, records = self._contexts.updated(request)
        await self._sync.push(records)
        if request.HasField("ttl_s"):
            self._renew_pin(context)
        return self._contexts.find(request.tenant, context.id)

    async def list(self, request: pb.ListContextsRequest) -> list[pb.Context]:
        """A tenant's contexts, or the one with the request's id; raises as `ContextRecords.check_heard`."""
        await self._sync.pull()
        if request.id:
            return [self._contexts.find(request.tenant, request.id)]
        self._contexts.check_heard()
        return _within_list_bytes(LIST_BYTES, self._contexts.of_tenant(request.tenant))

    async def delete(self, request: pb.DeleteContextRequest) -> pb.DeleteContextResponse:
        """Delete a context, and the context's KV everywhere, also if a request of the same id has begun to."""
        await self._sync.pull()
        deletions, name = self._services.deletions, request.id or world.random_hex(16)
        if (begun := deletions.begun(name)) is not None:
            return pb.DeleteContextResponse(id=request.name, deleted=await deletions.delete(begun, name))
        context = self._contexts.find(request.tenant, request.name)
        chosen = KVSelection(keys=frozenset(unpack_keys(context.keys)))
        # Together: a conductor that knows the one knows the other.
        await self._sync.push([*self._contexts.deleted(context), *([deletions.new(name, chosen)] if chosen else ())])
        await self._pins.unpin(pinned_chain(context))
        response = pb.DeleteContextResponse(id=context.id)
        if chosen:
            response.deleted.CopyFrom(await deletions.delete(chosen, name))
        return response

    # --- uses ------------------------------------------------------------------------------------------------------

    async def expand(
        self, message: pb.GenerateRequest, within_s: float
    ) -> tuple[pb.GenerateRequest, Callable[[int], None] | None]:
        """The request with the whole prompt; see `servicer.NamedContexts`.

        Records of other conductors are read first. A context that another conductor deleted a moment ago may still be
        found.
        """
        if not message.HasField("context"):
            return message, None
        self._services.model("")
        if self._contexts.knows(message.tenant, message.context.id):
            await self._sync.refresh(within_s)
        else:
            await self._sync.pull(within_s)
        whole, context = self._contexts.expand(message)
        if message.context.reset_ttl_s:
            renewed = [self._contexts.record(context)]
            self._sync.merge(renewed)
            self._start_task(self._push(renewed))  # so that the request does not wait for slow kvstores
        return whole, partial(self._used, context, bool(message.context.reset_ttl_s))

    async def _push(self, records: Sequence[kv_pb2.Record]) -> None:
        await self._sync.push(records)

    def _used(self, context: pb.Context, renewed: bool, cached_tokens: int) -> None:
        """A request that begins with a context is over."""
        if not self._uncounted:
            self._start_task(self._write_hits())
        self._uncounted.append((context, min(cached_tokens, context.tokens)))
        if renewed:
            self._renew_pin(context)
        elif context.pinned_blocks < context.blocks:
            self._pins.complete(pinned_chain(context).owner, partial(self._pin, context_key(context)))

    async def _write_hits(self) -> None:
        await asyncio.sleep(HITS_FLUSH_S)
        uncounted, self._uncounted = self._uncounted, []
        for context, saved_tokens in uncounted:
            if self._contexts.get(*context_key(context)) is not None:
                self._sync.merge([self._contexts.hit(context, saved_tokens)])
        keys = {context_key(context): None for context, _ in uncounted}
        records = [self._contexts.counted(*key) for key in keys]
        await self._sync.push([record for record in records if record is not None])

    # --- KV --------------------------------------------------------------------------------------------------------

    async def _prefix(self, context: pb.Context) -> ValidRequest:
        """The tokens with which every prompt begins that extends a context."""
        request = prefix_request(context)
        if request.HasField("tokens"):
            return await self._services.read(request)
        # A chat template may put marks anywhere: certain is only what two different next messages have in common.
        prompts = []
        for text in ("a", "b"):
            extended = pb.GenerateRequest()
            extended.CopyFrom(request)
            extended.chat.messages.add(role="user", content=text)
            prompts.append((await self._services.read(extended)).prompt)
        first, second = prompts
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
        return await self._services.read(_of_tokens(context, first[:common]))

    async def _fill(self, context: pb.Context, prefix: ValidRequest, keys: Sequence[BlockKey]) -> None:
        """Compute a new context's KV, wait until the KV is stored, and pin the KV."""
        request = _of_tokens(context, prefix.prompt)
        request.sampling.max_tokens, request.sampling.temperature = 1, 0.0
        status, why = pb.CONTEXT_STATUS_READY, ""
        try:
            await self._services.compute(request)
            await self._until_stored(keys)
        except MoonpoolError as error:
            status, why = pb.CONTEXT_STATUS_ERROR, str(error)
        await self._pins.renewed(pinned_chain(context).owner, partial(self._pin, context_key(context)))
        latest = self._contexts.get(*context_key(context))
        if latest is not None and latest.pinned_blocks < latest.blocks:  # a context that is wholly pinned is ready
            await self._sync.push([self._contexts.filled(latest, status, why)])

    async def _until_stored(self, keys: Sequence[BlockKey]) -> None:
        """Wait until a kvstore has all of a chain, at most `STORED_TIMEOUT_S`."""
        for _ in range(int(STORED_TIMEOUT_S / STORED_POLL_S)):
            if self._pins.best_store(keys)[1] == len(keys) or not self._services.stores():
                return
            await asyncio.sleep(STORED_POLL_S)

    # --- pins ------------------------------------------------------------------------------------------------------

    def _renew_pin(self, context: pb.Context) -> None:
        """Pin a context until expiry."""
        if context.keys:
            self._pins.renew(pinned_chain(context).owner, partial(self._pin, context_key(context)))

    async def _pin(self, key: ContextKey) -> None:
        """Pin a context once, as the context's present records say, and record what is pinned."""
        context, now = self._contexts.get(*key), self._sync.clock()
        if context is None or context.expires_at <= now:
            return
        chain = pinned_chain(context)
        pinned = await self._pins.pin(chain, now)
        if pinned.store is None:
            await self._sync.push([self._contexts.pinned(context, error=pinned.error)])
            return
        await self._sync.pull()
        latest = self._contexts.get(*key)
        if latest is None:  # deleted meanwhile
            await self._pins.unpin(chain, pinned.store)
            return
        if latest.expires_at != context.expires_at:  # renewed meanwhile, perhaps by another conductor that pinned first
            self._renew_pin(latest)
        records = [self._contexts.pinned(latest, pinned.store.id, pinned.blocks, pinned.nbytes, pinned.error)]
        if pinned.blocks == latest.blocks and latest.status != pb.CONTEXT_STATUS_READY:
            records.append(self._contexts.filled(latest, pb.CONTEXT_STATUS_READY))
        await self._sync.push(records)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in the background; a failure is logged."""

        async def guarded() -> None:
            try:
                await work
            except MoonpoolError as error:
                log.warning("a context's KV could not be computed, pinned or counted", error=str(error))
            except Exception:
                log.exception("a context's KV could not be computed, pinned or counted")

        task = asyncio.create_task(guarded())
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)


def _within_list_bytes(nbytes: int, contexts: list[pb.Context]) -> list[pb.Context]:
    """Make a list fit a message: the older contexts' prompts are left out."""
    for context in contexts:
        nbytes -= context.ByteSize()
        if nbytes < 0:
            for name in ("chat", "prompt"):
                context.made.ClearField(name)
            context.ClearField("keys")
    return contexts


def _of_tokens(context: pb.Context, tokens: Sequence[int]) -> pb.GenerateRequest:
    """A request with tokens of a context as its prompt, whose KV has the context's salt."""
    prompt, made = pb.TokenPrompt(token_ids=tokens), context.made
    return pb.GenerateRequest(tokens=prompt, tenant=made.tenant, cache_salt=made.cache_salt, model=context.model)


def pinned_chain(context: pb.Context) -> RetainedChain:
    """Return the chain that a context keeps, with the kvstore that has pinned it."""
    owner, stores = (context.made.tenant, f"context:{context.id}"), (context.kvstore,) if context.kvstore else ()
    return RetainedChain(owner, context.keys, context.keys[-KEY_BYTES:], stores, until=context.expires_at)
