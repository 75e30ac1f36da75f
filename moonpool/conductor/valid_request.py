"""A checked request, and what requests are checked against."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moonpool.base.checkpoint import ModelConfig, Tokenizer
from moonpool.base.checkpoint.config import AnswerRules
from moonpool.base.cluster.proto_conversion import media_to_proto
from moonpool.base.contracts import sampling_to_proto
from moonpool.base.errors import InvalidRequest
from moonpool.base.kv.keys import BlockKey, block_keys, pack_keys, tokens_to_bytes
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.media import MediaItem
from moonpool.base.pictures.base import PictureRule
from moonpool.base.sampling_params import SamplingParams
from moonpool.conductor.core.request_spec import RequestSpec, ResumeState
from moonpool.v1 import conductor_pb2, kv_pb2


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A checked request.

    The request never changes, except that the dispatcher fills in `spec.number` and `spec.resumed`.

    Attributes:
        spec: what the core knows of the request: lengths, limits, tenant, times; no tokens.
        prompt: token ids.
        sampling: with a seed, unless the answers are deferred.
        stops: stop strings.
        end_token_ids: tokens that end the generation.
        chain_root: the root of the prompt's block keys.
        prompt_keys: keys of the prompt's full blocks, `block_size` tokens each.
        bad_tokens: runs of tokens; a run's last token is never chosen after the others.
        suppressed: tokens that are never chosen.
        thinking: how many tokens the answer may think; None = any number.
        whole: the client reads the answer only at the end.
        resume: the client's progress, if the client resumes the request.
        cache_salt: the salt in `chain_root`; "" for none.
        lora: the LoRA adapter in `chain_root`; None = the base model.
        media: pictures in the prompt, in order.
    """

    spec: RequestSpec
    prompt: array[int]
    sampling: SamplingParams
    stops: tuple[str, ...]
    end_token_ids: tuple[int, ...]
    chain_root: bytes
    prompt_keys: tuple[BlockKey, ...]
    block_size: int
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()
    thinking: kv_pb2.ThinkingBudget | None = None
    whole: bool = False
    resume: ResumeRequest | None = None
    cache_salt: str = ""
    lora: kv_pb2.LoraAdapter | None = None
    media: tuple[MediaItem, ...] = ()

    def ends_with(self, token_id: int, generated: int) -> bool:
        """Return whether `token_id`, as the `generated`-th token of a choice, is the choice's regular end."""
        return token_id in self.end_token_ids and generated >= self.sampling.min_tokens

    def keys_with(self, generated: array[int]) -> list[BlockKey]:
        """Keys for all full blocks in prompt and generated tokens; only blocks beyond the prompt's are hashed."""
        known = list(self.prompt_keys)
        start = len(known) * self.block_size
        if len(self.prompt) + len(generated) < start + self.block_size:
            return known
        parent, tokens = known[-1] if known else self.chain_root, self.prompt[start:] + generated
        return known + block_keys(parent, tokens, self.block_size, self.media, start)

    def sequence(
        self, sequence_id: str, generated: array[int], keys: list[BlockKey], *, scored: bool = False
    ) -> kv_pb2.SequenceSpec:
        """Return the sequence that engines compute.

        Args:
            sequence_id: the id that engines see.
            generated: tokens of the answer that are known already.
            keys: keys for all full blocks in prompt and `generated`.
            scored: the prompt's log probabilities, or the prompt's embedding, are wanted.
        """
        sampling = self.sampling if scored else replace(self.sampling, prompt_logprobs=None, embedding=False)
        return kv_pb2.SequenceSpec(
            request_id=sequence_id,
            token_ids=tokens_to_bytes(self.prompt + generated),
            prompt_tokens=len(self.prompt),
            block_keys=pack_keys(keys),
            sampling=sampling_to_proto(sampling),
            end_token_ids=self.end_token_ids,
            tenant=self.spec.tenant,
            chain_root=self.chain_root,
            cache_salt=self.cache_salt,
            lora=self.lora,
            thinking=self.thinking,
            suppressed_token_ids=self.suppressed,
            bad_tokens=[kv_pb2.TokenRun(token_ids=run) for run in self.bad_tokens],
            priority=self.spec.priority,
            expected_output_tokens=self.spec.expected_tokens,
            weight=self.spec.weight,
            media=media_to_proto(self.media),
        )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model, against which requests are checked: the checkpoint, and what the engines agreed on."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    namespace: bytes
    layout: KVLayout
    max_tokens: int
    """Longest sequence, prompt and answer together."""
    queue_s: float
    """Seconds that requests may wait for a placement if they set no `slo.queue_s`."""
    suggested: Mapping[str, float | int]
    """Sampling parameters for requests that do not set them."""
    rules: AnswerRules
    """What holds for every answer."""
    weights: Mapping[str, float]
    """Shares of tenants, as `ConductorConfig.tenant_weights` has them."""
    lora: Callable[[str], kv_pb2.LoraAdapter | None] = lambda name: None
    """The LoRA adapter of a name."""
    pictures: PictureRule | str = ""
    """What the model makes of pictures; a text says why the model takes none."""


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """How far the client of a resumed request is.

    Attributes:
        choices: the client's progress, per choice.
        point: the resume point that the client got last. The secret proves that the client is the same.
        state: the core's part.
        unscored: the client wants the prompt's log probabilities or embedding, and has not got them.
    """

    choices: tuple[ClientProgress, ...]
    point: conductor_pb2.ResumePoint
    state: ResumeState
    unscored: bool = False


@dataclass(frozen=True, slots=True)
class ClientProgress:
    """How much of one choice a client already has: tokens, and text characters."""

    tokens: array[int]
    text_chars: int


def require(field: str, condition: bool, message: str) -> None:
    """Raise InvalidRequest about a field, unless the condition holds."""
    if not condition:
        raise InvalidRequest(field, message)
