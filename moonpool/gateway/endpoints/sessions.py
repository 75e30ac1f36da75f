"""`/moonpool/sessions/{name}`: what is known of a session between two requests."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from moonpool.base.errors import NotFound
from moonpool.client import SessionTurn
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.generate_body import SessionBody
from moonpool.gateway.serving.json_response import json_response


async def update_session(gateway: GatewayContext, request: Request) -> Response:
    """Say when the session's next request is expected, how long KV is worth keeping, or that the session has ended.

    Raises:
        NotFound: the tenant has no such session.
    """
    checked = await gateway.auth.read_body(request, SessionBody, uses_budget=False)
    turn = replace(checked.body.to_turn(), id=request.path_params["name"])
    return await _tell(gateway, turn, checked.caller.tenant)


async def end_session(gateway: GatewayContext, request: Request) -> Response:
    """Say that a session has ended: its KV is evicted first.

    Raises:
        NotFound: the tenant has no such session.
    """
    return await _tell(gateway, SessionTurn(id=request.path_params["name"], last=True), gateway.auth.tenant(request))


async def _tell(gateway: GatewayContext, turn: SessionTurn, tenant: str) -> Response:
    if not await gateway.client.update_session(turn, tenant=tenant):
        raise NotFound(f"no session {turn.id!r} is known")
    return json_response({"id": turn.id, "ended": turn.last})
