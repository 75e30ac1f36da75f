"""The HTTP interface of Mooncake's conductor and Dynamo's indexer: register, query by tokens or hashes."""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from moonpool.base.errors import InvalidRequest, MoonpoolError, NotFound, Overloaded
from moonpool.interop.indexer.core.cluster import DEFAULT_TENANT
from moonpool.interop.indexer.core.index import (
    TIERS,
    Holder,
    InstanceMatch,
    Scope,
    block_hashes,
    key_of,
    rolling,
    salt_root,
)
from moonpool.interop.indexer.core.publishers import Publisher
from moonpool.interop.indexer.indexer import Indexer

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
MAX_BODY_BYTES = 16 << 20
PUBLISHER_TYPES = ("vllm", "sglang", "moonpool")
"""Those whose events tell tokens. Mooncake's master tells keys alone."""


class Registration(msgspec.Struct):
    """A body of /register. Names are Mooncake's; the second of two is Dynamo's."""

    endpoint: str
    instance_id: str | int
    block_size: int
    modelname: str = ""
    model_name: str = ""
    type: str = "vLLM"
    replay_endpoint: str | None = None
    lora_name: str | None = None
    tenant_id: str = DEFAULT_TENANT
    dp_rank: int | None = None
    additionalsalt: str = ""


class Removal(msgspec.Struct):
    """A body of /unregister."""

    instance_id: str | int
    modelname: str = ""
    model_name: str = ""
    tenant_id: str | None = None
    dp_rank: int | None = None


class Query(msgspec.Struct):
    """A body of /query or /query_by_hash.

    `seq_hashes` roll over all blocks before; so do Mooncake's `block_hash`. Dynamo's `block_hashes` do not.
    """

    model: str = ""
    model_name: str = ""
    token_ids: list[int] = []
    seq_hashes: list[int] = []
    block_hash: list[int] = []
    block_hashes: list[int] = []
    lora_name: str | None = None
    lora_id: int | None = None
    tenant_id: str = DEFAULT_TENANT
    instance_id: str | int | None = None
    block_size: int | None = None
    cache_salt: str = ""

    @property
    def lora(self) -> str:
        """The LoRA adapter's name; older clients have a number."""
        return self.lora_name or ("" if self.lora_id is None else str(self.lora_id))


def application(indexer: Indexer, api_key: str) -> web.Application:
    """The interface."""
    routes: dict[str, tuple[str, Callable[[web.Request], Awaitable[web.Response]]]] = {
        "/register": ("POST", _Routes(indexer).register),
        "/unregister": ("POST", _Routes(indexer).unregister),
        "/query": ("POST", _Routes(indexer).query),
        "/query_by_hash": ("POST", _Routes(indexer).query_by_hash),
        "/workers": ("GET", _Routes(indexer).workers),
        "/kv_event_sources": ("GET", _Routes(indexer).sources),
        "/health": ("GET", _Routes(indexer).health),
    }
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_guard(api_key)])
    for path, (method, handler) in routes.items():
        app.router.add_route(method, path, handler)
    return app


def _guard(api_key: str) -> Any:
    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = shown.encode(errors="surrogateescape")  # a head may have any bytes
        if api_key and request.path != "/health" and not hmac.compare_digest(given, api_key.encode()):
            return web.json_response({"error": "a key is needed: Authorization: Bearer KEY"}, status=401)
        try:
            return await handler(request)
        except NotFound as error:
            return web.json_response({"error": str(error)}, status=404)
        except Overloaded as error:
            return web.json_response({"error": str(error)}, status=429)
        except MoonpoolError as error:
            return web.json_response({"error": str(error)}, status=400)

    return guard


class _Routes:
    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer

    async def register(self, request: web.Request) -> web.Response:
        """Begin to follow a publisher."""
        body = await _body(request, Registration)
        model, instance = _model(body.modelname, body.model_name), str(body.instance_id)
        if body.type.lower() not in PUBLISHER_TYPES:
            raise InvalidRequest("type", f"must be one of {', '.join(PUBLISHER_TYPES)}: others tell no tokens")
        for name, endpoint in (("endpoint", body.endpoint), ("replay_endpoint", body.replay_endpoint or "tcp://")):
            if not endpoint.startswith(("tcp://", "ipc://")):
                raise InvalidRequest(name, f"must be tcp://HOST:PORT or ipc://PATH, is {endpoint!r}")
        if body.block_size < 1:
            raise InvalidRequest("block_size", "must be positive")
        publisher = Publisher(
            Holder(instance, body.dp_rank or 0),
            Scope(model, body.tenant_id, body.block_size),
            body.endpoint,
            body.replay_endpoint or "",
            body.additionalsalt,
            body.lora_name or "",
        )
        self._indexer.register(publisher)
        if body.model_name:
            return web.json_response({"status": "ok"}, status=201)
        return web.json_response({"status": "registered successfully", "instance_id": instance})

    async def unregister(self, request: web.Request) -> web.Response:
        body = await _body(request, Removal)
        model = _model(body.modelname, body.model_name)
        removed = await self._indexer.unregister(str(body.instance_id), model, body.tenant_id, body.dp_rank)
        if not removed:
            raise NotFound(f"no publisher of {body.instance_id!r} is registered for {model!r}")
        if body.model_name:
            return web.json_response({"status": "ok"})
        names = ["|".join(map(str, publisher.name)) for publisher in removed]
        return web.json_response({"status": "unregistered successfully", "removed_instances": names})

    async def query(self, request: web.Request) -> web.Response:
        """Leading tokens of a prompt at each instance."""
        body = await _body(request, Query)
        model = _model(body.model, body.model_name)
        self._indexer.learn(model, body.tenant_id, body.cache_salt, body.token_ids, body.lora)
        return self._answer(body, model, lambda size: block_hashes(body.token_ids, size, body.lora))

    async def query_by_hash(self, request: web.Request) -> web.Response:
        """The same, of a prompt whose hashes are known."""
        body = await _body(request, Query)
        model, rolled = _model(body.model, body.model_name), body.seq_hashes or body.block_hash
        own = [key_of(number) for number in body.block_hashes]
        return self._answer(body, model, lambda _: own, [key_of(number) for number in rolled] or None)

    def _answer(
        self, body: Query, model: str, own_of: Callable[[int], Sequence[bytes]], rolled: Any = None
    ) -> web.Response:
        """`own_of` gives blocks' own hashes, by tokens per block; `rolled`: the rolling hashes, if known."""
        found: dict[str, InstanceMatch] = {}
        index = self._indexer.index
        known = index.scopes(model, body.tenant_id, body.block_size)
        if body.model_name and not known and not self._indexer.serves(model, body.tenant_id):
            raise NotFound(f"no indexer for model={model} tenant={body.tenant_id}")
        for scope in known:
            keys = rolled or rolling(salt_root(body.cache_salt), own_of(scope.block_size))
            for instance, match in index.match(scope, keys).items():
                if body.instance_id is None or str(body.instance_id) == instance:
                    found[instance] = match
        self._indexer.queries += 1
        return web.json_response(_dynamos(found) if body.model_name else {body.tenant_id: _mooncakes(found)})

    async def workers(self, request: web.Request) -> web.Response:
        """The registered publishers, by instance."""
        found: dict[str, dict[str, str]] = {}
        for publisher in self._indexer.publishers:
            found.setdefault(publisher.holder.instance, {})[str(publisher.holder.rank)] = publisher.endpoint
        return web.json_response([{"instance_id": name, "endpoints": places} for name, places in found.items()])

    async def sources(self, request: web.Request) -> web.Response:
        """Where each of the cluster's instances has its KV events published, in vLLM's form."""
        return web.json_response({
            name: {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": publisher.endpoint,
                "replay_endpoint": publisher.replay_endpoint or None,
                "topic": publisher.topic,
            }
            for name, publisher in self._indexer.published.items()
        })  # fmt: skip

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


async def _body(request: web.Request, kind: type[BodyT]) -> BodyT:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (ValueError, RecursionError, web.RequestPayloadError) as error:  # also text that is no UTF-8
        raise InvalidRequest("body", str(error)) from error


def _model(mooncakes: str, dynamos: str) -> str:
    if not (mooncakes or dynamos):
        raise InvalidRequest("model", "is missing")
    return mooncakes or dynamos


def _mooncakes(found: dict[str, InstanceMatch]) -> dict[str, object]:
    return {
        instance: {
            "longest_matched": match.longest,
            "DP": {str(rank): tokens for rank, tokens in match.ranks.items()},
            **dict(zip(TIERS, match.tiers, strict=True)),
        }
        for instance, match in found.items()
    }


def _dynamos(found: dict[str, InstanceMatch]) -> dict[str, object]:
    return {
        "scores": {
            name: {str(rank): tokens for rank, tokens in match_.ranks.items()} for name, match_ in found.items()
        },
        "instances": {
            name: {
                "longest_matched": match_.longest,
                "dp": {str(rank): tokens for rank, tokens in match_.ranks.items()},
                **{tier.lower(): tokens for tier, tokens in zip(TIERS, match_.tiers, strict=True)},
            }
            for name, match_ in found.items()
        },
    }
