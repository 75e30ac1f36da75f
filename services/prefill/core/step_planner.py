"""Plans prefill steps: which jobs get blocks, which tokens are computed next, and the KV gates of steps.

A step's gate at a layer opens when the layer is loaded for every job of the step. A job whose prefix is still loading
joins a step only if its layers are predicted to arrive in time. If a layer is late while other jobs wait, the job's
slice is dropped from the step and the job waits for the rest of its load.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from moonpool.kv.keys import BlockKey
from moonpool.scheduling.fair_share import QueueEntry, QueueKey
from moonpool.scheduling.latency import prefill_seconds
from services.prefill.core.actions import ChunkOrder, DropSequenceSlice, GiveUpStep, OpenKVGate, RunStep
from services.prefill.core.events import StepEnded
from services.prefill.core.forecast import stall_grace, wait_for_layers, wait_for_other_load_until
from services.prefill.core.jobs import (
    BlockTable,
    OutgoingTransfers,
    PrefillJob,
    PrefillState,
    SequenceSlice,
    StepFlight,
)


def start_next(state: PrefillState) -> PrefillJob | None:
    """Binds the blocks of the first waiting job, if there is room and what goes before it is running short.

    Returns:
        The job; whether more of its prefix is loaded must be decided at once. None = none can start now.
    """
    started = len(state.started)
    if started == len(state.jobs) or started >= state.settings.max_started:
        return None
    first = state.waiting.first()
    if not _engine_short_of_work(state, first):
        return None
    job = state.jobs[first.number]
    held = state.manager.match(job.spec.keys[: state.reusable_blocks(job)])
    state.manager.acquire(held)
    missing = state.settings.blocks_for(job.spec.tokens) - len(held)
    if not state.manager.can_allocate(missing):
        state.manager.release(held)
        return None
    state.waiting.remove(job.number)
    job.table = BlockTable(held + state.manager.allocate(missing))
    state.hold_prefix(job, len(held))
    state.started[job.number] = job
    return job


def _engine_short_of_work(state: PrefillState, first: QueueKey) -> bool:
    """Whether the started jobs that go before have less to compute than the steps that can be in flight, and one more.

    A job that waits for layers, of its own load or of another one's, does not count: a slow store must not keep the
    engine from work that needs no load.
    """
    key = state.shares.key
    last = key(first)
    ahead = sum(_tokens_ahead(state, job) for job in state.started.values() if key(job.place) < last)
    return ahead < (state.settings.stages + 1) * state.settings.step_tokens


def _tokens_ahead(state: PrefillState, job: PrefillJob) -> int:
    if job.load is None or job.gated:
        return 0 if wait_for_other_load_until(state, job) is not None else job.spec.tokens - job.scheduled
    if wait_for_layers(state, job.load, step_s=0.0) != 0.0:
        return 0
    return job.spec.tokens - job.load.end * state.settings.block_tokens


CORE_SHARE_WEIGHT = 0.2
"""Of a step in the mean of what share of its cores the engine has."""


@dataclass(slots=True)
class StepOutcome:
    """What the end of a step meant."""

    counted: list[PrefillJob] = field(default_factory=list)
    """Jobs whose share is computed now, finished ones among them."""
    given_up: list[PrefillJob] = field(default_factory=list)
    """Jobs whose share the engine gave up by itself."""


class StepPlanner:
    """The engine's steps.

    Attributes:
        plan_at: when a job that is being loaded can join a step, if nothing else happens; None = not foreseen.
        done: steps that have ended.
        idle_since: since when nothing is computed, as far as tenants' shares know of it, seconds.
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
        """Steps that the engine has, in their order."""
        return list(self._flights)

    # --- planning --------------------------------------------------------------------------------------------------

    def plan(self) -> bool:
        """Starts the next step; False when nothing can be computed now, or `stages` steps are in flight."""
        self.plan_at = None
        if self.are_full() or not self._state.started:
            return False
        shares = self._shares()
        if not shares:
            return False
        self._charge(shares)
        tables = tuple(table for share in shares if (table := self._state.jobs[share.job].table) is not None)
        flight = StepFlight(shares, tables, any(share.loading for share in shares), self._state.now, self._state.now)
        io = self._state.begin(flight)
        self._flights[io] = flight
        chunks = tuple(self._order_of(share, table) for share, table in zip(shares, tables, strict=True))
        self._state.do(RunStep(io, chunks, flight.gated))
        self._open(io, flight)
        return True

    def rest(self) -> None:
        """Tells the tenants' shares for how long nothing was computed, before anything is decided by them."""
        if not self._flights:
            self._state.shares.rest(self._state.now - self.idle_since)
            self.idle_since = self._state.now

    def _shares(self) -> list[SequenceSlice]:
        shares: list[SequenceSlice] = []
        budget, seconds = self._state.settings.step_tokens, 0.0
        under_way = self._under_way()
        for job in self._in_turn():
            share = self._share(job, budget)
            if share is None:
                break  # less than a block of budget left; others behind wait for their turn
            if self._is_under_way(job, share, under_way) or self._is_loaded(job):
                continue
            with_it = seconds + self._seconds(share)
            if job.load is not None and not self._ready(job, with_it):
                continue
            self._schedule(job, share)
            under_way.update(self._keys(job, share))
            shares.append(share)
            budget, seconds = budget - (share.end - share.start), with_it
            if not budget:
                break
        return shares

    def _in_turn(self) -> Iterator[PrefillJob]:
        """Started jobs of which something can be computed, in fair order."""
        state = self._state
        lines: dict[str, list[QueueEntry]] = {}
        for job in state.started.values():
            if self._plannable(job):
                lines.setdefault(job.place.tenant, []).append(QueueEntry(job.place, self._next_s(job)))
        for line in lines.values():
            line.sort(key=lambda wanted: wanted.place.own)
        return (state.jobs[wanted.place.number] for wanted in state.shares.order(lines.values()))

    def _next_s(self, job: PrefillJob) -> float:
        """Predicted seconds of as much of a job as a step can have."""
        settings = self._state.settings
        start = self._start(job)
        end = min(job.spec.tokens, start + settings.step_tokens)
        speeds = self._state.tracker.speeds
        return prefill_seconds(speeds, end - start, start, steps=1, begins=job.first_step_at is None)

    def _charge(self, shares: list[SequenceSlice]) -> None:
        for share in shares:
            place = self._state.jobs[share.job].place
            self._state.shares.serve(place.tenant, self._seconds(share), place.weight)

    def _plannable(self, job: PrefillJob) -> bool:
        if job.table is None or job.gated or job.settling:
            return False
        return job.scheduled < job.spec.tokens

    def _under_way(self) -> set[BlockKey]:
        """Keys of the blocks that steps in flight compute."""
        found: set[BlockKey] = set()
        for flight in self._flights.values():
            for share in flight.shares:
                if share.live:
                    found.update(self._keys(self._state.jobs[share.job], share))
        return found

    def _keys(self, job: PrefillJob, share: SequenceSlice) -> tuple[BlockKey, ...]:
        """Of the blocks that a share fills."""
        size = self._state.settings.block_tokens
        return () if share.full_hit else job.spec.keys[share.start // size : share.end // size]

    def _is_under_way(self, job: PrefillJob, share: SequenceSlice, under_way: set[BlockKey]) -> bool:
        """Whether a job that has not begun would compute what another computes just now: soon it will be found."""
        at = share.start // self._state.settings.block_tokens
        begins = job.first_step_at is None and job.load is None and not job.loaded and not share.full_hit
        return begins and at < self._state.reusable_blocks(job) and job.spec.keys[at] in under_way

    def _is_loaded(self, job: PrefillJob) -> bool:
        """Whether what the job would compute comes for another one; notes until when it waits for that."""
        until = wait_for_other_load_until(self._state, job)
        if until is not None:
            self._look_again(until)
        return until is not None

    def _ready(self, job: PrefillJob, step_s: float) -> bool:
        """Whether the job's layers come in time for a step that takes so long; notes when they will."""
        assert job.load is not None
        wait = wait_for_layers(self._state, job.load, step_s)
        if wait is None:
            return False
        if wait > 0:
            self._look_again(self._state.now + wait)
        return wait <= 0

    def _look_again(self, at: float) -> None:
        self.plan_at = at if self.plan_at is None else min(at, self.plan_at)

    def _share(self, job: PrefillJob, budget: int) -> SequenceSlice | None:
        """The job's next tokens within the budget; the prompt's end or a block border ends them."""
        size = self._state.settings.block_tokens
        if job.first_step_at is None and job.load is None and not job.loaded:
            self.match_again(job)
        start = self._start(job)
        end = min(job.spec.tokens, start + budget)
        if end < job.spec.tokens:
            end -= end % size
        if end <= start:
            return None
        begins = job.load is not None or start == job.cached + job.loaded
        prefix_blocks = job.prefix_blocks if job.load is None else job.load.end
        loading, full_hit = job.load is not None, start < prefix_blocks * size
        return SequenceSlice(job.number, start, end, begins, end == job.spec.tokens, loading, full_hit)

    def _start(self, job: PrefillJob) -> int:
        """The next token that is to be computed; with a load under way, the first one behind it."""
        if job.load is None:
            return job.scheduled
        return self._state.settings.reused_tokens(job.spec.tokens, job.load.end)

    def match_again(self, job: PrefillJob) -> None:
        """Blocks that others computed since the job was started need not be computed again."""
        state = self._state
        assert job.table is not None
        held = job.prefix_blocks
        more = state.manager.match(job.spec.keys[: state.reusable_blocks(job)])[held:]
        if not more:
            return
        state.manager.acquire(more)
        state.manager.release(job.table.blocks[held : held + len(more)])
        job.table.blocks[held : held + len(more)] = more
        state.hold_prefix(job, held + len(more))

    def _schedule(self, job: PrefillJob, share: SequenceSlice) -> None:
        if job.first_step_at is None:
            job.first_step_at = self._state.now
            self._sends.leading(job, job.prefix_blocks)
        job.scheduled = share.end
        job.flying += 1
        job.gated = share.loading

    def _order_of(self, share: SequenceSlice, table: BlockTable) -> ChunkOrder:
        blocks = tuple(table.blocks[: self._state.settings.blocks_for(share.end)])
        return ChunkOrder(share.job, share.start, share.end, blocks, share.last, share.full_hit)

    def _seconds(self, share: SequenceSlice) -> float:
        return prefill_seconds(
            self._state.tracker.speeds, share.end - share.start, share.start, steps=1, begins=share.first
        )

    # --- in flight -------------------------------------------------------------------------------------------------

    def layer_computed(self, io: int, layer: int) -> None:
        """A layer of a step is in the pool: its new slices may leave."""
        flight = self._flights.get(io)
        if flight is None:
            return
        flight.layers, flight.moved_at = max(flight.layers, layer + 1), self._state.now
        size, jobs = self._state.settings.block_tokens, self._state.jobs
        for share in flight.shares:
            job = jobs.get(share.job)
            if share.live and job is not None:
                self._sends.add(job, layer, share.start // size, -(-share.end // size), io)

    def ended(self, io: int, flight: StepFlight, result: StepEnded) -> StepOutcome:
        """A step is over. Steps end in the order in which they were planned, but for those that nobody wants."""
        assert self._state.front is flight or not any(share.live for share in flight.shares), "steps end in order"
        del self._flights[io]
        self.done += 1
        self.idle_since = self._state.now
        self._to_the_front()
        self._learn(flight, result)
        news = StepOutcome()
        for share in flight.shares:
            job = self._state.jobs.get(share.job)
            if job is None or not share.live:
                continue
            self._land(job)
            if result.aborted:
                job.scheduled = job.computed
                news.given_up.append(job)
            else:
                self._count(job, share)
                news.counted.append(job)
        return news

    def _to_the_front(self) -> None:
        """The next step has the engine's first stages for itself: from now on its gates may hold others up."""
        front = self._state.front
        if front is not None:
            front.moved_at = max(front.moved_at, self._state.now)

    def _count(self, job: PrefillJob, share: SequenceSlice) -> None:
        if job.load is not None:  # every gate was open, so every layer is there
            assert job.load.layers == self._state.settings.layers
            job.loaded, job.prefix_blocks = share.start - job.cached, job.load.end
            self._state.advance(job, share.start)
            job.load = None
        assert job.computed == share.start
        self._state.advance(job, share.end)

    def _land(self, job: PrefillJob) -> None:
        job.flying -= 1
        job.gated = False

    def _learn(self, flight: StepFlight, result: StepEnded) -> None:
        """A step that is alone in the engine takes as long as until its end is heard of, not just as it computes."""
        if flight.gated or result.aborted:
            return
        alone = self._state.settings.stages == 1
        seconds = max(result.seconds, self._state.now - flight.began_at) if alone else result.seconds
        chunks = [(share.end - share.start, share.start, share.first) for share in flight.shares]
        self._state.tracker.observe_prefill(chunks, seconds, share=result.share)
        self._state.share += CORE_SHARE_WEIGHT * (result.share - self._state.share)

    # --- gates -----------------------------------------------------------------------------------------------------

    def open_gates(self, job: PrefillJob) -> None:
        """More layers of the job are there."""
        if job.gated:
            for io, flight in self._flights.items():
                if any(share.job == job.number for share in flight.shares):
                    self._open(io, flight)

    def _open(self, io: int, flight: StepFlight) -> None:
        """Opens the gates up to the last layer that is there for all jobs of a step."""
        layer = min((self._layers_of(share) for share in flight.shares), default=0) - 1
        if flight.gated and layer > flight.opened:
            flight.opened = layer
            self._state.do(OpenKVGate(io, layer))

    def _layers_of(self, share: SequenceSlice) -> int:
        job = self._state.jobs.get(share.job)
        if not share.live or not share.loading or job is None or job.load is None:
            return self._state.settings.layers
        return job.load.layers

    def rewind(self, job: PrefillJob, first: int) -> None:
        """Blocks from `first` on are to be computed anew, when nothing reads or writes them any more."""
        job.settling.update(self._drop(job))
        self._sends.take_back(job, first)
        job.scheduled = job.computed

    def leave(self, job: PrefillJob) -> None:
        """The job ends: its shares count for nothing."""
        self._drop(job)

    def _drop(self, job: PrefillJob) -> list[int]:
        """Drops the job's shares; returns the steps they are in. A step without any share that counts is aborted."""
        dropped = []
        for io, flight in self._flights.items():
            for index, share in enumerate(flight.shares):
                if share.job == job.number and share.live:
                    share.live = False
                    self._land(job)
                    dropped.append(io)
                    self._dropped(io, flight, index)
        return dropped

    def _dropped(self, io: int, flight: StepFlight, index: int) -> None:
        if not any(share.live for share in flight.shares):
            self._state.do(GiveUpStep(io))
        else:  # also one that is not loading: the step that computes its prefix may have been aborted
            self._state.do(DropSequenceSlice(io, index))
            self._open(io, flight)

    # --- stalled loads ---------------------------------------------------------------------------------------------

    def stalled_at(self) -> float | None:
        """When the step in front will have waited too long at a gate while others wait; None = it does not."""
        flight = self._state.front
        if flight is None or not flight.gated:
            return None
        late = self._late(flight)
        if not late or not self._others_wait(late):
            return None
        return flight.moved_at + max(stall_grace(self._state, job.load) for job in late if job.load is not None)

    def _late(self, flight: StepFlight) -> list[PrefillJob]:
        """The jobs for whose layers a step waits at its next gate."""
        if flight.opened >= flight.layers or flight.layers == self._state.settings.layers:
            return []
        late = [share.job for share in flight.shares if self._layers_of(share) <= flight.layers]
        return [self._state.jobs[number] for number in late]

    def _others_wait(self, late: list[PrefillJob]) -> bool:
        """Whether something could be computed if the step did not wait."""
        return bool(self._state.waiting) or any(
            job not in late and job.load is None and not job.finished for job in self._state.started.values()
        )

    def overtake(self) -> None:
        """Drops the shares of late jobs from the step in front, which goes on without them."""
        at = self.stalled_at()
        if at is None or self._state.now < at:
            return
        front = self._state.front
        assert front is not None
        for job in self._late(front):
            assert job.load is not None
            job.load.overtaken = True
            self.rewind(job, job.load.end)
