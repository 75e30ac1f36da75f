"""From a sequence's parameters to what one step samples with, and when the sequence ends."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Self

from moonpool.frozen import frozen
from moonpool.kv.keys import tokens_to_bytes
from moonpool.sampling import GREEDY, SampleSpec, SamplingParams, stream_seed
from moonpool.sched.steps import Scored
from moonpool.v1 import kv_pb2


@frozen
class SequenceSampling:
    """How the tokens of one sequence are chosen and when they end."""

    prompt_tokens: int
    """Length of the original prompt: the token after it has output position 0, also in a continued stream."""
    params: SamplingParams = GREEDY
    sample_index: int = 0
    """Which of the request's samples; see `moonpool.sampling.stream_seed`."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence (already without end-of-sequence tokens when those are ignored)."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens not to be chosen before `params.min_tokens`."""
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    """Of each the last token is not chosen after the others, all of them the answer's."""

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_tokens: int,
        end_token_ids: Iterable[int],
        bad_tokens: Iterable[Sequence[int]] = (),
    ) -> Self:
        """Of a request; `end_token_ids` are the model's end-of-sequence tokens."""
        stop = frozenset(params.stop_token_ids)
        all_ends = stop.union(end_token_ids)
        return cls(
            prompt_tokens,
            params,
            end_token_ids=stop if params.ignore_eos else all_ends,
            banned_token_ids=tuple(sorted(all_ends)),
            bad_tokens=tuple(tuple(tokens) for tokens in bad_tokens),
        )

    @property
    def candidates(self) -> int:
        """Tokens that a beam search looks at after each beam: any end token, and enough others. 0 = no beam search."""
        return self.params.beam_width and self.params.beam_width + len(self.end_token_ids)

    def ends_with(self, token: int, tokens: int, model_tokens: int) -> bool:
        """Whether the sequence ends with this token, its `tokens`-th with the prompt's."""
        return token in self.end_token_ids or tokens >= self.total_tokens(model_tokens)

    def total_tokens(self, model_tokens: int) -> int:
        """Longest the sequence can become, prompt and output, where the model takes `model_tokens`."""
        return min(self.prompt_tokens + self.params.max_tokens, model_tokens)

    def at(self, tokens: "array[int]") -> SampleSpec:
        """Parameters for sampling the token after `tokens` (the prompt and everything generated so far).

        After the prompt alone that is the first token of each of the request's samples.
        """
        position = len(tokens) - self.prompt_tokens
        return SampleSpec(
            self.params,
            seed=stream_seed(self.params.seed or 0, self.sample_index),
            samples=1 if position else self.params.n,
            best=self.candidates,
            position=position,
            history=tokens.tobytes() if self.params.penalised else None,
            prompt_tokens=self.prompt_tokens,
            banned=self._banned(tokens, position),
            answer=tokens[self.prompt_tokens :].tobytes() if self.params.response_format else b"",
        )

    def steady(self, tokens: int, model_tokens: int) -> int:
        """How many of the next tokens are chosen as `SampleSpec.after` has it, of a sequence that has so many tokens.

        The last of them may be the answer's last.
        """
        left, answer = self.total_tokens(model_tokens) - tokens, tokens - self.prompt_tokens
        if self.bad_tokens:
            return 1
        return min(left, self.params.min_tokens - answer) if answer < self.params.min_tokens else left

    def _banned(self, tokens: "array[int]", position: int) -> tuple[int, ...]:
        """Tokens that must not come at an output position; worked out anew each time, so there is no state to lose."""
        banned = self.banned_token_ids if position < self.params.min_tokens else ()
        return banned + tuple(bad[-1] for bad in self.bad_tokens if _begun(bad, tokens, position))

    def scored(self, tokens: "array[int]", start: int, end: int) -> Scored | None:
        """Which prompt tokens get log probabilities where the tokens [start, end) of the prompt are computed."""
        top, last = self.params.prompt_logprobs, min(end + 1, self.prompt_tokens)
        if top is None or last <= start + 1:
            return None
        return Scored(tokens_to_bytes(tokens[start + 1 : last]), top)

    def finish(self, tokens: "array[int]", model_tokens: int) -> "kv_pb2.FinishReason.ValueType":
        """Why the sequence ends with the last of `tokens`, or FINISH_REASON_UNSPECIFIED when it goes on.

        An end token counts at any position: before `min_tokens` it is banned and cannot be sampled.
        """
        if len(tokens) > self.prompt_tokens and tokens[-1] in self.end_token_ids:
            return kv_pb2.FINISH_REASON_STOP
        if len(tokens) >= self.total_tokens(model_tokens):
            return kv_pb2.FINISH_REASON_LENGTH
        return kv_pb2.FINISH_REASON_UNSPECIFIED


def _begun(bad: tuple[int, ...], tokens: "array[int]", position: int) -> bool:
    """Whether an answer with so many tokens ends with all but the last token of a bad word."""
    before = len(bad) - 1
    return before <= position and tokens[len(tokens) - before :].tolist() == list(bad[:-1])
