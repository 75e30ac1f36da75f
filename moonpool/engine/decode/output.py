"""What a request's answers are so far: sent to conductors, and kept for takeovers."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from typing import Self

from moonpool.base.kv.keys import BlockKey, tokens_digest
from moonpool.base.logprobs import Logprobs
from moonpool.engine.subscriber import Subscriber
from moonpool.v1 import decode_pb2, kv_pb2, prefill_pb2

TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class RequestOutput:
    """A request's output, and what a takeover must show. The log keeps this record after the request's end.

    Attributes:
        request_id: id at the conductor.
        generation: the transfer's generation.
        secret: a conductor that knows the secret may take the request over; b"" = no conductor may.
        chain_root: root of the tenant's keys.
        answers: each answer's output. A search has no output before the end.
        why: why the request has ended early; "" = not failed.
    """

    request_id: str
    generation: int
    secret: bytes
    chain_root: BlockKey
    answers: "list[AnswerOutput]"
    why: str = ""

    def matches(self, asked: decode_pb2.ResumeSequence) -> bool:
        """Return whether the conductor knows the request, the secret, and each answer up to the given position."""
        named = (asked.request_id, asked.generation) == (self.request_id, self.generation)
        if not named or not self.secret or not compare_digest(asked.secret, self.secret):
            return False
        if len(asked.further) != len(self.answers) - 1:
            return False
        had = [
            (asked.from_position, asked.digest),
            *((position.from_position, position.digest) for position in asked.further),
        ]
        return all(self._knows(answer, *known) for answer, known in zip(self.answers, had, strict=True))

    def _knows(self, answer: "AnswerOutput", position: int, digest: bytes) -> bool:
        if answer.logprobs is not None and position < answer.scored_from:
            return False  # log probabilities not known here are computed again
        known = answer.up_to(position)
        return compare_digest(digest, tokens_digest(self.chain_root, known)) and len(known) == position

    def send(self, subscriber: Subscriber, positions: Sequence[int]) -> None:
        """Send each answer from the given position on."""
        subscriber.drop(self.request_id)
        for choice, (answer, position) in enumerate(zip(self.answers, positions, strict=True)):
            answer.send(subscriber, self.request_id, choice, position)
        if self.why:
            subscriber.failed(self.request_id, self.why)
        subscriber.flush()

    def without_prompt(self) -> Self:
        """Return the same output, without the tokens of the prompt."""
        return replace(self, answers=[answer.without_prompt() for answer in self.answers])


@dataclass(slots=True, eq=False)
class AnswerOutput:
    """One answer's output so far.

    Attributes:
        tokens: prompt and answer, once started; grows by each step. The log keeps the answer alone.
        prompt_tokens: number of prompt tokens in `tokens`.
        finish: why the answer has ended normally; unspecified while the answer continues.
        score: the score, if the answer is a search hypothesis.
        logprobs: log probabilities from position `scored_from` on; None if no log probabilities are wanted.
        prompt: how the prompt was computed, if here; told with the first output, at position `told_from`.
    """

    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    prompt_tokens: int = 0
    finish: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED
    score: float | None = None
    logprobs: Logprobs | None = None
    scored_from: int = 0
    prompt: prefill_pb2.FirstToken | None = None
    told_from: int = 0

    @property
    def length(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    def up_to(self, position: int) -> "array[int]":
        """Return the answer's tokens before a position."""
        return self.tokens[self.prompt_tokens : self.prompt_tokens + position]

    def send(self, subscriber: Subscriber, request_id: str, choice: int, position: int) -> None:
        """Queue the output from a position on for a conductor; sent at the next `flush`."""
        logprobs = None if self.logprobs is None else self.logprobs.part(position - self.scored_from)
        tokens = self.tokens[self.prompt_tokens + position :].tolist()
        prompt = self.prompt if position <= self.told_from else None
        subscriber.tokens(request_id, position, tokens, self.finish, choice, self.score, logprobs, prompt)

    def without_prompt(self) -> Self:
        """Return the same output, without the tokens of the prompt."""
        return replace(self, tokens=self.tokens[self.prompt_tokens :], prompt_tokens=0)
