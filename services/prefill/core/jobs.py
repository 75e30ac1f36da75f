"""State of the prefill scheduler: settings, jobs, their outgoing KV, and I/O in flight with the blocks it holds."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.kv.keys import BlockKey
from moonpool.scheduling.block_manager import BlockLending, BlockManager, KVOwner
from moonpool.scheduling.fair_share import FairQueue, FairShares, QueueKey, priority_rank
from moonpool.scheduling.latency import Speeds, SpeedTracker
from moonpool.scheduling.request import EngineRequest
from moonpool.scheduling.state_machine import CancelIo, PendingIo
from services.prefill.core.actions import (
    Action,
    AwaitVerdict,
    CloseTransfer,
    LayerBlocks,
    OpenTransfer,
    PrefixLoaded,
    PrefixMiss,
    SendSlices,
)
from services.prefill.core.events import KVSource, SubmitJob, WriteBackTarget

MERGE_BYTES = 128 << 10
"""Slices of several layers leave in one batch until they make so many bytes: a message costs about 150 us."""


class BlockSpan(NamedTuple):
    """Blocks [first, end) of one layer that are whole. `step`: the step that made them, None for a prefix."""

    layer: int
    first: int
    end: int
    step: int | None


@dataclass(slots=True, eq=False)
class OutgoingKV:
    """One prompt's way to decode. Waiting slices are positions only: the bytes stay in the pool until they are sent."""

    num_blocks: int
    handed: list[int]
    """Per layer one bit for each block handed over; blocks that decode holds count as handed over."""
    pending: deque[BlockSpan] = field(default_factory=deque)
    io: int | None = None
    """Opening, sending or waiting for the verdict: one at a time."""
    open: bool = False
    sent_bytes: int = 0

    @classmethod
    def of(cls, layers: int, num_blocks: int, held_blocks: int) -> "OutgoingKV":
        """For a prompt of which decode holds the leading blocks."""
        return cls(num_blocks, [(1 << held_blocks) - 1] * layers)

    @property
    def whole(self) -> bool:
        """Whether every slice was handed over."""
        return all(handed == (1 << self.num_blocks) - 1 for handed in self.handed)

    def add(self, layer: int, first: int, end: int, step: int | None) -> None:
        """Queues blocks [first, end) of a layer, which must not change any more; those queued before are skipped."""
        todo = _block_bits(first, end) & ~self.handed[layer]
        self.handed[layer] |= todo
        while todo:
            begin = (todo & -todo).bit_length() - 1
            run = todo >> begin
            length = (~run & run + 1).bit_length() - 1
            self.pending.append(BlockSpan(layer, begin, begin + length, step))
            todo = run >> length << begin + length

    def take_back(self, first: int) -> None:
        """Blocks from `first` on will be computed anew: what of them waits is not sent now, but then."""
        kept = deque[BlockSpan]()
        for span in self.pending:
            if span.first < first:
                kept.append(BlockSpan(span.layer, span.first, min(span.end, first), span.step))
            if span.end > first:
                self.handed[span.layer] &= ~_block_bits(max(span.first, first), span.end)
        self.pending = kept

    def take(self, slice_bytes: int) -> list[BlockSpan]:
        """The next batch to send: one layer's spans, and more layers while they are small."""
        batch, size = [self.pending.popleft()], 0
        while self.pending:
            size += (batch[-1].end - batch[-1].first) * slice_bytes
            if self.pending[0].layer != batch[-1].layer and size >= MERGE_BYTES:
                break
            batch.append(self.pending.popleft())
        return batch


def _block_bits(first: int, end: int) -> int:
    return (1 << end) - (1 << first) if end > first else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings:
    """What an instance's core is told once."""

    blocks: int
    """Of the KV pool."""
    block_tokens: int
    layers: int
    slice_bytes: int
    """One layer of one block."""
    step_tokens: int
    """Tokens computed by one step at most; at least one block."""
    stages: int = 1
    """Steps in flight at most."""
    max_started: int = 64
    """Jobs that hold blocks at most."""
    max_queue: int = 1024
    """Jobs at most; more are refused."""
    load_timeout_s: float = 5.0
    """A load may take so many seconds beyond what is predicted."""
    verdict_timeout_s: float = 30.0

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.layers * self.slice_bytes // self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-tokens // self.block_tokens)

    def reused_tokens(self, tokens: int, blocks: int) -> int:
        """Tokens of a prompt that need not be computed where its leading blocks are there: the last one always is."""
        return min(blocks * self.block_tokens, tokens - 1)


@dataclass(slots=True, eq=False)
class BlockTable:
    """A job's blocks. They are released when neither the job nor any I/O holds them."""

    blocks: list[int]
    holds: int = 1


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """A prefix that is being loaded: blocks [first, end) of the job."""

    io: int
    source: int
    first: int
    end: int
    moved_at: float
    """When the last layer came, or the load began."""
    first_at: float = 0.0
    """When the first layer came."""
    layers: int = 0
    """Leading layers that are there."""
    overtaken: bool = False
    """It has stalled under a step: no step follows it layer by layer any more."""


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One prompt."""

    number: int
    spec: EngineRequest
    sources: tuple[KVSource, ...]
    copies: tuple[WriteBackTarget, ...]
    outgoing: OutgoingKV | None
    added_at: float
    place: QueueKey
    expected_tokens: int
    """Leading tokens that are expected not to be computed; for predictions, until the job starts."""
    owner: KVOwner
    shared_tokens: int = 0
    """Leading tokens that jobs before it compute here, and register; for predictions, until its first step."""
    reuse: bool = True
    """False = nothing of it may be cached or loaded."""
    next_source: int = 0
    first_step_at: float | None = None
    token_at: float | None = None
    table: BlockTable | None = None
    """Bound when the job starts, given up when nothing of it is to be computed or sent."""
    prefix_blocks: int = 0
    """Leading blocks that were found in the own pool, or loaded. May grow until the first step is planned."""
    cached: int = 0
    """Leading tokens that need not be computed as they were found in the own pool."""
    loaded: int = 0
    """Tokens after these that need not as they were loaded."""
    computed: int = 0
    """Leading tokens that are cached, loaded or computed: their KV is in the pool in all layers. Never shrinks."""
    scheduled: int = 0
    """Leading tokens that are there, or in flight."""
    load: PrefixLoad | None = None
    flying: int = 0
    """Shares in flight that count."""
    gated: bool = False
    """The share in flight follows the load: nothing is built on it until it is done."""
    settling: set[int] = field(default_factory=set)
    """I/O that reads or writes blocks which are to be computed anew: until it ends, nothing is planned."""
    put_until: list[int] = field(default_factory=list)
    """Per copy, blocks before this one were offered or need not be."""
    misses: list[PrefixMiss] = field(default_factory=list)
    loads: list[PrefixLoaded] = field(default_factory=list)

    @classmethod
    def of(cls, event: SubmitJob, settings: PrefillSettings, now: float) -> "PrefillJob":
        """A job as it arrives."""
        spec, outgoing = event.request, None
        if event.held_blocks is not None:
            outgoing = OutgoingKV.of(settings.layers, settings.blocks_for(spec.tokens), event.held_blocks)
        sources = event.sources if event.reuse else ()
        believed = max((source.blocks for source in sources), default=0)
        expected = settings.reused_tokens(spec.tokens, believed)
        place = QueueKey(spec.tenant, priority_rank(now, spec.priority), event.job, spec.weight)
        given = event.job, spec, sources, event.copies
        owner = KVOwner(spec.tenant, spec.transient)
        return cls(*given, outgoing, now, place, expected, owner, reuse=event.reuse)

    @property
    def finished(self) -> bool:
        """Whether all KV is there and the next token was sampled."""
        return self.computed == self.spec.tokens


@dataclass(slots=True, eq=False)
class SequenceSlice:
    """A job's part of a step in flight."""

    job: int
    start: int
    end: int
    first: bool
    """The job's computing begins here."""
    last: bool
    loading: bool
    """Tokens before `start` come through the step's gates."""
    full_hit: bool
    """The KV of its tokens is there, or comes through the gates: it writes none."""
    live: bool = True
    """It counts."""


@dataclass(slots=True, eq=False)
class StepFlight:
    """A step that the engine has."""

    shares: list[SequenceSlice]
    tables: tuple[BlockTable, ...]
    gated: bool
    moved_at: float
    """When its last layer was done, or it came to the front of the engine."""
    began_at: float
    opened: int = -1
    """Highest layer whose gate is open."""
    layers: int = 0
    """Leading layers that are computed."""


@dataclass(slots=True, eq=False)
class LoadFlight:
    """A read from a kvstore, or from another instance's pool."""

    job: int
    source: KVSource
    nbytes: int
    wanted: int
    """Blocks."""
    tables: tuple[BlockTable, ...]


@dataclass(slots=True, eq=False)
class ReplicaFlight:
    """A chain's blocks that are being copied here: those before `first` were here."""

    number: int
    keys: tuple[BlockKey, ...]
    owner: KVOwner
    blocks: tuple[int, ...]
    first: int
    source: KVSource
    nbytes: int
    tables: tuple[BlockTable, ...] = ()


@dataclass(slots=True, eq=False)
class TransferFlight:
    """Opening a transfer, or waiting for its verdict: holds no blocks."""

    job: int
    opens: bool
    tables: tuple[BlockTable, ...] = ()


@dataclass(slots=True, eq=False)
class SendFlight:
    """Slices on their way out of the pool."""

    job: int
    tables: tuple[BlockTable, ...]


@dataclass(slots=True, eq=False)
class WriteBackFlight:
    """Blocks that are being written to a kvstore."""

    blocks: tuple[int, ...]
    tables: tuple[BlockTable, ...] = ()


IoInFlight = StepFlight | LoadFlight | ReplicaFlight | TransferFlight | SendFlight | WriteBackFlight


class PrefillState:
    """What the parts of the core share.

    Attributes:
        settings: what the core was told.
        manager: the pool's blocks.
        lending: those that other instances read.
        tracker: predicts seconds with all of the engine's cores, and learns from what was measured.
        share: of them, that steps have had lately: others of the host have the rest.
        jobs: all that have not ended, by number.
        shares: of the tenants; steps are charged to them, in predicted seconds.
        waiting: those without blocks, in fair order.
        started: those with blocks, in the order of starting.
        ios: I/O under way, with what it holds.
        steps: those of it that the engine computes, in their order.
        now: time of the event that is being handled.
        out: its actions.
    """

    def __init__(self, settings: PrefillSettings, speeds: Speeds) -> None:
        self.settings = settings
        self.manager = BlockManager(settings.blocks)
        self.lending = BlockLending(self.manager)
        self.tracker = SpeedTracker(speeds)
        self.share = 1.0
        self.jobs: dict[int, PrefillJob] = {}
        self.shares = FairShares()
        self.waiting = FairQueue(self.shares)
        self.started: dict[int, PrefillJob] = {}
        self.ios: PendingIo[IoInFlight] = PendingIo()
        self.steps: dict[int, StepFlight] = {}
        self.now = 0.0
        self.out: list[Action] = []

    @property
    def front(self) -> StepFlight | None:
        """The step that the engine computes, or the first of those in its pipeline."""
        return next(iter(self.steps.values()), None)

    def do(self, action: Action) -> None:
        """Notes an action."""
        self.out.append(action)

    def begin(self, flight: IoInFlight) -> int:
        """I/O begins, which holds tables of the flight; returns its number."""
        for table in flight.tables:
            table.holds += 1
        return self.ios.begin(flight)

    def end(self, io: int) -> IoInFlight:
        """I/O has ended: what it held is given back, and whoever waits for its end goes on."""
        flight = self.ios.end(io)
        for table in flight.tables:
            self.drop(table)
        for number in _jobs_of(flight):
            job = self.jobs.get(number)
            if job is not None and job.settling:
                job.settling.discard(io)
        return flight

    def cancel(self, io: int | None) -> None:
        """The I/O is not wanted any more, if it is still under way."""
        if io is not None and io in self.ios:
            self.do(CancelIo(io))

    def drop(self, table: BlockTable) -> None:
        """One hold less; the last one releases the blocks."""
        table.holds -= 1
        if not table.holds:
            self.manager.release(table.blocks)

    def unbind(self, job: PrefillJob) -> None:
        """The job itself needs its blocks no more."""
        if job.table is not None:
            self.drop(job.table)
            job.table = None

    def reusable_blocks(self, job: PrefillJob) -> int:
        """Leading blocks that may be cached or loaded: full ones."""
        return job.spec.tokens // self.settings.block_tokens if job.reuse else 0

    def hold_prefix(self, job: PrefillJob, blocks: int) -> None:
        """So many leading blocks of a job that has not begun were found in the pool."""
        job.prefix_blocks = blocks
        job.cached = job.computed = job.scheduled = self.settings.reused_tokens(job.spec.tokens, blocks)

    def advance(self, job: PrefillJob, end: int) -> None:
        """Tokens up to `end` are in the pool: the blocks they fill get their identity."""
        size = self.settings.block_tokens
        assert job.table is not None
        for index in range(job.computed // size, end // size):
            self.manager.register(job.table.blocks[index], job.spec.keys[index], job.owner)
        job.computed = end
        job.scheduled = max(job.scheduled, end)


def _jobs_of(flight: IoInFlight) -> Sequence[int]:
    match flight:
        case SendFlight() | LoadFlight() | TransferFlight():
            return (flight.job,)
        case StepFlight():
            return [share.job for share in flight.shares]
        case WriteBackFlight() | ReplicaFlight():
            return ()


class OutgoingTransfers:
    """Sends the KV of jobs, at most one batch of each at a time."""

    def __init__(self, state: PrefillState) -> None:
        self._state = state

    def open(self, job: PrefillJob) -> None:
        """A job has started: its transfer is opened, so that its first layer need not wait for that."""
        if job.outgoing is not None:
            job.outgoing.io = self._state.begin(TransferFlight(job.number, opens=True))
            self._state.do(OpenTransfer(job.outgoing.io, job.number))

    def add(self, job: PrefillJob, layer: int, first: int, end: int, step: int | None) -> None:
        """Blocks [first, end) of a layer are whole."""
        if job.outgoing is not None:
            job.outgoing.add(layer, first, end, step)
            self._pump(job, job.outgoing)

    def leading(self, job: PrefillJob, blocks: int) -> None:
        """The leading blocks are whole in all layers."""
        if job.outgoing is not None:
            for layer in range(self._state.settings.layers):
                job.outgoing.add(layer, 0, blocks, None)
            self._pump(job, job.outgoing)

    def take_back(self, job: PrefillJob, first: int) -> None:
        """Blocks from `first` on will be computed anew, but not before a batch that may read them has left."""
        outgoing = job.outgoing
        if outgoing is None:
            return
        outgoing.take_back(first)
        if outgoing.io is not None and isinstance(self._state.ios.get(outgoing.io), SendFlight):
            job.settling.add(outgoing.io)

    def finish(self, job: PrefillJob) -> bool:
        """All of the job is computed; returns whether nothing has to leave, or to be waited for."""
        if job.outgoing is None:
            self._state.unbind(job)
            return True
        assert job.outgoing.whole, "a slice was never handed over"
        self._pump(job, job.outgoing)
        return False

    def opened(self, number: int) -> None:
        """A transfer is open; that of a job which has ended meanwhile is given up."""
        job = self._state.jobs.get(number)
        if job is None or job.outgoing is None:
            self._state.do(CloseTransfer(number, aborted=True))
            return
        job.outgoing.io, job.outgoing.open = None, True
        self._pump(job, job.outgoing)

    def sent(self, job: PrefillJob, nbytes: int, seconds: float) -> None:
        """A batch has left."""
        assert job.outgoing is not None
        job.outgoing.io = None
        job.outgoing.sent_bytes += nbytes
        self._state.tracker.observe_transfer(nbytes, seconds)
        self._pump(job, job.outgoing)

    def give_up(self, job: PrefillJob) -> None:
        """The job ends before its verdict."""
        if job.outgoing is not None:
            self._state.cancel(job.outgoing.io)
            if job.outgoing.open:
                self._state.do(CloseTransfer(job.number, aborted=True))

    def _pump(self, job: PrefillJob, outgoing: OutgoingKV) -> None:
        """Sends what waits; after the last slice closes the transfer, for whose verdict no block is needed."""
        if outgoing.io is not None or not outgoing.open:
            return
        table, state = job.table, self._state
        if outgoing.pending and table is not None:
            pieces = tuple([_layer_blocks(span, table) for span in outgoing.take(state.settings.slice_bytes)])
            io = outgoing.io = state.begin(SendFlight(job.number, (table,)))
            state.do(SendSlices(io, job.number, pieces))
        elif job.finished:
            self._state.do(CloseTransfer(job.number, aborted=False))
            self._state.unbind(job)
            outgoing.io = self._state.begin(TransferFlight(job.number, opens=False))
            self._state.do(AwaitVerdict(outgoing.io, job.number, self._state.settings.verdict_timeout_s))


def _layer_blocks(span: BlockSpan, table: BlockTable) -> LayerBlocks:
    return LayerBlocks(span.layer, span.first, tuple(table.blocks[span.first : span.end]), span.step)
