"""`/moonpool/state` and `/moonpool/requests`: the cluster and requests as JSON, for the page and for scripts."""

from __future__ import annotations

from dataclasses import asdict, replace

from starlette.requests import Request
from starlette.responses import Response

from moonpool.base.errors import NotFound
from moonpool.client.explain import PHASE_NAMES, request_phases
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.json_response import json_response

NO_STORE = {"cache-control": "no-store"}


async def state(gateway: GatewayContext, request: Request) -> Response:
    """The cluster, as printed by `moonpool state --json`.

    Raises:
        PermissionDenied: the caller is not an operator.
    """
    gateway.auth.require_operator(request)
    return json_response(asdict(await gateway.cluster.state_now()), NO_STORE)


async def list_requests(gateway: GatewayContext, request: Request) -> Response:
    """The requests that ended last: all of them for an operator, the tenant's own for other callers."""
    is_visible = gateway.auth.visible_tenants(request)
    last = (await gateway.cluster.state_now()).recent.last
    return json_response({"requests": [asdict(ended) for ended in last if is_visible(ended.tenant)]}, NO_STORE)


async def get_request(gateway: GatewayContext, request: Request) -> Response:
    """One request, as printed by `moonpool explain --json`, with phases.

    Raises:
        NotFound: the request is unknown, or belongs to another tenant.
    """
    is_visible, name = gateway.auth.visible_tenants(request), request.path_params["name"]
    try:
        found = await gateway.client.explain(gateway.auth.full_request_id(request, name))
    except NotFound:
        raise _unknown_request(name) from None
    if not is_visible(found.timeline.tenant):
        raise _unknown_request(name)
    if not gateway.auth.is_operator(request):  # the queues of instances show other tenants' requests
        attempts = tuple(replace(attempt, candidates=()) for attempt in found.attempts)
        found = replace(found, candidates=(), attempts=attempts)
    phases = {"phases": [asdict(phase) for phase in request_phases(found)], "names": PHASE_NAMES}
    return json_response({"request_id": name, **asdict(found), **phases}, NO_STORE)


def _unknown_request(name: str) -> NotFound:
    """The same message whether the request exists or not, so that other tenants' requests stay hidden."""
    return NotFound(f"no request {name!r} is known")
