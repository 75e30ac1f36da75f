"""Kimi's context caching, `/v1/caching`: bodies, handlers, objects, and how a chat uses a cache.

A chat names a cache in the first message, whose role is "cache", or in headers. Moonpool's additions to Kimi's objects
are in the field `moonpool`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moonpool.base.errors import InvalidRequest, NotFound
from moonpool.client import Context, GenerateResult
from moonpool.gateway.serving.body import Body, FailFastList, Integer, SmallObject
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.generation_job import GenerationJob
from moonpool.gateway.serving.json_response import json_response
from moonpool.gateway.serving.messages import ConversationBody
from moonpool.gateway.serving.tool_set import ToolSet

CACHE_OBJECT = "context_cache_object"
CACHE_TAG_OBJECT = "cache_object.tag"
MAX_PAGE_ITEMS = 100
DEFAULT_PAGE_ITEMS = 20
_TAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,127}")
_METADATA_QUERY = re.compile(r"metadata\[(?P<name>[^\[\]]{1,64})\]")
CACHE_HEADER = "x-msh-context-cache"
TTL_HEADER = "x-msh-context-cache-reset-ttl"
DRY_RUN_HEADER = "x-msh-context-cache-dryrun"
MAX_TTL_DIGITS = 9
_CACHE_NAME = re.compile(r"[^;=]{1,256}")
_REFERENCE_FIELD = "messages.0.content"


class CacheUpdateBody(Body):
    """`PUT /v1/caching/{name}`: time to live and metadata."""

    unknown_ignored = True

    metadata: SmallObject[str] | None = None
    ttl: Integer | None = None
    expired_at: Integer | None = None

    def check(self) -> None:
        if self.ttl and self.expired_at:
            raise InvalidRequest("ttl", "only one of ttl and expired_at may be given")

    def ttl_s(self, now: float) -> float:
        """Time to live in seconds; 0 if the body has none. `now` is in seconds since 1970.

        Raises:
            InvalidRequest: the time is negative or has passed.
        """
        if not self.expired_at:
            if self.ttl is not None and self.ttl < 0:
                raise InvalidRequest("ttl", "must not be negative")
            return float(self.ttl or 0)
        if self.expired_at <= now:
            raise InvalidRequest("expired_at", "has passed")
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
            raise InvalidRequest("messages", "must be at least one message")
        if self.tool_choice not in (None, "auto"):
            raise InvalidRequest("tool_choice", "is allowed for a chat, not for a cache")
        for tag in self.tags or ():
            check_tag(tag)


class CacheTagBody(Body):
    """`POST /v1/caching/refs/tags`."""

    unknown_ignored = True

    tag: str
    cache_id: str

    def check(self) -> None:
        check_tag(self.tag)


def check_tag(tag: str) -> None:
    """Check the name of a tag.

    Raises:
        InvalidRequest: the name is wrong.
    """
    if not _TAG_NAME.fullmatch(tag):
        raise InvalidRequest(
            "tag", "must begin with a letter, followed by up to 127 letters, digits, underscores, hyphens and dots"
        )


def cache_object(context: Context) -> dict[str, Any]:
    """A cache as an object of the API."""
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
    """A tag as an object of the API."""
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
    """The list page that a query asks for, and the unknown query parameters' names. `found` is newest first.

    Raises:
        InvalidRequest: a query parameter is wrong; names the parameter.
    """
    order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT_PAGE_ITEMS))
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", "must be asc or desc")
    if not limit.isascii() or not limit.isdigit() or len(limit) > 4 or not 1 <= int(limit) <= MAX_PAGE_ITEMS:
        raise InvalidRequest("limit", f"must be in [1, {MAX_PAGE_ITEMS}]")
    metadata = {match["name"]: value for key, value in query.items() if (match := _METADATA_QUERY.fullmatch(key))}
    known = {"order", "limit", "after", "before"}
    unknown = [key for key in query if key not in known and not _METADATA_QUERY.fullmatch(key)]
    chosen = [item for item in found if metadata.items() <= (item.get("metadata") or {}).items()]
    chosen = chosen if order == "desc" else chosen[::-1]
    names = [item[name] for item in chosen]
    for cursor in ("after", "before"):
        if query.get(cursor) and query[cursor] not in names:
            raise InvalidRequest(cursor, f"is not a {'tag' if name == 'tag' else 'cache'} of this list")
    first = names.index(query["after"]) + 1 if query.get("after") else 0
    last = names.index(query["before"]) if query.get("before") else len(names)
    return chosen[first:last][: int(limit)], unknown


def cache_tags(context: Context) -> Iterator[dict[str, Any]]:
    """A cache's tags, as the API's objects."""
    return (tag_object(tag, context) for tag in context.tags)


@dataclass(frozen=True, slots=True)
class CacheReference:
    """The cache that a chat asks for.

    Attributes:
        name: id or tag of the cache.
        reset_ttl_s: new time to live in seconds; 0 leaves the time unchanged.
    """

    name: str
    reset_ttl_s: float = 0.0


def parse_cache_reference(content: object) -> CacheReference:
    """The content of a message with the role "cache", such as `cache_id=ID;reset_ttl=3600` or `tag=NAME`.

    Raises:
        InvalidRequest: the content has another form.
    """
    if not isinstance(content, str):
        raise InvalidRequest(_REFERENCE_FIELD, "must be text such as cache_id=ID;reset_ttl=SECONDS")
    options = dict(part.partition("=")[::2] for part in content.split(";"))
    unknown = options.keys() - {"cache_id", "tag", "reset_ttl", "dry_run"}
    name = options.get("cache_id", options.get("tag", ""))
    if unknown or ("cache_id" in options) == ("tag" in options) or not _CACHE_NAME.fullmatch(name):
        raise InvalidRequest(
            _REFERENCE_FIELD,
            "must be cache_id=ID or tag=NAME, then optionally reset_ttl=SECONDS, separated by semicolons",
        )
    _refuse_dry_run(options.get("dry_run", "0"), _REFERENCE_FIELD)
    return CacheReference(name, _parse_ttl(options.get("reset_ttl", ""), _REFERENCE_FIELD))


def _refuse_dry_run(value: str, field: str) -> None:
    if value not in ("", "0"):
        raise InvalidRequest(field, "dry_run is not supported: GET the cache to see whether it is ready")


def _parse_ttl(value: str, field: str) -> float:
    if value and not (value.isascii() and value.isdigit() and 0 < len(value) <= MAX_TTL_DIGITS):
        raise InvalidRequest(field, "reset_ttl must be a number of seconds")
    return float(value or 0)


async def create_cache(gateway: GatewayContext, request: Request) -> Response:
    """Create a cache. The cache's KV is computed afterwards."""
    checked = await gateway.auth.read_body(request, CacheCreateBody)
    body = checked.body
    tools, messages = await checked.work(body.tool_set), await checked.work(body.to_messages)
    context = await gateway.client.contexts.create(
        messages=messages,
        tools=tools.definitions if tools is not None else None,
        ttl_s=body.ttl_s(gateway.wall_clock()),
        tags=body.tags or (),
        metadata=body.metadata or {},
        tenant=checked.caller.tenant,
        name=body.name or "",
        description=body.description or "",
        model=body.model or "",
    )
    return json_response(cache_object(context), checked.warning_headers)


async def list_caches(gateway: GatewayContext, request: Request) -> Response:
    """The caches of the tenant, a page at a time."""
    contexts = await gateway.client.contexts.list(tenant=gateway.auth.tenant(request))
    return _list_response(*select_page([cache_object(context) for context in contexts], request.query_params))


async def get_cache(gateway: GatewayContext, request: Request) -> Response:
    """One cache."""
    return json_response(cache_object(await _get(gateway, request)))


async def update_cache(gateway: GatewayContext, request: Request) -> Response:
    """Change the time to live or the metadata of a cache."""
    checked = await gateway.auth.read_body(request, CacheUpdateBody)
    ttl_s = checked.body.ttl_s(gateway.wall_clock()) or None
    context = await gateway.client.contexts.update(
        _path_name(request), ttl_s=ttl_s, metadata=checked.body.metadata or {}, tenant=checked.caller.tenant
    )
    return json_response(cache_object(context), checked.warning_headers)


async def delete_cache(gateway: GatewayContext, request: Request) -> Response:
    """Delete a cache and the cache's KV on every instance."""
    tenant = gateway.auth.tenant(request)
    name, _ = await gateway.client.contexts.delete(_path_name(request), tenant=tenant)
    return json_response({"deleted": True, "id": name, "object": "context_cache_object.deleted"})


async def create_tag(gateway: GatewayContext, request: Request) -> Response:
    """Give a tag to a cache. Another cache with the tag loses the tag."""
    checked = await gateway.auth.read_body(request, CacheTagBody)
    body = checked.body
    context = await gateway.client.contexts.update(body.cache_id, add_tags=[body.tag], tenant=checked.caller.tenant)
    return json_response(tag_object(body.tag, context), checked.warning_headers)


async def list_tags(gateway: GatewayContext, request: Request) -> Response:
    """The tags of the tenant's caches, a page at a time."""
    contexts = await gateway.client.contexts.list(tenant=gateway.auth.tenant(request))
    tags = [tag for context in contexts for tag in cache_tags(context)]
    return _list_response(*select_page(tags, request.query_params, "tag"))


async def get_tag(gateway: GatewayContext, request: Request) -> Response:
    """One tag."""
    return json_response(tag_object(_path_name(request), await _get_tagged(gateway, request)))


async def get_tagged_cache(gateway: GatewayContext, request: Request) -> Response:
    """The cache that has a tag."""
    return json_response(cache_object(await _get_tagged(gateway, request)))


async def delete_tag(gateway: GatewayContext, request: Request) -> Response:
    """Remove a tag from the tag's cache. A tag that no cache has counts as removed."""
    tenant, tag = gateway.auth.tenant(request), _path_name(request)
    check_tag(tag)
    with contextlib.suppress(NotFound):
        await gateway.client.contexts.update(tag, remove_tags=[tag], tenant=tenant)
    return json_response({"deleted": True, "object": "cache_object.tag.deleted", "tag": tag})


async def apply_cache(
    gateway: GatewayContext, job: GenerationJob, reference: CacheReference, tools: ToolSet | None, *, repeated: bool
) -> ToolSet | None:
    """Begin the prompt of a chat with a cache. Returns the tools that the cache has.

    Args:
        gateway: the gateway.
        job: the chat; the job's prompt, headers and result headers change.
        reference: the cache.
        tools: the tools of the chat's body.
        repeated: the chat repeats the messages and tools of the cache. If they differ, the cache is not used.

    Raises:
        NotFound: the tenant has no such cache.
    """
    context = await gateway.client.contexts.get(reference.name, tenant=job.arguments["tenant"])
    (prompt,) = job.prompts
    if repeated:
        messages, cached = list(prompt.get("messages") or ()), list(context.messages)
        same_tools = list(tools.definitions if tools is not None else ()) == context.tools_offered
        if not same_tools or messages[: len(cached)] != cached or len(messages) == len(cached):
            return None
        prompt["messages"] = messages[len(cached) :]
    prompt["context"], prompt["context_ttl_s"] = context.id, reference.reset_ttl_s
    expires_at = gateway.wall_clock() + reference.reset_ttl_s if reference.reset_ttl_s else context.expires_at
    job.headers["msh-context-cache-id"] = context.id
    job.headers["msh-context-cache-token-exp"] = str(int(expires_at))
    job.result_headers = partial(_saved_tokens_header, context)
    return ToolSet(context.tools_offered) if context.tools_offered else None


def cache_reference_of_headers(headers: Mapping[str, str]) -> CacheReference | None:
    """The cache that the headers of a chat name; None without the header.

    Raises:
        InvalidRequest: a header is wrong; names the header.
    """
    name = headers.get(CACHE_HEADER)
    if not name:
        return None
    if not _CACHE_NAME.fullmatch(name):
        raise InvalidRequest(CACHE_HEADER, "is not the id of a cache")
    _refuse_dry_run(headers.get(DRY_RUN_HEADER, "0"), DRY_RUN_HEADER)
    return CacheReference(name, _parse_ttl(headers.get(TTL_HEADER, ""), TTL_HEADER))


def _saved_tokens_header(context: Context, result: GenerateResult) -> dict[str, str]:
    """The header with the number of prompt tokens that the cache saved."""
    return {"msh-context-cache-token-saved": str(min(result.usage.cached_tokens, context.tokens))}


def _path_name(request: Request) -> str:
    name: str = request.path_params["name"]
    return name


async def _get(gateway: GatewayContext, request: Request) -> Context:
    return await gateway.client.contexts.get(_path_name(request), tenant=gateway.auth.tenant(request))


async def _get_tagged(gateway: GatewayContext, request: Request) -> Context:
    """The cache that has the tag in the path.

    Raises:
        NotFound: no cache has the tag; the id of a cache is not a tag.
    """
    context = await _get(gateway, request)
    if _path_name(request) not in context.tags:
        raise NotFound(f"no context has the tag {_path_name(request)!r}")
    return context


def _list_response(items: list[dict[str, Any]], unknown: list[str]) -> Response:
    warning = {"warning": '299 moonpool "ignored parameters"'} if unknown else {}
    return json_response({"object": "list", "data": items}, warning)
