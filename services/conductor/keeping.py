"""Keeps contexts' KV: computes it when they are made, pins it where it is stored, and counts what it saves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from moonpool.errors import MoonpoolError, Unavailable
from moonpool.kv.keys import BlockKey, pack_keys, unpack_keys
from moonpool.kv.selection import Selection
from moonpool.rpc.channels import Channels
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2
from services.conductor.contexts import Contexts, Use, place_of
from services.conductor.forgetting import Forgetting
from services.conductor.ledger import Ledger
from services.conductor.pinning import Held, Pinning
from services.conductor.request import Request

log = get_logger(__name__)

STORED_TIMEOUT_S = 20.0
"""How long a new context's blocks may take from the pool of prefill to a kvstore."""
LOOK_S = 0.05
LIST_BYTES = 4 << 20
FLUSH_S = 1.0
"""Counts of hits are written so often at most."""

Read = Callable[[pb.GenerateRequest], Awaitable[Request]]
Compute = Callable[[pb.GenerateRequest], Awaitable[None]]


class ContextKeeper:
    """Answers the calls about contexts.

    Args:
        contexts: the records' content.
        ledger: has the records.
        forgetting: deletes KV.
        channels: to kvstores.
        stores: kvstores that are joined.
        model: name of what is served; raises Unavailable before the first engine.
        read: checks and tokenises a request.
        compute: serves a request, and drops the answer.
        held: how many leading blocks of a chain each instance holds.
    """

    def __init__(
        self,
        contexts: Contexts,
        ledger: Ledger,
        forgetting: Forgetting,
        channels: Channels,
        stores: Callable[[], Sequence[kv_pb2.Instance]],
        model: Callable[[], str],
        read: Read,
        compute: Compute,
        held: Held,
    ) -> None:
        self.contexts = contexts
        self._ledger = ledger
        self._forgetting = forgetting
        self._stores = stores
        self._model = model
        self._read = read
        self._compute = compute
        self._pins = Pinning(contexts, ledger, channels, stores, held, self._begin)
        self._tasks: set[asyncio.Task[None]] = set()
        self._uncounted: list[tuple[pb.Context, int]] = []

    @property
    def tasks(self) -> int:
        """What is being done besides calls."""
        return len(self._tasks)

    async def aclose(self) -> None:
        """Ends what is being done; hits that were not written yet are lost."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- calls -----------------------------------------------------------------------------------------------------

    async def create(self, request: pb.CreateContextRequest) -> pb.Context:
        """Makes a context; its KV is computed afterwards.

        Raises:
            InvalidRequest: names the field that is wrong.
            Overloaded: there are too many.
            Unavailable: there is no engine, or no kvstore that could keep it.
        """
        model = self._model()
        if not self._stores():
            raise Unavailable("contexts are kept by kvstores, and none has joined")
        await self._ledger.pull()
        context, tags = self.contexts.made(request, model)
        prefix = await self._prefix(context)
        keys = list(prefix.prompt_keys)
        context.tokens, context.blocks, context.keys = len(prefix.prompt), len(keys), pack_keys(keys)
        await self._ledger.push([self.contexts.record(context), *tags])
        if keys:
            self._begin(self._fill(context, prefix, keys))
        return self.contexts.find(request.tenant, context.id)

    async def update(self, request: pb.UpdateContextRequest) -> pb.Context:
        """Changes a context; a new time to live is its pin's too."""
        await self._ledger.pull()
        context, records = self.contexts.updated(request)
        await self._ledger.push(records)
        if request.HasField("ttl_s"):
            self._pins.wanted(context)
        return self.contexts.find(request.tenant, context.id)

    async def list(self, request: pb.ListContextsRequest) -> list[pb.Context]:
        """A tenant's contexts, or the one that is named."""
        await self._ledger.pull()
        if request.id:
            return [self.contexts.find(request.tenant, request.id)]
        return _within(LIST_BYTES, self.contexts.of(request.tenant))

    async def delete(self, request: pb.DeleteContextRequest) -> pb.DeleteContextResponse:
        """Ends a context and deletes its KV everywhere."""
        await self._ledger.pull()
        context = self.contexts.find(request.tenant, request.name)
        await self._ledger.push(self.contexts.deleted(context))
        await self._pins.unpin(context)
        response = pb.DeleteContextResponse(id=context.id)
        keys = frozenset(unpack_keys(context.keys))
        if keys:
            response.deleted.CopyFrom(await self._forgetting.delete(Selection(keys=keys)))
        return response

    # --- uses ------------------------------------------------------------------------------------------------------

    async def use(self, message: pb.GenerateRequest, within_s: float) -> Use | None:
        """See `Contexts.use`. What other conductors have written lately is asked for, within the time.

        One that was deleted elsewhere a moment ago may still be found.
        """
        if not message.HasField("context"):
            return None
        if self.contexts.knows(message.tenant, message.context.id):
            await self._ledger.fresh(within_s)
        else:
            await self._ledger.pull(within_s)
        use = self.contexts.use(message)
        if use is not None and message.context.reset_ttl_s:
            renewed = [self.contexts.record(use.context)]
            self._ledger.merge(renewed)
            self._begin(self._push(renewed))  # the answer need not wait for slow kvstores
        return use

    async def _push(self, records: Sequence[kv_pb2.Record]) -> None:
        await self._ledger.push(records)

    def used(self, use: Use, cached_tokens: int) -> None:
        """A request that began with a context has got its tokens."""
        if not self._uncounted:
            self._begin(self._count())
        self._uncounted.append((use.context, min(cached_tokens, use.context.tokens)))
        if use.request.context.reset_ttl_s:
            self._pins.wanted(use.context)
        else:
            self._pins.used(use.context)

    async def _count(self) -> None:
        await asyncio.sleep(FLUSH_S)
        uncounted, self._uncounted = self._uncounted, []
        for context, saved_tokens in uncounted:
            if self._is_there(context):
                self._ledger.merge([self.contexts.hit(context, saved_tokens)])
        places = {(context.made.tenant, context.id) for context, _ in uncounted}
        records = [self.contexts.counted(*place) for place in places]
        await self._ledger.push([record for record in records if record is not None])

    # --- KV --------------------------------------------------------------------------------------------------------

    async def _prefix(self, context: pb.Context) -> Request:
        """The tokens with which every prompt begins that goes on from a context."""
        beginning = self.contexts.beginning(context)
        if beginning.HasField("tokens"):
            return await self._read(beginning)
        # Where a template puts its marks is its own business: what two different next turns have in common is certain.
        asked = []
        for text in ("a", "b"):
            turn = pb.GenerateRequest()
            turn.CopyFrom(beginning)
            turn.chat.messages.add(role="user", content=text)
            asked.append((await self._read(turn)).prompt)
        first, second = asked
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
        tokens = pb.TokenPrompt(token_ids=first[:common])
        return await self._read(pb.GenerateRequest(tokens=tokens, tenant=context.made.tenant))

    async def _fill(self, context: pb.Context, prefix: Request, keys: Sequence[BlockKey]) -> None:
        """Computes a new context's KV, waits until it is stored, and has it pinned."""
        request = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=prefix.prompt), tenant=context.made.tenant)
        request.sampling.max_tokens, request.sampling.temperature = 1, 0.0
        status, why = pb.CONTEXT_STATUS_READY, ""
        try:
            await self._compute(request)
            await self._stored(keys)
        except MoonpoolError as error:
            status, why = pb.CONTEXT_STATUS_ERROR, str(error)
        await self._pins.now(context)
        latest = self.contexts.get(*place_of(context))
        if latest is not None and latest.pinned_blocks < latest.blocks:  # what is pinned whole is ready
            await self._ledger.push([self.contexts.filled(latest, status, why)])

    async def _stored(self, keys: Sequence[BlockKey]) -> None:
        """Waits until some kvstore has all of a chain; gives up after a time."""
        for _ in range(int(STORED_TIMEOUT_S / LOOK_S)):
            if self._pins.best(keys)[1] == len(keys) or not self._stores():
                return
            await asyncio.sleep(LOOK_S)

    def _is_there(self, context: pb.Context) -> bool:
        return self.contexts.get(*place_of(context)) is not None

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Does something besides; its failure costs a warning."""

        async def guarded() -> None:
            try:
                await work
            except MoonpoolError as error:
                log.warning("a context's KV could not be computed, pinned or counted", error=str(error))
            except Exception:
                log.exception("a context's KV could not be computed, pinned or counted")

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _within(nbytes: int, contexts: list[pb.Context]) -> list[pb.Context]:
    """A list that fits a message: prompts that would go beyond it are left out, the older ones'."""
    for context in contexts:
        nbytes -= context.ByteSize()
        if nbytes < 0:
            for name in ("chat", "prompt"):
                context.made.ClearField(name)
            context.ClearField("keys")
    return contexts
