"""OpenAI's `/v1/models`: the one model that is served."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from moonpool.client import ClusterState
from moonpool.errors import NotFound
from services.gateway.endpoints.base import GatewayContext
from services.gateway.serving.json_body import json_response


async def list_models(gateway: GatewayContext, request: Request) -> Response:
    """A list with the model that is served."""
    gateway.auth.tenant(request)
    return json_response({"object": "list", "data": [_model_card(gateway, await gateway.cluster.state())]})


async def get_model(gateway: GatewayContext, request: Request) -> Response:
    """The model with the name in the path.

    Raises:
        NotFound: another model is served.
    """
    gateway.auth.tenant(request)
    state, name = await gateway.cluster.state(), request.path_params["model"]
    if name != state.model:
        raise NotFound(f"only {state.model!r} is served")
    return json_response(_model_card(gateway, state))


def _model_card(gateway: GatewayContext, state: ClusterState) -> dict[str, object]:
    """OpenAI's model object, with vLLM's `max_model_len`."""
    return {
        "id": state.model,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "moonpool",
        "max_model_len": state.max_tokens,
    }
