"""Prefix loads from kvstores and other instances, ahead of the steps that need them; and replication of hot blocks.

A failing source is skipped for a while: the failure delays one request by one deadline, not every request.

Replication takes spare capacity only: one order at a time, and at most half the free or cached blocks that no waiting
prompt needs. Until a request uses them, replicated blocks are evicted first (`BlockManager`).
"""

from collections.abc import Iterator

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_manager import KVOwner
from moonpool.base.scheduling.latency import Speeds, load_is_cheaper, load_seconds, prompt_work
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.engine.prefill.core.actions import EndReplication, LoadBlocks, PrefixLoaded, PrefixMiss, ReadReplica
from moonpool.engine.prefill.core.events import KVSource, LoadEnded, ReplicateBlocks
from moonpool.engine.prefill.core.forecast import is_computed_by_other, overtake_at, wait_for_other_load_until
from moonpool.engine.prefill.core.jobs import (
    BlockTable,
    LoadFlight,
    OutgoingTransfers,
    OvertakenLoad,
    PrefillJob,
    PrefillState,
    PrefixLoad,
    ReplicaFlight,
)
from moonpool.engine.prefill.core.step_planner import StepPlanner

FAILED_SOURCE_PAUSE_S = 2.0
LOAD_SLACK = 4.0
"""A load may take this many times the predicted seconds, plus the configured timeout."""


class PrefixLoads:
    """Loads prefixes into the pool.

    Attributes:
        loaded_blocks: blocks that arrived whole.
        failures: loads that failed for another reason than missing or damaged blocks.
        overtaken: loads that took longer than computing their blocks.
        undecided: jobs that wait for another job before deciding (`decide_again`).
    """

    def __init__(self, state: PrefillState, steps: StepPlanner, sends: OutgoingTransfers) -> None:
        self._state = state
        self._steps = steps
        self._sends = sends
        self._paused: dict[str, float] = {}
        self.undecided: dict[int, None] = {}
        self._in_flight: dict[int, int] = {}  # job of each load
        self.loaded_blocks = 0
        self.failures = 0
        self.overtaken = 0

    def decide(self, job: PrefillJob) -> None:
        """Loads a prefix into a starting job's blocks, from the best source for which loading pays.

        If another job loads or computes the same blocks, the decision waits for that job (`decide_again`).
        """
        if self._comes_for_other(job):
            self.undecided[job.number] = None
            return
        while job.prefix.next_source < len(job.sources):
            blocks = self._worth(job)
            if blocks:
                self._begin(job, job.prefix.blocks, blocks)
                return
            job.prefix.next_source += 1

    def decide_again(self) -> None:
        """Decides for jobs that waited for another job and need not any more."""
        for number in list(self.undecided):
            job = self._state.jobs.get(number)
            if job is None or job.first_step_at is not None:
                del self.undecided[number]
            elif not self._comes_for_other(job):
                del self.undecided[number]
                self._steps.match_again(job)
                self.decide(job)

    def _comes_for_other(self, job: PrefillJob) -> bool:
        """Whether another job loads or computes the blocks that this job could load."""
        return bool(job.sources) and (
            wait_for_other_load_until(self._state, job) is not None or is_computed_by_other(self._state, job)
        )

    def layer_loaded(self, io: int, layer: int) -> None:
        """Notes that all of a layer's blocks are in the pool."""
        job = self._job_of(io)
        if job is None or job.prefix.load is None:
            return
        job.prefix.load.layers, job.prefix.load.progressed_at = layer + 1, self._state.now
        if not layer:
            job.prefix.load.first_at = self._state.now
        self._sends.add(job, layer, job.prefix.load.first, job.prefix.load.end, None)
        self._steps.open_gates(job)

    def ended(self, io: int, flight: LoadFlight, result: LoadEnded) -> None:
        """A load has ended; blocks that did not arrive are computed."""
        del self._in_flight[io]
        self.learn(flight.source, flight.nbytes, flight.wanted, result)
        self.loaded_blocks += result.blocks
        job = self._state.jobs.get(flight.job)
        overtaken = job.prefix.overtaken if job is not None else None
        if job is not None and overtaken is not None and overtaken.load.io == io:
            self._overtaken_ended(job, overtaken, flight, result)
            return
        if job is None or job.prefix.load is None or job.prefix.load.io != io:
            return
        load = job.prefix.load
        if result.missing is not None and not flight.source.peer:  # a peer may lend fewer, and reports lost blocks
            job.prefix.misses.append(PrefixMiss(load.source, load.first + result.missing, result.windowed))
        if result.blocks == flight.wanted:
            job.prefix.loads.append(PrefixLoaded(load.source, result.blocks, result.seconds))
            self._load_over(job, load.end)
        # Once a layer is handed on, the layer's blocks may be on the way to decode. Another source's copy may differ in
        # the last bit, and must not be written over these blocks.
        elif result.blocks or load.layers or not self._load_from_next(job, load):
            job.prefix.load = None
            assert job.table is not None
            end = self._state.manager.continuable(job.table.blocks[: load.first + result.blocks])
            self._steps.rewind(job, end)
            self._load_over(job, end)

    def digest(self) -> bytes:
        """Hash of the paused sources, the undecided jobs and the counters."""
        counts = self.loaded_blocks, self.failures, self.overtaken
        return digest_of(self._paused, self.undecided, self._in_flight, *counts)

    # --- overtaking ------------------------------------------------------------------------------------------------

    def overtake_at(self) -> float | None:
        """When the next load is overtaken, if no event comes before; None = not foreseen."""
        if not self._in_flight:
            return None  # most of the time
        state, others = self._state, self._others()
        jobs = [job for number in self._in_flight.values() if (job := state.jobs.get(number)) is not None]
        times = [overtake_at(state, job, job.prefix.load, others) for job in jobs if job.prefix.load is not None]
        return min([at for at in times if at is not None], default=None)

    def overtake(self) -> None:
        """Computes the blocks of loads that take longer than computing, into other blocks, while the loads go on."""
        if not self._in_flight:
            return  # most of the time
        state, others = self._state, self._others()
        for io, number in list(self._in_flight.items()):
            job = state.jobs.get(number)
            load = job.prefix.load if job is not None else None
            if job is None or load is None:
                continue
            at = overtake_at(state, job, load, others)
            if at is not None and at <= state.now:
                self._overtake(job, load, io)

    def _others(self) -> int:
        """Jobs that wait for the engine beside a job that loads."""
        state = self._state
        return len(state.waiting) + sum([not job.finished for job in state.started.values()]) - 1

    def _overtake(self, job: PrefillJob, load: PrefixLoad, io: int) -> None:
        state, flight = self._state, self._state.ios.get(io)
        assert job.table is not None
        assert isinstance(flight, LoadFlight)
        own = BlockTable(job.table.blocks[load.first : load.end], pins=2)
        job.table.blocks[load.first : load.end] = state.manager.allocate(load.end - load.first)
        state.unpin(job.table)
        flight.tables = (own,)
        job.prefix.load, job.prefix.overtaken = None, OvertakenLoad(load, own)
        self._steps.rewind(job, load.first)
        self.overtaken += 1

    def computed(self, job: PrefillJob) -> None:
        """Drops or takes an overtaken load, after a part of the job was computed."""
        overtaken, size = job.prefix.overtaken, self._state.settings.block_size
        if overtaken is None:
            return
        load = overtaken.load
        if job.computed >= min(load.end * size, job.spec.tokens):
            job.prefix.overtaken_tokens += (load.end - load.first) * size
            if not overtaken.whole:
                self._learn_from_part(load)
            self.give_up(job)
        elif overtaken.whole:
            self._take_rest(job, overtaken)

    def give_up(self, job: PrefillJob) -> None:
        """An overtaken load is not wanted any more."""
        overtaken, job.prefix.overtaken = job.prefix.overtaken, None
        if overtaken is not None:
            self._state.cancel(overtaken.load.io)
            self._state.unpin(overtaken.table)

    def _learn_from_part(self, load: PrefixLoad) -> None:
        """Learns how slow a load was that did not arrive whole: as if half of the next layer had come."""
        state, flight = self._state, self._state.ios.get(load.io)
        assert isinstance(flight, LoadFlight)
        nbytes = flight.nbytes * (load.layers + 0.5) / state.settings.layers
        state.tracker.observe_load(round(nbytes), state.now - load.began_at, peer=flight.source.peer)

    def _overtaken_ended(
        self, job: PrefillJob, overtaken: OvertakenLoad, flight: LoadFlight, result: LoadEnded
    ) -> None:
        load = overtaken.load
        if result.missing is not None and not flight.source.peer:
            job.prefix.misses.append(PrefixMiss(load.source, load.first + result.missing, result.windowed))
        overtaken.whole = result.blocks == flight.wanted
        if overtaken.whole:
            job.prefix.loads.append(PrefixLoaded(load.source, result.blocks, result.seconds))
            self.computed(job)
        else:
            self.give_up(job)

    def _take_rest(self, job: PrefillJob, overtaken: OvertakenLoad) -> None:
        """Takes the blocks that are not computed from the load, once no step computes any."""
        state, load, table = self._state, overtaken.load, job.table
        if job.slices_in_flight:
            return
        assert table is not None
        first = job.computed // state.settings.block_size
        at = first - load.first
        rest = overtaken.table.blocks[at:]
        overtaken.table.blocks[at:], table.blocks[first : load.end] = table.blocks[first : load.end], rest
        job.prefix.overtaken_tokens += at * state.settings.block_size
        tokens = state.settings.reused_tokens(job.spec.tokens, load.end)
        job.prefix.blocks, job.prefix.loaded = load.end, job.prefix.loaded + tokens - job.computed
        for copy, until in enumerate(job.put_until):  # what the store gave, or holds, need not be written
            job.put_until[copy] = max(until, min(job.copies[copy].held or 0, load.end))
        state.advance(job, tokens)
        self._sends.leading(job, load.end)
        self.give_up(job)

    # --- parts -----------------------------------------------------------------------------------------------------

    def _load_over(self, job: PrefillJob, end: int) -> None:
        """The load is over: blocks up to `end` are whole."""
        tokens = self._state.settings.reused_tokens(job.spec.tokens, end)
        job.prefix.load, job.prefix.blocks = None, end
        job.prefix.loaded = tokens - job.prefix.cached
        self._state.advance(job, tokens)
        self._state.pass_windows(job)
        self._sends.leading(job, end)
        self._steps.open_gates(job)

    def _load_from_next(self, job: PrefillJob, load: PrefixLoad) -> bool:
        for source in range(load.source + 1, len(job.sources)):
            if not self.is_paused(job.sources[source]):
                job.prefix.next_source = source
                self._begin(job, load.first, load.end)
                return True
        return False

    def _begin(self, job: PrefillJob, first: int, end: int) -> None:
        state = self._state
        assert job.table is not None
        assert first < end <= state.reusable_blocks(job)
        index, nbytes = job.prefix.next_source, state.settings.read_bytes(end - first)
        source = job.sources[index]
        flight = LoadFlight(job.number, source, nbytes, end - first, (job.table,))
        io = state.begin(flight)
        self._in_flight[io] = job.number
        job.prefix.load = PrefixLoad(io, index, first, end, state.now, state.now)
        blocks = tuple(job.table.blocks[first:end])
        state.manager.give_slots(blocks[-state.settings.window_blocks :])
        state.act(LoadBlocks(io, job.number, index, first, blocks, self.timeout_s(source, nbytes)))

    def _worth(self, job: PrefillJob) -> int:
        """Leading blocks that the prompt should have after loading from the next source; 0: computing is cheaper."""
        source, settings = job.sources[job.prefix.next_source], self._state.settings
        speeds, blocks = self._speeds(source), min(source.blocks, self._state.reusable_blocks(job))
        if self.is_paused(source) or blocks <= job.prefix.blocks:
            return 0
        lacking = blocks - job.prefix.blocks
        if self._state.manager.num_slots_available < min(settings.window_blocks, lacking):
            return 0
        tokens = job.spec.tokens
        local = prompt_work(tokens, job.prefix.cached, settings.max_num_batched_tokens)
        rest = prompt_work(tokens, settings.reused_tokens(tokens, blocks), settings.max_num_batched_tokens)
        nbytes = settings.read_bytes(lacking)
        return blocks if load_is_cheaper(speeds, local, rest, nbytes=nbytes, layers=settings.layers) else 0

    def expected_seconds(self, job: PrefillJob, held: int) -> float:
        """Predicted seconds for loading what is behind `held` blocks, from the job's first source."""
        source = next(iter(job.sources), None)
        blocks = min(source.blocks, self._state.reusable_blocks(job)) - held if source is not None else 0
        if source is None or blocks <= 0:
            return 0.0
        return load_seconds(self._speeds(source), self._state.settings.read_bytes(blocks))

    def timeout_s(self, source: KVSource, nbytes: int) -> float:
        """Longest time for reading `nbytes`, seconds."""
        return self._state.settings.load_timeout_s + LOAD_SLACK * load_seconds(self._speeds(source), nbytes)

    def learn(self, source: KVSource, nbytes: int, blocks: int, result: LoadEnded) -> None:
        """Learns from a read of `blocks` blocks; pauses a source that failed."""
        if result.failed:
            self.failures += 1
            self._paused = {name: at for name, at in self._paused.items() if at > self._state.now}
            self._paused[source.name] = self._state.now + FAILED_SOURCE_PAUSE_S
        elif result.blocks == blocks:
            self._state.tracker.observe_load(nbytes, result.seconds, peer=source.peer)

    def _speeds(self, source: KVSource) -> Speeds:
        """The instance's speeds, with the load rate for this kind of source."""
        speeds = self._state.tracker.speeds
        return speeds.loading_from_peers() if source.peer else speeds

    def is_paused(self, source: KVSource) -> bool:
        """Whether a source is paused after a failure."""
        return self._paused.get(source.name, 0.0) > self._state.now

    def _job_of(self, io: int) -> PrefillJob | None:
        """The load's job; None if the job has ended or does not use the load any more."""
        flight = self._state.ios.get(io)
        job = self._state.jobs.get(flight.job) if isinstance(flight, LoadFlight) else None
        return job if job is not None and job.prefix.load is not None and job.prefix.load.io == io else None


REPLICA_PART = 2
"""A replication takes at most 1 / this number of the free or cached blocks that waiting prompts do not need."""
MAX_ORDERS = 16
"""Orders that may wait for the order in flight; further orders are skipped."""


class Replication:
    """Replicates blocks from other instances, one order at a time.

    Attributes:
        copied_blocks: blocks that arrived whole.
    """

    def __init__(self, state: PrefillState, loads: PrefixLoads) -> None:
        self._state = state
        self._loads = loads
        self._io: int | None = None
        self._orders: dict[int, ReplicateBlocks] = {}
        self.copied_blocks = 0

    @property
    def owners(self) -> Iterator[tuple[KVOwner, tuple[BlockKey, ...]]]:
        """Owner and keys of the blocks in flight."""
        flight = self._state.replica
        if flight is not None:
            yield flight.owner, flight.keys

    def begin(self, event: ReplicateBlocks) -> None:
        """Reads a chain's blocks that are not cached, behind earlier orders; or skips the order."""
        if len(self._orders) < MAX_ORDERS:
            self._orders[event.number] = event
            self._begin_next()
        else:
            self._state.act(EndReplication(event.number, 0))

    def _begin_next(self) -> None:
        while self._io is None and self._orders:
            event = self._orders.pop(next(iter(self._orders)))
            if not self._begin(event):
                self._state.act(EndReplication(event.number, 0))

    def _begin(self, event: ReplicateBlocks) -> bool:
        """Reads the blocks; False if all blocks are cached, or the pool has no room now."""
        state, manager = self._state, self._state.manager
        held = manager.match(event.keys)
        missing = len(event.keys) - len(held)
        needed = sum([state.settings.blocks_for(state.jobs[number].spec.tokens) for number in state.waiting])
        spare = manager.num_available - needed - sum(map(manager.is_cached, held))
        windows = min(missing, state.settings.window_blocks)
        full = missing * REPLICA_PART > spare or windows * REPLICA_PART > manager.num_slots_available
        if not missing or full or self._loads.is_paused(event.source):
            return False
        manager.acquire(held, len(held))
        blocks = (*held, *manager.allocate(missing))
        manager.give_slots(blocks[len(blocks) - windows :])
        nbytes, owner = state.settings.read_bytes(missing), KVOwner(event.tenant)
        state.replica = ReplicaFlight(
            event.number, event.keys, owner, blocks, len(held), event.source, nbytes, state.now
        )
        self._io = state.begin(state.replica)
        timeout_s = self._loads.timeout_s(event.source, nbytes)
        state.act(ReadReplica(self._io, event.number, len(held), blocks[len(held) :], timeout_s))
        return True

    def ended(self, flight: ReplicaFlight, result: LoadEnded) -> None:
        """Keeps the blocks that arrived whole."""
        self._io = self._state.replica = None
        self._loads.learn(flight.source, flight.nbytes, len(flight.keys) - flight.first, result)
        manager, end = self._state.manager, flight.first + result.blocks
        fresh = flight.blocks[flight.first : end]
        for block, key in zip(fresh, flight.keys[flight.first : end], strict=True):
            manager.register(block, key, flight.owner)
        manager.release(flight.blocks, flight.first)
        manager.note_copies(fresh)
        self.copied_blocks += result.blocks
        self._state.act(EndReplication(flight.number, result.blocks))
        self._begin_next()

    def call_off(self, tail: BlockKey) -> None:
        """The chain that ends with this key is not wanted any more."""
        for number in [number for number, event in self._orders.items() if event.keys[-1] == tail]:
            del self._orders[number]
            self._state.act(EndReplication(number, 0))
        flight = self._state.replica
        if flight is not None and flight.keys[-1] == tail:
            self._state.cancel(self._io)

    def stop(self) -> None:
        """Cancels all replications."""
        for number in self._orders:
            self._state.act(EndReplication(number, 0))
        self._orders.clear()
        self._state.cancel(self._io)

    def digest(self) -> bytes:
        """Hash over the orders, the replication in flight and the counter."""
        return digest_of(self._io, self._orders, self._state.replica, self.copied_blocks)
