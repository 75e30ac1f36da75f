"""Named contexts: beginnings of prompts that are kept, with their KV, for a time.

The records of a context live in the kvstores (`Ledger`): what it is, how computing it went, what of it is pinned, and
who counts how many hits. They are apart, so that none is written back as it was by who writes another one. Its KV is a
chain like any other, computed once when it is made and pinned at the kvstore that has most of it. A use puts the
context before the prompt, and nothing more: what of its KV has been lost is computed again, as for any prompt.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moonpool.errors import InvalidRequest, NotFound, Overloaded
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2
from services.conductor.beside import HITS, TAG, Beside
from services.conductor.ledger import Ledger

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
class Use:
    """A request that begins with a context: the request with the whole prompt, and the context."""

    request: pb.GenerateRequest
    context: pb.Context


def place_of(context: pb.Context) -> tuple[str, str]:
    """Its tenant and id."""
    return context.made.tenant, context.id


class Contexts:
    """The contexts that the records tell of. Changes nothing but records.

    Args:
        ledger: has the records.
        conductor: this conductor's id: each counts its own hits.
    """

    def __init__(self, ledger: Ledger, conductor: str) -> None:
        self._ledger = ledger
        self._conductor = conductor
        self._beside = Beside(ledger.book)
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
        return self._ledger.record(CONTEXT, *place_of(context), kept.SerializeToString(), kept.expires_at + INACTIVE_S)

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
        return self._ledger.record(kind, *place_of(context), kept.SerializeToString(), expires_at)

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
        tenant, beside = place_of(context)[0], self._beside.of(*place_of(context))
        return [
            *(self._deleted(kind, *place_of(context)) for kind in (CONTEXT, FILLED, PINNED)),
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

    def use(self, message: pb.GenerateRequest) -> Use | None:
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
        return Use(whole, context)

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
