"""The body of a request that asks the model for an answer: what all APIs have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    PrivateAttr,
)

from moonpool.base.kv.keys import MAX_SALT_CHARS
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import SessionTurn, Slo
from moonpool.gateway.serving.body import Body, Integer
from moonpool.gateway.serving.thinking import ThinkingLimit
from moonpool.gateway.serving.tool_set import ToolSet

MOST_TOKENS = (1 << 31) - 1
_TTL_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class SloBody(Body):
    """Moonpool's latency limits, in seconds. A request that would miss a limit is answered with 429.

    Such a request first waits up to `queue_s` seconds for a placement that keeps the limits.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    queue_s: float | None = None


class SessionBody(Body):
    """The session that the request is a turn of, and what the client knows of the session. Times are seconds."""

    id: str | None = None
    return_s: float | None = None
    keep_s: float | None = None
    last: bool | None = None
    retention: Integer | None = None

    def to_turn(self, name: str = "", keep_s: float | None = None) -> SessionTurn:
        """The session for the SDK. `name` and `keep_s` count where the body has none."""
        return SessionTurn(
            id=self.id or name,
            return_s=self.return_s,
            keep_s=keep_s if self.keep_s is None else self.keep_s,
            last=bool(self.last),
            retention=self.retention or 0,
        )


class AgentHints(Body):
    """What an agent knows of its request, as Dynamo names it. A wrong hint costs time, and changes no answer."""

    unknown_ignored = True

    osl: Annotated[Integer, Field(ge=1, le=MOST_TOKENS)] | None = None
    speculative_prefill: bool | None = None


class Nvext(Body):
    """Dynamo's extensions of a request."""

    unknown_ignored = True

    agent_hints: AgentHints | None = None


class GenerateBody(Body):
    """A body that asks the model for an answer."""

    unknown_ignored = True

    model: str | None = None
    stream: bool | None = None
    slo: SloBody | None = None
    priority: Integer | None = None
    expected_output_tokens: Integer | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    session: SessionBody | None = None
    nvext: Nvext | None = None

    _format_field: str = PrivateAttr("")

    @property
    def format_field(self) -> str:
        """Name of the field that says what the answer looks like, for errors; "" before `to_sampling_params`."""
        return self._format_field

    def to_slo(self) -> Slo | None:
        """Latency limits for the SDK."""
        slo = self.slo
        return None if slo is None else Slo(ttft_s=slo.ttft_s, tbt_s=slo.tbt_s, queue_s=slo.queue_s)

    def to_session(self, header: str = "") -> SessionTurn | None:
        """The session for the SDK; None if the request names none and does not say how long KV is worth keeping.

        `header` is the name in the request's head, "" for none.
        """
        turn = (self.session or SessionBody()).to_turn(self.session_name(header), self.keep_s())
        return None if turn == SessionTurn() else turn

    @property
    def agent_hints(self) -> AgentHints:
        """What an agent knows of its request."""
        return (self.nvext and self.nvext.agent_hints) or AgentHints()

    def session_name(self, header: str) -> str:
        """Name of the session where `session` has none; "" for none."""
        return header

    def keep_s(self) -> float | None:
        """Seconds for which other fields say that KV is worth keeping; None: they do not say."""
        return None

    def tool_set(self) -> ToolSet | None:
        """Functions that the model may call. None: no functions.

        Raises:
            InvalidRequest: a tool is wrong or not supported; names the field.
        """
        return None

    def thinking_limit(self) -> ThinkingLimit:
        """How long the answer may think."""
        return ThinkingLimit()

    def num_logprobs(self) -> int | None:
        """Number of top log probabilities to return with each token. None: no log probabilities."""
        return None

    def wants_logprobs(self) -> bool:
        """Whether the response has log probabilities, for the answer or for the prompt."""
        return self.num_logprobs() is not None

    def to_sampling_params(self, max_tokens: int) -> SamplingParams:
        """Sampling parameters for the SDK, with at most `max_tokens` tokens. The conductor checks the values.

        Raises:
            InvalidRequest: a field cannot be translated; names the field.
        """
        raise NotImplementedError


class PromptCacheOptions(Body):
    """How OpenAI's prompt cache is used."""

    ignored = ("comparison_response_id", "mode", "prewarm")

    ttl: Annotated[str, Field(pattern=r"^[0-9]{1,5}[smhd]$")] | None = None


class PromptCacheBody(GenerateBody):
    """OpenAI's fields for the prompt cache: the key names a session, the others say how long KV is worth keeping."""

    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    def session_name(self, header: str) -> str:
        return header or self.prompt_cache_key or ""

    def keep_s(self) -> float | None:
        if self.prompt_cache_options is not None and (ttl := self.prompt_cache_options.ttl):
            return float(ttl[:-1]) * _TTL_UNITS_S[ttl[-1]]
        return _TTL_UNITS_S["d"] if self.prompt_cache_retention == "24h" else None
