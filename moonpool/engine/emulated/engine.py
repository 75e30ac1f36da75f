"""The emulated engine: an `Engine` with steps that take a profile's time and compute nothing.

The engine runs in the I/O process, on the process's event loop. Protocol, frames, leases, store and scheduling around
the engine are real; so are the pool's bytes (`moonpool.engine.emulated.kv`): a block with wrong bytes fails the engine
and the instance.

A step's layers are spread evenly over the step's time, and the stages work as a pipeline. Processor time for emulating
and late timers are part of a step's time: the next step makes up for up to `CARRY_S`, more is counted as late.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from moonpool.base import world
from moonpool.base.errors import Internal, Unavailable
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import (
    STEP_TOKENS,
    LayerDone,
    SampledCandidates,
    Step,
    StepResult,
    finished_blocks,
    max_steps_in_flight,
    stage_ranges,
)
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import Metric, counter
from moonpool.engine.emulated.kv import EmulatedKV, EmulatedSequences, SequenceWork, WrongKV
from moonpool.engine.emulated.profile import EmulatedCompute, copy_seconds, load_seconds, step_seconds

CARRY_S = 0.005
"""Most lateness that the next step makes up for: event loops have millisecond timers."""
TIMER_S = 0.0005
"""No timer is set for a shorter wait."""
log = get_logger(__name__)
OnLayer = Callable[[LayerDone], None] | None


@dataclass(frozen=True, slots=True)
class EngineClock:
    """Time of an emulated engine."""

    now: Callable[[], float] = world.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


MONOTONIC = EngineClock()


@dataclass(slots=True, eq=False)
class _StepControl:
    """Gates, dropped shares and abort of a step; they may come before the step begins."""

    open_layer: int = -1
    aborted: bool = False
    dropped: set[int] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None


@dataclass(slots=True)
class _LayerSchedule:
    """When a step's layers are due, seconds of the engine's clock."""

    due: float
    layer_s: float

    def add_layer(self) -> None:
        """Move the due time to the end of the next layer."""
        self.due += self.layer_s

    def not_before(self, moment: float) -> None:
        """Delay the layers that have not begun."""
        self.due = max(self.due, moment)


class EmulatedEngine:
    """Satisfies `moonpool.engine.interface.Engine`.

    Attributes:
        step_s: seconds that all steps were to take.
        late_s: seconds by which steps ended late.
        slowed: steps take `Noise.slowdown` times longer.
        decodes: steps are decode steps, one token per sequence; another in another role.
    """

    def __init__(
        self, emulated: EmulatedCompute, pool: KVPool, *, gate_timeout_s: float, clock: EngineClock = MONOTONIC
    ) -> None:
        self._gate_timeout_s = gate_timeout_s
        self._emulated = emulated
        self._pool = pool
        self._clock = clock
        self._speeds = emulated.speeds
        self._ranges = [(part.layer_begin, part.layer_end) for part in pool.parts]
        self._turns = [asyncio.Lock() for _ in self._ranges]
        self._sequences = EmulatedSequences(emulated, EmulatedKV(pool.layout), pool)
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._flights: dict[int, _StepControl] = {}
        self._tasks: set[asyncio.Task[StepResult]] = set()
        self._last_step_id: int | None = None
        self._last_done: int | None = None
        self._carry_s = 0.0
        self.step_s = 0.0
        self.late_s = 0.0
        self.slowed = False
        self.decodes = emulated.decode

    @property
    def layout(self) -> KVLayout:
        """Arrangement of the KV."""
        return self._pool.layout

    @property
    def blocks(self) -> int:
        return self._pool.blocks

    @property
    def max_num_batched_tokens(self) -> int:
        return STEP_TOKENS

    @property
    def stages(self) -> int:
        """Stages of the emulated pipeline."""
        return len(self._ranges)

    @property
    def pool(self) -> KVPool:
        return self._pool

    @property
    def speeds(self) -> Speeds:
        """The profile's, in this machine's seconds and emulated bytes."""
        return self._speeds

    def load_s(self, nbytes: int) -> float:
        """Return the seconds that loading so many bytes takes on the emulated hardware; 0 = as long as here."""
        return load_seconds(self._speeds, nbytes)

    async def fetch(self, blocks: Sequence[int]) -> None:
        """The pool has all KV."""

    def load(self) -> None:
        """Steps compute in the pool."""

    @property
    def steps_held(self) -> int:
        """Steps with remembered gates or aborts: running steps and steps that have not begun."""
        return len(self._flights)

    @property
    def failed(self) -> "asyncio.Future[str]":
        """Done, with the reason, when wrong KV was found."""
        return self._failed

    @property
    def slices_checked(self) -> int:
        """Number of KV slices whose bytes were compared with the expected bytes."""
        return self._sequences.slices_checked

    @property
    def run_steps(self) -> int:
        """The engine shares the process that sends steps: there is no way to save."""
        return 1

    async def run(
        self,
        step: Step,
        *,
        on_layer: Callable[[LayerDone], None] | None = None,
        on_step: Callable[[StepResult], None] | None = None,
        on_tokens: Callable[[StepResult], None] | None = None,
    ) -> StepResult:
        """See `Engine.run`. Nothing is hashed behind the tokens, so they come with the result."""
        if self._failed.done():
            raise Unavailable(self._failed.result())
        most = max_steps_in_flight(self.stages)
        if len(self._tasks) >= most:
            raise Internal(f"step {step.step_id} would be one more than the {most} that may be in flight")
        if self._last_step_id is not None and step.step_id <= self._last_step_id:
            raise Internal(f"step {step.step_id} after step {self._last_step_id}")
        self._last_step_id = step.step_id
        task = asyncio.create_task(self._run(step, on_layer))
        self._tasks.add(task)
        task.add_done_callback(self._over)
        try:
            return await asyncio.shield(task)  # a cancelled caller does not stop the step
        except asyncio.CancelledError:
            if task.cancelled():
                raise Unavailable("the engine was shut down") from None
            raise

    def open_gate(self, step_id: int, layer: int) -> None:
        flight = self._flight(step_id)
        flight.open_layer = max(flight.open_layer, layer)
        flight.changed.set()

    def drop(self, step_id: int, index: int) -> None:
        self._flight(step_id).dropped.add(index)

    async def load_lora(self, lora: bytes, folder: str) -> int:
        """See `Engine.load_lora`: nothing is loaded, as nothing is computed."""
        return 0

    async def drop_lora(self, lora: bytes) -> None:
        """See `Engine.drop_lora`."""

    def stop_run(self, step_id: int, *, urgent: bool = False) -> None:
        """Each run ends with the run's first step."""

    def abort(self, step_id: int) -> None:
        flight = self._flight(step_id)
        flight.aborted = True
        flight.changed.set()

    async def idle(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def shutdown(self) -> None:
        """End what runs; idempotent."""
        self._fail("the engine was shut down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- one step --------------------------------------------------------------------------------------------------

    def _flight(self, step_id: int) -> _StepControl:
        if self._last_done is not None and step_id <= self._last_done:
            return _StepControl()  # the step has ended
        return self._flights.setdefault(step_id, _StepControl())

    def _over(self, task: "asyncio.Task[StepResult]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved here, because the caller may have been cancelled

    def _fail(self, reason: str) -> None:
        if not self._failed.done():
            self._failed.set_result(reason)

    async def _run(self, step: Step, on_layer: OnLayer) -> StepResult:
        flight = self._flight(step.step_id)
        try:
            result = await self._timed(step, flight, on_layer)
        except WrongKV as wrong:
            log.error("wrong KV", step=step.step_id, reason=str(wrong))
            self._fail(f"wrong KV in step {step.step_id}: {wrong}")
            raise Unavailable(self._failed.result()) from wrong
        except Exception as defect:
            self._fail(f"step {step.step_id} failed: {type(defect).__name__}: {defect}")
            raise
        finally:
            self._last_done = step.step_id
            self._flights = {number: other for number, other in self._flights.items() if number > step.step_id}
        if flight.error is not None:
            raise flight.error
        return result

    async def _timed(self, step: Step, flight: _StepControl, on_layer: OnLayer) -> StepResult:
        start_ns = world.monotonic_ns()
        for part in self._pool.parts:
            for source, block in step.copies:
                part.copy(source, block)
        schedule = self._schedule(step)
        shares: list[SequenceWork] = []
        whole = True
        for stage, turn in enumerate(self._turns):
            waits = turn.locked()
            async with turn:
                if waits:
                    schedule.not_before(self._clock.now())
                shares = shares or [self._sequences.share(sequence) for sequence in step.sequences]
                # An aborted step goes through the other stages too, so that steps end in order.
                whole = whole and await self._stage(stage, step, flight, schedule, shares, on_layer)
        return self._finished(step, flight, shares, start_ns, schedule) if whole else self._aborted(step, start_ns)

    def _schedule(self, step: Step) -> _LayerSchedule:
        begins = [self._sequences.begin(sequence) for sequence in step.sequences]
        seconds = step_seconds(self._speeds, step, decode=self.decodes, begins=begins)
        seconds += copy_seconds(self._speeds, len(step.copies) * self.layout.block_size)
        seconds *= self._emulated.noise.factor(step.step_id, slowed=self.slowed)
        return _LayerSchedule(self._clock.now() - self._carry_s, seconds / self.layout.layers)

    async def _stage(
        self,
        stage: int,
        step: Step,
        flight: _StepControl,
        schedule: _LayerSchedule,
        shares: Sequence[SequenceWork],
        on_layer: OnLayer,
    ) -> bool:
        """All layers of a stage; False when the step was aborted before the last."""
        first, end = self._ranges[stage]
        finished = finished_blocks(step, self.layout.block_size)
        for layer in range(first, end):
            if step.gated:
                await self._gate(flight, layer, schedule)
            if flight.aborted:
                return False
            start_ns = world.monotonic_ns()
            schedule.add_layer()
            for index, share in enumerate(shares):
                if index not in flight.dropped:
                    self._sequences.run(share, layer)
            for block, valid_tokens in finished:
                self._pool.seal(layer, block, valid_tokens)
            if step.layer_events or step.gated or layer == end - 1:
                await self._until(schedule.due)
            if step.layer_events and on_layer is not None and flight.error is None:
                try:
                    on_layer(LayerDone(step.step_id, layer, start_ns, world.monotonic_ns()))
                except Exception as error:  # raised to the caller when the step has ended
                    flight.error = error
        return True

    async def _gate(self, flight: _StepControl, layer: int, schedule: _LayerSchedule) -> None:
        """Wait until a layer's gate is open or the step is aborted; abort the step after `gate_timeout_s`."""
        if flight.open_layer < layer and not flight.aborted:
            try:
                async with asyncio.timeout(self._gate_timeout_s):
                    while flight.open_layer < layer and not flight.aborted:
                        flight.changed.clear()
                        await flight.changed.wait()
            except TimeoutError:
                flight.aborted = True
            schedule.not_before(self._clock.now())

    def _finished(
        self, step: Step, flight: _StepControl, shares: Sequence[SequenceWork], start_ns: int, schedule: _LayerSchedule
    ) -> StepResult:
        late = self._clock.now() - schedule.due
        self._carry_s = min(late, CARRY_S) if self.stages == 1 else 0.0
        self.step_s += schedule.layer_s * self.layout.layers
        self.late_s += max(0.0, late - CARRY_S)
        for index, sequence in enumerate(step.sequences):
            self._sequences.done(sequence, aborted=index in flight.dropped)
        sampled = tuple(share.tokens[0] if share.tokens else None for share in shares)
        several = {
            index: SampledCandidates(share.tokens) for index, share in enumerate(shares) if len(share.tokens) > 1
        }
        return StepResult(sampled, False, start_ns, world.monotonic_ns(), several)

    def _aborted(self, step: Step, start_ns: int) -> StepResult:
        for sequence in step.sequences:
            self._sequences.done(sequence, aborted=True)
        return StepResult((), True, start_ns, world.monotonic_ns())

    async def _until(self, due: float) -> None:
        await asyncio.sleep(0)  # lets other tasks run, however late this step is
        left = due - self._clock.now()
        if left > TIMER_S:
            await self._clock.sleep(left)  # an early timer is made up for like a late one


EMULATED_METRICS: "tuple[Metric[EmulatedEngine], ...]" = (
    counter(
        "emulated_step_seconds_total",
        "Seconds that all steps should take, in this machine's time.",
        lambda engine: engine.step_s,
    ),
    counter("emulated_late_seconds_total", "Seconds by which steps ended late.", lambda engine: engine.late_s),
    counter(
        "emulated_slices_checked_total",
        "KV slices compared with the expected bytes.",
        lambda engine: engine.slices_checked,
    ),
)
"""Reported by instances with emulated compute."""


@contextmanager
def _slowed_by_signals(engine: "EmulatedEngine", slowdown: float) -> Iterator[None]:
    """While the body runs, SIGUSR1 makes an engine with a slowdown slow, and SIGUSR2 normal again."""
    if not slowdown:
        yield
        return
    loop = asyncio.get_running_loop()
    for number, slowed in ((signal.SIGUSR1, True), (signal.SIGUSR2, False)):
        loop.add_signal_handler(number, setattr, engine, "slowed", slowed)
    try:
        yield
    finally:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def start_emulated(
    emulated: EmulatedCompute,
    layout: KVLayout,
    blocks: int,
    *,
    stages: int,
    gate_timeout_s: float,
    clock: EngineClock = MONOTONIC,
) -> AsyncIterator["EmulatedEngine"]:
    """Return an emulated engine; leaving the context ends the engine and frees the pool.

    See `moonpool.engine.start_engine.start_engine`.

    Raises:
        ConfigError: a value is refused (stages, blocks, memory).
    """
    pool = KVPool.create(layout, blocks, stage_ranges(layout.layers, stages))
    try:
        log.warning("compute is emulated: times are a profile's, tokens mean nothing", **emulated.describe())
        engine = EmulatedEngine(emulated, pool, gate_timeout_s=gate_timeout_s, clock=clock)
        try:
            with _slowed_by_signals(engine, emulated.noise.slowdown):
                yield engine
        finally:
            await engine.shutdown()
    finally:
        pool.close()
