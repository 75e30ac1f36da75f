"""Prefill requests in progress: the message, the tokens, and a bounded queue of events for the conductor."""

import asyncio
import dataclasses
from collections.abc import Sequence
from math import inf

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import check_instance
from moonpool.base.contracts import add_logprobs, copy_logprobs, logprobs_to_proto
from moonpool.base.errors import Internal, InvalidRequest, MoonpoolError
from moonpool.base.logprobs import Logprobs
from moonpool.base.scheduling.steps import SampledCandidates, StepResult, TokenHistory
from moonpool.engine.block_loader import check_source_kind, kv_source
from moonpool.engine.prefill.core.actions import (
    ChunkOrder,
    ReportFirstToken,
)
from moonpool.engine.prefill.core.events import (
    AddRequest,
    WriteBackTarget,
)
from moonpool.engine.request import IncomingRequest
from moonpool.v1 import kv_pb2, prefill_pb2

MAX_EVENTS = 8
MAX_STORES = 16
MAX_CHUNKS = 256
"""Most steps with reported times."""


@dataclasses.dataclass(slots=True, eq=False)
class LivePrefill:
    """One prompt: the order, the results, and a bounded queue with events for the conductor.

    Attributes:
        id: the request's number in the scheduler; an earlier attempt of the same request may still be ending.
        incoming: the request's record.
        asked: the conductor's message, checked.
        history: the sequence's tokens, for engines that check blocks' content.
        first: for each answer, the token after the prompt; for deferred answers, the most likely tokens.
        logprobs: the tokens' log probabilities, if wanted.
        scores: log probabilities of the prompt's tokens except the first, if wanted.
        embedding: the prompt's embedding, if wanted.
        error: why I/O for the prompt has failed.
        forgotten: deletions of the prompt's blocks, carried out here before the request arrived.
        loads, chunks: tokens that were loaded, and computed step by step, with their times.
        transport: transport on which the KV goes to decode.
    """

    id: int
    incoming: IncomingRequest
    asked: prefill_pb2.PrefillRequest
    history: TokenHistory = dataclasses.field(init=False)
    first: SampledCandidates | None = None
    logprobs: Logprobs | None = None
    scores: kv_pb2.Logprobs = dataclasses.field(default_factory=kv_pb2.Logprobs)
    embedding: bytes = b""
    error: MoonpoolError | None = None
    forgotten: Sequence[str] = ()
    loads: list[prefill_pb2.TimedTokens] = dataclasses.field(default_factory=list)
    chunks: list[prefill_pb2.TimedTokens] = dataclasses.field(default_factory=list)
    _came: float = dataclasses.field(default_factory=world.monotonic)
    transport: str = ""
    encode_s: float = 0.0
    _events: "asyncio.Queue[prefill_pb2.PrefillResponse | MoonpoolError | None]" = dataclasses.field(
        default_factory=lambda: asyncio.Queue(MAX_EVENTS)
    )

    def __post_init__(self) -> None:
        self.history = self.incoming.history()

    @property
    def request_id(self) -> str:
        return self.incoming.request_id

    @property
    def target(self) -> kv_pb2.TransferTarget | None:
        """The decode instance's transfer that takes the KV; None = the KV is not sent."""
        return self.asked.target if self.asked.HasField("target") else None

    @property
    def sources(self) -> list[prefill_pb2.PrefixSource]:
        """Instances to load a prefix from, best first."""
        return [*([self.asked.source] if self.asked.HasField("source") else []), *self.asked.other_sources]

    @property
    def copies(self) -> list[kv_pb2.Instance]:
        """Kvstores to write blocks to."""
        first = [self.asked.write_back] if self.asked.HasField("write_back") else []
        return [*first, *(replica.instance for replica in self.asked.replicas)]

    @property
    def _held(self) -> list[int | None]:
        """For each of `copies`, leading blocks that the kvstore is believed to hold; None = unknown."""
        asked = self.asked
        first = [asked.write_back_held if asked.HasField("write_back_held") else None]
        return [*(first if asked.HasField("write_back") else ()), *(replica.held_blocks for replica in asked.replicas)]

    def arrival(self) -> AddRequest:
        """Return the event for the scheduler."""
        asked, held = self.asked, zip(self.copies, self._held, strict=True)
        rows = self.incoming.rows
        return AddRequest(
            self.id,
            self.incoming.spec,
            None if self.target is None else self.target.held_blocks,
            tuple(kv_source(source.instance, source.blocks) for source in self.sources),
            tuple(WriteBackTarget(_store_name(store), blocks) for store, blocks in held),
            reuse=self.incoming.sampling.params.prompt_logprobs is None,
            max_queue_s=asked.max_queue_s if asked.HasField("max_queue_s") else None,
            delay_s=asked.delay_s,
            rows_tokens=0 if rows is None else rows.tokens,
            rows_s=0.0 if rows is None else rows.seconds,
        )

    def computed(self, chunk: ChunkOrder, index: int, result: StepResult) -> None:
        """Take a step's results for this request, the step's sequence at `index`; chunks come in order."""
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(self._timed(chunk.end - chunk.start, result.start_ns / 1e9, result.end_ns / 1e9))
        self.encode_s += sum(picture.ns for picture in result.pictures if picture.index == index) / 1e9
        token = result.sampled[index]
        if index in result.scores:
            add_logprobs(self.scores, result.scores[index])  # now: all at the end take too long
        self.embedding = result.embeddings.get(index, b"")
        if index in result.failed:
            self.error = self._failure(result.failed[index])
        if chunk.last and token is not None:
            self.first, self.logprobs = (
                result.several.get(index, SampledCandidates((token,))),
                result.logprobs.get(index),
            )

    def _failure(self, why: str) -> MoonpoolError:
        """Return why no token was sampled."""
        if self.incoming.sampling.params.response_format:
            return InvalidRequest("sequence.sampling.grammar", why)
        return Internal(why)

    def first_token(self, told: ReportFirstToken) -> prefill_pb2.PrefillResponse:
        """Return the event for the conductor when the prompt's next tokens are known."""
        found, rows = self.first, self.incoming.rows
        assert found is not None, "the last chunk samples"
        sources = [source.instance for source in self.sources]
        first = prefill_pb2.FirstToken(
            token_id=found.tokens[0],
            further_token_ids=found.tokens[1:],
            log_probabilities=found.log_probabilities,
            logprobs=None if self.logprobs is None else logprobs_to_proto(self.logprobs),
            embedding=self.embedding,
            local_tokens=told.cached_tokens,
            loaded_tokens=told.loaded_tokens,
            computed_tokens=told.computed_tokens,
            overtaken_tokens=told.overtaken_tokens,
            encode_s=self.encode_s,
            rows_s=0.0 if rows is None else rows.seconds,
            rows_tokens=0 if rows is None else rows.tokens,
            queue_s=told.queue_s,
            prefill_s=told.prefill_s,
            loads=self.loads,
            chunks=self.chunks,
            transport=self.transport,
            misses=[
                prefill_pb2.StoreMiss(store=sources[miss.source], block=miss.block, windowed=miss.windowed)
                for miss in told.misses
            ],
            reads=[
                prefill_pb2.LoadedPrefix(source=sources[load.source], blocks=load.blocks, seconds=load.seconds)
                for load in told.loads
            ],
        )
        response = prefill_pb2.PrefillResponse(first_token=first)
        if self.scores.logprobs:
            copy_logprobs(response.first_token.prompt_logprobs, self.scores)
        return response

    def note_load(self, tokens: int, began: float, ended: float) -> None:
        """Record loaded tokens; begin and end in seconds of `time.monotonic()`."""
        self.loads.append(self._timed(tokens, began, ended))

    def _timed(self, tokens: int, began: float, ended: float) -> prefill_pb2.TimedTokens:
        return prefill_pb2.TimedTokens(tokens=tokens, begin_s=began - self._came, end_s=ended - self._came)

    def report(self, event: prefill_pb2.PrefillResponse) -> None:
        """Queue an event for the conductor."""
        self._events.put_nowait(event)

    def stale(self, drain_s: float, taken: int) -> None:
        """Refuse the prompt: the queue is longer than the conductor assumed."""
        self.report(prefill_pb2.PrefillResponse(stale=prefill_pb2.PrefillStale(drain_s=drain_s, taken=taken)))
        self.end()

    def end(self, error: MoonpoolError | None = None) -> None:
        """End the events, with an error if one is given."""
        self._events.put_nowait(error)

    async def next(self) -> prefill_pb2.PrefillResponse | None:
        """Return the next event, None after the last; raises the error given to `end`."""
        event = await self._events.get()
        if isinstance(event, MoonpoolError):
            raise event
        return event


def check_prefill(request: prefill_pb2.PrefillRequest, incoming: IncomingRequest) -> None:
    """Check a request except the sequence; `incoming` was read from the sequence.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    if request.HasField("target"):
        check_instance(request.target.decode, "target.decode")
        if request.target.held_blocks > len(incoming.spec.keys):
            raise InvalidRequest("target.held_blocks", f"must be at most {len(incoming.spec.keys)}")
    if request.HasField("source"):
        check_instance(request.source.instance, "source.instance")
        check_source_kind("source", request.source)
    if request.HasField("write_back"):
        check_instance(request.write_back, "write_back")
    if request.HasField("max_queue_s") and not request.max_queue_s >= 0:
        raise InvalidRequest("max_queue_s", "must not be negative")
    if not 0 <= request.delay_s < inf:
        raise InvalidRequest("delay_s", f"must be a number of at least 0, is {request.delay_s}")
    _check_stores("other_sources", request.other_sources)
    for index, source in enumerate(request.other_sources):
        check_source_kind(f"other_sources[{index}]", source)
    _check_stores("replicas", request.replicas)


def _check_stores(field: str, stores: Sequence[prefill_pb2.PrefixSource | prefill_pb2.StoreReplica]) -> None:
    if len(stores) > MAX_STORES:
        raise InvalidRequest(field, f"at most {MAX_STORES}")
    for index, store in enumerate(stores):
        check_instance(store.instance, f"{field}[{index}].instance")


def _store_name(store: kv_pb2.Instance) -> str:
    """Name a store by id and address, whatever the epoch."""
    return f"{store.id} {store.address}"
