"""Endpoints about the server: `/health`, `/ping`, `/version`, `/load` and `/metrics`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from moonpool.base.errors import Unavailable
from moonpool.base.version import installed_version
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.json_response import json_response


async def health(gateway: GatewayContext, request: Request) -> Response:
    """200 if requests can be served, else 503."""
    state = await gateway.cluster.state_now()
    if not state.ready:
        raise Unavailable("no prefill or no decode instance is there")
    return json_response({"status": "ok", "model": gateway.shown_name(state)})


async def version(gateway: GatewayContext, request: Request) -> Response:
    """The version of Moonpool."""
    return json_response({"version": installed_version()})


async def load(gateway: GatewayContext, request: Request) -> Response:
    """Number of requests that this gateway is answering."""
    return json_response({"server_load": gateway.metrics.open_requests})


async def metrics(gateway: GatewayContext, request: Request) -> Response:
    """Metrics in the exposition format that the client accepts. Runs on a thread, which waits for the event loop."""
    text, content_type = await gateway.scrapes.text(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})
