"""State of the prefill scheduler: settings, jobs, their outgoing KV, and I/O in flight with pinned blocks."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import STATES_IN_WORK
from moonpool.base.scheduling.block_manager import BlockLending, BlockManager, KVOwner
from moonpool.base.scheduling.fair_share import FairQueue, FairShares, QueueKey, priority_rank
from moonpool.base.scheduling.latency import Speeds, SpeedTracker
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.state_machine import CancelIo, PendingIo
from moonpool.base.settings import setting
from moonpool.engine.prefill.core.actions import (
    Action,
    AwaitVerdict,
    CloseTransfer,
    LayerBlocks,
    OpenTransfer,
    PrefixLoaded,
    PrefixMiss,
    SendSlices,
)
from moonpool.engine.prefill.core.events import KVSource, SubmitJob, WriteBackTarget

MERGE_BYTES = 128 << 10
"""Slices from several layers are sent in one batch up to this many bytes: a message costs about 150 us."""


class BlockSpan(NamedTuple):
    """Whole blocks [first, end) in one layer. `step`: the step that computed the blocks; None for a prefix."""

    layer: int
    first: int
    end: int
    step: int | None


@dataclass(slots=True, eq=False)
class OutgoingKV:
    """One prompt's KV on the way to decode. Queued slices are positions: the bytes stay in the pool until sent.

    Attributes:
        handed: for each layer a bitmap of the blocks queued or sent; blocks that decode holds or does not need count
            as sent.
        pending: queued spans.
        io: opening, sending or waiting for the verdict: one at a time.
        open: the transfer is open.
    """

    num_blocks: int
    handed: list[int]
    pending: deque[BlockSpan] = field(default_factory=deque)
    io: int | None = None
    open: bool = False
    sent_bytes: int = 0

    @classmethod
    def of(cls, settings: "PrefillSettings", tokens: int, held_blocks: int) -> "OutgoingKV":
        """Prepares a prompt for which decode holds the leading `held_blocks`. Slices behind the window are not sent."""
        windowed = max(held_blocks, tokens // settings.block_size - settings.window_blocks)
        first = [windowed if layer in settings.windowed_layers else held_blocks for layer in range(settings.layers)]
        return cls(settings.blocks_for(tokens), [(1 << begin) - 1 for begin in first])

    @property
    def whole(self) -> bool:
        """Whether every slice was queued or sent."""
        return all(handed == (1 << self.num_blocks) - 1 for handed in self.handed)

    def add(self, layer: int, first: int, end: int, step: int | None) -> None:
        """Queues blocks [first, end) of a layer, which must not change any more; skips blocks queued before."""
        todo = _block_bits(first, end) & ~self.handed[layer]
        self.handed[layer] |= todo
        while todo:
            begin = (todo & -todo).bit_length() - 1
            run = todo >> begin
            length = (~run & run + 1).bit_length() - 1
            self.pending.append(BlockSpan(layer, begin, begin + length, step))
            todo = run >> length << begin + length

    def take_back(self, first: int) -> None:
        """Removes blocks from `first` on from the queue: they will be computed again and sent then."""
        kept = deque[BlockSpan]()
        for span in self.pending:
            if span.first < first:
                kept.append(BlockSpan(span.layer, span.first, min(span.end, first), span.step))
            if span.end > first:
                self.handed[span.layer] &= ~_block_bits(max(span.first, first), span.end)
        self.pending = kept

    def take(self, slice_bytes: int) -> list[BlockSpan]:
        """The next batch to send: one layer's spans, and further layers' spans up to `MERGE_BYTES`."""
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
    """One prefill instance's settings.

    Attributes:
        blocks: blocks in the pool.
        slice_bytes: bytes for one layer in one block, on average.
        max_num_batched_tokens: most tokens in a step; at least one block.
        stages: most steps in flight.
        max_started: most jobs with blocks.
        recurrent: layers have a recurrent state: a prompt's last token cannot be computed behind its own state.
        states_alone: all windowed layers have a recurrent state (`KVLayout.states_alone`).
        windowed_layers: layers that need the slices of a sequence's last blocks only.
        window_blocks: full blocks that windowed layers need before a token (`KVLayout.window_blocks`).
        window_slots: slots in the pool for windowed layers.
        window_bytes: bytes of windowed layers in one block; reads leave out bytes behind the window. 0 = no windowed
            layers.
    """

    blocks: int
    block_size: int
    layers: int
    slice_bytes: int
    max_num_batched_tokens: int
    stages: int = 1
    max_started: int = 64
    max_queue: int = setting(1024, "requests waiting or running at most; more are refused", ge=1)
    load_timeout_s: float = setting(
        5.0, "seconds a load from a kvstore may take beyond what is predicted; after that the KV is computed", gt=0
    )
    verdict_timeout_s: float = setting(30.0, "seconds a decode instance has to confirm a transfer", gt=0)
    windowed_layers: frozenset[int] = frozenset()
    window_blocks: int = 0
    window_slots: int = 0
    window_bytes: int = 0
    recurrent: bool = False
    states_alone: bool = False

    def read_bytes(self, blocks: int) -> int:
        """Bytes to read for `blocks` blocks from elsewhere; for windowed layers, only the last blocks are read."""
        behind = max(0, blocks - self.window_blocks)
        return blocks * self.layers * self.slice_bytes - behind * self.window_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def first_windowed_block(self, tokens: int) -> int:
        """First block with windowed slices that the token behind `tokens` tokens needs."""
        return max(0, tokens // self.block_size - self.window_blocks) if self.window_blocks else 0

    def held_slots(self, tokens: int) -> int:
        """Window slots that a prompt with `tokens` tokens holds between two steps."""
        return min(self.blocks_for(tokens), self.window_blocks + 1) if self.window_blocks else 0

    @property
    def slots_in_work(self) -> int:
        """Window slots that steps in flight need besides the slots held between steps."""
        if not self.window_blocks:
            return 0
        return self.stages * (STATES_IN_WORK if self.states_alone else self.blocks_for(self.max_num_batched_tokens) + 1)

    def reused_tokens(self, tokens: int, blocks: int) -> int:
        """Tokens not to compute if `blocks` leading blocks have KV; a prompt's last token is always computed."""
        return min(blocks * self.block_size, tokens - 1)


@dataclass(slots=True, eq=False)
class BlockTable:
    """A job's blocks, released when neither the job nor any I/O pins the blocks.

    `past`: leading blocks with windowed slices that the job does not read any more.
    """

    blocks: list[int]
    past: int = 0
    pins: int = 1


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """A prefix that is being loaded: blocks [first, end) of the job.

    Attributes:
        io: the load's I/O number.
        source: index in the job's sources.
        began_at: when the load began, seconds.
        progressed_at: when the last layer arrived, or the load began, seconds.
        first_at: when the first layer arrived, seconds.
        layers: leading layers that have arrived.
        stalled: a step has waited too long for a layer: no step follows the load layer by layer any more.
    """

    io: int
    source: int
    first: int
    end: int
    began_at: float
    progressed_at: float
    first_at: float = 0.0
    layers: int = 0
    stalled: bool = False


@dataclass(slots=True, eq=False)
class OvertakenLoad:
    """A load that took longer than computing: both go on. For each block, the first to finish counts.

    Attributes:
        load: the load.
        table: blocks that the load writes, from `load.first` on; pinned by the load in flight and by the job.
        whole: the load has arrived whole.
    """

    load: PrefixLoad
    table: BlockTable
    whole: bool = False


@dataclass(slots=True, eq=False)
class JobPrefix:
    """A prompt's leading part that need not be computed.

    Attributes:
        blocks: leading blocks that were cached or loaded. May grow until the first step is planned.
        cached: leading tokens not to compute, because they were cached.
        loaded: further tokens not to compute, because they were loaded.
        next_source: index of the source tried next.
        load: the load in flight that the job waits for.
        overtaken: the load that computing has overtaken.
        overtaken_tokens: tokens that were computed while their load was under way.
        misses: blocks that a kvstore lacked.
        loads: loads that arrived whole.
    """

    blocks: int = 0
    cached: int = 0
    loaded: int = 0
    next_source: int = 0
    load: PrefixLoad | None = None
    overtaken: OvertakenLoad | None = None
    overtaken_tokens: int = 0
    misses: list[PrefixMiss] = field(default_factory=list)
    loads: list[PrefixLoaded] = field(default_factory=list)


class JobStatus(Enum):
    """A job's state; `TRANSITIONS` has the changes that may happen."""

    WAITING = "waiting"
    """In the queue, without blocks."""
    STARTED = "started"
    """Has blocks for the whole prompt. No step was planned; the prefix may be loading."""
    COMPUTING = "computing"
    """Steps compute the prompt; the KV is sent meanwhile."""
    COMPUTED = "computed"
    """The first token was reported. The KV is sent, or decode's verdict is awaited."""
    ENDED = "ended"
    """No longer among the scheduler's jobs; I/O may still pin the job's blocks."""


TRANSITIONS: Mapping[JobStatus, frozenset[JobStatus]] = {
    JobStatus.WAITING: frozenset({JobStatus.STARTED, JobStatus.ENDED}),
    JobStatus.STARTED: frozenset({JobStatus.COMPUTING, JobStatus.ENDED}),
    JobStatus.COMPUTING: frozenset({JobStatus.COMPUTED, JobStatus.ENDED}),
    JobStatus.COMPUTED: frozenset({JobStatus.ENDED}),
    JobStatus.ENDED: frozenset(),
}
"""Statuses that may follow each status. A job begins as WAITING."""


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One prompt.

    Attributes:
        asked: what the conductor asked for.
        outgoing: KV on the way to decode; None = the KV is not sent.
        added_at: when the job was queued, seconds.
        queue_key: place in the fair queue.
        expected_tokens: leading tokens expected not to be computed; for predictions, until the job starts.
        owner: the KV's tenant, and whether the blocks may be kept.
        load_s: predicted seconds for loading what is expected to come from a source.
        shared_tokens: leading tokens that earlier jobs compute and register; for predictions, until the first step.
        status: set by `set_status` only.
        first_step_at: when the first step was planned, seconds.
        token_at: when the first token was computed, seconds.
        table: the job's blocks; bound at the start, unbound once no KV is left to compute or send.
        prefix: leading blocks that were cached or loaded, and the load in flight.
        computed: leading tokens that are cached, loaded or computed, in all layers. Never shrinks.
        scheduled: leading tokens that have KV, or are in flight.
        slices_in_flight: the job's live slices in steps in flight.
        gated: the slice in flight follows the load: no further slice is planned until that slice is done.
        blocked_by: I/O on blocks that are to be computed again: until the I/O ends, no slice is planned.
        put_until: for each copy, blocks before this index were written or need not be.
        borders: counts of leading full blocks behind which this prompt or others may be continued.
    """

    asked: SubmitJob
    outgoing: OutgoingKV | None
    added_at: float
    queue_key: QueueKey
    expected_tokens: int
    owner: KVOwner
    load_s: float = 0.0
    shared_tokens: int = 0
    status: JobStatus = JobStatus.WAITING
    first_step_at: float | None = None
    token_at: float | None = None
    table: BlockTable | None = None
    prefix: JobPrefix = field(default_factory=JobPrefix)
    computed: int = 0
    scheduled: int = 0
    slices_in_flight: int = 0
    gated: bool = False
    blocked_by: set[int] = field(default_factory=set)
    put_until: list[int] = field(default_factory=list)
    borders: frozenset[int] = frozenset()

    @classmethod
    def of(cls, event: SubmitJob, settings: PrefillSettings, now: float) -> "PrefillJob":
        """A job on arrival."""
        spec, outgoing = event.request, None
        if event.held_blocks is not None:
            outgoing = OutgoingKV.of(settings, spec.tokens, event.held_blocks)
        believed = max((source.blocks for source in event.sources), default=0) if event.reuse else 0
        expected = settings.reused_tokens(spec.tokens, believed)
        place = QueueKey(spec.tenant, priority_rank(now, spec.priority), event.job, spec.weight).delayed(event.delay_s)
        return cls(event, outgoing, now, place, expected, KVOwner(spec.tenant, spec.transient))

    @property
    def number(self) -> int:
        """The job's number."""
        return self.asked.job

    @property
    def spec(self) -> EngineRequest:
        """The request's record: tokens, keys, tenant."""
        return self.asked.request

    @property
    def reuse(self) -> bool:
        """Whether cached and stored blocks may be used; otherwise every token is computed."""
        return self.asked.reuse

    @property
    def sources(self) -> tuple[KVSource, ...]:
        """Instances that a prefix may be loaded from, best first."""
        return self.asked.sources if self.asked.reuse else ()

    @property
    def copies(self) -> tuple[WriteBackTarget, ...]:
        """Kvstores that blocks are written to."""
        return self.asked.copies

    def set_status(self, status: JobStatus) -> None:
        """Changes the status, along `TRANSITIONS` only."""
        assert status in TRANSITIONS[self.status], f"job {self.number} cannot go from {self.status} to {status}"
        self.status = status

    @property
    def may_match(self) -> bool:
        """Whether cached blocks may still be used: no step was planned, and no prefix is loaded or loading."""
        return self.first_step_at is None and self.prefix.load is None and not self.prefix.loaded

    @property
    def finished(self) -> bool:
        """Whether all KV is computed and the next token was sampled."""
        return self.computed == self.spec.tokens


@dataclass(slots=True, eq=False)
class SequenceSlice:
    """A job's part of a step in flight: tokens [start, end).

    Attributes:
        first: this is the job's first slice.
        last: the prompt ends with this slice.
        loading: tokens before `start` arrive through the step's KV gates.
        full_hit: the tokens have KV, or get KV through the gates: the slice writes no KV.
        live: the slice counts; False after the slice was dropped.
    """

    job: int
    start: int
    end: int
    first: bool
    last: bool
    loading: bool
    full_hit: bool
    live: bool = True


@dataclass(slots=True, eq=False)
class StepFlight:
    """A step in flight.

    Attributes:
        progressed_at: when the last layer was computed, or the step came to the front of the engine, seconds.
        began_at: when the step was started, seconds.
        opened: highest layer with an open gate.
        layers: leading layers that are computed.
    """

    slices: list[SequenceSlice]
    tables: tuple[BlockTable, ...]
    gated: bool
    progressed_at: float
    began_at: float
    opened: int = -1
    layers: int = 0


@dataclass(slots=True, eq=False)
class LoadFlight:
    """A read of `wanted` blocks from a kvstore, or from another instance's pool."""

    job: int
    source: KVSource
    nbytes: int
    wanted: int
    tables: tuple[BlockTable, ...]


@dataclass(slots=True, eq=False)
class ReplicaFlight:
    """A chain's blocks being replicated here since `began_at`, seconds; blocks before `first` were cached."""

    number: int
    keys: tuple[BlockKey, ...]
    owner: KVOwner
    blocks: tuple[int, ...]
    first: int
    source: KVSource
    nbytes: int
    began_at: float
    tables: tuple[BlockTable, ...] = ()


@dataclass(slots=True, eq=False)
class TransferFlight:
    """Opening a transfer, or waiting for decode's verdict; pins no blocks."""

    job: int
    opens: bool
    tables: tuple[BlockTable, ...] = ()


@dataclass(slots=True, eq=False)
class SendFlight:
    """Slices being sent out of the pool."""

    job: int
    tables: tuple[BlockTable, ...]


@dataclass(slots=True, eq=False)
class WriteBackFlight:
    """Blocks being written to a kvstore; the first `past` blocks are written without their windowed slices."""

    blocks: tuple[int, ...]
    past: int
    tables: tuple[BlockTable, ...] = ()


IoInFlight = StepFlight | LoadFlight | ReplicaFlight | TransferFlight | SendFlight | WriteBackFlight


class PrefillState:
    """State that the prefill scheduler's parts share.

    Attributes:
        settings: the instance's settings.
        manager: the pool's block manager.
        lending: blocks that other instances read.
        tracker: measured speeds of the engine with all cores; predicts times.
        core_share: part of the engine's cores that steps have had lately; other processes on the host had the rest.
        jobs: all jobs that have not ended, by number.
        shares: the tenants' shares; steps are charged to them, in predicted seconds.
        waiting: jobs without blocks, in fair order.
        started: jobs that have, or had, blocks, in the order of starting.
        ios: I/O in flight, with the blocks that each pins.
        steps: steps in flight, in order.
        replica: the replication in flight.
        now: time of the event being handled, seconds.
        out: actions of the event being handled.
    """

    def __init__(self, settings: PrefillSettings, speeds: Speeds) -> None:
        self.settings = settings
        self.manager = BlockManager(settings.blocks, settings.window_blocks, settings.window_slots)
        self.lending = BlockLending(self.manager)
        self.tracker = SpeedTracker(speeds)
        self.core_share = 1.0
        self.jobs: dict[int, PrefillJob] = {}
        self.shares = FairShares()
        self.waiting = FairQueue(self.shares)
        self.started: dict[int, PrefillJob] = {}
        self.ios: PendingIo[IoInFlight] = PendingIo()
        self.steps: dict[int, StepFlight] = {}
        self.replica: ReplicaFlight | None = None
        self.now = 0.0
        self.out: list[Action] = []

    @property
    def front(self) -> StepFlight | None:
        """The step that the engine computes, or the first in the pipeline."""
        return next(iter(self.steps.values()), None)

    def act(self, action: Action) -> None:
        """Adds an action."""
        self.out.append(action)

    def begin(self, flight: IoInFlight) -> int:
        """Starts I/O, which pins the flight's tables; returns the I/O's number."""
        for table in flight.tables:
            table.pins += 1
        return self.ios.begin(flight)

    def end(self, io: int) -> IoInFlight:
        """I/O has ended: unpins the tables, and unblocks jobs that waited for the end."""
        flight = self.ios.end(io)
        for table in flight.tables:
            self.unpin(table)
        for number in _jobs_of(flight):
            job = self.jobs.get(number)
            if job is not None and job.blocked_by:
                job.blocked_by.discard(io)
        return flight

    def cancel(self, io: int | None) -> None:
        """Cancels I/O that is still in flight."""
        if io is not None and io in self.ios:
            self.act(CancelIo(io))

    def unpin(self, table: BlockTable) -> None:
        """Drops one pin; dropping the last pin releases the blocks."""
        table.pins -= 1
        if not table.pins:
            self.manager.release(table.blocks, table.past)

    def unbind(self, job: PrefillJob) -> None:
        """Drops the job's own pin on the blocks."""
        if job.table is not None:
            self.unpin(job.table)
            job.table = None

    def reusable_blocks(self, job: PrefillJob) -> int:
        """Leading full blocks, which may be cached or loaded; with recurrent states, only before the last token."""
        return (job.spec.tokens - self.settings.recurrent) // self.settings.block_size if job.reuse else 0

    def hold_prefix(self, job: PrefillJob, held: list[int], more: list[int]) -> None:
        """Takes cached leading blocks for a job without steps: `held` were taken before; acquires `more`."""
        assert job.table is not None
        blocks = len(held) + len(more)
        first = self.settings.first_windowed_block(blocks * self.settings.block_size)
        self.manager.acquire(more, max(0, first - len(held)))
        self.manager.pass_windows(held[job.table.past : first])
        job.table.past = first
        job.prefix.blocks = blocks
        job.prefix.cached = job.computed = job.scheduled = self.settings.reused_tokens(job.spec.tokens, blocks)

    def note_borders(self, job: PrefillJob) -> None:
        """Notes behind which blocks the prompt, or another that leaves the chain, may be continued."""
        if not self.settings.window_blocks:
            return
        tokens, size = job.spec.tokens, self.settings.block_size
        found = len(self.manager.find(job.spec.keys))
        # The same prompt is continued behind its last full block, or before that block if a state must not be reused.
        ends = (tokens // size, (tokens - self.settings.recurrent) // size, job.prefix.blocks, found)
        job.borders = frozenset((*ends, *(copy.held or 0 for copy in job.copies)))

    def pass_windows(self, job: PrefillJob) -> None:
        """Notes that the job reads no windowed slices behind the next token's window."""
        table, first = job.table, self.settings.first_windowed_block(job.computed)
        if table is not None and first > table.past:
            window = self.settings.window_blocks
            at = {index for border in job.borders for index in range(max(0, border - window), border)}
            kept = [table.blocks[index] for index in range(table.past, first) if index in at]
            self.manager.pass_windows(table.blocks[table.past : first], kept)
            table.past = first

    def advance(self, job: PrefillJob, end: int) -> None:
        """Registers the keys of the full blocks up to token `end`, whose KV is there."""
        size = self.settings.block_size
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
            return [part.job for part in flight.slices]
        case WriteBackFlight() | ReplicaFlight():
            return ()


class OutgoingTransfers:
    """Sends jobs' KV, one batch per job at a time."""

    def __init__(self, state: PrefillState) -> None:
        self._state = state

    def open(self, job: PrefillJob) -> None:
        """Opens a starting job's transfer, so that the first layer need not wait for the opening."""
        if job.outgoing is not None:
            job.outgoing.io = self._state.begin(TransferFlight(job.number, opens=True))
            self._state.act(OpenTransfer(job.outgoing.io, job.number))

    def add(self, job: PrefillJob, layer: int, first: int, end: int, step: int | None) -> None:
        """Sends a layer's blocks [first, end), which are whole."""
        if job.outgoing is not None:
            job.outgoing.add(layer, first, end, step)
            self._pump(job, job.outgoing)

    def leading(self, job: PrefillJob, blocks: int) -> None:
        """Sends the leading blocks, which are whole in all layers."""
        if job.outgoing is not None:
            for layer in range(self._state.settings.layers):
                job.outgoing.add(layer, 0, blocks, None)
            self._pump(job, job.outgoing)

    def take_back(self, job: PrefillJob, first: int) -> None:
        """Blocks from `first` on will be computed again, once every batch that may read these blocks was sent."""
        outgoing = job.outgoing
        if outgoing is None:
            return
        outgoing.take_back(first)
        if outgoing.io is not None and isinstance(self._state.ios.get(outgoing.io), SendFlight):
            job.blocked_by.add(outgoing.io)

    def finish(self, job: PrefillJob) -> bool:
        """The job is computed; returns whether no KV is left to send or wait for."""
        if job.outgoing is None:
            self._state.unbind(job)
            return True
        assert job.outgoing.whole, "a slice was never queued"
        self._pump(job, job.outgoing)
        return False

    def opened(self, number: int) -> None:
        """A transfer is open; aborts the transfer if the job has ended meanwhile."""
        job = self._state.jobs.get(number)
        if job is None or job.outgoing is None:
            self._state.act(CloseTransfer(number, aborted=True))
            return
        job.outgoing.io, job.outgoing.open = None, True
        self._pump(job, job.outgoing)

    def sent(self, job: PrefillJob, nbytes: int, seconds: float) -> None:
        """A batch was sent."""
        assert job.outgoing is not None
        job.outgoing.io = None
        job.outgoing.sent_bytes += nbytes
        self._state.tracker.observe_transfer(nbytes, seconds)
        self._pump(job, job.outgoing)

    def give_up(self, job: PrefillJob) -> None:
        """The job ends before decode's verdict: aborts the transfer."""
        if job.outgoing is not None:
            self._state.cancel(job.outgoing.io)
            if job.outgoing.open:
                self._state.act(CloseTransfer(job.number, aborted=True))

    def _pump(self, job: PrefillJob, outgoing: OutgoingKV) -> None:
        """Sends queued slices; after the last slice closes the transfer. The verdict needs no block."""
        if outgoing.io is not None or not outgoing.open:
            return
        table, state = job.table, self._state
        if outgoing.pending and table is not None:
            pieces = tuple([_layer_blocks(span, table) for span in outgoing.take(state.settings.slice_bytes)])
            io = outgoing.io = state.begin(SendFlight(job.number, (table,)))
            state.act(SendSlices(io, job.number, pieces))
        elif job.finished:
            self._state.act(CloseTransfer(job.number, aborted=False))
            self._state.unbind(job)
            outgoing.io = self._state.begin(TransferFlight(job.number, opens=False))
            self._state.act(AwaitVerdict(outgoing.io, job.number, self._state.settings.verdict_timeout_s))


def _layer_blocks(span: BlockSpan, table: BlockTable) -> LayerBlocks:
    return LayerBlocks(span.layer, span.first, tuple(table.blocks[span.first : span.end]), span.step)
