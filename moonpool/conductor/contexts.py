"""Named contexts: prompt prefixes with KV computed once, pinned at a kvstore and kept for a time (ADR 22).

The conductor knows this module only through `servicer.NamedContexts`, and provides `ContextServices`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moonpool.base import world
from moonpool.base.cluster.records import ReplicatedRecords
from moonpool.base.errors import InvalidRequest, MoonpoolError, NotFound, Overloaded, Unavailable
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import BlockKey, pack_keys, unpack_keys
from moonpool.base.rpc.channels import Channels
from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.deletion import KVDeletions
from moonpool.conductor.records import CALL_TIMEOUT_S, RecordSync
from moonpool.conductor.valid_request import ValidRequest
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2, kvstore_pb2
from moonpool.v1.kvstore_pb2_grpc import KVStoreServiceStub

log = get_logger(__name__)

CONTEXT, FILLED, PINNED, TAG, HITS = "context", "filled", "pinned", "tag", "hits"
"""Kinds of a context's records: the context; how computing the context went; what is pinned; the context's tags; each
conductor's hits.
"""

SPARE_ENTRIES = 1024
"""The index is swept at this many entries more than twice the number left by the last sweep."""

PREFIX = "cache-"
"""Beginning of a context's id."""

PIN_PREFIX = "pin-"
"""Beginning of a pin-only context's id."""

DEFAULT_TTL_S = 3600.0

MAX_TTL_S = 7 * 86400.0
"""The longest TTL of a pin, too."""

INACTIVE_S = 86400.0
"""Seconds for which an expired context can be renewed."""

TOMBSTONE_S = 30 * 86400.0
"""Seconds for which a deleted context's records are kept as deleted."""

TAG_S = 366 * 86400.0
"""Seconds for which a tag is kept. A tag without a context has no effect."""

MAX_CONTEXTS = 1024
"""Most contexts per tenant."""

MAX_TAGS = 16

MAX_NAME_CHARS = 256

MAX_DESCRIPTION_CHARS = 512

MAX_METADATA = 16

MAX_METADATA_CHARS = (64, 512)

REPIN_PAUSE_S = 0.5
"""Shortest pause between two attempts to pin the rest of a context that is used."""

MAX_PIN_TIMES = 4096
"""Contexts with a remembered last attempt to pin."""

STORED_TIMEOUT_S = 20.0
"""Longest wait for a new context's blocks to get from prefill to a kvstore."""

STORED_POLL_S = 0.05

LIST_BYTES = 4 << 20

HITS_FLUSH_S = 1.0
"""Shortest pause between two writes of hit counts."""

_ContextKey = tuple[str, str]  # a context's tenant and id


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


class ContextIndex:
    """Tags and hit counts by context: keys of records with these kinds.

    An entry is checked on reading: the record may be gone, or the tag may belong to another context now. All entries
    are swept when they have doubled, so there are never many more entries than records.

    Args:
        records: the shared records.
    """

    def __init__(self, records: ReplicatedRecords) -> None:
        self._records = records
        self._entries: dict[_ContextKey, dict[tuple[str, str], None]] = {}  # kinds and ids of records
        self._count = 0
        self._sweep_at = SPARE_ENTRIES

    def __len__(self) -> int:
        """Number of entries."""
        return self._count

    def add(self, records: Iterable[kv_pb2.Record]) -> None:
        """Add the tags and hit counts among some new records."""
        for record in records:
            if record.kind in (TAG, HITS) and record.value:
                context_id = record.value.decode() if record.kind == TAG else record.id.partition("/")[0]
                entries = self._entries.setdefault((record.tenant, context_id), {})
                self._count -= len(entries)
                entries[record.kind, record.id] = None
                self._count += len(entries)
        if self._count > self._sweep_at:
            for key in list(self._entries):
                self.records_of(*key)
            self._sweep_at = 2 * self._count + SPARE_ENTRIES

    def records_of(self, tenant: str, context_id: str) -> dict[str, list[kv_pb2.Record]]:
        """A context's tags and hit counts, by kind. Outdated entries are dropped."""
        entries = self._entries.get((tenant, context_id), {})
        found: dict[str, list[kv_pb2.Record]] = {TAG: [], HITS: []}
        for kind, record_id in list(entries):
            record = self._records.get(kind, tenant, record_id)
            if record is None or (kind == TAG and record.value.decode() != context_id):
                del entries[kind, record_id]
                self._count -= 1
            else:
                found[kind].append(record)
        if not entries:
            self._entries.pop((tenant, context_id), None)
        return found


def context_key(context: pb.Context) -> _ContextKey:
    """A context's tenant and id."""
    return context.made.tenant, context.id


class ContextRecords:
    """Contexts as records: reads contexts from records, and makes records of changes. This class changes no state.

    Args:
        sync: the records that conductors share.
        conductor: this conductor's id: each conductor counts separate hits.
    """

    def __init__(self, sync: RecordSync, conductor: str) -> None:
        self._sync = sync
        self._conductor = conductor
        self._index = ContextIndex(sync.records)
        sync.listeners.append(self._index.add)

    # --- reading ---------------------------------------------------------------------------------------------------

    def find(self, tenant: str, name: str) -> pb.Context:
        """A tenant's context by id or tag.

        Raises:
            NotFound: the tenant has no such context.
            Unavailable: as `check_heard`.
        """
        tag = self._sync.records.get(TAG, tenant, name)
        found = self.get(tenant, tag.value.decode() if tag is not None else name)
        if found is None:
            self.check_heard()
            raise NotFound(f"there is no context {name!r}")
        return found

    def check_heard(self) -> None:
        """Check that what is not known here is not there.

        Raises:
            Unavailable: no kvstore has told its records since this conductor started, or none answers.
        """
        if not self._sync.heard:
            raise Unavailable(
                "contexts are kept by kvstores, and none has told this conductor of them yet, or none answers"
            )

    def get(self, tenant: str, context_id: str) -> pb.Context | None:
        """A tenant's context by id."""
        record = self._sync.records.get(CONTEXT, tenant, context_id)
        return self._read(record) if record is not None else None

    def knows(self, tenant: str, name: str) -> bool:
        """Whether this conductor knows a tenant's context by id or tag."""
        records = self._sync.records
        return records.get(TAG, tenant, name) is not None or records.get(CONTEXT, tenant, name) is not None

    def of_tenant(self, tenant: str) -> list[pb.Context]:
        """A tenant's contexts, newest first."""
        records = self._sync.records.of(CONTEXT, tenant)
        found = [self._read(record) for record in records if record.id.startswith(PREFIX)]
        return sorted(found, key=lambda context: (-context.created_at, context.id))

    def __len__(self) -> int:
        return sum(1 for _ in self._sync.records.of(CONTEXT))

    def _read(self, record: kv_pb2.Record) -> pb.Context:
        """A context from all the context's records."""
        key = record.tenant, record.id
        context, indexed = pb.Context.FromString(record.value), self._index.records_of(*key)
        for kind in (FILLED, PINNED):
            part = self._sync.records.get(kind, *key)
            if part is not None:
                _merge_part(context, pb.Context.FromString(part.value), kind)
        if context.pinned_blocks == context.blocks:
            context.error = ""
        for counted in map(pb.Context.FromString, (hits.value for hits in indexed[HITS])):
            context.hits += counted.hits
            context.saved_tokens += counted.saved_tokens
        context.made.tags[:] = sorted(tag.id for tag in indexed[TAG])
        if context.expires_at <= self._sync.clock():
            context.status = pb.CONTEXT_STATUS_INACTIVE
        return context

    # --- writing ---------------------------------------------------------------------------------------------------

    def new(self, request: pb.CreateContextRequest, model: str) -> tuple[pb.Context, list[kv_pb2.Record]]:
        """A new context without tokens, and records for the context's tags.

        Raises:
            InvalidRequest: names the field that is wrong.
            Overloaded: the tenant has too many contexts.
        """
        check_create(request)
        prefix = PIN_PREFIX if request.pin_only else PREFIX
        ids = (record.id for record in self._sync.records.of(CONTEXT, request.tenant))
        if sum(name.startswith(prefix) for name in ids) >= MAX_CONTEXTS:
            message = f"a tenant has at most {MAX_CONTEXTS} contexts; delete some"
            raise Overloaded(message, reason="contexts_full", retry_after_s=60.0)
        now = self._sync.clock()
        context = pb.Context(
            id=f"{prefix}{world.random_hex(10)}",
            made=request,
            status=pb.CONTEXT_STATUS_PENDING,
            created_at=now,
            expires_at=now + (request.ttl_s or DEFAULT_TTL_S),
            model=model,
        )
        context.made.ClearField("tags")
        return context, self._tags(context, request.tags)

    def record(self, context: pb.Context) -> kv_pb2.Record:
        """The record with a context's definition and end, without the other records' content."""
        kept = pb.Context()
        kept.CopyFrom(context)
        for field in ("hits", "saved_tokens", "error", "kvstore", "pinned_blocks", "pinned_bytes"):
            kept.ClearField(field)
        kept.made.ClearField("tags")
        if kept.made.pin_only:
            kept.made.ClearField("chat")
            kept.made.ClearField("prompt")
            kept.made.ClearField("cache_salt")
        kept.status = pb.CONTEXT_STATUS_PENDING if kept.blocks else pb.CONTEXT_STATUS_READY
        return self._sync.record(CONTEXT, *context_key(context), kept.SerializeToString(), _kept_until(kept))

    def filled(self, context: pb.Context, status: pb.ContextStatus.ValueType, error: str = "") -> kv_pb2.Record:
        """The record of how computing a context went."""
        return self._part(FILLED, context, pb.Context(status=status, error=error))

    def pinned(
        self, context: pb.Context, kvstore: str = "", blocks: int = 0, nbytes: int = 0, error: str = ""
    ) -> kv_pb2.Record:
        """The record of a context's pin."""
        kept = pb.Context(kvstore=kvstore, pinned_blocks=blocks, pinned_bytes=nbytes, error=error)
        return self._part(PINNED, context, kept)

    def _part(self, kind: str, context: pb.Context, part: pb.Context) -> kv_pb2.Record:
        """A record with a part of a context. The record outlives one renewal."""
        expires_at = _kept_until(context) + MAX_TTL_S
        return self._sync.record(kind, *context_key(context), part.SerializeToString(), expires_at)

    def updated(self, request: pb.UpdateContextRequest) -> tuple[pb.Context, list[kv_pb2.Record]]:
        """A changed context and the context's records.

        Raises:
            NotFound: there is no such context.
            InvalidRequest: names the field that is wrong.
        """
        context = self.find(request.tenant, request.id)
        _check_tags("add_tags", request.add_tags)
        _check_metadata(request.metadata)
        if request.HasField("ttl_s"):
            check_ttl("ttl_s", request.ttl_s)
            context.expires_at = self._sync.clock() + request.ttl_s
        if request.metadata:
            context.made.ClearField("metadata")
            context.made.metadata.update(request.metadata)
        gone = [tag for tag in request.remove_tags if tag in context.made.tags]
        records = [self.record(context), *self._tags(context, request.add_tags)]
        return context, [*records, *(self._deleted(TAG, context.made.tenant, tag) for tag in gone)]

    def deleted(self, context: pb.Context) -> list[kv_pb2.Record]:
        """Records that delete a context, the text and everything about the context."""
        tenant, indexed = context_key(context)[0], self._index.records_of(*context_key(context))
        return [
            *(self._deleted(kind, *context_key(context)) for kind in (CONTEXT, FILLED, PINNED)),
            *(self._deleted(kind, tenant, one.id) for kind, records in indexed.items() for one in records),
        ]

    def hit(self, context: pb.Context, saved_tokens: int) -> kv_pb2.Record:
        """This conductor's hit count for a context, with one more request."""
        key = HITS, context.made.tenant, f"{context.id}/{self._conductor}"
        record = self._sync.records.get(*key)
        counted = pb.Context.FromString(record.value) if record is not None else pb.Context()
        counted.hits += 1
        counted.saved_tokens += saved_tokens
        return self._sync.record(*key, counted.SerializeToString(), context.expires_at + MAX_TTL_S)

    def counted(self, tenant: str, context_id: str) -> kv_pb2.Record | None:
        """This conductor's hit count of a context; None without hits."""
        return self._sync.records.get(HITS, tenant, f"{context_id}/{self._conductor}")

    def expand(self, message: pb.GenerateRequest) -> tuple[pb.GenerateRequest, pb.Context]:
        """A request with the context put before the prompt, and the context, renewed if the request wants renewal.

        Raises:
            NotFound: there is no such context, or the context has expired.
            InvalidRequest: the context is of another kind than the prompt.
        """
        context, renewed_s = self.find(message.tenant, message.context.id), message.context.reset_ttl_s
        if context.made.pin_only:
            raise NotFound(f"context {message.context.id!r} only pins KV, and cannot be used")
        if renewed_s:
            check_ttl("context.reset_ttl_s", renewed_s)
            context.expires_at = self._sync.clock() + renewed_s
        elif context.status == pb.CONTEXT_STATUS_INACTIVE:
            raise NotFound(f"the time of context {message.context.id!r} is over; reset_ttl_s brings it back")
        kind = "chat" if context.made.HasField("chat") else "tokens"
        if message.WhichOneof("prompt") != kind:
            needed = "messages" if kind == "chat" else "token_ids"
            raise InvalidRequest("context", f"this context is of {needed}, and so must the prompt be")
        whole = pb.GenerateRequest()
        whole.CopyFrom(message)
        whole.ClearField("prompt")
        whole.MergeFrom(prefix_request(context))
        whole.model = message.model
        if kind == "chat":
            whole.chat.MergeFrom(message.chat)
        else:
            whole.tokens.MergeFrom(message.tokens)
        return whole, context

    def _tags(self, context: pb.Context, tags: Iterable[str]) -> list[kv_pb2.Record]:
        expires_at = self._sync.clock() + TAG_S
        tenant, value = context.made.tenant, context.id.encode()
        return [self._sync.record(TAG, tenant, tag, value, expires_at) for tag in dict.fromkeys(tags)]

    def _deleted(self, kind: str, tenant: str, record_id: str) -> kv_pb2.Record:
        return self._sync.record(kind, tenant, record_id, b"", self._sync.clock() + TOMBSTONE_S)


def prefix_request(context: pb.Context) -> pb.GenerateRequest:
    """A request with the context as prompt."""
    made = context.made
    if made.HasField("chat"):
        return pb.GenerateRequest(chat=made.chat, tenant=made.tenant, cache_salt=made.cache_salt, model=context.model)
    return pb.GenerateRequest(tokens=made.prompt, tenant=made.tenant, cache_salt=made.cache_salt, model=context.model)


def _of_tokens(context: pb.Context, tokens: Sequence[int]) -> pb.GenerateRequest:
    """A request with tokens of a context as its prompt, whose KV has the context's salt."""
    prompt, made = pb.TokenPrompt(token_ids=tokens), context.made
    return pb.GenerateRequest(tokens=prompt, tenant=made.tenant, cache_salt=made.cache_salt, model=context.model)


def _kept_until(context: pb.Context) -> float:
    """When the records of a context end."""
    return context.expires_at + (0.0 if context.made.pin_only else INACTIVE_S)


def _merge_part(context: pb.Context, part: pb.Context, kind: str) -> None:
    """Put the part of a FILLED or PINNED record into a context."""
    if kind == FILLED:
        context.status, context.error = part.status, part.error
        return
    context.kvstore, context.pinned_blocks, context.pinned_bytes = part.kvstore, part.pinned_blocks, part.pinned_bytes
    context.error = context.error or part.error


def check_create(request: pb.CreateContextRequest) -> None:
    """Check everything that defines a context, except the prompt and the model.

    Raises:
        InvalidRequest: names the field that is wrong.
    """
    if request.HasField("chat") == request.HasField("prompt"):
        raise InvalidRequest("messages", "a context is made of either messages or token_ids")
    if request.ttl_s:
        check_ttl("ttl_s", request.ttl_s)
    if request.cache_salt and not request.pin_only:
        raise InvalidRequest("cache_salt", "is allowed only with pin_only: requests that name a context have no salt")
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
    """Check a time to live, seconds."""
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= MAX_TTL_S):
        raise InvalidRequest(field, f"must be in (0, {MAX_TTL_S:g}], is {ttl_s:g}")


def _check_tags(field: str, tags: Iterable[str]) -> None:
    tags = list(tags)
    if len(tags) > MAX_TAGS:
        raise InvalidRequest(field, f"at most {MAX_TAGS} tags")
    for tag in tags:
        begins_as_id = tag.startswith((PREFIX, PIN_PREFIX))
        if not 1 <= len(tag) <= MAX_NAME_CHARS or not tag.isprintable() or begins_as_id:
            ids = f"{PREFIX} or {PIN_PREFIX}"
            raise InvalidRequest(field, f"a tag has 1 to {MAX_NAME_CHARS} characters and does not begin with {ids}")


def _check_metadata(metadata: Mapping[str, str]) -> None:
    most_key, most_value = MAX_METADATA_CHARS
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest("metadata", f"at most {MAX_METADATA} entries")
    if any(len(key) > most_key or len(value) > most_value for key, value in metadata.items()):
        raise InvalidRequest("metadata", f"a name has at most {most_key} characters, a value {most_value}")


class ContextPins:
    """Pins contexts at kvstores, one attempt per context at a time.

    Args:
        contexts: the contexts.
        services: the conductor's.
        start_task: runs work in the background.
    """

    def __init__(
        self,
        contexts: ContextRecords,
        services: ContextServices,
        start_task: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._contexts = contexts
        self._services = services
        self._sync = services.sync
        self._start_task = start_task
        self._pinning: dict[_ContextKey, bool] = {}  # contexts that are being pinned; True: once more afterwards
        self._last_pin: dict[_ContextKey, float] = {}  # end of the last attempt

    def best_store(self, keys: Sequence[BlockKey]) -> tuple[kv_pb2.Instance | None, int]:
        """The kvstore that holds most of a chain, and the number of leading blocks there."""
        held = self._services.held(keys)
        stores = [(held.get(store.id, 0), store) for store in self._services.stores()]
        blocks, best = max(stores, key=lambda one: one[0], default=(0, None))
        return best, blocks

    def pin_rest(self, context: pb.Context) -> None:
        """A context was used, so the context's KV may be stored again: soon pin the unpinned blocks."""
        if context.pinned_blocks < context.blocks and context_key(context) not in self._pinning:
            self._start(context_key(context), REPIN_PAUSE_S)

    def request_pin(self, context: pb.Context) -> None:
        """Pin a context until expiry; once more if the context is being pinned now."""
        key = context_key(context)
        if key in self._pinning:
            self._pinning[key] = True
        elif context.keys:
            self._start(key, 0.0)

    async def pin(self, context: pb.Context) -> None:
        """Pin a context and wait for that; if being pinned now, order another attempt without waiting."""
        key = context_key(context)
        if key in self._pinning:
            self._pinning[key] = True
        else:
            self._pinning[key] = False
            await self._pin(key, 0.0)

    def _start(self, key: _ContextKey, pause_s: float) -> None:
        self._pinning[key] = False
        now = asyncio.get_running_loop().time()
        self._start_task(self._pin(key, max(0.0, self._last_pin.get(key, -pause_s) + pause_s - now)))

    async def unpin(self, context: pb.Context, store: kv_pb2.Instance | None = None) -> None:
        """End a context's pin, by default at the pinning store."""
        store = store or next((one for one in self._services.stores() if one.id == context.kvstore), None)
        if store is not None:
            request = kvstore_pb2.UnpinRequest(name=_pin_name(context), tenant=context.made.tenant)
            try:
                await KVStoreServiceStub(self._services.channels.get(store.address)).Unpin(
                    request, timeout=CALL_TIMEOUT_S
                )
            except MoonpoolError as error:
                log.warning("a context's pin was not ended", context=context.id, error=str(error))

    async def _pin(self, key: _ContextKey, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
            while True:
                self._pinning[key] = False
                await self._try_pin(key)
                if not self._pinning[key]:
                    return
        finally:
            del self._pinning[key]
            if len(self._last_pin) >= MAX_PIN_TIMES:
                self._last_pin.clear()
            self._last_pin[key] = asyncio.get_running_loop().time()

    async def _try_pin(self, key: _ContextKey) -> None:
        """One attempt, with the context's present records."""
        context = self._contexts.get(*key)
        if context is None:
            return
        keys, now = unpack_keys(context.keys), self._sync.clock()
        store, _ = self.best_store(keys)
        ttl_s = min(MAX_TTL_S, context.expires_at - now)
        if ttl_s <= 0:
            return
        if store is None:
            await self._sync.push([self._contexts.pinned(context, error="not pinned: no kvstore is there")])
            return
        if context.kvstore not in ("", store.id):
            await self.unpin(context)
        pinned, error = await self._call_pin(store, context, keys, ttl_s)
        await self._sync.pull()
        latest = self._contexts.get(*key)
        if latest is None:  # deleted meanwhile
            await self.unpin(context, store)
            return
        if latest.expires_at != context.expires_at:  # renewed meanwhile, perhaps by another conductor that pinned first
            self._pinning[key] = True
        records = [self._contexts.pinned(latest, store.id, pinned.blocks, pinned.bytes, error)]
        if pinned.blocks == latest.blocks and latest.status != pb.CONTEXT_STATUS_READY:
            records.append(self._contexts.filled(latest, pb.CONTEXT_STATUS_READY))
        await self._sync.push(records)

    async def _call_pin(
        self, store: kv_pb2.Instance, context: pb.Context, keys: Sequence[BlockKey], ttl_s: float
    ) -> tuple[kvstore_pb2.PinResponse, str]:
        """What a kvstore has pinned, and the reason if that is not all."""
        request = kvstore_pb2.PinRequest(
            name=_pin_name(context), keys=context.keys, ttl_s=ttl_s, tenant=context.made.tenant
        )
        try:
            stub = KVStoreServiceStub(self._services.channels.get(store.address))
            pinned: kvstore_pb2.PinResponse = await stub.Pin(request, timeout=CALL_TIMEOUT_S)
        except MoonpoolError as error:
            return kvstore_pb2.PinResponse(), f"not pinned: {error}"
        limit = kvstore_pb2.PinLimit.Name(pinned.limit).removeprefix("PIN_LIMIT_").lower()
        return pinned, "" if pinned.blocks == len(keys) else f"not all of it is pinned: {limit}"


def _pin_name(context: pb.Context) -> str:
    """The name of a context's pin."""
    return f"context:{context.id}"


class NamedContextManager:
    """Serves the calls about contexts, and the requests that begin with one; see `servicer.NamedContexts`.

    Args:
        services: the conductor's.
    """

    def __init__(self, services: ContextServices) -> None:
        self._services = services
        self._sync = services.sync
        self._contexts = ContextRecords(services.sync, services.conductor)
        self._pins = ContextPins(self._contexts, services, self._start_task)
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
            self._pins.request_pin(context)
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
        await self._pins.unpin(context)
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
            self._pins.request_pin(context)
        else:
            self._pins.pin_rest(context)

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
        await self._pins.pin(context)
        latest = self._contexts.get(*context_key(context))
        if latest is not None and latest.pinned_blocks < latest.blocks:  # a context that is wholly pinned is ready
            await self._sync.push([self._contexts.filled(latest, status, why)])

    async def _until_stored(self, keys: Sequence[BlockKey]) -> None:
        """Wait until a kvstore has all of a chain, at most `STORED_TIMEOUT_S`."""
        for _ in range(int(STORED_TIMEOUT_S / STORED_POLL_S)):
            if self._pins.best_store(keys)[1] == len(keys) or not self._services.stores():
                return
            await asyncio.sleep(STORED_POLL_S)

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
