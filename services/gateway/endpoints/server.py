"""Endpoints of the server itself: `/health` and `/metrics`."""

from __future__ import annotations

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from moonpool.errors import Unavailable
from services.gateway.endpoints.base import GatewayContext
from services.gateway.serving.json_body import json_response


async def health(gateway: GatewayContext, request: Request) -> Response:
    """200 if requests can be served, else 503."""
    state = await gateway.cluster.state()
    if not state.ready:
        raise Unavailable("no prefill or no decode instance is there")
    return json_response({"status": "ok", "model": state.model})


async def metrics(gateway: GatewayContext, request: Request) -> Response:
    """Metrics in Prometheus' text format. Runs on a thread, because gauges wait for the event loop."""
    text = await asyncio.to_thread(generate_latest, gateway.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
