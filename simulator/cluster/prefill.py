"""A prefill instance in virtual time: a queue, a pool of blocks that are reused, loads, steps and sends."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.cost import prefill_seconds
from moonpool.kv.keys import BlockKey
from moonpool.sched.block_manager import BlockManager
from simulator.cluster.config import ClusterConfig
from simulator.cluster.requests import Attempt
from simulator.cluster.store import Store
from simulator.kernel.clock import World, ps
from simulator.kernel.links import Flow, Link, Network

LOOKAHEAD = 4
"""Jobs that hold blocks at once: those that are computed, and the next ones, whose prefixes are loaded meanwhile."""


@dataclass(slots=True, eq=False)
class Job:
    """An attempt's prompt at its prefill instance. Times are picoseconds."""

    attempt: Attempt
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    """Leading tokens whose KV is not computed."""
    computed: int = 0
    """Tokens whose KV is there, cached ones included."""
    held: int = 0
    """Leading blocks that were in the pool."""
    store: int = -1
    """The store that it loads from; -1 = nothing is loading."""
    load: Flow | None = None
    has_layer: bool = False
    """The first layer of what is loading has come."""
    begun_at: int | None = None
    """When its first step began."""
    token_at: int | None = None
    """When its first token was there."""
    early: Flow | None = None
    """The KV of all layers but the last."""
    early_sent: bool = False
    sending: bool = False

    @property
    def tokens(self) -> int:
        return self.attempt.tokens


@dataclass(slots=True, eq=False)
class Step:
    """A step that is being computed."""

    chunks: list[tuple[Job, int]]
    """Jobs, and how many tokens of each are computed."""
    duration: int
    not_before: int = 0
    """When it may end at the earliest."""
    computed: bool = False
    """Its time is over; it waits for the last layer of a prefix that is still loading."""


@dataclass(slots=True)
class PrefillUse:
    """What an instance did."""

    steps: int = 0
    busy: int = 0
    computed_tokens: int = 0
    reused_tokens: int = 0


class PrefillInstance:
    """One instance.

    Args:
        stores: of the cluster.
        on_token: called when an attempt's first token is there.
        on_sent: called when an attempt's KV is whole at decode.
        on_keys: called with the keys that came into the pool and those that left it.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        config: ClusterConfig,
        name: str,
        stores: Sequence[Store],
        on_token: Callable[[Attempt], None],
        on_sent: Callable[[Attempt], None],
        on_keys: Callable[[Sequence[BlockKey], Sequence[BlockKey]], None],
    ) -> None:
        self.name = name
        self.loads = Link(f"{name} in", config.load_bytes_per_s)
        self.sends = Link(f"{name} out", config.transfer_bytes_per_s)
        self._world, self._network, self._config, self._stores = world, network, config, stores
        self._on_token, self._on_sent, self._on_keys = on_token, on_sent, on_keys
        self._layers = config.profile.layers
        self.up = True
        self.begin_anew()

    def begin_anew(self) -> None:
        """An empty instance, as after a crash; what was planned before has no effect."""
        self.use = PrefillUse()
        self.pool = BlockManager(self._config.blocks)
        self._jobs: dict[Attempt, Job] = {}
        self._queue: deque[Job] = deque()
        self._active: list[Job] = []
        self._step: Step | None = None

    # What others tell it

    def submit(self, attempt: Attempt) -> None:
        """An attempt's prompt is to be computed."""
        job = Job(attempt)
        self._jobs[attempt] = job
        self._queue.append(job)
        self._go_on()

    def promised(self, attempt: Attempt, to: Link) -> None:
        """Decode has room for an attempt: its KV may be sent."""
        attempt.to = to
        job = self._jobs.get(attempt)
        if job is not None:
            self._send(job)

    def cancel(self, attempt: Attempt) -> None:
        """An attempt is over; unknown ones are fine."""
        job = self._jobs.get(attempt)
        if job is not None:
            self._drop(job)
            self._go_on()

    def crash(self) -> None:
        """Loses everything."""
        jobs = list(self._jobs.values())
        self.begin_anew()
        for job in jobs:
            self._stop_flows(job)

    @property
    def jobs(self) -> int:
        """Attempts that are here."""
        return len(self._jobs)

    def check_at_rest(self) -> None:
        """Asserts that nothing is held."""
        assert not self._jobs
        assert not self._queue
        assert not self._active
        assert self.pool.num_used == 0
        self.pool.check_invariants()

    # Jobs

    def _go_on(self) -> None:
        while self._queue and len(self._active) < LOOKAHEAD and self._admit(self._queue[0]):
            self._active.append(self._queue.popleft())
        if self._step is None:
            self._begin_step()

    def _admit(self, job: Job) -> bool:
        """Takes blocks for the whole prompt, those that are held already first; False when there are too few."""
        keys, pool = job.attempt.request.keys, self.pool
        found = pool.match(keys)
        pool.acquire(found)
        wanted = self._config.blocks_for(job.tokens) - len(found)
        if not pool.can_allocate(wanted):
            pool.release(found)
            return False
        job.blocks, job.held = found + pool.allocate(wanted), len(found)
        self._note_keys()
        job.cached = job.computed = self._usable(job.held, job.tokens)
        self._load(job)
        return True

    def _usable(self, blocks: int, tokens: int) -> int:
        """Tokens of so many leading blocks; the last one of a prompt is always computed."""
        return min(blocks * self._config.block_tokens, tokens - 1)

    # Loading: a prompt whose prefix is on its way lets others pass; when there are none, layer by layer ahead of it

    def _load(self, job: Job) -> None:
        attempt = job.attempt
        if attempt.store < 0 or attempt.loaded_blocks <= job.held:
            return
        keys, store = attempt.request.keys[: attempt.loaded_blocks], self._stores[attempt.store]
        blocks = store.holds(keys)
        if blocks <= job.held:
            return
        job.store = attempt.store
        job.cached = job.computed = self._usable(blocks, job.tokens)
        nbytes = max(0, job.cached * self._config.profile.token_bytes - job.held * self._config.block_bytes)
        store.read(keys, job.held, blocks, lambda: self._fetch(job, store.sends, nbytes))

    def _fetch(self, job: Job, source: Link, nbytes: int) -> None:
        """The store has the bytes in DRAM: they cross the network."""
        if self._jobs.get(job.attempt) is job and job.store >= 0:
            first, path = nbytes // self._layers, (source, self.loads)
            job.load = self._network.send(path, first, lambda: self._first_layer(job, path, nbytes - first))

    def _first_layer(self, job: Job, path: Sequence[Link], rest: int) -> None:
        """The computation may begin."""
        job.has_layer = True
        job.load = self._network.send(path, rest, lambda: self._loaded(job))
        self._unblock()

    def _loaded(self, job: Job) -> None:
        job.store, job.load = -1, None
        step = self._step
        if step is not None and any(other is job for other, _ in step.chunks):  # the last layer is still to be computed
            step.not_before = self._world.now + step.duration // self._layers
        self._unblock()

    def lose_store(self, store: int) -> None:
        """What is loading from a store does not come: it is computed."""
        for job in self._active:
            if job.store == store:
                self._stop_loading(job)
                job.cached = job.computed = self._usable(job.held, job.tokens)
                if self._step is not None:  # what it has computed of this prompt was on top of what is missing
                    self._step.chunks = [chunk for chunk in self._step.chunks if chunk[0] is not job]
        self._unblock()

    def _stop_loading(self, job: Job) -> None:
        job.store, job.has_layer = -1, False
        if job.load is not None:
            self._network.cancel(job.load)
            job.load = None

    def _stop_flows(self, job: Job) -> None:
        self._stop_loading(job)
        if job.early is not None:
            self._network.cancel(job.early)

    def _unblock(self) -> None:
        """Something has loaded, or will not: the step that waited for it ends, or a step begins."""
        step = self._step
        if step is None:
            self._begin_step()
        elif step.computed:
            step.computed = False
            self._world.at(max(self._world.now, step.not_before), self._step_done, step)

    def _drop(self, job: Job) -> None:
        del self._jobs[job.attempt]
        self._stop_flows(job)
        if job in self._queue:
            self._queue.remove(job)
        if job in self._active:
            self._active.remove(job)
        if self._step is not None:
            self._step.chunks = [chunk for chunk in self._step.chunks if chunk[0] is not job]
        self.pool.release(job.blocks)
        self._unblock()

    # Steps

    def _begin_step(self) -> None:
        chunks = self._plan()
        if not chunks:
            return
        seconds = self._config.profile.speeds.prefill_base_s
        for job, tokens in chunks:
            begins = job.begun_at is None
            seconds += prefill_seconds(self._config.profile.speeds, tokens, job.computed, steps=0, begins=begins)
            if begins:
                job.begun_at = self._world.now
        self._step = step = Step(chunks, ps(seconds))
        self.use.steps += 1
        self.use.busy += step.duration
        self._world.after(step.duration, self._step_done, step)
        for job, _ in chunks:
            self._send(job)

    def _plan(self) -> list[tuple[Job, int]]:
        """Chunks of the next step, in the order of coming."""
        waiting = [job for job in self._active if job.token_at is None]
        ready = [job for job in waiting if job.store < 0] or [job for job in waiting if job.has_layer][:1]
        left, chunks = self._config.step_tokens, list[tuple[Job, int]]()
        for job in ready:
            tokens = min(left, job.tokens - job.computed)
            if tokens <= 0:
                break
            chunks.append((job, tokens))
            left -= tokens
        return chunks

    def _step_done(self, step: Step) -> None:
        if step is not self._step:
            return
        if any(job.store >= 0 for job, _ in step.chunks):
            step.computed = True
            return
        if self._world.now < step.not_before:
            self._world.at(step.not_before, self._step_done, step)
            return
        for job, tokens in step.chunks:
            self.use.computed_tokens += tokens
            job.computed += tokens
            if job.computed == job.tokens:
                self._complete(job)
        self._step = None
        self._go_on()

    def _complete(self, job: Job) -> None:
        job.token_at = self._world.now
        self._active.remove(job)
        job.attempt.request.reused = job.cached
        self.use.reused_tokens += job.cached
        keys = job.attempt.request.keys
        for block, key in zip(job.blocks, keys, strict=False):
            self.pool.register(block, key)
        self._note_keys()
        if job.attempt.write_to >= 0:
            self._stores[job.attempt.write_to].write(keys, self.sends, lambda: None)
        self._on_token(job.attempt)
        if job.attempt.decode < 0:
            self._finish(job.attempt)
        else:
            self._send(job)

    def _note_keys(self) -> None:
        events = self.pool.take_events()
        if events.stored or events.removed:
            self._on_keys(events.stored, events.removed)

    # Sending: all layers but the last while the prompt is computed, the last one after it

    def _send(self, job: Job) -> None:
        to = job.attempt.to
        if self._jobs.get(job.attempt) is not job or to is None or job.begun_at is None:
            return
        held = min(job.tokens, job.attempt.held * self._config.block_tokens)
        nbytes = (job.tokens - held) * self._config.profile.token_bytes
        last = nbytes // self._layers
        if job.early is None and not job.early_sent:
            job.early = self._network.send([self.sends, to], nbytes - last, lambda: self._early_sent(job))
        elif job.early_sent and job.token_at is not None and not job.sending:
            job.sending = True
            job.early = self._network.send([self.sends, to], last, lambda: self._sent(job))

    def _early_sent(self, job: Job) -> None:
        job.early, job.early_sent = None, True
        self._send(job)

    def _sent(self, job: Job) -> None:
        job.early = None
        self._finish(job.attempt)
        self._on_sent(job.attempt)

    def _finish(self, attempt: Attempt) -> None:
        """Nothing of an attempt is needed here any more."""
        job = self._jobs.pop(attempt)
        self.pool.release(job.blocks)
        self._go_on()
