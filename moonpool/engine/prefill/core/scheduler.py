"""The prefill scheduler, a state machine: events in, actions out; and the invariants."""

from collections import Counter
from collections.abc import Sequence

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.block_lending import WRITTEN_PART, LendBlocks, ReturnBlocks
from moonpool.base.scheduling.fair_share import may_admit
from moonpool.base.scheduling.kv_deletion import DeleteKV, delete_kv
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.state_machine import IoEnded, Tick, digest_of, earliest
from moonpool.engine.prefill.core.actions import (
    AcceptJob,
    Action,
    EndJob,
    EndReplication,
    JobOutcome,
    RefusalReason,
    RefuseJob,
    RefuseStaleJob,
    ReportFirstToken,
    WriteBackBlocks,
)
from moonpool.engine.prefill.core.events import (
    CancelJob,
    Drain,
    Event,
    IoDone,
    IoFailed,
    IoResult,
    LayerComputed,
    LayerLoaded,
    LoadEnded,
    ReplicateBlocks,
    SlicesSent,
    StepEnded,
    StopAllJobs,
    StopReplicating,
    SubmitJob,
)
from moonpool.engine.prefill.core.forecast import queue_seconds, reassign_shared_prefix, shared_tokens, speeds_now
from moonpool.engine.prefill.core.jobs import (
    BlockTable,
    JobStatus,
    LoadFlight,
    OutgoingTransfers,
    PrefillJob,
    PrefillSettings,
    PrefillState,
    ReplicaFlight,
    SendFlight,
    StepFlight,
    TransferFlight,
    WriteBackFlight,
)
from moonpool.engine.prefill.core.loads import PrefixLoads, Replication
from moonpool.engine.prefill.core.step_planner import StepPlanner


def check_prefill_state(state: PrefillState, steps: StepPlanner) -> None:
    """Asserts that blocks are pinned exactly by their users, and that every job's place agrees with the status."""
    state.manager.check_invariants()
    _check_block_pins(state)
    _check_steps_in_flight(state, steps)
    state.waiting.check_invariants()
    waiting = set(state.waiting)
    assert len(waiting) == len(state.waiting)
    assert waiting | state.started.keys() == state.jobs.keys()
    assert not waiting & state.started.keys()
    for job in state.jobs.values():
        _check_job(state, job)


def _check_block_pins(state: PrefillState) -> None:
    pins: Counter[int] = Counter()
    tables: dict[int, BlockTable] = {}
    refs: Counter[int] = Counter(state.lending)
    owned = [job.table for job in state.jobs.values() if job.table is not None]
    owned += [it.table for job in state.jobs.values() if (it := job.prefix.overtaken) is not None]
    for _, flight in state.ios:
        owned += flight.tables
        if isinstance(flight, WriteBackFlight | ReplicaFlight):
            refs.update(flight.blocks)
    for table in owned:
        pins[id(table)] += 1
        tables[id(table)] = table
    for name, table in tables.items():
        assert table.pins == pins[name] > 0
        assert len(set(table.blocks)) == len(table.blocks)
        refs.update(table.blocks)
    for block in range(state.manager.num_blocks):
        assert state.manager.ref_count(block) == refs[block], f"block {block} is held by something else"


def _check_steps_in_flight(state: PrefillState, steps: StepPlanner) -> None:
    steps_in_flight = {io: flight for io, flight in state.ios if isinstance(flight, StepFlight)}
    assert steps_in_flight == state.steps
    assert steps.plan_at is None or not steps.are_full()
    assert list(steps_in_flight) == steps.in_flight == sorted(steps.in_flight)
    assert len(steps_in_flight) <= state.settings.stages
    live: Counter[int] = Counter()
    for flight in steps_in_flight.values():
        for part in flight.slices:
            job = state.jobs.get(part.job)
            assert not part.live or job is not None, "a slice of a job that has ended counts"
            live[part.job] += part.live
            if part.live and job is not None and part.loading:
                assert job.gated
                arrived = job.prefix.load.layers if job.prefix.load else state.settings.layers
                assert flight.opened < arrived, "open too early"
    for job in state.jobs.values():
        assert job.slices_in_flight == live[job.number]


def _check_job(state: PrefillState, job: PrefillJob) -> None:
    assert all(io in state.ios for io in job.blocked_by)
    assert (job.number in state.waiting) == (job.status is JobStatus.WAITING)
    assert (job.first_step_at is None) == (job.status in (JobStatus.WAITING, JobStatus.STARTED))
    assert (job.token_at is not None) == job.finished == (job.status is JobStatus.COMPUTED)
    if job.status is JobStatus.WAITING:
        assert job.table is None
        assert not job.slices_in_flight
        return
    assert 0 <= job.prefix.cached <= job.computed <= job.scheduled <= job.spec.tokens
    assert not job.gated or job.slices_in_flight == 1
    if job.table is None:
        assert job.finished
        return
    assert len(job.table.blocks) == state.settings.blocks_for(job.spec.tokens)
    if job.prefix.load is not None:
        assert isinstance(state.ios.get(job.prefix.load.io), LoadFlight)
        assert job.computed == job.prefix.cached
        assert job.prefix.blocks == job.prefix.load.first < job.prefix.load.end <= state.reusable_blocks(job)
    if job.outgoing is not None and job.outgoing.io is not None:
        assert job.outgoing.io in state.ios
        assert job.outgoing.open or not isinstance(state.ios.get(job.outgoing.io), SendFlight)


MIN_RETRY_S = 0.1


class PrefillScheduler:
    """One prefill instance's decisions: which prompts start, load, compute and send, and when.

    A job is queued, gets blocks for the whole prompt, may load a prefix, and is computed in steps together with others.
    Meanwhile the job's KV is sent. The job ends when decode has confirmed the transfer. `JobStatus` has the states.
    Each user pins its blocks: a job that ends early drops the job's pin; a step, load or send keeps a pin until the
    end.

    Attributes:
        state: jobs, blocks and I/O.
        steps: plans the engine's steps.
        loads: loads prefixes.
        copies: replicates hot blocks.
        taken: number of the last accepted job; numbers grow.

    Raises:
        ConfigError: `max_num_batched_tokens` is less than one block.
    """

    def __init__(self, settings: PrefillSettings, speeds: Speeds) -> None:
        if settings.max_num_batched_tokens < settings.block_size:
            reason = f"must be at least one block ({settings.block_size} tokens), not {settings.max_num_batched_tokens}"
            raise ConfigError("max_num_batched_tokens", reason)
        self.state = PrefillState(settings, speeds)
        self._sends = OutgoingTransfers(self.state)
        self.steps = StepPlanner(self.state, self._sends)
        self.loads = PrefixLoads(self.state, self.steps, self._sends)
        self.copies = Replication(self.state, self.loads)
        self._draining = False
        self.taken = 0
        self._stopped = False

    def handle(self, now: float, event: Event | IoEnded[IoResult] | Tick, out: list[Action]) -> None:
        """See `moonpool.base.scheduling.state_machine.Core.handle`."""
        self.state.now, self.state.out = now, out
        self.state.manager.now = now
        match event:
            case LayerComputed():  # most are these two
                self.steps.layer_computed(event.step, event.layer)
            case IoEnded():
                self._ended(event.io, event.result)
            case LayerLoaded():
                self.loads.layer_loaded(event.io, event.layer)
            case SubmitJob():
                self._arrive(event)
            case CancelJob():
                self._end_early(event.job, JobOutcome.LEFT)
            case DeleteKV():
                jobs = [(job.owner, job.spec.keys) for job in self.state.jobs.values()]
                self.state.act(delete_kv(self.state.manager, event, [*jobs, *self.copies.owners]))
            case ReplicateBlocks() | StopReplicating():
                self._copy(event)
            case LendBlocks() | ReturnBlocks():
                self.state.out += self.state.lending.handle(event, self.state.manager.num_available)
            case Drain():
                self._draining = True
            case StopAllJobs():
                self._stop()
        if not isinstance(event, LayerComputed):  # frees nothing, and comes often
            self._go_on()
            out[:0] = self.state.manager.take_slot_moves()
        self.state.out = []

    def due(self) -> float | None:
        """See `moonpool.base.scheduling.state_machine.Core.due`."""
        return earliest(earliest(self.steps.plan_at, self.steps.stalled_at()), self.loads.overtake_at())

    def check_invariants(self) -> None:
        """Asserts what must hold between any two events."""
        check_prefill_state(self.state, self.steps)

    def digest(self) -> bytes:
        """See `moonpool.base.scheduling.state_machine.Core.digest`."""
        state = self.state
        return digest_of(
            state.settings,
            list(state.jobs.values()),
            (state.waiting, state.shares),
            list(state.started),
            list(state.ios),
            self.steps.in_flight,
            state.manager.keys(),
            (state.manager.num_free, state.manager.num_cached),
            state.lending,
            state.tracker.speeds,
            (self._draining, self._stopped, self.taken, self.steps.plan_at, self.steps.idle_since),
            (self.loads, self.copies),
        )

    # --- figures ---------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether new jobs are refused."""
        return self._draining

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that have no KV yet."""
        return sum(job.spec.tokens - job.computed for job in self.state.jobs.values())

    def drain_seconds(self, now: float | None = None) -> float:
        """Predicted seconds until all jobs queued now are computed.

        Args:
            now: seconds; None = time of the last event.
        """
        return queue_seconds(self.state, self.state.now if now is None else now)

    def speeds(self, now: float) -> Speeds:
        """The engine's speeds at `now`: a step that takes too long counts before the end."""
        return speeds_now(self.state, now)

    def started(self, job: int) -> bool:
        """Whether a job has blocks, or had them."""
        found = self.state.jobs.get(job)
        return found is not None and found.status is not JobStatus.WAITING

    # --- jobs ------------------------------------------------------------------------------------------------------

    def _arrive(self, event: SubmitJob) -> None:
        state = self.state
        why = self._refusal(event)
        if why is not None:
            retry_s = max(MIN_RETRY_S, self.drain_seconds()) if why is RefusalReason.QUEUE_FULL else 0.0
            state.act(RefuseJob(event.job, why, retry_s))
            return
        if event.max_queue_s is not None and self.drain_seconds() > event.max_queue_s:
            state.act(RefuseStaleJob(event.job, self.drain_seconds(), self.taken))
            return
        assert event.job not in state.jobs, "a job's number is never used twice"
        assert len(event.request.keys) == event.request.tokens // state.settings.block_size, "one key per full block"
        state.act(AcceptJob(event.job, self.drain_seconds()))
        job = PrefillJob.of(event, state.settings, state.now)
        held = len(state.manager.match(job.spec.keys[: state.reusable_blocks(job)]))
        job.load_s = self.loads.expected_seconds(job, held)
        job.expected_tokens = max(job.expected_tokens, state.settings.reused_tokens(job.spec.tokens, held))
        job.shared_tokens = shared_tokens(state, job)
        state.jobs[event.job] = job
        self.taken = event.job
        state.waiting.add(job.queue_key)

    def _refusal(self, event: SubmitJob) -> RefusalReason | None:
        if self._stopped:
            return RefusalReason.STOPPED
        if self._draining:
            return RefusalReason.DRAINING
        if self.state.settings.blocks_for(event.request.tokens) > self.state.settings.blocks:
            return RefusalReason.TOO_LONG
        return None if self._may_enter(event) else RefusalReason.QUEUE_FULL

    def _may_enter(self, event: SubmitJob) -> bool:
        jobs, limit = self.state.jobs.values(), self.state.settings.max_queue
        if len(jobs) < limit:
            return True
        weights = {job.queue_key.tenant: job.queue_key.weight for job in jobs} | {
            event.request.tenant: event.request.weight
        }
        return may_admit(
            Counter(job.queue_key.tenant for job in jobs), event.request.tenant, limit, weights.__getitem__
        )

    def _go_on(self) -> None:
        """Starts jobs and steps as far as possible, and drops stalled slices from the step in front."""
        if self._stopped:
            self.steps.plan_at = None
            return
        self.steps.drop_stalled()
        self.loads.overtake()
        if self.steps.are_full() and not self.loads.undecided and len(self.state.started) == len(self.state.jobs):
            return  # nothing can start; most events come here
        self.steps.forgive_idle()
        self.loads.decide_again()
        going = True
        while going:
            while (job := self.steps.start_next()) is not None:
                self._sends.open(job)
                self.loads.decide(job)
            going = self.steps.plan()

    def _end_early(self, number: int, outcome: JobOutcome) -> None:
        """Ends a job early: drops the job's pin on the blocks; steps and I/O that use the blocks keep their pins."""
        job = self.state.jobs.get(number)
        if job is None:
            return
        self._forget(job)
        if not job.finished:
            reassign_shared_prefix(self.state, job)
        self._sends.give_up(job)
        self.state.cancel(job.prefix.load.io if job.prefix.load is not None else None)
        self.loads.give_up(job)
        self.steps.drop_job(job)
        self.state.unbind(job)
        self.state.act(EndJob(number, outcome))

    def _forget(self, job: PrefillJob) -> None:
        job.set_status(JobStatus.ENDED)
        del self.state.jobs[job.number]
        if self.state.started.pop(job.number, None) is None:
            self.state.waiting.remove(job.number)

    def _stop(self) -> None:
        self._stopped = True
        for number in list(self.state.jobs):
            self._end_early(number, JobOutcome.STOPPED)
        for io in self.steps.in_flight:
            self.state.cancel(io)
        self.copies.stop()

    def _copy(self, event: ReplicateBlocks | StopReplicating) -> None:
        if isinstance(event, StopReplicating):
            self.copies.call_off(event.tail)
        elif self._draining or self._stopped:
            self.state.act(EndReplication(event.number, 0))
        else:
            self.copies.begin(event)

    # --- ends of I/O -----------------------------------------------------------------------------------------------

    def _ended(self, io: int, result: IoResult) -> None:
        flight = self.state.end(io)
        match flight:
            case SendFlight():  # most are these
                assert isinstance(result, SlicesSent | IoFailed)
                self._batch_ended(flight, result)
            case StepFlight():
                assert isinstance(result, StepEnded)
                self._step_ended(io, flight, result)
            case LoadFlight():
                assert isinstance(result, LoadEnded)
                self.loads.ended(io, flight, result)
            case ReplicaFlight():
                assert isinstance(result, LoadEnded)
                self.copies.ended(flight, result)
            case TransferFlight():
                assert isinstance(result, IoDone | IoFailed)
                self._transfer_ended(flight, result)
            case WriteBackFlight():
                self.state.manager.release(flight.blocks, flight.past)

    def _step_ended(self, io: int, flight: StepFlight, result: StepEnded) -> None:
        news = self.steps.ended(io, flight, result)
        for job in news.counted:
            self.loads.computed(job)
            self._write_back(job)
            self.state.pass_windows(job)
            if job.finished:
                self._computed(job)
        for job in news.given_up:
            self._end_early(job.number, JobOutcome.STEP_GIVEN_UP)

    def _transfer_ended(self, flight: TransferFlight, result: IoDone | IoFailed) -> None:
        if isinstance(result, IoFailed):
            self._io_failed(flight.job, result)
        elif flight.opens:
            self._sends.opened(flight.job)
        elif (job := self.state.jobs.get(flight.job)) is not None:
            self._done(job)

    def _batch_ended(self, flight: SendFlight, result: SlicesSent | IoFailed) -> None:
        if isinstance(result, IoFailed):
            self._io_failed(flight.job, result)
        elif (job := self.state.jobs.get(flight.job)) is not None:
            self._sends.sent(job, result.nbytes, result.seconds)

    def _io_failed(self, number: int, result: IoFailed) -> None:
        """The job fails. A damaged block, and the blocks behind, are not found by key any more."""
        job = self.state.jobs.get(number)
        if job is not None and job.outgoing is not None:
            job.outgoing.io = None
            if result.damaged_block is not None:
                self.state.manager.forget(job.spec.keys[result.damaged_block :])
        self._end_early(number, JobOutcome.IO_FAILED)

    def _computed(self, job: PrefillJob) -> None:
        """A prompt is computed: reports the first token at once, without waiting for the transfer."""
        now = self.state.now
        job.set_status(JobStatus.COMPUTED)
        job.token_at = now
        began = job.first_step_at if job.first_step_at is not None else now
        computed = job.spec.tokens - job.prefix.cached - job.prefix.loaded
        told = (job.prefix.cached, job.prefix.loaded, computed, began - job.added_at, now - began)
        prefix = job.prefix
        reads = tuple(prefix.misses), tuple(prefix.loads), prefix.overtaken_tokens
        self.state.act(ReportFirstToken(job.number, *told, *reads))
        if self._sends.finish(job):
            self._done(job)

    def _done(self, job: PrefillJob) -> None:
        tail_s, sent_bytes = 0.0, 0
        if job.outgoing is not None and job.token_at is not None:
            tail_s, sent_bytes = self.state.now - job.token_at, job.outgoing.sent_bytes
        self._forget(job)
        self.state.act(EndJob(job.number, JobOutcome.DONE, tail_s, sent_bytes))

    def _windowed(self, job: PrefillJob, table: Sequence[int], blocks: range, held: int | None) -> tuple[int, ...]:
        """Blocks whose windowed slices a store gets, for requests that continue the prompt or fork where `held` ends.

        The store holds `held` blocks of another prompt, maybe without the windows needed to continue behind these
        blocks.
        """
        window = self.state.settings.window_blocks
        if not window:
            return ()
        written = sum(len(it.blocks) - it.past for _, it in self.state.ios if isinstance(it, WriteBackFlight))
        if written * WRITTEN_PART > self.state.settings.window_slots:
            return ()
        tokens, size = job.spec.tokens, self.state.settings.block_size
        ends = (tokens // size, (tokens - self.state.settings.recurrent) // size, held or 0)
        wanted = [index for index in blocks if any(end - window <= index < end for end in ends)]
        return tuple(index for index in wanted if not self.state.manager.is_partial(table[index]))

    def _write_back(self, job: PrefillJob) -> None:
        """Writes full blocks to the kvstores as soon as they are computed, after the prefix blocks that these lack."""
        if job.owner.transient:
            return
        prefix, full = job.prefix.blocks, job.computed // self.state.settings.block_size
        if not job.put_until:
            # Computed blocks are always written: a store that could not provide them does not hold them.
            job.put_until = [prefix if copy.held is None else min(copy.held, prefix) for copy in job.copies]
        for copy, first in enumerate(job.put_until):
            if job.table is not None and first < full:
                blocks = tuple(job.table.blocks[first:full])
                windowed = self._windowed(job, job.table.blocks, range(first, full), job.copies[copy].held)
                read = {job.table.blocks[index] for index in windowed}
                pinned = tuple(sorted(blocks, key=read.__contains__))
                past = len(blocks) - len(read) if self.state.settings.window_blocks else 0
                self.state.manager.acquire(pinned, past)
                flight = self.state.begin(WriteBackFlight(pinned, past))
                self.state.act(WriteBackBlocks(flight, job.number, copy, first, blocks, windowed))
                job.put_until[copy] = full
