"""Named contexts.

Prompt prefixes whose KV is computed once, pinned at a kvstore and kept for a time (docs/adr/0022-contexts.md).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from moonpool.cluster.records import ReplicatedRecords
from moonpool.errors import InvalidRequest, MoonpoolError, NotFound, Overloaded, Unavailable
from moonpool.kv.delete_kv import KVSelection
from moonpool.kv.keys import BlockKey, pack_keys, unpack_keys
from moonpool.rpc.channels import Channels
from moonpool.rpc.errors import from_rpc_error
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub
from services.conductor.deletion import CALL_TIMEOUT_S, KVDeletions, RecordLedger
from services.conductor.request import ValidRequest

TAG, HITS = "tag", "hits"


SPARE_NOTES = 1024
"""So many notes beyond twice those that a sweep left make the next one due."""


class ContextIndex:
    """Notes of the records that lie beside contexts' own, by context.

    A note is checked when it is read: the record may be gone, or the tag another context's. Contexts that nobody reads
    any more are swept when the notes have doubled, so there are never many more notes than records.

    Args:
        book: has the records.
    """

    def __init__(self, book: ReplicatedRecords) -> None:
        self._book = book
        self._notes: dict[tuple[str, str], set[tuple[str, str]]] = {}  # kinds and ids, by tenant and context
        self._count = 0
        self._sweep_at = SPARE_NOTES

    def __len__(self) -> int:
        """Notes."""
        return self._count

    def heard(self, records: Iterable[kv_pb2.Record]) -> None:
        """Notes to which contexts records belong that are in the book now."""
        for record in records:
            if record.kind in (TAG, HITS) and record.value:
                of = record.value.decode() if record.kind == TAG else record.id.partition("/")[0]
                notes = self._notes.setdefault((record.tenant, of), set())
                self._count -= len(notes)
                notes.add((record.kind, record.id))
                self._count += len(notes)
        if self._count > self._sweep_at:
            for place in list(self._notes):
                self.of(*place)
            self._sweep_at = 2 * self._count + SPARE_NOTES

    def of(self, tenant: str, context_id: str) -> dict[str, list[kv_pb2.Record]]:
        """A context's tags and hits, by kind. Those that are not its own any more are forgotten."""
        notes = self._notes.get((tenant, context_id), set())
        found: dict[str, list[kv_pb2.Record]] = {TAG: [], HITS: []}
        for kind, record_id in list(notes):
            record = self._book.get(kind, tenant, record_id)
            if record is None or (kind == TAG and record.value.decode() != context_id):
                notes.discard((kind, record_id))
                self._count -= 1
            else:
                found[kind].append(record)
        if not notes:
            self._notes.pop((tenant, context_id), None)
        return found


CONTEXT, FILLED, PINNED = "context", "filled", "pinned"


PREFIX = "cache-"
"""Of contexts' ids."""


DEFAULT_TTL_S = 3600.0


MAX_TTL_S = 7 * 86400.0
"""As of pins."""


INACTIVE_S = 86400.0
"""How long a context whose time is over can be brought back."""


TOMBSTONE_S = 30 * 86400.0
"""How long it is known that one was deleted."""


TAG_S = 366 * 86400.0
"""How long a tag is kept; it says nothing once its context is gone."""


MAX_CONTEXTS = 1024
"""Of one tenant."""


MAX_TAGS = 16


MAX_NAME_CHARS = 256


MAX_DESCRIPTION_CHARS = 512


MAX_METADATA = 16


MAX_METADATA_CHARS = (64, 512)


@dataclass(frozen=True, slots=True)
class ContextUse:
    """A request that begins with a context: the request with the whole prompt, and the context."""

    request: pb.GenerateRequest
    context: pb.Context


def context_key(context: pb.Context) -> tuple[str, str]:
    """Its tenant and id."""
    return context.made.tenant, context.id


class ContextRecords:
    """The contexts that the records tell of. Changes nothing but records.

    Args:
        ledger: has the records.
        conductor: this conductor's id: each counts its own hits.
    """

    def __init__(self, ledger: RecordLedger, conductor: str) -> None:
        self._ledger = ledger
        self._conductor = conductor
        self._beside = ContextIndex(ledger.book)
        ledger.heard.append(self._beside.heard)

    # --- reading ---------------------------------------------------------------------------------------------------

    def find(self, tenant: str, name: str) -> pb.Context:
        """A tenant's context of this id or tag.

        Raises:
            NotFound: the tenant has none, whatever others have.
        """
        tag = self._ledger.book.get(TAG, tenant, name)
        found = self.get(tenant, tag.value.decode() if tag is not None else name)
        if found is None:
            raise NotFound(f"there is no context {name!r}")
        return found

    def get(self, tenant: str, context_id: str) -> pb.Context | None:
        """A tenant's context of this id, as it is now."""
        record = self._ledger.book.get(CONTEXT, tenant, context_id)
        return self._read(record) if record is not None else None

    def knows(self, tenant: str, name: str) -> bool:
        """Whether a tenant has a context of this id or tag, by what is known here."""
        book = self._ledger.book
        return book.get(TAG, tenant, name) is not None or book.get(CONTEXT, tenant, name) is not None

    def of(self, tenant: str) -> list[pb.Context]:
        """All of a tenant's, newest first."""
        found = map(self._read, self._ledger.book.of(CONTEXT, tenant))
        return sorted(found, key=lambda context: (-context.created_at, context.id))

    def __len__(self) -> int:
        return sum(1 for _ in self._ledger.book.of(CONTEXT))

    def _read(self, record: kv_pb2.Record) -> pb.Context:
        """A context with what is kept beside it."""
        book, place = self._ledger.book, (record.tenant, record.id)
        context, beside = pb.Context.FromString(record.value), self._beside.of(*place)
        for kind in (FILLED, PINNED):
            kept = book.get(kind, *place)
            if kept is not None:
                _lay_over(context, pb.Context.FromString(kept.value), kind)
        if context.pinned_blocks == context.blocks:
            context.error = ""
        for counted in map(pb.Context.FromString, (one.value for one in beside[HITS])):
            context.hits += counted.hits
            context.saved_tokens += counted.saved_tokens
        context.made.tags[:] = sorted(tag.id for tag in beside[TAG])
        if context.expires_at <= self._ledger.clock():
            context.status = pb.CONTEXT_STATUS_INACTIVE
        return context

    # --- writing ---------------------------------------------------------------------------------------------------

    def made(self, request: pb.CreateContextRequest, model: str) -> tuple[pb.Context, list[kv_pb2.Record]]:
        """A new context, and its records; nothing is known of its tokens yet.

        Raises:
            InvalidRequest: names the field that is wrong.
            Overloaded: the tenant has too many.
        """
        check_made(request, model)
        if sum(1 for _ in self._ledger.book.of(CONTEXT, request.tenant)) >= MAX_CONTEXTS:
            message = f"a tenant has at most {MAX_CONTEXTS} contexts; delete some"
            raise Overloaded(message, reason="contexts_full", retry_after_s=60.0)
        now = self._ledger.clock()
        context = pb.Context(
            id=f"{PREFIX}{secrets.token_hex(10)}",
            made=request,
            status=pb.CONTEXT_STATUS_PENDING,
            created_at=now,
            expires_at=now + (request.ttl_s or DEFAULT_TTL_S),
            model=model,
        )
        context.made.ClearField("tags")
        return context, self._tags(context, request.tags)

    def record(self, context: pb.Context) -> kv_pb2.Record:
        """The record of what a context is and how long it lives, without what others write beside it."""
        kept = pb.Context()
        kept.CopyFrom(context)
        for beside in ("hits", "saved_tokens", "error", "kvstore", "pinned_blocks", "pinned_bytes"):
            kept.ClearField(beside)
        kept.made.ClearField("tags")
        kept.status = pb.CONTEXT_STATUS_PENDING if kept.blocks else pb.CONTEXT_STATUS_READY
        return self._ledger.record(
            CONTEXT, *context_key(context), kept.SerializeToString(), kept.expires_at + INACTIVE_S
        )

    def filled(self, context: pb.Context, status: pb.ContextStatus.ValueType, error: str = "") -> kv_pb2.Record:
        """The record of how computing a context went."""
        return self._kept(FILLED, context, pb.Context(status=status, error=error))

    def pinned(
        self, context: pb.Context, kvstore: str = "", blocks: int = 0, nbytes: int = 0, error: str = ""
    ) -> kv_pb2.Record:
        """The record of what of a context is pinned."""
        kept = pb.Context(kvstore=kvstore, pinned_blocks=blocks, pinned_bytes=nbytes, error=error)
        return self._kept(PINNED, context, kept)

    def _kept(self, kind: str, context: pb.Context, kept: pb.Context) -> kv_pb2.Record:
        """A record beside a context's own. It outlives one renewal."""
        expires_at = context.expires_at + INACTIVE_S + MAX_TTL_S
        return self._ledger.record(kind, *context_key(context), kept.SerializeToString(), expires_at)

    def updated(self, request: pb.UpdateContextRequest) -> tuple[pb.Context, list[kv_pb2.Record]]:
        """A changed context and its records.

        Raises:
            NotFound: there is none.
            InvalidRequest: names the field that is wrong.
        """
        context = self.find(request.tenant, request.id)
        _check_tags("add_tags", request.add_tags)
        _check_metadata(request.metadata)
        if request.HasField("ttl_s"):
            check_ttl("ttl_s", request.ttl_s)
            context.expires_at = self._ledger.clock() + request.ttl_s
        if request.metadata:
            context.made.ClearField("metadata")
            context.made.metadata.update(request.metadata)
        gone = [tag for tag in request.remove_tags if tag in context.made.tags]
        records = [self.record(context), *self._tags(context, request.add_tags)]
        return context, [*records, *(self._deleted(TAG, context.made.tenant, tag) for tag in gone)]

    def deleted(self, context: pb.Context) -> list[kv_pb2.Record]:
        """Records by which a context and everything of it is gone, its text too."""
        tenant, beside = context_key(context)[0], self._beside.of(*context_key(context))
        return [
            *(self._deleted(kind, *context_key(context)) for kind in (CONTEXT, FILLED, PINNED)),
            *(self._deleted(kind, tenant, one.id) for kind, records in beside.items() for one in records),
        ]

    def hit(self, context: pb.Context, saved_tokens: int) -> kv_pb2.Record:
        """This conductor's count with one more request."""
        place = HITS, context.made.tenant, f"{context.id}/{self._conductor}"
        record = self._ledger.book.get(*place)
        counted = pb.Context.FromString(record.value) if record is not None else pb.Context()
        counted.hits += 1
        counted.saved_tokens += saved_tokens
        return self._ledger.record(*place, counted.SerializeToString(), context.expires_at + MAX_TTL_S)

    def counted(self, tenant: str, context_id: str) -> kv_pb2.Record | None:
        """This conductor's count; None when there is none."""
        return self._ledger.book.get(HITS, tenant, f"{context_id}/{self._conductor}")

    def use(self, message: pb.GenerateRequest) -> ContextUse | None:
        """A request with the context that it names before its prompt; None when it names none.

        Raises:
            NotFound: there is no such context, or its time is over.
            InvalidRequest: the context is of another kind than the prompt.
        """
        if not message.HasField("context"):
            return None
        context, again = self.find(message.tenant, message.context.id), message.context.reset_ttl_s
        if again:
            check_ttl("context.reset_ttl_s", again)
            context.expires_at = self._ledger.clock() + again
        elif context.status == pb.CONTEXT_STATUS_INACTIVE:
            raise NotFound(f"the time of context {message.context.id!r} is over; reset_ttl_s brings it back")
        kind = "chat" if context.made.HasField("chat") else "tokens"
        if message.WhichOneof("prompt") != kind:
            needed = "messages" if kind == "chat" else "token_ids"
            raise InvalidRequest("context", f"this context is of {needed}, and so must the prompt be")
        whole = pb.GenerateRequest()
        whole.CopyFrom(message)
        whole.ClearField("prompt")
        whole.MergeFrom(self.beginning(context))
        if kind == "chat":
            whole.chat.MergeFrom(message.chat)
        else:
            whole.tokens.MergeFrom(message.tokens)
        return ContextUse(whole, context)

    def beginning(self, context: pb.Context) -> pb.GenerateRequest:
        """A request of the context alone."""
        made = context.made
        if made.HasField("chat"):
            return pb.GenerateRequest(chat=made.chat, tenant=made.tenant)
        return pb.GenerateRequest(tokens=made.prompt, tenant=made.tenant)

    def _tags(self, context: pb.Context, tags: Iterable[str]) -> list[kv_pb2.Record]:
        expires_at = self._ledger.clock() + TAG_S
        tenant, value = context.made.tenant, context.id.encode()
        return [self._ledger.record(TAG, tenant, tag, value, expires_at) for tag in dict.fromkeys(tags)]

    def _deleted(self, kind: str, tenant: str, record_id: str) -> kv_pb2.Record:
        return self._ledger.record(kind, tenant, record_id, b"", self._ledger.clock() + TOMBSTONE_S)


def _lay_over(context: pb.Context, kept: pb.Context, kind: str) -> None:
    """Lays what is kept beside a context over it."""
    if kind == FILLED:
        context.status, context.error = kept.status, kept.error
        return
    context.kvstore, context.pinned_blocks, context.pinned_bytes = kept.kvstore, kept.pinned_blocks, kept.pinned_bytes
    context.error = context.error or kept.error


def check_made(request: pb.CreateContextRequest, model: str) -> None:
    """Checks what a context is made from, but for its prompt.

    Raises:
        InvalidRequest: names the field that is wrong.
    """
    if request.model not in ("", model):
        raise InvalidRequest("model", f"only {model!r} is served, not {request.model!r}")
    if request.HasField("chat") == request.HasField("prompt"):
        raise InvalidRequest("messages", "a context is made of either messages or token_ids")
    if request.ttl_s:
        check_ttl("ttl_s", request.ttl_s)
    for field, text, limit in (
        ("name", request.name, MAX_NAME_CHARS),
        ("tenant", request.tenant, MAX_NAME_CHARS),
        ("description", request.description, MAX_DESCRIPTION_CHARS),
    ):
        if len(text) > limit:
            raise InvalidRequest(field, f"at most {limit} characters")
    _check_tags("tags", request.tags)
    _check_metadata(request.metadata)


def check_ttl(field: str, ttl_s: float) -> None:
    """Checks a time to live."""
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= MAX_TTL_S):
        raise InvalidRequest(field, f"must be in (0, {MAX_TTL_S:g}], is {ttl_s:g}")


def _check_tags(field: str, tags: Iterable[str]) -> None:
    tags = list(tags)
    if len(tags) > MAX_TAGS:
        raise InvalidRequest(field, f"at most {MAX_TAGS} tags")
    for tag in tags:
        if not 1 <= len(tag) <= MAX_NAME_CHARS or not tag.isprintable() or tag.startswith(PREFIX):
            raise InvalidRequest(field, f"a tag has 1 to {MAX_NAME_CHARS} characters and does not begin with {PREFIX}")


def _check_metadata(metadata: Mapping[str, str]) -> None:
    most_key, most_value = MAX_METADATA_CHARS
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest("metadata", f"at most {MAX_METADATA} entries")
    if any(len(key) > most_key or len(value) > most_value for key, value in metadata.items()):
        raise InvalidRequest("metadata", f"a name has at most {most_key} characters, a value {most_value}")


log = get_logger(__name__)


REPIN_PAUSE_S = 0.5
"""A context that is not wholly pinned is pinned again after its uses, so often at most."""


MAX_TRIED = 4096
"""Contexts of which it is remembered when they were pinned."""


HeldBlocks = Callable[[Sequence[BlockKey]], Mapping[str, int]]


StartTask = Callable[[Coroutine[Any, Any, None]], None]


_ContextKey = tuple[str, str]  # a context's tenant and id


class ContextPins:
    """The pins of contexts.

    Args:
        contexts: the records' content.
        ledger: has the records.
        channels: to kvstores.
        stores: kvstores that are joined.
        held: how many leading blocks of a chain each instance holds.
        begin: does something besides.
    """

    def __init__(
        self,
        contexts: ContextRecords,
        ledger: RecordLedger,
        channels: Channels,
        stores: Callable[[], Sequence[kv_pb2.Instance]],
        held: HeldBlocks,
        begin: StartTask,
    ) -> None:
        self._contexts = contexts
        self._ledger = ledger
        self._channels = channels
        self._stores = stores
        self._held = held
        self._begin = begin
        self._again: dict[_ContextKey, bool] = {}  # contexts that are being pinned; whether once more then
        self._tried: dict[_ContextKey, float] = {}  # when each was pinned last

    def best(self, keys: Sequence[BlockKey]) -> tuple[kv_pb2.Instance | None, int]:
        """The kvstore that holds most of a chain, and how many blocks."""
        held = self._held(keys)
        stores = [(held.get(store.id, 0), store) for store in self._stores()]
        blocks, best = max(stores, key=lambda one: one[0], default=(0, None))
        return best, blocks

    def used(self, context: pb.Context) -> None:
        """A context was used, which may have been stored again: what is not pinned of it is pinned, in a moment."""
        if context.pinned_blocks < context.blocks and context_key(context) not in self._again:
            self._start(context_key(context), REPIN_PAUSE_S)

    def wanted(self, context: pb.Context) -> None:
        """Pins what a kvstore has of a context, until its time is over. While it is being pinned: once more."""
        place = context_key(context)
        if place in self._again:
            self._again[place] = True
        elif context.keys:
            self._start(place, 0.0)

    async def now(self, context: pb.Context) -> None:
        """As `wanted`, and waits for it; while it is being pinned, not."""
        place = context_key(context)
        if place in self._again:
            self._again[place] = True
        else:
            self._again[place] = False
            await self._pin(place, 0.0)

    def _start(self, place: _ContextKey, pause_s: float) -> None:
        self._again[place] = False
        now = asyncio.get_running_loop().time()
        self._begin(self._pin(place, max(0.0, self._tried.get(place, -pause_s) + pause_s - now)))

    async def unpin(self, context: pb.Context, store: kv_pb2.Instance | None = None) -> None:
        """Ends a context's pin, at the store that has it by default."""
        store = store or next((one for one in self._stores() if one.id == context.kvstore), None)
        if store is not None:
            request = kvstore_pb2.UnpinRequest(name=_pin_name(context), tenant=context.made.tenant)
            try:
                await KVStoreServiceStub(self._channels.get(store.address)).Unpin(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.warning("a context's pin was not ended", context=context.id, error=str(from_rpc_error(error)))

    async def _pin(self, place: _ContextKey, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
            while True:
                self._again[place] = False
                await self._once(place)
                if not self._again[place]:
                    return
        finally:
            del self._again[place]
            self._note(place)

    def _note(self, place: _ContextKey) -> None:
        if len(self._tried) >= MAX_TRIED:
            self._tried.clear()
        self._tried[place] = asyncio.get_running_loop().time()

    async def _once(self, place: _ContextKey) -> None:
        """One attempt, by what is known of the context now."""
        context = self._contexts.get(*place)
        if context is None:
            return
        keys, now = unpack_keys(context.keys), self._ledger.clock()
        store, _ = self.best(keys)
        ttl_s = min(MAX_TTL_S, context.expires_at - now)
        if ttl_s <= 0:
            return
        if store is None:
            await self._ledger.push([self._contexts.pinned(context, error="not pinned: no kvstore is there")])
            return
        if context.kvstore not in ("", store.id):
            await self.unpin(context)
        pinned, error = await self._ask(store, context, keys, ttl_s)
        await self._ledger.pull()
        latest = self._contexts.get(*place)
        if latest is None:  # deleted meanwhile
            await self.unpin(context, store)
            return
        if latest.expires_at != context.expires_at:  # renewed meanwhile, perhaps by another conductor that pinned first
            self._again[place] = True
        records = [self._contexts.pinned(latest, store.id, pinned.blocks, pinned.bytes, error)]
        if pinned.blocks == latest.blocks and latest.status != pb.CONTEXT_STATUS_READY:
            records.append(self._contexts.filled(latest, pb.CONTEXT_STATUS_READY))
        await self._ledger.push(records)

    async def _ask(
        self, store: kv_pb2.Instance, context: pb.Context, keys: Sequence[BlockKey], ttl_s: float
    ) -> tuple[kvstore_pb2.PinResponse, str]:
        """What the store has pinned, and why not all."""
        request = kvstore_pb2.PinRequest(
            name=_pin_name(context), keys=context.keys, ttl_s=ttl_s, tenant=context.made.tenant
        )
        try:
            stub = KVStoreServiceStub(self._channels.get(store.address))
            pinned: kvstore_pb2.PinResponse = await stub.Pin(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return kvstore_pb2.PinResponse(), f"not pinned: {from_rpc_error(error)}"
        limit = kvstore_pb2.PinLimit.Name(pinned.limit).removeprefix("PIN_LIMIT_").lower()
        return pinned, "" if pinned.blocks == len(keys) else f"not all of it is pinned: {limit}"


def _pin_name(context: pb.Context) -> str:
    """Of its pin."""
    return f"context:{context.id}"


STORED_TIMEOUT_S = 20.0
"""How long a new context's blocks may take from the pool of prefill to a kvstore."""


STORED_POLL_S = 0.05


LIST_BYTES = 4 << 20


HITS_FLUSH_S = 1.0
"""Counts of hits are written so often at most."""


ReadRequest = Callable[[pb.GenerateRequest], Awaitable[ValidRequest]]


ComputeRequest = Callable[[pb.GenerateRequest], Awaitable[None]]


class NamedContextManager:
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
        contexts: ContextRecords,
        ledger: RecordLedger,
        forgetting: KVDeletions,
        channels: Channels,
        stores: Callable[[], Sequence[kv_pb2.Instance]],
        model: Callable[[], str],
        read: ReadRequest,
        compute: ComputeRequest,
        held: HeldBlocks,
    ) -> None:
        self.contexts = contexts
        self._ledger = ledger
        self._forgetting = forgetting
        self._stores = stores
        self._model = model
        self._read = read
        self._compute = compute
        self._pins = ContextPins(contexts, ledger, channels, stores, held, self._begin)
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
        return _within_list_bytes(LIST_BYTES, self.contexts.of(request.tenant))

    async def delete(self, request: pb.DeleteContextRequest) -> pb.DeleteContextResponse:
        """Ends a context and deletes its KV everywhere."""
        await self._ledger.pull()
        context = self.contexts.find(request.tenant, request.name)
        await self._ledger.push(self.contexts.deleted(context))
        await self._pins.unpin(context)
        response = pb.DeleteContextResponse(id=context.id)
        keys = frozenset(unpack_keys(context.keys))
        if keys:
            response.deleted.CopyFrom(await self._forgetting.delete(KVSelection(keys=keys)))
        return response

    # --- uses ------------------------------------------------------------------------------------------------------

    async def use(self, message: pb.GenerateRequest, within_s: float) -> ContextUse | None:
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

    def used(self, use: ContextUse, cached_tokens: int) -> None:
        """A request that began with a context has got its tokens."""
        if not self._uncounted:
            self._begin(self._count())
        self._uncounted.append((use.context, min(cached_tokens, use.context.tokens)))
        if use.request.context.reset_ttl_s:
            self._pins.wanted(use.context)
        else:
            self._pins.used(use.context)

    async def _count(self) -> None:
        await asyncio.sleep(HITS_FLUSH_S)
        uncounted, self._uncounted = self._uncounted, []
        for context, saved_tokens in uncounted:
            if self._is_there(context):
                self._ledger.merge([self.contexts.hit(context, saved_tokens)])
        places = {(context.made.tenant, context.id) for context, _ in uncounted}
        records = [self.contexts.counted(*place) for place in places]
        await self._ledger.push([record for record in records if record is not None])

    # --- KV --------------------------------------------------------------------------------------------------------

    async def _prefix(self, context: pb.Context) -> ValidRequest:
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

    async def _fill(self, context: pb.Context, prefix: ValidRequest, keys: Sequence[BlockKey]) -> None:
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
        latest = self.contexts.get(*context_key(context))
        if latest is not None and latest.pinned_blocks < latest.blocks:  # what is pinned whole is ready
            await self._ledger.push([self.contexts.filled(latest, status, why)])

    async def _stored(self, keys: Sequence[BlockKey]) -> None:
        """Waits until some kvstore has all of a chain; gives up after a time."""
        for _ in range(int(STORED_TIMEOUT_S / STORED_POLL_S)):
            if self._pins.best(keys)[1] == len(keys) or not self._stores():
                return
            await asyncio.sleep(STORED_POLL_S)

    def _is_there(self, context: pb.Context) -> bool:
        return self.contexts.get(*context_key(context)) is not None

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


def _within_list_bytes(nbytes: int, contexts: list[pb.Context]) -> list[pb.Context]:
    """A list that fits a message: prompts that would go beyond it are left out, the older ones'."""
    for context in contexts:
        nbytes -= context.ByteSize()
        if nbytes < 0:
            for name in ("chat", "prompt"):
                context.made.ClearField(name)
            context.ClearField("keys")
    return contexts
