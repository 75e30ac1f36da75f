"""Handlers of `/v1/responses`: create, count tokens, read, cancel, delete, list the input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moonpool.base.errors import InvalidRequest
from moonpool.gateway.responses.background_turn import BackgroundTurn
from moonpool.gateway.responses.body import ResponsesBody
from moonpool.gateway.responses.context import ResponsesContext
from moonpool.gateway.responses.event_log import EventLog, EventLogResponse
from moonpool.gateway.responses.formatter import BackgroundFormatter, ResponsesFormatter, ResponsesOptions
from moonpool.gateway.responses.response_object import UNDER_WAY, response_head
from moonpool.gateway.responses.stored_items import list_page, owner_and_name
from moonpool.gateway.responses.turn import ResponsesTurn
from moonpool.gateway.serving.body_reader import CLEANUP
from moonpool.gateway.serving.client_watch import while_connected
from moonpool.gateway.serving.generation_response import GenerationResponse
from moonpool.gateway.serving.json_response import json_response
from moonpool.gateway.serving.logprobs import LogprobsFormatter
from moonpool.gateway.serving.tolerance import known


async def create_response(
    gateway: ResponsesContext, request: Request
) -> Response | GenerationResponse | EventLogResponse:
    """Answer a conversation of items."""
    checked = await gateway.auth.read_body(request, ResponsesBody)
    body, state = checked.body, await gateway.cluster.state()
    limit = body.max_output_tokens
    job = gateway.builder.prepare(checked, state, state.max_tokens if limit is None else limit)
    turn = await ResponsesTurn.of(gateway, checked, job.arguments.get("model", ""))
    job.prompts, tools = [{"messages": await checked.work(turn.messages)}], await checked.work(body.tool_set)
    job.set_chat_options(body.chat_options())
    parser = await while_connected(request.receive, gateway.builder.offer_tools(job, tools))
    logprobs = LogprobsFormatter.of(gateway.tokenizer, body, state)
    options = ResponsesOptions(
        echoed_fields=body.echoed_fields(stored=turn.is_stored),
        call_kinds=dict(pair for _, tool in known(body.tools) for pair in tool.call_kinds()),
        keep=turn.keep,
    )
    if not body.background:
        return gateway.generate(job, ResponsesFormatter(job.model_name, parser, logprobs, options))
    waiting = BackgroundTurn(
        gateway,
        turn,
        {"id": f"resp_{turn.request_id}", **response_head(job.model_name, options.echoed_fields)},
        EventLog() if body.stream else None,
    )
    job.on_placed = waiting.placed
    formatter = BackgroundFormatter(waiting.head, job.model_name, parser, logprobs, options)
    await waiting.start(gateway.generate(job, formatter), request.scope[CLEANUP])
    if waiting.events is None:
        return json_response(waiting.response("queued"), job.headers)
    return EventLogResponse(waiting.events, 0, {**job.headers, "x-request-id": job.client_id or turn.request_id})


async def count_input_tokens(gateway: ResponsesContext, request: Request) -> Response:
    """Number of tokens in the prompt that a request would have."""
    checked = await gateway.auth.read_body(request, ResponsesBody)
    turn, tools = await ResponsesTurn.of(gateway, checked, ""), await checked.work(checked.body.tool_set)
    definitions, given = tools.definitions if tools else (), await checked.work(turn.messages)
    max_tokens = await gateway.max_model_len()
    options = checked.body.chat_options()

    async def encoded() -> list[int]:
        messages = await gateway.pictures.read(turn.tenant, given)
        return await gateway.tokenizer.encode_chat(turn.tenant, messages, definitions, max_tokens, options)

    tokens = await while_connected(request.receive, encoded())
    checked.caller.budget.charge_work(len(tokens))
    content = {"object": "response.input_tokens", "input_tokens": len(tokens)}
    return json_response(content, checked.warning_headers)


async def get_response(gateway: ResponsesContext, request: Request) -> Response | EventLogResponse:
    """A stored response; with `stream`, the response's events after the number `starting_after`."""
    tenant, name = owner_and_name(gateway, request, "resp_")
    streamed, after = request.query_params.get("stream", "false"), request.query_params.get("starting_after")
    if streamed not in ("true", "false"):
        raise InvalidRequest("stream", "must be true or false")
    if after is not None and (streamed == "false" or not after.isdecimal()):
        raise InvalidRequest("starting_after", "must be the number of an event, with stream=true")
    response = await _response(gateway, tenant, name)
    if streamed == "false":
        return json_response(response)
    events = gateway.background.events(tenant, name)
    if events is None:
        message = "only background responses that were created with stream: true have events, at their own gateway and "
        raise InvalidRequest("stream", message + "for some time after their end; read the response without stream")
    return EventLogResponse(events, 0 if after is None else int(after) + 1, {})


async def cancel_response(gateway: ResponsesContext, request: Request) -> Response:
    """End a background response that has no answer yet. An ended response stays unchanged."""
    tenant, name = owner_and_name(gateway, request, "resp_")
    if not (await gateway.responses.get(tenant, name)).body["background"]:
        raise InvalidRequest("", f"{name} is no background response, and only these can be cancelled")
    await gateway.background.cancel(tenant, name)
    record = await gateway.responses.get(tenant, name)
    if record.body["status"] in UNDER_WAY:  # not begun yet, or another gateway's, which has ended
        await gateway.responses.replace_body(tenant, replace(record, body={**record.body, "status": "cancelled"}))
    return json_response(await _response(gateway, tenant, name))


async def delete_response(gateway: ResponsesContext, request: Request) -> Response:
    """Delete a stored response. Responses after the deleted response can no longer be continued."""
    tenant, name = owner_and_name(gateway, request, "resp_")
    await gateway.background.delete(tenant, name)
    await gateway.responses.delete(tenant, name)
    gateway.pins.release(tenant, name)
    return json_response({"id": name, "object": "response", "deleted": True})


async def list_input_items(gateway: ResponsesContext, request: Request) -> Response:
    """Items of the request that a stored response answered, the last first."""
    return await list_page(gateway, request, "resp_")


async def _response(gateway: ResponsesContext, tenant: str, name: str) -> dict[str, Any]:
    """A stored response, with the current status.

    Raises:
        NotFound: the response is not stored.
    """
    body = (await gateway.responses.get(tenant, name)).body
    response = {**body, "output": await gateway.responses.items(tenant, name, output=True)}
    if response["status"] not in UNDER_WAY:
        return response
    phase = gateway.background.phase(tenant, name)
    if phase is None and gateway.wall_clock() > response["created_at"] + gateway.background.timeout_s:
        lost = {"code": "server_error", "message": "the gateway that computed the response has ended"}
        return {**response, "status": "failed", "error": lost}
    return {**response, "status": phase or response["status"]}
