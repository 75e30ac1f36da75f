"""Arguments and results of requests. If vLLM or OpenAI has a name for a thing, the name is theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from moonpool.base.logprobs import TokenLogprobs
from moonpool.base.pictures.files import Picture
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.sessions import SessionTurn

FinishReason = Literal["stop", "length", "cancelled"]


class CalledFunction(TypedDict):
    """A called function; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A tool call in an assistant's message, in OpenAI's form."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class MessagePart(TypedDict):
    """A text or a picture of a message."""

    text: NotRequired[str]
    picture: NotRequired[Picture]


class Message(TypedDict):
    """One message in a conversation.

    Attributes:
        role: "system", "user", "assistant" or "tool" (the result of a tool call).
        content: the text; "" with `parts`.
        parts: texts and pictures in their order, in place of `content`.
        tool_calls: tool calls in an assistant's message.
        tool_call_id: id of the call that the tool's message answers.
        reasoning_content: the assistant's thoughts before the text.
    """

    role: str
    content: str
    tool_calls: NotRequired[Sequence[ToolCall]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]
    parts: NotRequired[Sequence[MessagePart]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency limits in seconds; None for no limit. A request that would miss a limit is refused with `Overloaded`.

    Attributes:
        ttft_s: time to first token, without the time in `queue_s`.
        tbt_s: time between tokens.
        queue_s: how long the request may wait for a placement that keeps the limits. 0: refused at once. None: the
            conductor's `--queue-deadline-s`.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    queue_s: float | None = None


class GenerateArguments(TypedDict, total=False):
    """Keyword arguments for `generate` and `stream`: give exactly one of `prompt`, `token_ids` and `messages`.

    Attributes:
        prompt: text, which the conductor tokenises.
        token_ids: the prompt as tokens.
        messages: a conversation; the model's chat template turns the messages into a prompt.
        tools: functions that the model may call, with `messages`: OpenAI's definitions, as the chat template takes
            them. A call is text in the answer, in the model's own form. If `SamplingParams.skip_special_tokens` is
            false, the text has the special tokens that mark the call.
        chat_template_kwargs: further variables of the chat template, with `messages`; plain JSON.
        continue_final_message: the answer continues the last message, an assistant's.
        sampling: sampling parameters.
        slo: latency limits.
        tenant: the request's owner; tenants do not share KV.
        model: name of the model or of a LoRA adapter; "" for the model that is served.
        request_id: unique in the cluster; "": the conductor chooses an id.
        context: id or tag of a context that precedes the messages or tokens; "" for none.
        context_ttl_s: new time to live of the context in seconds; 0 leaves the time unchanged.
        priority: -100 to 100; as in vLLM, lower values are served earlier, among the tenant's own requests.
        cache_salt: requests with different salts share no KV; "": no salt. At most 256 characters.
        expected_output_tokens: tokens that you expect of the answer, for forecasts of load; bounds nothing. 0: unknown.
        session: the session that the request is a turn of, with what is known about the session; None: no session.
        timeout_s: time limit for the request in seconds; None for the client's default.
    """

    prompt: str | None
    token_ids: Sequence[int] | None
    messages: Sequence[Message] | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    sampling: SamplingParams | None
    slo: Slo | None
    tenant: str
    model: str
    request_id: str
    context: str
    context_ttl_s: float
    priority: int
    cache_salt: str
    expected_output_tokens: int
    session: SessionTurn | None
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens with reused KV; 0 for a resumed stream.
        completion_tokens: tokens of all answers.
        loaded_tokens: of `cached_tokens`, those whose KV was loaded from kvstores and other instances.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    loaded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """A request's times in seconds, measured by the conductor. A resumed stream counts from the last resume.

    Attributes:
        ttft_s: from arrival to the first token.
        tpot_s: mean time per further token.
        e2e_s: from arrival to the end.
        queue_s: waiting for prefill.
        prefill_s: prefill.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    e2e_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs: instance ids, "" for none, and the predicted times."""

    prefill: str = ""
    decode: str = ""
    kvstore: str = ""
    predicted_cached_blocks: int = 0
    predicted_ttft_s: float = 0.0
    emulated: bool = False
    """Compute is emulated: the times come from a profile, and the tokens have no meaning."""
    predicted_tbt_s: float = 0.0
    """A decode step's time, as the decode instance predicted; 0 if no prediction was needed."""
    predicted_tpot_s: float = 0.0
    """Mean time per token, as `Timing.tpot_s`; 0 if not predicted."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens in an answer, and the text that became certain with these tokens.

    The text may lag behind the tokens, while a character or a stop text is incomplete. The last event may have text and
    no tokens. All events' texts together are the answer's text. The token that ends an answer has no text.

    Attributes:
        position: index of the first token in the answer.
        token_ids: the tokens.
        text: the text.
        choice: the answer's number, if the request has several (`SamplingParams.n`). The answers' events alternate.
        logprobs: the tokens' log probabilities, if `SamplingParams.logprobs` asks for them.
        finish_reason: why the answer ended, with the answer's last event. None: the answer goes on, or only the result
            tells.
        prompt_logprobs: log probabilities of the prompt's tokens, with the request's first event, if
            `SamplingParams.prompt_logprobs` asks for them. The first token has None.
    """

    position: int
    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a request. `finish_reason` is "stop", "length" or "cancelled".

    A beam search's hypothesis has a `score`: log probability / (number of tokens ^ length penalty).
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    score: float | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    """All tokens' log probabilities, if `SamplingParams.logprobs` asks for them."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole answer; with several answers, the first. `finish_reason` is "stop", "length" or "cancelled"."""

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    placement: Placement
    seed: int
    placements: tuple[Placement, ...] = ()
    """Every placement in order: several if an instance failed."""
    choices: tuple[Choice, ...] = ()
    """All answers, by number."""
    resumes: int = 0
    """How many times the stream lost the conductor or the connection and was resumed."""
    logprobs: Sequence[TokenLogprobs] = ()
    """The first answer's `Choice.logprobs`."""
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    """The prompt tokens' log probabilities, if `SamplingParams.prompt_logprobs` asks for them. The first token has
    None."""
    embedding: tuple[float, ...] = ()
    """The prompt's embedding, if `SamplingParams.embedding` asks for the embedding."""
