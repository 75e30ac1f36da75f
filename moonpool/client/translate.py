"""Translates between the SDK's types and the messages of the contract."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from moonpool.base.contracts import assign, sampling_to_proto
from moonpool.base.errors import InvalidRequest
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.client.cluster_state import (
    ClusterState,
    GaugeValue,
    InstanceInfo,
    LoraInfo,
    PoolInfo,
    QueueInfo,
    RecentInfo,
    TierInfo,
)
from moonpool.client.explain import Attempt, Candidate, Explanation, Timeline
from moonpool.client.types import (
    GenerateArguments,
    Message,
    Placement,
)
from moonpool.v1 import conductor_pb2, kv_pb2

MAX_REQUEST_BYTES = 8 << 20
"""A gRPC message's maximum size, at the client and at the conductor."""


def generate_request(given: GenerateArguments, *, whole: bool = False) -> conductor_pb2.GenerateRequest:
    """Build a request. `whole`: the answer is sent as one message.

    Raises:
        InvalidRequest: there is not exactly one prompt, or a value does not fit the field; names the field.
        TypeError: an argument is unknown.
    """
    unknown = set(given) - set(GenerateArguments.__annotations__)
    if unknown:
        raise TypeError(f"unexpected arguments: {', '.join(sorted(unknown))}")
    request = conductor_pb2.GenerateRequest(whole=whole)
    for name in ("tenant", "model", "request_id", "cache_salt"):
        _assign(request, name, given.get(name, ""))
    for name in ("priority", "expected_output_tokens"):
        _assign(request, name, given.get(name, 0))
    prompt_field = _set_prompt(request, given)
    sampling, slo = given.get("sampling"), given.get("slo")
    if sampling is not None:
        request.sampling.CopyFrom(sampling_to_proto(sampling))
    for name in ("ttft_s", "tbt_s", "queue_s") if slo is not None else ():
        value_s = getattr(slo, name)
        if value_s is not None:
            _assign(request.slo, name, value_s, f"slo.{name}")
    if given.get("context") or given.get("context_ttl_s"):
        _assign(request.context, "id", given.get("context", ""), "context")
        _assign(request.context, "reset_ttl_s", given.get("context_ttl_s", 0.0), "context_ttl_s")
    session = given.get("session")
    if session is not None:
        request.session.CopyFrom(session_to_proto(session))
    if request.ByteSize() > MAX_REQUEST_BYTES:
        raise InvalidRequest(
            prompt_field, f"the request has {request.ByteSize()} bytes, at most {MAX_REQUEST_BYTES} are allowed"
        )
    return request


MAX_ANNOUNCED, MAX_ANNOUNCED_BYTES = 256, MAX_REQUEST_BYTES // 2
"""Most requests in one announcement, and most bytes if there are several requests."""


def in_portions(requests: Sequence[conductor_pb2.GenerateRequest]) -> Iterator[list[conductor_pb2.GenerateRequest]]:
    """The requests in order, in portions that fit into a message."""
    portion: list[conductor_pb2.GenerateRequest] = []
    nbytes = 0
    for request in requests:
        size = request.ByteSize()
        if portion and (len(portion) == MAX_ANNOUNCED or nbytes + size > MAX_ANNOUNCED_BYTES):
            yield portion
            portion, nbytes = [], 0
        portion.append(request)
        nbytes += size
    if portion:
        yield portion


def session_to_proto(session: SessionTurn) -> conductor_pb2.SessionTurn:
    """What a client says about a session.

    Raises:
        InvalidRequest: a value does not fit the field; names the field.
    """
    message = conductor_pb2.SessionTurn()
    for field in fields(session):
        value = getattr(session, field.name)
        if value is not None:
            _assign(message, field.name, value, f"session.{field.name}")
    return message


def _set_prompt(request: conductor_pb2.GenerateRequest, given: GenerateArguments) -> str:
    """Set the prompt. Returns the name of the argument that has the prompt."""
    prompt, token_ids, messages = given.get("prompt"), given.get("token_ids"), given.get("messages")
    if sum(value is not None for value in (prompt, token_ids, messages)) != 1:
        raise InvalidRequest("prompt", "exactly one of prompt, token_ids and messages must be given")
    for name in ("tools", "chat_template_kwargs", "continue_final_message"):
        if given.get(name) and messages is None:
            raise InvalidRequest(name, "is allowed only with messages: for the chat template")
    if prompt is not None:
        _assign(request, "text", prompt, "prompt")
        return "prompt"
    if token_ids is not None:
        request.tokens.SetInParent()
        assign("token_ids", lambda: request.tokens.token_ids.extend(token_ids))
        return "token_ids"
    request.chat.SetInParent()
    assign("messages", lambda: request.chat.messages.extend(map(_message, messages or ())))
    for name, field in (("tools", "tools"), ("chat_template_kwargs", "template_kwargs")):
        if value := given.get(name):
            assign(name, partial(_set_json, request.chat, field, value))
    request.chat.continue_final_message = given.get("continue_final_message", False)
    return "messages"


def _set_json(chat: conductor_pb2.ChatPrompt, field: str, value: Any) -> None:
    setattr(chat, field, json.dumps(value, ensure_ascii=False, allow_nan=False))


def _message(message: Mapping[str, Any]) -> conductor_pb2.ChatMessage:
    unknown = set(message) - Message.__annotations__.keys()
    if unknown:
        raise ValueError(f"a message has {', '.join(Message.__annotations__)}, not {', '.join(sorted(unknown))}")
    return conductor_pb2.ChatMessage(
        role=message["role"],
        content=message["content"],
        tool_calls=map(_tool_call, message.get("tool_calls", ())),
        tool_call_id=message.get("tool_call_id", ""),
        reasoning_content=message.get("reasoning_content", ""),
        parts=map(_part, message.get("parts", ())),
    )


def _part(part: Mapping[str, Any]) -> conductor_pb2.ContentPart:
    if (picture := part.get("picture")) is None:
        return conductor_pb2.ContentPart(text=part["text"])
    return conductor_pb2.ContentPart(
        picture=conductor_pb2.Picture(
            content=picture.content, width=picture.width, height=picture.height, detail=picture.detail
        )
    )


def _tool_call(call: Mapping[str, Any]) -> conductor_pb2.ToolCall:
    function = call["function"]
    return conductor_pb2.ToolCall(id=call["id"], name=function["name"], arguments=function["arguments"])


_ENGINE_KINDS = {"prefill": kv_pb2.INSTANCE_KIND_PREFILL, "decode": kv_pb2.INSTANCE_KIND_DECODE}


def change_role(instance_id: str, kind: str) -> conductor_pb2.ChangeRoleRequest:
    """Build a request to change an instance's role.

    Raises:
        InvalidRequest: the role is unknown.
    """
    if kind not in _ENGINE_KINDS:
        raise InvalidRequest("kind", f"must be prefill or decode, is {kind!r}")
    return conductor_pb2.ChangeRoleRequest(instance_id=instance_id, kind=_ENGINE_KINDS[kind])


def load_lora_adapter(lora_name: str, lora_path: str, *, load_inplace: bool) -> conductor_pb2.LoadLoraAdapterRequest:
    """Build a request to load a LoRA adapter.

    Raises:
        InvalidRequest: a value does not fit the field; names the field.
    """
    request = conductor_pb2.LoadLoraAdapterRequest(load_inplace=load_inplace)
    _assign(request, "lora_name", lora_name)
    _assign(request, "lora_path", lora_path)
    return request


def unload_lora_adapter(lora_name: str) -> conductor_pb2.UnloadLoraAdapterRequest:
    """Build a request to unload a LoRA adapter.

    Raises:
        InvalidRequest: the name does not fit the field.
    """
    request = conductor_pb2.UnloadLoraAdapterRequest()
    _assign(request, "lora_name", lora_name)
    return request


def with_requests(
    state: conductor_pb2.ClusterStateResponse, others: Sequence[conductor_pb2.ClusterStateResponse]
) -> conductor_pb2.ClusterStateResponse:
    """A cluster's state with the requests that further conductors have, and those that ended there."""
    found = conductor_pb2.ClusterStateResponse()
    found.CopyFrom(state)
    for other in others:
        _add_requests(found, other)
    return found


def _add_requests(state: conductor_pb2.ClusterStateResponse, other: conductor_pb2.ClusterStateResponse) -> None:
    queue, recent, others = state.queue, state.recent, other.recent
    queue.for_limits += other.queue.for_limits
    queue.for_room += other.queue.for_room
    queue.prompt_bytes += other.queue.prompt_bytes
    known = {tenant.tenant: tenant for tenant in queue.tenants}
    for tenant in other.queue.tenants:
        if (same := known.get(tenant.tenant)) is None:
            queue.tenants.append(tenant)
        else:
            same.requests += tenant.requests
            same.waiting += tenant.waiting
    queue.tenants.sort(key=lambda tenant: tenant.tenant)
    both = recent.requests + others.requests
    for ours, theirs in ((recent.ttft_s, others.ttft_s), (recent.tpot_s, others.tpot_s)):
        if both:
            ours.p50 = (ours.p50 * recent.requests + theirs.p50 * others.requests) / both
        ours.p99 = max(ours.p99, theirs.p99)
    recent.requests = both
    recent.window_s = max(recent.window_s, others.window_s)
    for field in others.usage.DESCRIPTOR.fields:
        setattr(recent.usage, field.name, getattr(recent.usage, field.name) + getattr(others.usage, field.name))
    last = sorted([*recent.last, *others.last], key=lambda request: request.ended_ago_s)[:MAX_LISTED]
    del recent.last[:]
    recent.last.extend(last)


def cluster_state(message: conductor_pb2.ClusterStateResponse) -> ClusterState:
    """Translate a cluster's state."""
    return ClusterState(
        ready=message.ready,
        model=message.model.name,
        max_tokens=message.model.max_tokens,
        block_size=message.model.layout.block_size,
        conductor=message.conductor.address,
        instances=tuple(map(_instance, message.instances)),
        emulated=message.model.emulated,
        queue=from_message(QueueInfo, message.queue),
        recent=from_message(RecentInfo, message.recent),
        loras=tuple(from_message(LoraInfo, lora) for lora in message.loras),
        pools=tuple(
            PoolInfo(
                _KINDS.get(pool.kind, "unknown"),
                pool.instances,
                pool.pressure,
                pool.backlog_s,
                pool.free_share,
                pool.wanted,
            )
            for pool in message.pools
        ),
    )


MAX_LISTED = 32
"""Ended requests listed individually, as conductors list them."""
_KINDS: dict[int, str] = {
    kv_pb2.INSTANCE_KIND_CONDUCTOR: "conductor",
    kv_pb2.INSTANCE_KIND_PREFILL: "prefill",
    kv_pb2.INSTANCE_KIND_DECODE: "decode",
    kv_pb2.INSTANCE_KIND_KVSTORE: "kvstore",
}


def _instance(state: conductor_pb2.InstanceState) -> InstanceInfo:
    load = state.load
    return InstanceInfo(
        id=state.instance.id,
        kind=_KINDS.get(state.instance.kind, "unknown"),
        address=state.instance.address,
        epoch=state.instance.epoch,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        total_blocks=state.total_blocks,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        promised_blocks=load.promised_blocks,
        indexed_blocks=state.indexed_blocks,
        draining=load.draining,
        tiers=tuple(from_message(TierInfo, tier) for tier in load.tiers),
        preemptions=load.preemptions,
        draft_tokens=load.draft_tokens,
        accepted_tokens=load.accepted_tokens,
        computes_prompts=state.computes_prompts,
        version=state.version,
        commit=state.commit,
    )


def explanation(message: conductor_pb2.ExplainResponse) -> Explanation:
    """Translate an explanation."""
    return Explanation(
        placement=from_message(Placement, message.placement) if message.HasField("placement") else None,
        candidates=tuple(from_message(Candidate, candidate) for candidate in message.candidates),
        measured_ttft_s=message.measured_ttft_s,
        measured_tpot_s=message.measured_tpot_s,
        refused=message.refused,
        failed=message.failed,
        cancelled=message.cancelled,
        policy=message.policy,
        waited_s=message.waited_s,
        timeline=from_message(Timeline, message.timeline),
        transport=message.transport,
        attempts=tuple(from_message(Attempt, attempt) for attempt in message.attempts),
        regret_s=message.regret_s,
        better=message.better,
        decode_regret_s=message.decode_regret_s,
        better_decode=message.better_decode,
    )


def gauges(message: conductor_pb2.ConductorStatsResponse) -> tuple[GaugeValue, ...]:
    """Translate gauges."""
    return tuple(
        GaugeValue(gauge.name, gauge.value, gauge.at_rest if gauge.HasField("at_rest") else None)
        for gauge in message.gauges
    )


DataclassT = TypeVar("DataclassT")


def from_message(cls: Callable[..., DataclassT], message: Any) -> DataclassT:
    """Build a dataclass from a message with the same field names.

    A field that is a dataclass, or a tuple of dataclasses, is built the same way.
    """
    return cls(**{name: convert(getattr(message, name)) for name, convert in _converters(cls)})


@cache
def _converters(cls: Any) -> Sequence[tuple[str, Callable[[Any], Any]]]:
    hints = get_type_hints(cls)
    return [(field.name, _converter(hints[field.name])) for field in fields(cls)]


def _converter(hint: Any) -> Callable[[Any], Any]:
    """The function that converts a message field's value to a type."""
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(from_message, hint)
    if get_origin(hint) is tuple:
        convert = _converter(get_args(hint)[0])
        return lambda values: tuple(map(convert, values))
    return lambda value: value


def _assign(message: Any, name: str, value: object, field: str | None = None) -> None:
    assign(field or name, lambda: setattr(message, name, value))
