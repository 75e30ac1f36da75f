"""Kimi's context caching, `/v1/caching`: bodies, objects, endpoints, and chats that use a cache.

A chat names a cache by its first message, of the role "cache", or by headers. What Moonpool adds to Kimi's objects is
in the field `moonpool`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from pydantic import ModelWrapValidatorHandler, PrivateAttr, model_validator
from starlette.requests import Request
from starlette.responses import Response

from moonpool.client import AsyncClient, Context, GenerateArguments, GenerateResult
from moonpool.errors import InvalidRequest, NotFound
from services.gateway.auth import Authenticator
from services.gateway.generation import ResultHeaders
from services.gateway.json_body import Body, FailFastList, SmallObject, json_response
from services.gateway.openai_completions import ChatBody, ConversationBody
from services.gateway.tool_calls import ToolSet

CACHE_OBJECT = "context_cache_object"


CACHE_TAG_OBJECT = "cache_object.tag"


MAX_PAGE_ITEMS = 100


DEFAULT_PAGE_ITEMS = 20


_TAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,127}")


_METADATA_QUERY = re.compile(r"metadata\[(?P<name>[^\[\]]{1,64})\]")


class CacheUpdateBody(Body):
    """What a body says of a cache's time and notes."""

    metadata: SmallObject[str] | None = None
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


class CacheCreateBody(ConversationBody, CacheUpdateBody):
    """`POST /v1/caching`."""

    model: str | None = None
    name: str | None = None
    description: str | None = None
    tags: FailFastList[str] | None = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise InvalidRequest("messages", "a cache is made of at least one message")
        if self.tool_choice not in (None, "auto"):
            raise InvalidRequest("tool_choice", "is a chat's, not a cache's")
        for tag in self.tags or ():
            check_tag(tag)


class CacheTagBody(Body):
    """`POST /v1/caching/refs/tags`."""

    tag: str
    cache_id: str

    def check(self) -> None:
        check_tag(self.tag)


def check_tag(tag: str) -> None:
    """Raises InvalidRequest unless it is a tag's name."""
    if not _TAG_NAME.fullmatch(tag):
        raise InvalidRequest("tag", "begins with a letter; then up to 127 letters, digits, underscores, hyphens, dots")


def cache_object(context: Context) -> dict[str, Any]:
    """A cache as clients know it."""
    return {
        "id": context.id,
        "object": CACHE_OBJECT,
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
        "object": CACHE_TAG_OBJECT,
        "owned_by": context.tenant,
        "created_at": int(context.created_at),
    }


def select_page(
    found: Sequence[dict[str, Any]], query: Mapping[str, str], name: str = "id"
) -> tuple[list[dict[str, Any]], list[str]]:
    """The part of a list, newest first, that a query asks for, and names in the query that mean nothing.

    Raises:
        InvalidRequest: names the parameter that is wrong.
    """
    order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT_PAGE_ITEMS))
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", "must be asc or desc")
    if not limit.isascii() or not limit.isdigit() or len(limit) > 4 or not 1 <= int(limit) <= MAX_PAGE_ITEMS:
        raise InvalidRequest("limit", f"must be in [1, {MAX_PAGE_ITEMS}]")
    wanted = {match["name"]: value for key, value in query.items() if (match := _METADATA_QUERY.fullmatch(key))}
    known = {"order", "limit", "after", "before"}
    ignored = [key for key in query if key not in known and not _METADATA_QUERY.fullmatch(key)]
    chosen = [one for one in found if wanted.items() <= (one.get("metadata") or {}).items()]
    chosen = chosen if order == "desc" else chosen[::-1]
    names = [one[name] for one in chosen]
    for cursor in ("after", "before"):
        if query.get(cursor) and query[cursor] not in names:
            raise InvalidRequest(cursor, f"is no {'tag' if name == 'tag' else 'cache'} of this list")
    first = names.index(query["after"]) + 1 if query.get("after") else 0
    last = names.index(query["before"]) if query.get("before") else len(names)
    return chosen[first:last][: int(limit)], ignored


def cache_tags(context: Context) -> Iterator[dict[str, Any]]:
    """A cache's tags."""
    return (tag_object(tag, context) for tag in context.tags)


CACHING_PATH = "/v1/caching"


CACHE_TAGS_PATH = f"{CACHING_PATH}/refs/tags"


CACHE_HEADER = "x-msh-context-cache"


TTL_HEADER = "x-msh-context-cache-reset-ttl"


DRY_RUN_HEADER = "x-msh-context-cache-dryrun"


MAX_TTL_DIGITS = 9


_CACHE_NAME = re.compile(r"[^;=]{1,256}")


@dataclass(frozen=True, slots=True)
class CacheReference:
    """Which cache a chat asks for: `name` is its id or tag; `reset_ttl_s` 0 = its time stays as it is."""

    name: str
    reset_ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AppliedCache:
    """What a cache does to a chat: headers of its answer, at its end too, and tools that the model has heard of."""

    headers: dict[str, str] = field(default_factory=dict)
    tools: ToolSet | None = None
    told: ResultHeaders = lambda result: {}


class CachingChatBody(ChatBody):
    """`/v1/chat/completions`, whose first message may be a reference to a cache instead of the cache's messages."""

    _use: CacheReference | None = PrivateAttr(None)
    places: ClassVar[str] = "messages.0.content"

    @property
    def cache(self) -> CacheReference | None:
        """The cache that its first message named."""
        return self._use

    @model_validator(mode="wrap")
    @classmethod
    def _take_reference(cls, given: Any, handler: ModelWrapValidatorHandler[CachingChatBody]) -> CachingChatBody:
        messages = given.get("messages") if isinstance(given, dict) else None
        if not isinstance(messages, list) or not messages:
            return handler(given)
        first = messages[0]
        if not isinstance(first, dict) or first.get("role") != "cache":
            return handler(given)
        body = handler({**given, "messages": messages[1:]})
        body._use = parse_cache_reference(first.get("content"))
        return body

    def check(self) -> None:
        super().check()
        if self.cache is not None and self.tools is not None:
            raise InvalidRequest("tools", "must be null beside a cache, which has its own")


def parse_cache_reference(content: object) -> CacheReference:
    """The content of a message of the role "cache", such as `cache_id=ID;reset_ttl=3600` or `tag=NAME`.

    Raises:
        InvalidRequest: it is not of this form.
    """
    place = CachingChatBody.places
    if not isinstance(content, str):
        raise InvalidRequest(place, "must be text such as cache_id=ID;reset_ttl=SECONDS")
    options = dict(part.partition("=")[::2] for part in content.split(";"))
    unknown = options.keys() - {"cache_id", "tag", "reset_ttl", "dry_run"}
    name = options.get("cache_id", options.get("tag", ""))
    if unknown or ("cache_id" in options) == ("tag" in options) or not _CACHE_NAME.fullmatch(name):
        raise InvalidRequest(place, "names one of cache_id and tag, and may have reset_ttl, separated by semicolons")
    _refuse_dry_run(options.get("dry_run", "0"), place)
    return CacheReference(name, _parse_ttl(options.get("reset_ttl", ""), place))


def _refuse_dry_run(given: str, place: str) -> None:
    if given not in ("", "0"):
        raise InvalidRequest(place, "dry_run is not supported: GET the cache to see whether it is ready")


def _parse_ttl(given: str, place: str) -> float:
    if given and not (given.isascii() and given.isdigit() and 0 < len(given) <= MAX_TTL_DIGITS):
        raise InvalidRequest(place, "reset_ttl must be a number of seconds")
    return float(given or 0)


class CachingEndpoints:
    """The endpoints of caches, and what they do to chats."""

    def __init__(self, client: AsyncClient, door: Authenticator, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970."""
        self._contexts = client.contexts
        self._door = door
        self._clock = clock

    # --- caches ----------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        """Makes a cache; its KV is computed afterwards."""
        caller, body, ignored = await self._door.read(request, CacheCreateBody)
        offered = body.tools_offered()
        given: dict[str, Any] = {name: getattr(body, name) or "" for name in ("name", "description", "model")}
        context = await self._contexts.create(
            messages=body.turns(),
            tools=offered.definitions if offered is not None else None,
            ttl_s=body.ttl_s(self._clock()),
            tags=body.tags or (),
            metadata=body.metadata or {},
            tenant=caller.tenant,
            **given,
        )
        return json_response(cache_object(context), ignored)

    async def list(self, request: Request) -> Response:
        """The tenant's caches."""
        tenant = self._door.tenant(request)
        found = [cache_object(context) for context in await self._contexts.list(tenant=tenant)]
        return _list_response(*select_page(found, request.query_params))

    async def get(self, request: Request) -> Response:
        """One cache."""
        return json_response(cache_object(await self._named(request)))

    async def update(self, request: Request) -> Response:
        """Changes a cache's time or notes."""
        caller, body, ignored = await self._door.read(request, CacheUpdateBody)
        ttl_s = body.ttl_s(self._clock()) or None
        changed = await self._contexts.update(
            _path_name(request), ttl_s=ttl_s, metadata=body.metadata or {}, tenant=caller.tenant
        )
        return json_response(cache_object(changed), ignored)

    async def delete(self, request: Request) -> Response:
        """Ends a cache, and deletes its KV everywhere."""
        tenant = self._door.tenant(request)
        name, _ = await self._contexts.delete(_path_name(request), tenant=tenant)
        return json_response({"deleted": True, "id": name, "object": "context_cache_object.deleted"})

    async def _named(self, request: Request) -> Context:
        return await self._contexts.get(_path_name(request), tenant=self._door.tenant(request))

    # --- tags ------------------------------------------------------------------------------------------------------

    async def create_tag(self, request: Request) -> Response:
        """Gives a cache a tag, which it takes from another one."""
        caller, body, ignored = await self._door.read(request, CacheTagBody)
        context = await self._contexts.update(body.cache_id, add_tags=[body.tag], tenant=caller.tenant)
        return json_response(tag_object(body.tag, context), ignored)

    async def list_tags(self, request: Request) -> Response:
        """All tags of the tenant's caches."""
        tenant = self._door.tenant(request)
        found = [tag for context in await self._contexts.list(tenant=tenant) for tag in cache_tags(context)]
        return _list_response(*select_page(found, request.query_params, "tag"))

    async def get_tag(self, request: Request) -> Response:
        """One tag."""
        return json_response(tag_object(_path_name(request), await self._tagged(request)))

    async def get_tagged(self, request: Request) -> Response:
        """The cache that has a tag."""
        return json_response(cache_object(await self._tagged(request)))

    async def _tagged(self, request: Request) -> Context:
        """The cache that has a tag.

        Raises:
            NotFound: none has it; a cache's id is no tag.
        """
        context = await self._named(request)
        if _path_name(request) not in context.tags:
            raise NotFound(f"no context has the tag {_path_name(request)!r}")
        return context

    async def delete_tag(self, request: Request) -> Response:
        """Takes a tag from its cache; also one that is not there."""
        tenant, tag = self._door.tenant(request), _path_name(request)
        check_tag(tag)
        with contextlib.suppress(NotFound):
            await self._contexts.update(tag, remove_tags=[tag], tenant=tenant)
        return json_response({"deleted": True, "object": "cache_object.tag.deleted", "tag": tag})

    # --- chats -----------------------------------------------------------------------------------------------------

    async def apply(
        self, request: Request, tenant: str, body: CachingChatBody, arguments: GenerateArguments
    ) -> AppliedCache:
        """Lets a chat begin with the cache that it names.

        With the header, the body has the cache's messages too; where they are others, the cache is not used.

        Raises:
            NotFound: the tenant has no such cache.
            InvalidRequest: a header is wrong.
        """
        use = body.cache or cache_reference_of_headers(request.headers)
        if use is None:
            return AppliedCache()
        context = await self._contexts.get(use.name, tenant=tenant)
        if body.cache is None:
            given, cached, offered = list(arguments.get("messages") or ()), list(context.messages), body.tools_offered()
            same = list(offered.definitions if offered is not None else ()) == context.tools_offered
            if not same or given[: len(cached)] != cached or len(given) == len(cached):
                return AppliedCache()
            arguments["messages"] = given[len(cached) :]
        arguments["context"], arguments["context_ttl_s"] = context.id, use.reset_ttl_s
        expires_at = self._clock() + use.reset_ttl_s if use.reset_ttl_s else context.expires_at
        tools = ToolSet(context.tools_offered) if context.tools_offered else None
        headers = {"msh-context-cache-id": context.id, "msh-context-cache-token-exp": str(int(expires_at))}
        return AppliedCache(headers, tools, partial(_saved_tokens_header, context))


def cache_reference_of_headers(headers: Mapping[str, str]) -> CacheReference | None:
    """The cache that a request's headers name.

    Raises:
        InvalidRequest: one of them is wrong; names it.
    """
    name = headers.get(CACHE_HEADER)
    if not name:
        return None
    if not _CACHE_NAME.fullmatch(name):
        raise InvalidRequest(CACHE_HEADER, "is no cache's id")
    _refuse_dry_run(headers.get(DRY_RUN_HEADER, "0"), DRY_RUN_HEADER)
    return CacheReference(name, _parse_ttl(headers.get(TTL_HEADER, ""), TTL_HEADER))


def _saved_tokens_header(context: Context, result: GenerateResult) -> dict[str, str]:
    """What a whole answer says of the tokens that its cache saved."""
    return {"msh-context-cache-token-saved": str(min(result.usage.cached_tokens, context.tokens))}


def _path_name(request: Request) -> str:
    name: str = request.path_params["name"]
    return name


def _list_response(found: list[dict[str, Any]], ignored: list[str]) -> Response:
    warning = {"warning": '299 moonpool "ignored parameters"'} if ignored else {}
    return json_response({"object": "list", "data": found}, warning)
