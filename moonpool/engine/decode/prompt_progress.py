"""A whole prompt that is computed here, as the conductor is told about it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.base.cluster.proto_conversion import check_instance
from moonpool.base.contracts import add_logprobs, copy_logprobs, cut_logprobs, logprobs_to_proto
from moonpool.base.errors import InvalidRequest
from moonpool.base.logprobs import Logprobs
from moonpool.base.scheduling.steps import SampledCandidates, StepResult
from moonpool.engine.block_loader import check_source_kind, kv_source
from moonpool.engine.decode.core.actions import BeginPrompt, Chunk
from moonpool.engine.request import RequestRows
from moonpool.engine.scheduler.prefix_sources import KVSource
from moonpool.engine.subscriber import known_tokens
from moonpool.v1 import decode_pb2, kv_pb2, prefill_pb2

MAX_CHUNKS = 256
"""Most steps with reported times."""
MAX_SOURCES = 17
"""Most sources of a prefix."""


@dataclass(slots=True, eq=False)
class PromptProgress:
    """What is known of a whole prompt computed here.

    Attributes:
        asked: the conductor's message, checked.
        came: when the message came, seconds.
        tokens: tokens in the prompt.
        rows: encoded rows of its pictures, where kvstores keep such.
        told: how much was cached and loaded, once the prompt's turn has come.
        loads, chunks: tokens that were loaded, and computed step by step, with their times.
        scores: log probabilities of the prompt's tokens except the first, if wanted.
        embedding: the prompt's embedding, if wanted.
        encode_s: seconds that went into pictures.
        began, ended: begin of the first step and end of the last one, seconds.
        over: the first tokens are known.
    """

    asked: decode_pb2.StartSequence
    came: float
    tokens: int
    rows: RequestRows | None = None
    told: BeginPrompt | None = None
    loads: list[prefill_pb2.TimedTokens] = field(default_factory=list)
    chunks: list[prefill_pb2.TimedTokens] = field(default_factory=list)
    scores: kv_pb2.Logprobs = field(default_factory=kv_pb2.Logprobs)
    embedding: bytes = b""
    encode_s: float = 0.0
    began: float | None = None
    ended: float = 0.0
    over: bool = False

    def known(self, answers: int) -> list[Sequence[int]]:
        """For each answer, the tokens known behind the first token."""
        return known_tokens(self.asked, answers)

    @property
    def sources(self) -> Sequence[prefill_pb2.PrefixSource]:
        """Where a prefix may be loaded from, the best first."""
        return self.asked.sources

    def kv_sources(self) -> tuple[KVSource, ...]:
        """Return the sources for the scheduler."""
        return tuple(kv_source(source.instance, source.blocks) for source in self.sources)

    def note_load(self, tokens: int, began: float, ended: float) -> None:
        """Record loaded tokens; begin and end in seconds of `time.monotonic()`."""
        self.loads.append(self._timed(tokens, began, ended))

    def _timed(self, tokens: int, began: float, ended: float) -> prefill_pb2.TimedTokens:
        return prefill_pb2.TimedTokens(tokens=tokens, begin_s=began - self.came, end_s=ended - self.came)

    def computed(self, chunk: Chunk, index: int, result: StepResult) -> None:
        """Take a step's results, the chunk's at `index`. After a preemption chunks are computed again."""
        begin_s, self.ended = result.start_ns / 1e9, result.end_ns / 1e9
        self.began = begin_s if self.began is None else self.began
        self.encode_s += sum(picture.ns for picture in result.pictures if picture.index == index) / 1e9
        if self.rows is not None:
            self.rows.computed(index, result.pictures)
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(self._timed(chunk.count, begin_s, self.ended))
        if index in result.scores:
            cut_logprobs(self.scores, chunk.start)
            add_logprobs(self.scores, result.scores[index])
        self.embedding = result.embeddings.get(index, b"")

    def first_token(self, found: SampledCandidates, logprobs: Logprobs | None) -> prefill_pb2.FirstToken:
        """Return what the conductor is told with the first token."""
        began = self.ended if self.began is None else self.began
        told, stores = self.told, [source.instance for source in self.sources]
        assert told is not None, "a prompt is computed after its turn has come"
        first = prefill_pb2.FirstToken(
            token_id=found.tokens[0],
            further_token_ids=found.tokens[1:],
            log_probabilities=found.log_probabilities,
            logprobs=None if logprobs is None else logprobs_to_proto(logprobs),
            embedding=self.embedding,
            local_tokens=told.cached_tokens,
            loaded_tokens=told.loaded_tokens,
            computed_tokens=self.tokens - told.cached_tokens - told.loaded_tokens,
            encode_s=self.encode_s,
            rows_s=0.0 if self.rows is None else self.rows.seconds,
            rows_tokens=0 if self.rows is None else self.rows.tokens,
            queue_s=max(0.0, began - self.came),
            prefill_s=self.ended - began,
            loads=self.loads,
            chunks=self.chunks,
            misses=[
                prefill_pb2.StoreMiss(store=stores[miss.source], block=miss.block, windowed=miss.windowed)
                for miss in told.misses
            ],
            reads=[
                prefill_pb2.LoadedPrefix(source=stores[load.source], blocks=load.blocks, seconds=load.seconds)
                for load in told.loads
            ],
        )
        if self.scores.logprobs:
            copy_logprobs(first.prompt_logprobs, self.scores)
        return first


def prompt_error(message: decode_pb2.StartSequence, stores: int) -> str | None:
    """Return why a whole prompt cannot be computed with this message; None if it can."""
    if not 0 <= message.delay_s < math.inf:
        return f"delay_s: must be a number of at least 0, is {message.delay_s}"
    if len(message.held_blocks) > stores:
        return f"held_blocks: {len(message.held_blocks)} numbers for {stores} kvstores"
    if len(message.sources) > MAX_SOURCES:
        return f"sources: at most {MAX_SOURCES}"
    try:
        for index, source in enumerate(message.sources):
            check_instance(source.instance, f"sources[{index}].instance")
            check_source_kind(f"sources[{index}]", source)
    except InvalidRequest as error:
        return str(error)
    return None
