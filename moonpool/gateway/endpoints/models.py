"""OpenAI's `/v1/models`: the model that is served, and LoRA adapters on the model."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from moonpool.base.errors import NotFound
from moonpool.client import ClusterState
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.json_response import json_response

ANTHROPIC_HEADER = "anthropic-version"
"""Clients of Anthropic's API send the header with each request."""


async def list_models(gateway: GatewayContext, request: Request) -> Response:
    """The served model, under each name, and the LoRA adapters; in Anthropic's form for Anthropic's clients."""
    gateway.auth.tenant(request)
    state = await gateway.cluster.state()
    names = served_model_names(gateway, state)
    if ANTHROPIC_HEADER in request.headers:
        data = [_anthropic_card(gateway, name) for name in names]
        return json_response({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})
    return json_response({"object": "list", "data": [_model_card(gateway, state, name) for name in names]})


async def get_model(gateway: GatewayContext, request: Request) -> Response:
    """The model with the name in the path.

    Raises:
        NotFound: another model is served.
    """
    gateway.auth.tenant(request)
    state, name = await gateway.cluster.state(), request.path_params["model"]
    names = served_model_names(gateway, state)
    if name not in names:
        raise NotFound(f"only {', '.join(map(repr, names))} is served")
    if ANTHROPIC_HEADER in request.headers:
        return json_response(_anthropic_card(gateway, name))
    return json_response(_model_card(gateway, state, name))


def served_model_names(gateway: GatewayContext, state: ClusterState) -> list[str]:
    """The names under which clients know the model, and those of LoRA adapters."""
    return [*(gateway.served_names or [state.model]), *(lora.name for lora in state.loras)]


def _model_card(gateway: GatewayContext, state: ClusterState, name: str) -> dict[str, object]:
    """OpenAI's model object, with vLLM's `max_model_len`, OpenRouter's modalities, and a LoRA adapter's `parent`."""
    card: dict[str, object] = {
        "id": name,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "moonpool",
        "max_model_len": state.max_tokens,
        "architecture": {"input_modalities": ["text", *(["image"] if gateway.tokenizer.takes_pictures else [])]},
    }
    if any(name == lora.name for lora in state.loras):
        card["parent"] = gateway.shown_name(state)
    return card


def _anthropic_card(gateway: GatewayContext, name: str) -> dict[str, object]:
    """Anthropic's model object."""
    created = datetime.fromtimestamp(gateway.started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}
