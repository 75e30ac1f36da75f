"""`/v1/caching`, and how a chat uses a cache: by its first message, of the role "cache", or by headers."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from pydantic import ModelWrapValidatorHandler, PrivateAttr, model_validator
from starlette.requests import Request
from starlette.responses import Response

from moonpool.client import AsyncClient, Context, GenerateArguments, GenerateResult
from moonpool.errors import InvalidRequest, NotFound
from services.gateway.answering import Told
from services.gateway.caches import CacheBody, LifeBody, TagBody, cache_object, check_tag, page, pairs, tag_object
from services.gateway.door import Door, json_response
from services.gateway.tools import Tools
from services.gateway.turns import ChatBody

CACHING = "/v1/caching"
TAGS = f"{CACHING}/refs/tags"
CACHE_HEADER = "x-msh-context-cache"
TTL_HEADER = "x-msh-context-cache-reset-ttl"
DRY_RUN_HEADER = "x-msh-context-cache-dryrun"
MAX_TTL_DIGITS = 9
_NAMED = re.compile(r"[^;=]{1,256}")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Which cache a chat asks for: `name` is its id or tag; `reset_ttl_s` 0 = its time stays as it is."""

    name: str
    reset_ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Applied:
    """What a cache does to a chat: headers of its answer, at its end too, and tools that the model has heard of."""

    headers: dict[str, str] = field(default_factory=dict)
    tools: Tools | None = None
    told: Told = lambda result: {}


class CachingChatBody(ChatBody):
    """`/v1/chat/completions`, whose first message may be a reference to a cache instead of the cache's messages."""

    _use: CacheUse | None = PrivateAttr(None)
    places: ClassVar[str] = "messages.0.content"

    @property
    def cache(self) -> CacheUse | None:
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
        body._use = read_reference(first.get("content"))
        return body

    def check(self) -> None:
        super().check()
        if self.cache is not None and self.tools is not None:
            raise InvalidRequest("tools", "must be null beside a cache, which has its own")


def read_reference(content: object) -> CacheUse:
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
    if unknown or ("cache_id" in options) == ("tag" in options) or not _NAMED.fullmatch(name):
        raise InvalidRequest(place, "names one of cache_id and tag, and may have reset_ttl, separated by semicolons")
    _no_dry_run(options.get("dry_run", "0"), place)
    return CacheUse(name, _seconds(options.get("reset_ttl", ""), place))


def _no_dry_run(given: str, place: str) -> None:
    if given not in ("", "0"):
        raise InvalidRequest(place, "dry_run is not supported: GET the cache to see whether it is ready")


def _seconds(given: str, place: str) -> float:
    if given and not (given.isascii() and given.isdigit() and 0 < len(given) <= MAX_TTL_DIGITS):
        raise InvalidRequest(place, "reset_ttl must be a number of seconds")
    return float(given or 0)


class Caching:
    """The endpoints of caches, and what they do to chats."""

    def __init__(self, client: AsyncClient, door: Door, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970."""
        self._contexts = client.contexts
        self._door = door
        self._clock = clock

    # --- caches ----------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        """Makes a cache; its KV is computed afterwards."""
        caller, body, ignored = await self._door.read(request, CacheBody)
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
        return _listed(*page(found, request.query_params))

    async def get(self, request: Request) -> Response:
        """One cache."""
        return json_response(cache_object(await self._named(request)))

    async def update(self, request: Request) -> Response:
        """Changes a cache's time or notes."""
        caller, body, ignored = await self._door.read(request, LifeBody)
        ttl_s = body.ttl_s(self._clock()) or None
        changed = await self._contexts.update(
            _id_of(request), ttl_s=ttl_s, metadata=body.metadata or {}, tenant=caller.tenant
        )
        return json_response(cache_object(changed), ignored)

    async def delete(self, request: Request) -> Response:
        """Ends a cache, and deletes its KV everywhere."""
        tenant = self._door.tenant(request)
        name, _ = await self._contexts.delete(_id_of(request), tenant=tenant)
        return json_response({"deleted": True, "id": name, "object": "context_cache_object.deleted"})

    async def _named(self, request: Request) -> Context:
        return await self._contexts.get(_id_of(request), tenant=self._door.tenant(request))

    # --- tags ------------------------------------------------------------------------------------------------------

    async def create_tag(self, request: Request) -> Response:
        """Gives a cache a tag, which it takes from another one."""
        caller, body, ignored = await self._door.read(request, TagBody)
        context = await self._contexts.update(body.cache_id, add_tags=[body.tag], tenant=caller.tenant)
        return json_response(tag_object(body.tag, context), ignored)

    async def list_tags(self, request: Request) -> Response:
        """All tags of the tenant's caches."""
        tenant = self._door.tenant(request)
        found = [tag for context in await self._contexts.list(tenant=tenant) for tag in pairs(context)]
        return _listed(*page(found, request.query_params, "tag"))

    async def get_tag(self, request: Request) -> Response:
        """One tag."""
        return json_response(tag_object(_id_of(request), await self._tagged(request)))

    async def get_tagged(self, request: Request) -> Response:
        """The cache that has a tag."""
        return json_response(cache_object(await self._tagged(request)))

    async def _tagged(self, request: Request) -> Context:
        """The cache that has a tag.

        Raises:
            NotFound: none has it; a cache's id is no tag.
        """
        context = await self._named(request)
        if _id_of(request) not in context.tags:
            raise NotFound(f"no context has the tag {_id_of(request)!r}")
        return context

    async def delete_tag(self, request: Request) -> Response:
        """Takes a tag from its cache; also one that is not there."""
        tenant, tag = self._door.tenant(request), _id_of(request)
        check_tag(tag)
        with contextlib.suppress(NotFound):
            await self._contexts.update(tag, remove_tags=[tag], tenant=tenant)
        return json_response({"deleted": True, "object": "cache_object.tag.deleted", "tag": tag})

    # --- chats -----------------------------------------------------------------------------------------------------

    async def apply(
        self, request: Request, tenant: str, body: CachingChatBody, arguments: GenerateArguments
    ) -> Applied:
        """Lets a chat begin with the cache that it names.

        With the header, the body has the cache's messages too; where they are others, the cache is not used.

        Raises:
            NotFound: the tenant has no such cache.
            InvalidRequest: a header is wrong.
        """
        use = body.cache or read_headers(request.headers)
        if use is None:
            return Applied()
        context = await self._contexts.get(use.name, tenant=tenant)
        if body.cache is None:
            given, cached, offered = list(arguments.get("messages") or ()), list(context.messages), body.tools_offered()
            same = list(offered.definitions if offered is not None else ()) == context.tools_offered
            if not same or given[: len(cached)] != cached or len(given) == len(cached):
                return Applied()
            arguments["messages"] = given[len(cached) :]
        arguments["context"], arguments["context_ttl_s"] = context.id, use.reset_ttl_s
        expires_at = self._clock() + use.reset_ttl_s if use.reset_ttl_s else context.expires_at
        tools = Tools(context.tools_offered) if context.tools_offered else None
        headers = {"msh-context-cache-id": context.id, "msh-context-cache-token-exp": str(int(expires_at))}
        return Applied(headers, tools, partial(_saved, context))


def read_headers(headers: Mapping[str, str]) -> CacheUse | None:
    """The cache that a request's headers name.

    Raises:
        InvalidRequest: one of them is wrong; names it.
    """
    name = headers.get(CACHE_HEADER)
    if not name:
        return None
    if not _NAMED.fullmatch(name):
        raise InvalidRequest(CACHE_HEADER, "is no cache's id")
    _no_dry_run(headers.get(DRY_RUN_HEADER, "0"), DRY_RUN_HEADER)
    return CacheUse(name, _seconds(headers.get(TTL_HEADER, ""), TTL_HEADER))


def _saved(context: Context, result: GenerateResult) -> dict[str, str]:
    """What a whole answer says of the tokens that its cache saved."""
    return {"msh-context-cache-token-saved": str(min(result.usage.cached_tokens, context.tokens))}


def _id_of(request: Request) -> str:
    name: str = request.path_params["name"]
    return name


def _listed(found: list[dict[str, Any]], ignored: list[str]) -> Response:
    warning = {"warning": '299 moonpool "ignored parameters"'} if ignored else {}
    return json_response({"object": "list", "data": found}, warning)
