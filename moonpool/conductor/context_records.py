"""Named contexts as records that conductors share, and the checks of what clients say about contexts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from moonpool.base import world
from moonpool.base.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from moonpool.conductor.chain_pins import MAX_TTL_S
from moonpool.conductor.context_index import HITS, TAG, ContextIndex, ContextKey
from moonpool.conductor.records import RecordSync
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

CONTEXT, FILLED, PINNED = "context", "filled", "pinned"
"""Kinds of a context's records: the context; how computing the context went; what is pinned."""
PREFIX = "cache-"
"""Beginning of a context's id."""
PIN_PREFIX = "pin-"
"""Beginning of a pin-only context's id."""
DEFAULT_TTL_S = 3600.0
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
            *(self._deleted(kind, tenant, record.id) for kind, records in indexed.items() for record in records),
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


def context_key(context: pb.Context) -> ContextKey:
    """A context's tenant and id."""
    return context.made.tenant, context.id


def prefix_request(context: pb.Context) -> pb.GenerateRequest:
    """A request with the context as prompt."""
    made = context.made
    if made.HasField("chat"):
        return pb.GenerateRequest(chat=made.chat, tenant=made.tenant, cache_salt=made.cache_salt, model=context.model)
    return pb.GenerateRequest(tokens=made.prompt, tenant=made.tenant, cache_salt=made.cache_salt, model=context.model)


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
    if any(part.HasField("picture") for turn in request.chat.messages for part in turn.parts):
        raise InvalidRequest("messages", "contexts take no pictures")
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
