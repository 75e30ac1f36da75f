"""A whole prompt that is computed here, as the conductor is told about it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.base.contracts import logprobs_to_proto
from moonpool.base.logprobs import Logprobs
from moonpool.base.scheduling.steps import SampledCandidates, StepResult
from moonpool.engine.decode.core.actions import BeginPrompt, Chunk
from moonpool.engine.subscriber import known_tokens
from moonpool.v1 import decode_pb2, prefill_pb2

MAX_CHUNKS = 256
"""Most steps with reported times."""


@dataclass(slots=True, eq=False)
class PromptProgress:
    """What is known of a whole prompt computed here.

    Attributes:
        asked: the conductor's message, checked.
        came: when the message came, seconds.
        tokens: tokens in the prompt.
        cached_tokens: leading tokens that are not computed, because they were cached.
        chunks: tokens that were computed step by step, with their times.
        scores: log probabilities of the prompt's tokens except the first, if wanted.
        embedding: the prompt's embedding, if wanted.
        began, ended: begin of the first step and end of the last one, seconds.
        over: the first tokens are known.
    """

    asked: decode_pb2.StartSequence
    came: float
    tokens: int
    cached_tokens: int = 0
    chunks: list[prefill_pb2.TimedTokens] = field(default_factory=list)
    scores: Logprobs = field(default_factory=Logprobs)
    embedding: bytes = b""
    began: float | None = None
    ended: float = 0.0
    over: bool = False

    def known(self, answers: int) -> list[Sequence[int]]:
        """For each answer, the tokens known behind the first token."""
        return known_tokens(self.asked, answers)

    def begin(self, told: BeginPrompt) -> None:
        """Note that the prompt's turn has come."""
        self.cached_tokens = told.cached_tokens

    def computed(self, chunk: Chunk, index: int, result: StepResult) -> None:
        """Take a step's results, the chunk's at `index`. After a preemption chunks are computed again."""
        begin_s, self.ended = result.start_ns / 1e9, result.end_ns / 1e9
        self.began = begin_s if self.began is None else self.began
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(
                prefill_pb2.TimedTokens(tokens=chunk.count, begin_s=begin_s - self.came, end_s=self.ended - self.came)
            )
        if index in result.scores:
            self.scores = self.scores.part(0, chunk.start)
            self.scores.extend(result.scores[index])
        self.embedding = result.embeddings.get(index, b"")

    def first_token(self, found: SampledCandidates, logprobs: Logprobs | None) -> prefill_pb2.FirstToken:
        """Return what the conductor is told with the first token."""
        began = self.ended if self.began is None else self.began
        return prefill_pb2.FirstToken(
            token_id=found.tokens[0],
            further_token_ids=found.tokens[1:],
            log_probabilities=found.log_probabilities,
            logprobs=None if logprobs is None else logprobs_to_proto(logprobs),
            prompt_logprobs=logprobs_to_proto(self.scores) if len(self.scores) else None,
            embedding=self.embedding,
            local_tokens=self.cached_tokens,
            computed_tokens=self.tokens - self.cached_tokens,
            queue_s=max(0.0, began - self.came),
            prefill_s=self.ended - began,
            chunks=self.chunks,
        )


def prompt_error(message: decode_pb2.StartSequence, stores: int) -> str | None:
    """Return why a whole prompt cannot be computed with this message; None if it can."""
    if not 0 <= message.delay_s < math.inf:
        return f"delay_s: must be a number of at least 0, is {message.delay_s}"
    if len(message.held_blocks) > stores:
        return f"held_blocks: {len(message.held_blocks)} numbers for {stores} kvstores"
    return None
