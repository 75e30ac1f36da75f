"""The contract for engine clients: what an adapter needs from the engine that joins the cluster.

An engine takes token ids and gives token ids, and publishes KV events over ZMQ (docs/extend/engine_adapter.md).
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from moonpool.base.kv.media import MediaItem
from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import SamplingParams
from moonpool.interop.kv_events.stream import EventSource

HANDLED = frozenset({
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "n", "skip_special_tokens",
    "grammar", "length_penalty", "early_stopping", "thinking_budget", "thinking_marks",
})  # fmt: skip
"""Options that no table of an adapter has: the conductor and the adapter carry them out (`EnginePrompt` has lengths,
seed and ends, `EngineAnswer` ends thoughts), or they say more about `response_format` and `beam_width`."""


def refused_options(passed: Collection[str], params: type[SamplingParams] = SamplingParams) -> tuple[str, ...]:
    """Return the sampling options that an adapter refuses: those that the adapter does not pass to the engine."""
    return tuple(sorted({option.name for option in fields(params)} - set(passed) - HANDLED))


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine, from start to end.

    Attributes:
        version: software name and version.
        life: differs between two starts of the engine.
        block_size: tokens per KV block.
        blocks: KV blocks on the engine's devices.
        max_tokens: longest sequence.
        sources: where the ranks publish KV events; one for each rank.
        unsupported: sampling options that are not passed to the engine (`refused_options`).
        page_namespace: namespace of the KV that the engine keeps in kvstores; b"" = none, or not known yet.
        loras: folders of the LoRA adapters that the engine serves, by name.
        pictures: whether the engine computes pictures in prompts of token ids.
    """

    version: str
    life: str
    block_size: int
    blocks: int
    max_tokens: int
    sources: tuple[EventSource, ...]
    unsupported: tuple[str, ...]
    page_namespace: bytes = b""
    loras: Mapping[str, str] = field(default_factory=dict)
    pictures: bool = False


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """One answer that the engine shall generate.

    Attributes:
        request_id: for the engine's logs.
        token_ids: tokens before the answer.
        params: how tokens are chosen; its lengths, seed and ends do not count.
        seed: this answer's seed.
        max_tokens, min_tokens: tokens to generate.
        end_token_ids: any of them ends the answer; no other token does.
        salt: prompts with different salts share no KV; "" = no salt.
        priority: lower ones go first.
        tenant: whose KV the prompt's is in kvstores; None = the engine uses none.
        keep: only the first token is wanted; the engine keeps the prompt's KV for another engine.
        transfer: the prompt's KV is at another engine, which named it so; None = it is computed here.
        lora: the engine's name of the LoRA adapter that computes; "" = the base model.
        rank: data-parallel rank that holds most of the prompt; negative = any.
        timed: the engine is timed, and its tokens do not matter.
        media: pictures among the tokens, with their files.
    """

    request_id: str
    token_ids: "array[int]"
    params: SamplingParams
    seed: int
    max_tokens: int
    min_tokens: int
    end_token_ids: tuple[int, ...]
    salt: str
    priority: int
    rank: int
    tenant: str | None = None
    keep: bool = False
    transfer: Mapping[str, Any] | None = None
    lora: str = ""
    timed: bool = False
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The next tokens of an answer.

    Attributes:
        token_ids: the tokens.
        logprobs: the tokens' log probabilities, if wanted.
        finish: "stop" = an end token is the last one; "length"; "" = the answer goes on.
        cached_tokens: tokens of the prompt that the engine had cached; None = not told.
        transfer: names kept KV (`EnginePrompt.keep`) for another engine.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    finish: str = ""
    cached_tokens: int | None = None
    transfer: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What runs on an engine.

    Attributes:
        running: requests that run.
        waiting: requests that wait.
        usage: share of the engine's KV blocks that requests hold.
        preemptions: preemptions since the engine's start.
        computed_tokens: prompt tokens computed since the engine's start; None = not told.
    """

    running: int
    waiting: int
    usage: float
    preemptions: int = 0
    computed_tokens: int | None = None


class EngineClient(ABC):
    """Speaks to one engine. Calls may be cancelled; a cancelled call ends the call's work at the engine."""

    @abstractmethod
    async def describe(self) -> EngineFacts:
        """The engine's current facts.

        Raises:
            Unavailable: the engine does not answer, or is not ready.
            ConfigError: the engine was started without something that an adapter needs; names what to add.
        """

    @abstractmethod
    async def load(self) -> tuple[str, EngineLoad]:
        """`EngineFacts.life`, and the load; raises Unavailable."""

    @abstractmethod
    def generate(self, prompt: EnginePrompt) -> AsyncGenerator[EngineOutput, None]:
        """Generate an answer; the last output has `finish`.

        Raises:
            Unavailable: the engine is lost, or cannot go on.
            InvalidRequest: the engine refuses the prompt.
        """

    def meeting(self, prompt: EnginePrompt) -> Mapping[str, Any] | None:
        """Where the engine that computes a prompt meets the one that answers, if both must be asked at the same time.

        None: the answer tells where KV is (`EngineOutput.transfer`), and the other engine is asked afterwards.
        """
        return None

    @abstractmethod
    async def clear_cache(self) -> bool:
        """Delete all KV that no request uses; return whether the engine could. Raises Unavailable."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close all connections."""
