"""Named contexts over HTTP, in the form of Kimi's context caching: bodies and objects.

What Moonpool knows besides is in an object of its own, `moonpool`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moonpool.client import Context
from moonpool.errors import InvalidRequest
from services.gateway.fields import Body, Few, Many
from services.gateway.turns import Conversation

OBJECT = "context_cache_object"
TAG_OBJECT = "cache_object.tag"
MAX_PAGE = 100
DEFAULT_PAGE = 20
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,127}")
_METADATA = re.compile(r"metadata\[(?P<name>[^\[\]]{1,64})\]")


class LifeBody(Body):
    """What a body says of a cache's time and notes."""

    metadata: Few[str] | None = None
    ttl: int | None = None
    expired_at: int | None = None

    def check(self) -> None:
        if self.ttl and self.expired_at:
            raise InvalidRequest("ttl", "only one of ttl and expired_at may be given")

    def ttl_s(self, now: float) -> float:
        """Seconds that it lives from now on; 0 = not said. `now` is seconds since 1970.

        Raises:
            InvalidRequest: it is over already.
        """
        if not self.expired_at:
            if self.ttl is not None and self.ttl < 0:
                raise InvalidRequest("ttl", "must not be negative")
            return float(self.ttl or 0)
        if self.expired_at <= now:
            raise InvalidRequest("expired_at", "is over already")
        return self.expired_at - now


class CacheBody(Conversation, LifeBody):
    """`POST /v1/caching`."""

    model: str | None = None
    name: str | None = None
    description: str | None = None
    tags: Many[str] | None = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise InvalidRequest("messages", "a cache is made of at least one message")
        if self.tool_choice not in (None, "auto"):
            raise InvalidRequest("tool_choice", "is a chat's, not a cache's")
        for tag in self.tags or ():
            check_tag(tag)


class TagBody(Body):
    """`POST /v1/caching/refs/tags`."""

    tag: str
    cache_id: str

    def check(self) -> None:
        check_tag(self.tag)


def check_tag(tag: str) -> None:
    """Raises InvalidRequest unless it is a tag's name."""
    if not _TAG.fullmatch(tag):
        raise InvalidRequest("tag", "begins with a letter; then up to 127 letters, digits, underscores, hyphens, dots")


def cache_object(context: Context) -> dict[str, Any]:
    """A cache as clients know it."""
    return {
        "id": context.id,
        "object": OBJECT,
        "status": context.status,
        "created_at": int(context.created_at),
        "expired_at": int(context.expires_at),
        "tokens": context.tokens,
        "model": context.model,
        "messages": list(context.messages),
        "tools": context.tools_offered or None,
        "name": context.name,
        "description": context.description,
        "metadata": dict(context.metadata) or None,
        "error": {"type": "cache_error", "message": context.error} if context.error else None,
        "moonpool": {
            "tags": list(context.tags),
            "hits": context.hits,
            "saved_tokens": context.saved_tokens,
            "blocks": context.blocks,
            "pinned_blocks": context.pinned_blocks,
            "pinned_bytes": context.pinned_bytes,
        },
    }


def tag_object(tag: str, context: Context) -> dict[str, Any]:
    """A tag as clients know it."""
    return {
        "tag": tag,
        "cache_id": context.id,
        "object": TAG_OBJECT,
        "owned_by": context.tenant,
        "created_at": int(context.created_at),
    }


def page(
    found: Sequence[dict[str, Any]], query: Mapping[str, str], name: str = "id"
) -> tuple[list[dict[str, Any]], list[str]]:
    """The part of a list, newest first, that a query asks for, and names in the query that mean nothing.

    Raises:
        InvalidRequest: names the parameter that is wrong.
    """
    order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT_PAGE))
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", "must be asc or desc")
    if not limit.isascii() or not limit.isdigit() or len(limit) > 4 or not 1 <= int(limit) <= MAX_PAGE:
        raise InvalidRequest("limit", f"must be in [1, {MAX_PAGE}]")
    wanted = {match["name"]: value for key, value in query.items() if (match := _METADATA.fullmatch(key))}
    known = {"order", "limit", "after", "before"}
    ignored = [key for key in query if key not in known and not _METADATA.fullmatch(key)]
    chosen = [one for one in found if wanted.items() <= (one.get("metadata") or {}).items()]
    chosen = chosen if order == "desc" else chosen[::-1]
    names = [one[name] for one in chosen]
    for cursor in ("after", "before"):
        if query.get(cursor) and query[cursor] not in names:
            raise InvalidRequest(cursor, f"is no {'tag' if name == 'tag' else 'cache'} of this list")
    first = names.index(query["after"]) + 1 if query.get("after") else 0
    last = names.index(query["before"]) if query.get("before") else len(names)
    return chosen[first:last][: int(limit)], ignored


def pairs(context: Context) -> Iterator[dict[str, Any]]:
    """A cache's tags."""
    return (tag_object(tag, context) for tag in context.tags)
