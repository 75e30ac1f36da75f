"""From a sequence's parameters to what one step samples with, and when the sequence ends.

Owns the arithmetic of output positions, end tokens and lengths, in one place for prefill and decode. Knows nothing of
logits, blocks or batches.
"""

from array import array
from dataclasses import dataclass
from typing import Self

from moonpool.sched.steps import SampleSpec
from moonpool.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """How the tokens of one sequence are chosen and when they end. Fields as in the contract's Sampling."""

    prompt_tokens: int
    """Length of the original prompt: the token after it has output position 0, also in a continued stream."""
    max_tokens: int = 128
    """Output tokens at most, counted from the original prompt's end."""
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    sample_index: int = 0
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence (already without end-of-sequence tokens when those are ignored)."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens not to be chosen before `min_tokens`."""

    @classmethod
    def from_proto(cls, spec: kv_pb2.SequenceSpec) -> Self:
        """From the contract; every field of `spec.sampling` is taken as set (the conductor fills in the defaults)."""
        s = spec.sampling
        stop = frozenset(s.stop_token_ids)
        all_ends = frozenset(spec.end_token_ids) | stop
        return cls(
            prompt_tokens=spec.prompt_tokens,
            max_tokens=s.max_tokens if s.HasField("max_tokens") else 128,
            min_tokens=s.min_tokens,
            temperature=s.temperature if s.HasField("temperature") else 1.0,
            top_p=s.top_p if s.HasField("top_p") else 1.0,
            top_k=s.top_k,
            min_p=s.min_p,
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            repetition_penalty=s.repetition_penalty if s.HasField("repetition_penalty") else 1.0,
            logit_bias=tuple(sorted(s.logit_bias.items())),
            seed=s.seed,
            end_token_ids=stop if s.ignore_eos else all_ends,
            banned_token_ids=tuple(sorted(all_ends)),
        )

    @property
    def needs_history(self) -> bool:
        """Whether sampling looks at the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def total_tokens(self, model_tokens: int) -> int:
        """Longest the sequence can become, prompt and output, where the model takes `model_tokens`."""
        return min(self.prompt_tokens + self.max_tokens, model_tokens)

    def at(self, tokens: "array[int]") -> SampleSpec:
        """Parameters for sampling the token after `tokens` (the prompt and everything generated so far)."""
        position = len(tokens) - self.prompt_tokens
        return SampleSpec(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=dict(self.logit_bias),
            seed=self.seed,
            sample_index=self.sample_index,
            position=position,
            history=tokens.tobytes() if self.needs_history else None,
            prompt_tokens=self.prompt_tokens,
            banned=self.banned_token_ids if position < self.min_tokens else (),
        )

    def finish(self, tokens: "array[int]", model_tokens: int) -> "kv_pb2.FinishReason.ValueType":
        """Why the sequence ends with the last of `tokens`, or FINISH_REASON_UNSPECIFIED when it goes on.

        An end token is believed wherever it was sampled: `min_tokens` has kept it from being sampled too early.
        """
        if len(tokens) > self.prompt_tokens and tokens[-1] in self.end_token_ids:
            return kv_pb2.FINISH_REASON_STOP
        if len(tokens) >= self.total_tokens(model_tokens):
            return kv_pb2.FINISH_REASON_LENGTH
        return kv_pb2.FINISH_REASON_UNSPECIFIED
