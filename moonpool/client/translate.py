"""Pure translation between the SDK's types and the contract's messages."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from moonpool.client.explain import Candidate, Explanation, TimedTokens, Timeline
from moonpool.client.types import (
    Choice,
    ClusterState,
    EndedRequest,
    FinishReason,
    GaugeValue,
    GenerateArguments,
    GenerateResult,
    InstanceInfo,
    Message,
    Placement,
    Quantiles,
    QueueInfo,
    RecentInfo,
    TenantInfo,
    TierInfo,
    Timing,
    TokenEvent,
    Usage,
)
from moonpool.contracts import assign, logprobs_from_proto, sampling_to_proto
from moonpool.errors import InvalidRequest, StreamBroken
from moonpool.logprobs import TokenLogprobs
from moonpool.v1 import conductor_pb2, kv_pb2

MAX_REQUEST_BYTES = 8 << 20
"""Largest message that gRPC takes, on both sides."""


_FINISH: dict[int, FinishReason] = {
    kv_pb2.FINISH_REASON_STOP: "stop",
    kv_pb2.FINISH_REASON_LENGTH: "length",
    kv_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


_KINDS: dict[int, str] = {
    kv_pb2.INSTANCE_KIND_CONDUCTOR: "conductor",
    kv_pb2.INSTANCE_KIND_PREFILL: "prefill",
    kv_pb2.INSTANCE_KIND_DECODE: "decode",
    kv_pb2.INSTANCE_KIND_KVSTORE: "kvstore",
}


def generate_request(given: GenerateArguments, *, whole: bool = False) -> conductor_pb2.GenerateRequest:
    """Build a request; `whole`: its answer is not read token by token.

    Raises:
        InvalidRequest: not exactly one prompt was given, or a value does not fit its field; names it.
        TypeError: an argument is not known.
    """
    unknown = set(given) - set(GenerateArguments.__annotations__)
    if unknown:
        raise TypeError(f"unexpected arguments: {', '.join(sorted(unknown))}")
    request = conductor_pb2.GenerateRequest(whole=whole)
    for name in ("tenant", "model", "request_id"):
        _assign(request, name, given.get(name, ""))
    _assign(request, "priority", given.get("priority", 0))
    form = _set_prompt(request, given)
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
    if request.ByteSize() > MAX_REQUEST_BYTES:
        raise InvalidRequest(form, f"the request has {request.ByteSize()} bytes, at most {MAX_REQUEST_BYTES} are taken")
    return request


def _set_prompt(request: conductor_pb2.GenerateRequest, given: GenerateArguments) -> str:
    """Set the prompt in the form that was given; returns the name of the form."""
    prompt, token_ids, messages = given.get("prompt"), given.get("token_ids"), given.get("messages")
    if sum(form is not None for form in (prompt, token_ids, messages)) != 1:
        raise InvalidRequest("prompt", "exactly one of prompt, token_ids and messages must be given")
    if given.get("tools") and messages is None:
        raise InvalidRequest("tools", "are for messages only: the chat template shows them to the model")
    if prompt is not None:
        _assign(request, "text", prompt, "prompt")
        return "prompt"
    if token_ids is not None:
        request.tokens.SetInParent()
        assign("token_ids", lambda: request.tokens.token_ids.extend(token_ids))
        return "token_ids"
    request.chat.SetInParent()
    assign("messages", lambda: request.chat.messages.extend(map(_message, messages or ())))
    if tools := given.get("tools"):
        assign("tools", lambda: setattr(request.chat, "tools", json.dumps(tools, ensure_ascii=False, allow_nan=False)))
    return "messages"


class ResultCollector:
    """Makes events and finally the result of a stream's messages, and checks that no token is lost or doubled."""

    def __init__(self) -> None:
        self.result: GenerateResult | None = None
        """The whole answer, once it has ended."""
        self.request_id = ""
        self.prompt_tokens = 0
        """Tokens of the prompt, 0 before it was placed."""
        self.placements: list[Placement] = []
        self.resumes = 0
        """How often the stream was taken up again."""
        self._seed = 0
        self._point: conductor_pb2.ResumePoint | None = None
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)  # by choice
        self._text: defaultdict[int, list[str]] = defaultdict(list)
        self._logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    @property
    def started(self) -> bool:
        """Something has been received."""
        return bool(self.placements or self._tokens or self.result)

    @property
    def resumable(self) -> bool:
        """The conductor has told how the stream is taken up again."""
        return self._point is not None

    def resume(self, request: conductor_pb2.GenerateRequest) -> conductor_pb2.GenerateRequest:
        """The request with which the stream goes on behind what has come; at first the request itself."""
        if self._point is None:
            return request
        self.resumes += 1
        again = conductor_pb2.GenerateRequest()
        again.CopyFrom(request)
        again.request_id, again.from_position = self.request_id, len(self._tokens[0])
        if not request.sampling.beam_width:
            again.sampling.seed = self._seed
        first, *further = [
            conductor_pb2.AnswerSoFar(token_ids=self._tokens[it], text_chars=sum(map(len, self._text[it])))
            for it in range(max(1, request.sampling.n))
        ]
        again.resume.CopyFrom(
            conductor_pb2.Resume(
                point=self._point,
                token_ids=first.token_ids,
                text_chars=first.text_chars,
                count=self.resumes,
                further=further,
                prompt_scored=bool(self._prompt_logprobs),
            )
        )
        return again

    def take(self, message: conductor_pb2.GenerateResponse) -> TokenEvent | None:
        """Take a message; returns an event when it holds one.

        Raises:
            StreamBroken: tokens are missing or came twice.
        """
        match message.WhichOneof("event"):
            case "placed":
                self.request_id = message.placed.request_id
                self.prompt_tokens = message.placed.prompt_tokens
                self._seed = message.placed.seed
                self._point = message.placed.resume if message.placed.HasField("resume") else None
                if message.placed.corrected:
                    del self.placements[-1:]
                self.placements.append(placement(message.placed.placement))
            case "delta":
                return self._delta(message.delta)
            case "prompt_logprobs":
                self._prompt_logprobs = (None, *_prompt_logprobs(message.prompt_logprobs))
            case "finished":
                self.result = self._finished(message.finished)
        return None

    def ended(self) -> GenerateResult:
        """Return the result at the stream's end.

        Raises:
            StreamBroken: the stream ended before the answer did.
        """
        if self.result is None:
            raise StreamBroken("the stream ended before the answer did")
        return self.result

    def _delta(self, delta: conductor_pb2.TokenDelta) -> TokenEvent:
        tokens = self._tokens[delta.choice]
        if delta.position != len(tokens):
            raise StreamBroken(f"expected token {len(tokens)} of the answer, got {delta.position}")
        tokens.extend(delta.token_ids)
        self._text[delta.choice].append(delta.text)
        logprobs = _logprobs(delta.logprobs, delta.token_ids) if delta.HasField("logprobs") else ()
        self._logprobs[delta.choice].extend(logprobs)
        return TokenEvent(delta.position, tuple(delta.token_ids), delta.text, delta.choice, logprobs)

    def _choices(self, finished: conductor_pb2.Finished) -> tuple[Choice, ...]:
        ends = finished.choices or [conductor_pb2.FinishedChoice(reason=finished.reason)]
        return tuple(
            Choice(
                list(self._tokens[index]),
                "".join(self._text[index]),
                _FINISH.get(end.reason, "cancelled"),
                end.score if end.HasField("score") else None,
                tuple(self._logprobs[index]),
            )
            for index, end in enumerate(ends)
        )

    def _finished(self, finished: conductor_pb2.Finished) -> GenerateResult:
        last, choices = placement(finished.placement), self._choices(finished)
        return GenerateResult(
            request_id=self.request_id,
            token_ids=choices[0].token_ids,
            text=choices[0].text,
            finish_reason=choices[0].finish_reason,
            usage=_copy(Usage, finished.usage),
            timing=_copy(Timing, finished.timing),
            placement=last,
            seed=self._seed,
            placements=(*self.placements[:-1], last),
            choices=choices,
            resumes=self.resumes,
            logprobs=choices[0].logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )


def _logprobs(message: kv_pb2.Logprobs, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """Row by row.

    Raises:
        StreamBroken: they are not those of the tokens.
    """
    found = logprobs_from_proto(message)
    if len(found) != len(token_ids) or not found.consistent:
        raise StreamBroken(f"the log probabilities are not those of {len(token_ids)} tokens")
    return tuple(found.of(token_ids))


def _prompt_logprobs(message: conductor_pb2.PromptLogprobs) -> tuple[TokenLogprobs, ...]:
    return _logprobs(message.logprobs, message.token_ids[1:])


def placement(message: conductor_pb2.Placement) -> Placement:
    """Translate a placement."""
    translated: Placement = _copy(Placement, message)
    return translated


_ENGINE_KINDS = {"prefill": kv_pb2.INSTANCE_KIND_PREFILL, "decode": kv_pb2.INSTANCE_KIND_DECODE}


def change_role(instance_id: str, kind: str) -> conductor_pb2.ChangeRoleRequest:
    """The request.

    Raises:
        InvalidRequest: there is no such role.
    """
    if kind not in _ENGINE_KINDS:
        raise InvalidRequest("kind", f"must be prefill or decode, is {kind!r}")
    return conductor_pb2.ChangeRoleRequest(instance_id=instance_id, kind=_ENGINE_KINDS[kind])


def cluster_state(message: conductor_pb2.ClusterStateResponse) -> ClusterState:
    """Translate the cluster's picture."""
    return ClusterState(
        ready=message.ready,
        model=message.model.name,
        max_tokens=message.model.max_tokens,
        block_tokens=message.model.layout.block_tokens,
        conductor=message.conductor.address,
        instances=tuple(map(_instance, message.instances)),
        emulated=message.model.emulated,
        queue=_queue(message.queue),
        recent=_recent(message.recent),
    )


def explanation(message: conductor_pb2.ExplainResponse) -> Explanation:
    """Translate an explanation."""
    return Explanation(
        placement=placement(message.placement) if message.HasField("placement") else None,
        candidates=tuple(_copy(Candidate, candidate) for candidate in message.candidates),
        measured_ttft_s=message.measured_ttft_s,
        measured_tpot_s=message.measured_tpot_s,
        refused=message.refused,
        policy=message.policy,
        waited_s=message.waited_s,
        timeline=_timeline(message.timeline),
        lane=message.lane,
    )


def _timeline(message: conductor_pb2.Timeline) -> Timeline:
    return Timeline(
        tenant=message.tenant,
        arrived_at=message.arrived_at,
        usage=_copy(Usage, message.usage),
        timing=_copy(Timing, message.timing),
        local_tokens=message.local_tokens,
        loads=tuple(_copy(TimedTokens, load) for load in message.loads),
        chunks=tuple(_copy(TimedTokens, chunk) for chunk in message.chunks),
        transfer_tail_s=message.transfer_tail_s,
        sent_bytes=message.sent_bytes,
        token_s=tuple(message.token_s),
    )


def gauges(message: conductor_pb2.ConductorStatsResponse) -> tuple[GaugeValue, ...]:
    """Translate gauges."""
    return tuple(
        GaugeValue(gauge.name, gauge.value, gauge.at_rest if gauge.HasField("at_rest") else None)
        for gauge in message.gauges
    )


def _instance(state: conductor_pb2.InstanceState) -> InstanceInfo:
    load = state.load
    return InstanceInfo(
        id=state.instance.id,
        kind=_KINDS.get(state.instance.kind, "unknown"),
        address=state.instance.address,
        incarnation=state.instance.incarnation,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        total_blocks=state.total_blocks,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        promised_blocks=load.promised_blocks,
        indexed_blocks=state.indexed_blocks,
        draining=load.draining,
        tiers=tuple(_copy(TierInfo, tier) for tier in load.tiers),
    )


def _queue(state: conductor_pb2.QueueState) -> QueueInfo:
    tenants = tuple(_copy(TenantInfo, tenant) for tenant in state.tenants)
    return QueueInfo(state.for_limits, state.for_room, state.prompt_bytes, tenants)


def _recent(state: conductor_pb2.RecentState) -> RecentInfo:
    return RecentInfo(
        window_s=state.window_s,
        requests=state.requests,
        usage=_copy(Usage, state.usage),
        ttft_s=_copy(Quantiles, state.ttft_s),
        tpot_s=_copy(Quantiles, state.tpot_s),
        last=tuple(
            EndedRequest(it.request_id, it.tenant, _copy(Usage, it.usage), _copy(Timing, it.timing))
            for it in state.last
        ),
    )


def _message(message: Mapping[str, Any]) -> conductor_pb2.ChatMessage:
    unknown = set(message) - Message.__annotations__.keys()
    if unknown:
        raise ValueError(f"a message has {', '.join(Message.__annotations__)}, not {', '.join(sorted(unknown))}")
    return conductor_pb2.ChatMessage(
        role=message["role"],
        content=message["content"],
        tool_calls=map(_tool_call, message.get("tool_calls", ())),
        tool_call_id=message.get("tool_call_id", ""),
    )


def _tool_call(call: Mapping[str, Any]) -> conductor_pb2.ToolCall:
    function = call["function"]
    return conductor_pb2.ToolCall(id=call["id"], name=function["name"], arguments=function["arguments"])


def _copy(cls: Any, message: Any) -> Any:
    """Build a dataclass whose fields are all fields of a message of the same name and type."""
    return cls(**{item.name: getattr(message, item.name) for item in fields(cls)})


def _assign(message: Any, name: str, value: object, field: str | None = None) -> None:
    assign(field or name, lambda: setattr(message, name, value))
