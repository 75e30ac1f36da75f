"""vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from moonpool.base.errors import InvalidRequest
from moonpool.gateway.serving.body import Body
from moonpool.gateway.serving.context import GatewayContext


class LoadLoraBody(Body):
    """`/v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadLoraBody(Body):
    """`/v1/unload_lora_adapter`."""

    ignored = ("lora_int_id",)

    lora_name: str


async def load_lora_adapter(gateway: GatewayContext, request: Request) -> Response:
    """Load a LoRA adapter, from then on a model that requests may name.

    Raises:
        PermissionDenied: the caller is not an operator.
        InvalidRequest: the name is taken, the path is not allowed, or the adapter cannot be computed; names the field.
    """
    gateway.auth.require_operator(request)
    checked = await gateway.auth.read_body(request, LoadLoraBody, uses_budget=False)
    body = checked.body
    if body.lora_name in gateway.served_names:
        raise InvalidRequest("lora_name", f"{body.lora_name!r} is the model's own name")
    await gateway.client.load_lora_adapter(body.lora_name, body.lora_path, load_inplace=bool(body.load_inplace))
    gateway.cluster.forget()
    told = f"Success: LoRA adapter '{body.lora_name}' added successfully."
    return PlainTextResponse(told, headers=checked.warning_headers)


async def unload_lora_adapter(gateway: GatewayContext, request: Request) -> Response:
    """Unload a LoRA adapter. Requests that have begun go on.

    Raises:
        PermissionDenied: the caller is not an operator.
        NotFound: no adapter of this name is loaded.
    """
    gateway.auth.require_operator(request)
    checked = await gateway.auth.read_body(request, UnloadLoraBody, uses_budget=False)
    await gateway.client.unload_lora_adapter(checked.body.lora_name)
    gateway.cluster.forget()
    name = checked.body.lora_name
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.", headers=checked.warning_headers)
