"""Named contexts: beginnings of prompts that are kept, with their KV, for a time.

The record of a context lives in the kvstores (`Ledger`); its KV is a chain like any other, computed once when it is
made and pinned at the kvstore that has most of it. A use puts the context before the prompt, and nothing more: what of
its KV has been lost is computed again, as for any prompt.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moonpool.errors import InvalidRequest, NotFound, Overloaded
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2
from services.conductor.ledger import Ledger

CONTEXT, TAG, HITS = "context", "tag", "hits"
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


class Contexts:
    """The contexts that the records tell of. Changes nothing but records.

    Args:
        ledger: has the records.
        conductor: this conductor's id: each counts its own hits.
    """

    def __init__(self, ledger: Ledger, conductor: str) -> None:
        self._ledger = ledger
        self._conductor = conductor

    # --- reading ---------------------------------------------------------------------------------------------------

    def find(self, tenant: str, name: str) -> pb.Context:
        """A tenant's context of this id or tag.

        Raises:
            NotFound: the tenant has none, whatever others have.
        """
        book = self._ledger.book
        tag = book.get(TAG, tenant, name)
        record = book.get(CONTEXT, tenant, tag.value.decode() if tag is not None else name)
        if record is None:
            raise NotFound(f"there is no context {name!r}")
        [context] = self._read(tenant, [record])
        return context

    def of(self, tenant: str) -> list[pb.Context]:
        """All of a tenant's, newest first."""
        found = self._read(tenant, self._ledger.book.of(CONTEXT, tenant))
        return sorted(found, key=lambda context: (-context.created_at, context.id))

    def __len__(self) -> int:
        return sum(1 for _ in self._ledger.book.of(CONTEXT))

    def _read(self, tenant: str, records: Iterable[kv_pb2.Record]) -> list[pb.Context]:
        """A tenant's contexts with what is kept beside them: hits and tags."""
        book, now = self._ledger.book, self._ledger.clock()
        hits, tags = defaultdict[str, list[pb.Context]](list), defaultdict[bytes, list[str]](list)
        for counted in book.of(HITS, tenant):
            hits[counted.id.partition("/")[0]].append(pb.Context.FromString(counted.value))
        for tag in book.of(TAG, tenant):
            tags[tag.value].append(tag.id)
        found = []
        for record in records:
            context = pb.Context.FromString(record.value)
            context.hits = sum(counted.hits for counted in hits[context.id])
            context.saved_tokens = sum(counted.saved_tokens for counted in hits[context.id])
            context.made.tags[:] = sorted(tags[context.id.encode()])
            if context.expires_at <= now:
                context.status = pb.CONTEXT_STATUS_INACTIVE
            found.append(context)
        return found

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
        """The record of a context as it is now, without what others count and name."""
        kept = pb.Context()
        kept.CopyFrom(context)
        kept.hits = kept.saved_tokens = 0
        kept.made.ClearField("tags")
        if kept.status == pb.CONTEXT_STATUS_INACTIVE:  # that is for the clock to say
            kept.status = pb.CONTEXT_STATUS_READY
        place = CONTEXT, context.made.tenant, context.id
        return self._ledger.record(*place, kept.SerializeToString(), kept.expires_at + INACTIVE_S)

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
        tenant, book = context.made.tenant, self._ledger.book
        hits = [one.id for one in book.of(HITS, tenant) if one.id.startswith(f"{context.id}/")]
        return [
            self._deleted(CONTEXT, tenant, context.id),
            *(self._deleted(TAG, tenant, tag) for tag in context.made.tags),
            *(self._deleted(HITS, tenant, one) for one in hits),
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
