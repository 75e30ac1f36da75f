"""What callers of the SDK pass in and get back; names are those of vLLM and OpenAI where they have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from moonpool.logprobs import TokenLogprobs
from moonpool.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled"]


class CalledFunction(TypedDict):
    """A function that was called; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a function in an assistant's turn, in OpenAI's form."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(TypedDict):
    """One turn of a conversation.

    Attributes:
        role: "system", "user", "assistant" or "tool" (the result of a call).
        content: the text.
        tool_calls: what an assistant's turn has called.
        tool_call_id: which call a tool's turn is the result of.
    """

    role: str
    content: str
    tool_calls: NotRequired[Sequence[ToolCall]]
    tool_call_id: NotRequired[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency limits, seconds; None = no limit. A request that would miss one is refused with `Overloaded`.

    It may wait for `queue_s` seconds before that; this time does not count in `ttft_s`. 0 = it is refused at once, None
    = what the conductor's `--queue-deadline-s` says.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    queue_s: float | None = None


class GenerateArguments(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`: exactly one of `prompt`, `token_ids` and `messages`.

    Attributes:
        prompt: text, tokenised by the conductor.
        token_ids: tokens as they are.
        messages: a conversation; the model's chat template makes a prompt of it.
        tools: functions that the model may call, with `messages`: OpenAI's definitions, as the chat template takes
            them. Calls come as text, in the model's own form; with `SamplingParams.skip_special_tokens` false, special
            tokens that mark them are part of it.
        sampling: how tokens are chosen.
        slo: latency limits.
        tenant: whose request it is; tenants do not share KV.
        model: name of the model; "" = whatever is served.
        request_id: unique in the cluster; drawn by the conductor when "".
        context: id or tag of a context that goes before the messages or tokens; "" = none.
        context_ttl_s: the context lives so many seconds from now on; 0 = as it was.
        priority: as in vLLM, a lower one is served earlier; among the tenant's own requests; -100 to 100.
        timeout_s: seconds the request may take; None = the client's.
    """

    prompt: str | None
    token_ids: Sequence[int] | None
    messages: Sequence[Message] | None
    tools: Sequence[Mapping[str, Any]] | None
    sampling: SamplingParams | None
    slo: Slo | None
    tenant: str
    model: str
    request_id: str
    context: str
    context_ttl_s: float
    priority: int
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted. `cached_tokens` are prompt tokens whose KV was not computed anew; 0 of a resumed stream."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds on the conductor's clock: to the first token, per further token, to the end, waiting, prefilling.

    Of a resumed stream: since it was resumed the last time.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    e2e_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request ran: ids of instances, "" for none, and what was predicted."""

    prefill: str = ""
    decode: str = ""
    kvstore: str = ""
    predicted_cached_blocks: int = 0
    predicted_ttft_s: float = 0.0
    emulated: bool = False
    """Compute was emulated: times are a profile's, tokens mean nothing."""
    predicted_tbt_s: float = 0.0
    """Of a step, as decode predicted with its promise; 0 = it was not needed."""
    predicted_tpot_s: float = 0.0
    """Mean from one token of the answer to the next, as `Timing.tpot_s`; 0 = not predicted."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of an answer, the first of them at `position`, and the text that became certain with them.

    With several answers (`SamplingParams.n`), `choice` says of which; they come mixed, each in order.

    Text may lag behind tokens (a character or a stop text may be incomplete); the last event may have text alone. All
    texts together are the answer's text. A token that ended the answer is among the tokens and has no text.
    """

    position: int
    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the tokens, where `SamplingParams.logprobs` wants them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a request's answers. `finish_reason` is "stop", "length" or "cancelled".

    A hypothesis of a beam search has a `score`: its log probability over (its tokens ^ length penalty).
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    score: float | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of all tokens, where `SamplingParams.logprobs` wants them."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole answer, the first one when there are several. `finish_reason` is "stop", "length" or "cancelled"."""

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    placement: Placement
    seed: int
    placements: tuple[Placement, ...] = ()
    """Every placement the request had, the last one included: more than one when an instance failed on the way."""
    choices: tuple[Choice, ...] = ()
    """All answers, in the order of their numbers."""
    resumes: int = 0
    """How often the stream was lost with its conductor, or the connection to it, and taken up again."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """As `Choice.logprobs`, of the first answer."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Of the prompt's tokens, where `SamplingParams.prompt_logprobs` wants them; None of the first, which nothing
    precedes."""


@dataclass(frozen=True, slots=True)
class TierInfo:
    """What a kvstore holds in a tier, "dram" or "ssd"."""

    name: str
    blocks: int
    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """An instance as the conductor sees it. `tiers` are a kvstore's."""

    id: str
    kind: str
    address: str
    incarnation: int
    running: int
    waiting: int
    queued_tokens: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    promised_blocks: int
    indexed_blocks: int
    draining: bool
    tiers: tuple[TierInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """A tenant's requests at the conductor, and how many of them wait there; `weight` is its share."""

    tenant: str
    weight: float
    requests: int
    waiting: int


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """Requests that wait at the conductor: for a limit that can be kept, and for room at decode.

    `prompt_bytes` are those of the former. `tenants` are those with requests here, waiting or not; 100 at most.
    """

    for_limits: int = 0
    for_room: int = 0
    prompt_bytes: int = 0
    tenants: tuple[TenantInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A quantity of some requests: half of them have less than `p50`, one in a hundred has more than `p99`."""

    p50: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that was answered."""

    request_id: str
    tenant: str
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class RecentInfo:
    """Requests that the conductor answered in the last `window_s` seconds.

    Attributes:
        window_s: a minute, or less if the conductor is younger.
        requests: how many there were; at most 1,024 are counted.
        usage: their tokens, together.
        ttft_s: seconds to the first token.
        tpot_s: mean seconds between tokens, of answers with more than one.
        last: the last 32 at most, the newest first, also those from before.
    """

    window_s: float = 0.0
    requests: int = 0
    usage: Usage = Usage()
    ttft_s: Quantiles = Quantiles()
    tpot_s: Quantiles = Quantiles()
    last: tuple[EndedRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The cluster as the conductor sees it. `model` is "" before the first engine has joined.

    `emulated` names the profile by which the engines' compute is emulated; "" = it is real.
    """

    ready: bool
    model: str
    max_tokens: int
    block_tokens: int
    conductor: str
    instances: tuple[InstanceInfo, ...]
    emulated: str = ""
    queue: QueueInfo = QueueInfo()
    recent: RecentInfo = RecentInfo()


@dataclass(frozen=True, slots=True)
class GaugeValue:
    """One measured quantity; `at_rest` is what it must be when no request runs, None where it may rest anywhere."""

    name: str
    value: float
    at_rest: float | None
