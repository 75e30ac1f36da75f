"""Plans prefill steps: which jobs get blocks, which tokens are computed next, and the KV gates of steps.

A step's gate at a layer opens when the layer is loaded for every job in the step. If a job's prefix is still loading,
the job joins a step only if the layers are predicted to arrive in time. If a layer is late while other jobs wait, the
job's slice is dropped from the step and the job waits for the rest of the load.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.fair_share import QueueEntry, QueueKey
from moonpool.base.scheduling.latency import prefill_seconds
from moonpool.engine.prefill.core.actions import ChunkOrder, DropSequenceSlice, GiveUpStep, OpenKVGate, RunStep
from moonpool.engine.prefill.core.events import StepEnded
from moonpool.engine.prefill.core.forecast import stall_grace, wait_for_layers, wait_for_other_load_until
from moonpool.engine.prefill.core.jobs import (
    BlockTable,
    JobStatus,
    OutgoingTransfers,
    PrefillJob,
    PrefillState,
    SequenceSlice,
    StepFlight,
)

CORE_SHARE_WEIGHT = 0.2
"""One step's weight in the mean core share."""


@dataclass(slots=True)
class StepOutcome:
    """Jobs in a step that has ended.

    Attributes:
        counted: jobs with a slice computed now, finished jobs included.
        given_up: jobs with a slice that the engine gave up by itself.
    """

    counted: list[PrefillJob] = field(default_factory=list)
    given_up: list[PrefillJob] = field(default_factory=list)


class StepPlanner:
    """Plans the engine's steps, opens KV gates, and drops slices if their load stalls.

    Attributes:
        plan_at: when a job with a loading prefix can join a step, if no event comes; None = not foreseen.
        done: steps that have ended.
        idle_since: since when no token is computed, as told to the tenants' shares, seconds.
    """

    def __init__(self, state: PrefillState, sends: OutgoingTransfers) -> None:
        self._state = state
        self._sends = sends
        self._flights = state.steps
        self.plan_at: float | None = None
        self.done = 0
        self.idle_since = 0.0

    def are_full(self) -> bool:
        """Whether `stages` steps are in flight."""
        return len(self._flights) >= self._state.settings.stages

    @property
    def in_flight(self) -> list[int]:
        """Steps in flight, in order."""
        return list(self._flights)

    # --- starting jobs ---------------------------------------------------------------------------------------------

    def start_next(self) -> PrefillJob | None:
        """Binds the blocks of the first waiting job, if they are available and the engine lacks work before that job.

        Returns:
            The job, for which the caller decides at once whether to load a prefix; None if no job can start now.
        """
        state = self._state
        started = len(state.started)
        if started == len(state.jobs) or started >= state.settings.max_started:
            return None
        first = state.waiting.first()
        if not self._is_short_of_work(first):
            return None
        job = state.jobs[first.number]
        if not self._has_slots(job):
            return None
        held = state.manager.match(job.spec.keys[: state.reusable_blocks(job)])
        missing = state.settings.blocks_for(job.spec.tokens) - len(held)
        if missing > state.manager.num_available - sum(map(state.manager.is_cached, held)):
            return None
        state.waiting.remove(job.number)
        job.table = BlockTable(held)
        state.hold_prefix(job, [], held)
        state.note_borders(job)
        job.table.blocks = held + state.manager.allocate(missing)
        job.set_status(JobStatus.STARTED)
        state.started[job.number] = job
        return job

    def _has_slots(self, job: PrefillJob) -> bool:
        """Whether all started jobs and this job leave enough window slots for the steps in flight."""
        settings = self._state.settings
        tokens = [it.spec.tokens for it in self._state.started.values() if it.table is not None]
        if not settings.window_blocks or not tokens:
            return True
        held = sum(map(settings.held_slots, [*tokens, job.spec.tokens]))
        return held + settings.slots_in_work <= settings.window_slots

    def _is_short_of_work(self, first: QueueKey) -> bool:
        """Whether the started jobs before `first` have less to compute than the steps in flight at most, plus one.

        A job that waits for layers, from the job's own load or another, does not count: a slow store must not keep the
        engine from work that needs no load. A job with a load starts as much sooner as the load is expected to take, so
        that the blocks are here when the job's turn comes.
        """
        state = self._state
        key = state.shares.key
        last = key(first)
        ahead = sum(self._tokens_ahead(job) for job in state.started.values() if key(job.queue_key) < last)
        max_num_batched_tokens, load_s = state.settings.max_num_batched_tokens, state.jobs[first.number].load_s
        beyond = ahead - (state.settings.stages + 1) * max_num_batched_tokens
        if beyond < 0 or not load_s:
            return beyond < 0
        step_s = prefill_seconds(state.tracker.speeds, max_num_batched_tokens, 0) / state.settings.stages
        return beyond * step_s < load_s * max_num_batched_tokens

    def _tokens_ahead(self, job: PrefillJob) -> int:
        state = self._state
        if job.prefix.load is None or job.gated:
            return 0 if wait_for_other_load_until(state, job) is not None else job.spec.tokens - job.scheduled
        if wait_for_layers(state, job.prefix.load, step_s=0.0) != 0.0:
            return 0
        return job.spec.tokens - job.prefix.load.end * state.settings.block_size

    # --- planning --------------------------------------------------------------------------------------------------

    def plan(self) -> bool:
        """Starts the next step; False if no token can be computed now, or `stages` steps are in flight."""
        self.plan_at = None
        if self.are_full() or not self._state.started:
            return False
        slices = self._slices()
        if not slices:
            return False
        self._charge(slices)
        tables = tuple(table for part in slices if (table := self._state.jobs[part.job].table) is not None)
        flight = StepFlight(slices, tables, any(part.loading for part in slices), self._state.now, self._state.now)
        io = self._state.begin(flight)
        self._flights[io] = flight
        chunks = tuple(self._order_of(part, table) for part, table in zip(slices, tables, strict=True))
        self._state.act(RunStep(io, chunks, flight.gated))
        self._open(io, flight)
        return True

    def forgive_idle(self) -> None:
        """Tells the tenants' shares how long the engine was idle, before they decide anything."""
        if not self._flights:
            self._state.shares.forgive_idle(self._state.now - self.idle_since)
            self.idle_since = self._state.now

    def _slices(self) -> list[SequenceSlice]:
        slices: list[SequenceSlice] = []
        budget, seconds = self._state.settings.max_num_batched_tokens, 0.0
        under_way = self._under_way()
        for job in self._fair_order():
            part = self._next_slice(job, budget)
            if part is None:
                break  # less than a block of budget left; others behind wait for their turn
            if self._is_under_way(job, part, under_way) or self._is_loaded(job):
                continue
            with_it = seconds + self._seconds(part)
            if job.prefix.load is not None and not self._ready(job, with_it):
                continue
            if not self._give_slots(job, part):
                continue
            self._schedule(job, part)
            under_way.update(self._keys(job, part))
            slices.append(part)
            budget, seconds = budget - (part.end - part.start) * job.spec.token_cost, with_it
            if budget <= 0:
                break
        return slices

    def _give_slots(self, job: PrefillJob, part: SequenceSlice) -> bool:
        """Gives window slots to a slice's blocks; makes the slice shorter if slots do not suffice.

        Layers with a window write KV in each block. Recurrent states are written behind the slice, behind the prompt's
        last full block, and behind further borders if there are slots. Idle slots take states for blocks between:
        another prompt may leave the chain there.

        Returns:
            False if no token can be computed.
        """
        settings, manager, size = self._state.settings, self._state.manager, self._state.settings.block_size
        if not settings.window_blocks or part.full_hit:
            return True
        assert job.table is not None
        first, end = part.start // size, settings.blocks_for(part.end)
        needed, further = set(range(first, end)), set[int]()
        if settings.states_alone:
            further = {border - 1 for border in job.borders if first < border <= part.end // size}
            needed = {end - 1, *further.intersection((job.spec.tokens // size - 1,))}
        lacking = [index for index in sorted(needed) if manager.is_partial(job.table.blocks[index])]
        short = len(lacking) - manager.num_slots_available
        if short > 0:
            if settings.states_alone:
                return False
            part.end, part.last = lacking[-short] * size, False
            del lacking[-short:]
        manager.give_slots(job.table.blocks[index] for index in lacking)
        more = [block for index in sorted(further) if manager.is_partial(block := job.table.blocks[index])]
        manager.give_slots(more[: manager.num_slots_available])
        if settings.states_alone and (idle := manager.num_slots_idle // 2):
            between = [block for block in job.table.blocks[first:end] if manager.is_partial(block)]
            manager.give_slots(between[:: -(-len(between) // idle)] if between else ())
        return part.end > part.start

    def _fair_order(self) -> Iterator[PrefillJob]:
        """Started jobs that have something to compute, in fair order."""
        state = self._state
        queues: dict[str, list[QueueEntry]] = {}
        for job in state.started.values():
            if self._plannable(job):
                queues.setdefault(job.queue_key.tenant, []).append(QueueEntry(job.queue_key, self._next_s(job)))
        for queue in queues.values():
            queue.sort(key=lambda entry: entry.key.order_in_tenant)
        return (state.jobs[entry.key.number] for entry in state.shares.order(queues.values()))

    def _next_s(self, job: PrefillJob) -> float:
        """Predicted seconds for a job's largest slice that fits a step."""
        settings = self._state.settings
        start = self._start(job)
        end = min(job.spec.tokens, start + settings.max_num_batched_tokens)
        speeds = self._state.tracker.speeds
        begins, cost = job.first_step_at is None, job.spec.token_cost
        return cost * prefill_seconds(speeds, end - start, start, steps=1, begins=begins)

    def _charge(self, slices: list[SequenceSlice]) -> None:
        for part in slices:
            key = self._state.jobs[part.job].queue_key
            self._state.shares.serve(key.tenant, self._seconds(part), key.weight)

    def _plannable(self, job: PrefillJob) -> bool:
        if job.table is None or job.gated or job.blocked_by:
            return False
        if job.prefix.overtaken is not None and job.prefix.overtaken.whole:
            return False  # the rest comes from the load once the steps in flight have ended
        return job.scheduled < job.spec.tokens

    def _under_way(self) -> set[BlockKey]:
        """Keys for blocks that steps in flight compute."""
        found: set[BlockKey] = set()
        for flight in self._flights.values():
            for part in flight.slices:
                if part.live:
                    found.update(self._keys(self._state.jobs[part.job], part))
        return found

    def _keys(self, job: PrefillJob, part: SequenceSlice) -> tuple[BlockKey, ...]:
        """Keys for blocks that a slice fills."""
        size = self._state.settings.block_size
        return () if part.full_hit else job.spec.keys[part.start // size : part.end // size]

    def _is_under_way(self, job: PrefillJob, part: SequenceSlice, under_way: set[BlockKey]) -> bool:
        """Whether a job without steps would compute a block that another job computes now, and that is soon cached."""
        at = part.start // self._state.settings.block_size
        begins = job.may_match and not part.full_hit
        return begins and at < self._state.reusable_blocks(job) and job.spec.keys[at] in under_way

    def _is_loaded(self, job: PrefillJob) -> bool:
        """Whether another job loads what this job would compute; notes how long this job waits for the load."""
        until = wait_for_other_load_until(self._state, job)
        if until is not None:
            self._look_again(until)
        return until is not None

    def _ready(self, job: PrefillJob, step_s: float) -> bool:
        """Whether the job's layers arrive in time for a step of `step_s` seconds; notes the time if not."""
        assert job.prefix.load is not None
        wait = wait_for_layers(self._state, job.prefix.load, step_s)
        if wait is None:
            return False
        if wait > 0:
            self._look_again(self._state.now + wait)
        return wait <= 0

    def _look_again(self, at: float) -> None:
        self.plan_at = at if self.plan_at is None else min(at, self.plan_at)

    def _next_slice(self, job: PrefillJob, budget: int) -> SequenceSlice | None:
        """The job's next slice within the budget; a slice ends at a block border or at the prompt's end.

        Tokens that take longer make a slice shorter: every step takes about equally long.
        """
        size, most = self._state.settings.block_size, budget
        if job.spec.token_cost > 1:
            fewest = size if budget == self._state.settings.max_num_batched_tokens else 0
            most = max(fewest, budget // job.spec.token_cost)
        if job.may_match:
            self.match_again(job)
        start = self._start(job)
        end = min(job.spec.tokens, start + most)
        if end < job.spec.tokens:
            end -= end % size
        if end <= start:
            return None
        begins = job.prefix.load is not None or start == job.prefix.cached + job.prefix.loaded
        prefix_blocks = job.prefix.blocks if job.prefix.load is None else job.prefix.load.end
        loading, full_hit = job.prefix.load is not None, start < prefix_blocks * size
        return SequenceSlice(job.number, start, end, begins, end == job.spec.tokens, loading, full_hit)

    def _start(self, job: PrefillJob) -> int:
        """The next token to compute; while a prefix is loading, the first token behind the prefix."""
        if job.prefix.load is None:
            return job.scheduled
        return self._state.settings.reused_tokens(job.spec.tokens, job.prefix.load.end)

    def match_again(self, job: PrefillJob) -> None:
        """Takes blocks that other jobs have computed since this job started."""
        state = self._state
        assert job.table is not None
        held = job.prefix.blocks
        more = state.manager.match(job.spec.keys[: state.reusable_blocks(job)])[held:]
        if not more:
            return
        own = job.table.blocks[held : held + len(more)]
        state.hold_prefix(job, job.table.blocks[:held], more)
        state.note_borders(job)
        state.manager.release(own)
        job.table.blocks[held : held + len(more)] = more

    def _schedule(self, job: PrefillJob, part: SequenceSlice) -> None:
        if job.first_step_at is None:
            job.first_step_at = self._state.now
            job.set_status(JobStatus.COMPUTING)
            self._sends.leading(job, job.prefix.blocks)
        job.scheduled = part.end
        job.slices_in_flight += 1
        job.gated = part.loading

    def _order_of(self, part: SequenceSlice, table: BlockTable) -> ChunkOrder:
        blocks = tuple(table.blocks[: self._state.settings.blocks_for(part.end)])
        return ChunkOrder(part.job, part.start, part.end, blocks, part.last, part.full_hit)

    def _seconds(self, part: SequenceSlice) -> float:
        seconds = prefill_seconds(
            self._state.tracker.speeds, part.end - part.start, part.start, steps=1, begins=part.first
        )
        return self._state.jobs[part.job].spec.token_cost * seconds

    # --- in flight -------------------------------------------------------------------------------------------------

    def layer_computed(self, io: int, layer: int) -> None:
        """Sends a step's layer, whose KV is in the pool."""
        flight = self._flights.get(io)
        if flight is None:
            return
        flight.layers, flight.progressed_at = max(flight.layers, layer + 1), self._state.now
        size, jobs = self._state.settings.block_size, self._state.jobs
        for part in flight.slices:
            job = jobs.get(part.job)
            if part.live and job is not None:
                self._sends.add(job, layer, part.start // size, -(-part.end // size), io)

    def ended(self, io: int, flight: StepFlight, result: StepEnded) -> StepOutcome:
        """Ends a step. Steps end in the order of planning, except steps without a live slice."""
        assert self._state.front is flight or not any(part.live for part in flight.slices), "steps end in order"
        del self._flights[io]
        self.done += 1
        self.idle_since = self._state.now
        self._to_the_front()
        self._learn(flight, result)
        news = StepOutcome()
        for part in flight.slices:
            job = self._state.jobs.get(part.job)
            if job is None or not part.live:
                continue
            self._slice_over(job)
            if result.aborted:
                job.scheduled = job.computed
                news.given_up.append(job)
            else:
                self._count(job, part)
                news.counted.append(job)
        return news

    def _to_the_front(self) -> None:
        """The next step is in front: from now on the step's gates may hold others up."""
        front = self._state.front
        if front is not None:
            front.progressed_at = max(front.progressed_at, self._state.now)

    def _count(self, job: PrefillJob, part: SequenceSlice) -> None:
        if job.prefix.load is not None:  # every gate was open, so every layer has arrived
            assert job.prefix.load.layers == self._state.settings.layers
            job.prefix.loaded, job.prefix.blocks = part.start - job.prefix.cached, job.prefix.load.end
            self._state.advance(job, part.start)
            job.prefix.load = None
        assert job.computed == part.start
        self._state.advance(job, part.end)

    def _slice_over(self, job: PrefillJob) -> None:
        job.slices_in_flight -= 1
        job.gated = False

    def _learn(self, flight: StepFlight, result: StepEnded) -> None:
        """Learns a step's speed. A step alone in the engine counts until the report of the end.

        A step with prompts' log probabilities is left out: its speed does not predict other steps.
        """
        jobs = [job for part in flight.slices if (job := self._state.jobs.get(part.job)) is not None]
        if flight.gated or result.aborted or any(job.spec.token_cost > 1 for job in jobs):
            return
        alone = self._state.settings.stages == 1
        seconds = max(result.seconds, self._state.now - flight.began_at) if alone else result.seconds
        chunks = [(part.end - part.start, part.start, part.first) for part in flight.slices]
        self._state.tracker.observe_prefill(chunks, seconds, share=result.share)
        self._state.core_share += CORE_SHARE_WEIGHT * (result.share - self._state.core_share)

    # --- gates -----------------------------------------------------------------------------------------------------

    def open_gates(self, job: PrefillJob) -> None:
        """Notes that more layers of the job's prefix have arrived."""
        if job.gated:
            for io, flight in self._flights.items():
                if any(part.job == job.number for part in flight.slices):
                    self._open(io, flight)

    def _open(self, io: int, flight: StepFlight) -> None:
        """Opens the gates up to the last layer that has arrived for all jobs of a step."""
        layer = min((self._layers_of(part) for part in flight.slices), default=0) - 1
        if flight.gated and layer > flight.opened:
            flight.opened = layer
            self._state.act(OpenKVGate(io, layer))

    def _layers_of(self, part: SequenceSlice) -> int:
        job = self._state.jobs.get(part.job)
        if not part.live or not part.loading or job is None or job.prefix.load is None:
            return self._state.settings.layers
        return job.prefix.load.layers

    def rewind(self, job: PrefillJob, first: int) -> None:
        """Blocks from `first` on are computed again, once no I/O reads or writes them."""
        job.blocked_by.update(self._drop(job))
        self._sends.take_back(job, first)
        job.scheduled = job.computed

    def drop_job(self, job: PrefillJob) -> None:
        """The job ends: the job's slices do not count any more."""
        self._drop(job)

    def _drop(self, job: PrefillJob) -> list[int]:
        """Drops the job's slices; returns their steps. Gives up a step without a live slice."""
        dropped = []
        for io, flight in self._flights.items():
            for index, part in enumerate(flight.slices):
                if part.job == job.number and part.live:
                    part.live = False
                    self._slice_over(job)
                    dropped.append(io)
                    self._dropped(io, flight, index)
        return dropped

    def _dropped(self, io: int, flight: StepFlight, index: int) -> None:
        if not any(part.live for part in flight.slices):
            self._state.act(GiveUpStep(io))
        else:  # also a slice without a load: the step that computes the prefix may have been aborted
            self._state.act(DropSequenceSlice(io, index))
            self._open(io, flight)

    # --- stalled loads ---------------------------------------------------------------------------------------------

    def stalled_at(self) -> float | None:
        """When the step in front will have waited too long at a gate while other jobs wait; None = never."""
        flight = self._state.front
        if flight is None or not flight.gated:
            return None
        late = self._late(flight)
        if not late or not self._others_wait(late):
            return None
        loads = [job.prefix.load for job in late if job.prefix.load is not None]
        return flight.progressed_at + max(stall_grace(self._state, load) for load in loads)

    def _late(self, flight: StepFlight) -> list[PrefillJob]:
        """The jobs that a step waits for at the next gate."""
        if flight.opened >= flight.layers or flight.layers == self._state.settings.layers:
            return []
        late = [part.job for part in flight.slices if self._layers_of(part) <= flight.layers]
        return [self._state.jobs[number] for number in late]

    def _others_wait(self, late: list[PrefillJob]) -> bool:
        """Whether another job could be computed if the step did not wait."""
        return bool(self._state.waiting) or any(
            job not in late and job.prefix.load is None and not job.finished for job in self._state.started.values()
        )

    def drop_stalled(self) -> None:
        """Drops late jobs' slices from the step in front; the step continues without these slices."""
        at = self.stalled_at()
        if at is None or self._state.now < at:
            return
        front = self._state.front
        assert front is not None
        for job in self._late(front):
            assert job.prefix.load is not None
            job.prefix.load.stalled = True
            self.rewind(job, job.prefix.load.end)
