"""The emulated engine: an `Engine` whose steps take the time that a profile gives, and compute nothing.

Owns steps in flight, gates, and the pace; lives in the I/O process, on its event loop. What the blocks hold is in
`moonpool.engine.emulated.sequence`. Everything around it is real: protocol, frames, leases, store and scheduling; the
pool's bytes are real too, and wrong ones are noticed: the engine fails, and with it the instance.

A step's layers are spread evenly over its time, and its stages work as a pipeline. The work that emulation costs, and
late timers, are part of a step's time: the next step makes up for what is small; what is more is counted as late.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from moonpool.cost import Speeds
from moonpool.engine.emulated.content import PacedKV
from moonpool.engine.emulated.profile import Emulation, load_seconds, step_seconds
from moonpool.engine.emulated.sequence import PacedSequences, Share, WrongKV
from moonpool.engine.handle import Engine, StepResult
from moonpool.engine.messages import EngineSpec, LayerDone
from moonpool.engine.stages import stage_ranges
from moonpool.errors import Internal, Unavailable
from moonpool.kv.layout import KVLayout
from moonpool.kv.pool import KVPool
from moonpool.sched.steps import Step, finished_blocks
from moonpool.telemetry.gauges import Entry
from moonpool.telemetry.logs import get_logger

CARRY_S = 0.005
"""Lateness of one step that the next one makes up for; timers count milliseconds."""
TIMER_S = 0.0005
"""Timers are not set for less."""

log = get_logger(__name__)

_now = time.monotonic
_sleep = asyncio.sleep
OnLayer = Callable[[LayerDone], None] | None


@dataclass(slots=True, eq=False)
class _Flight:
    """What was said of a step, perhaps before it began."""

    open_layer: int = -1
    aborted: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None


@dataclass(slots=True)
class _Pace:
    """When a step's layers are due, seconds of time.monotonic."""

    begin: float
    due: float
    layer_s: float
    load_layer_s: float
    """Seconds that one layer of the prefix takes to load."""

    def layer(self) -> None:
        """One more layer."""
        self.due += self.layer_s

    def not_before(self, moment: float) -> None:
        """What is to come cannot begin earlier."""
        self.due = max(self.due, moment)


class PacedEngine:
    """Satisfies `moonpool.engine.handle.Engine`."""

    def __init__(self, spec: EngineSpec, emulation: Emulation, pool: KVPool) -> None:
        self._spec = spec
        self._emulation = emulation
        self._pool = pool
        self._speeds = emulation.speeds
        self._ranges = stage_ranges(spec.layout.layers, spec.stages)
        self._turns = [asyncio.Lock() for _ in self._ranges]
        self._sequences = PacedSequences(emulation, PacedKV(spec.layout), pool)
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._flights: dict[int, _Flight] = {}
        self._tasks: set[asyncio.Task[StepResult]] = set()
        self._last_step_id: int | None = None
        self._last_done: int | None = None
        self._carry_s = 0.0
        self.paced_s = 0.0
        self.late_s = 0.0

    @property
    def layout(self) -> KVLayout:
        """Arrangement of the KV."""
        return self._spec.layout

    @property
    def blocks(self) -> int:
        """Blocks in the pool."""
        return self._spec.blocks

    @property
    def stages(self) -> int:
        """Stages of the emulated pipeline."""
        return self._spec.stages

    @property
    def pool(self) -> KVPool:
        """The paged memory."""
        return self._pool

    @property
    def speeds(self) -> Speeds:
        """The profile's, in this machine's seconds and emulated bytes."""
        return self._speeds

    @property
    def failed(self) -> "asyncio.Future[str]":
        """Done, with the reason, when wrong KV was found."""
        return self._failed

    def gauges(self) -> list[Entry]:
        """How well the pace is kept, in this machine's seconds."""
        return [
            ("emulated_step_seconds", lambda: self.paced_s, None),
            ("emulated_late_seconds", lambda: self.late_s, None),
            ("emulated_slices_checked", lambda: self._sequences.slices_checked, None),
        ]

    async def run(self, step: Step, *, on_layer: Callable[[LayerDone], None] | None = None) -> StepResult:
        """See `Engine.run`."""
        if self._failed.done():
            raise Unavailable(self._failed.result())
        if len(self._tasks) >= self.stages:
            raise Internal(f"step {step.step_id} would be one more than the {self.stages} that may be in flight")
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
        """See `Engine.open_gate`."""
        flight = self._flight(step_id)
        flight.open_layer = max(flight.open_layer, layer)
        flight.changed.set()

    def abort(self, step_id: int) -> None:
        """See `Engine.abort`."""
        flight = self._flight(step_id)
        flight.aborted = True
        flight.changed.set()

    async def shutdown(self) -> None:
        """Ends what runs; idempotent."""
        self._fail("the engine was shut down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- one step --------------------------------------------------------------------------------------------------

    def _flight(self, step_id: int) -> _Flight:
        if self._last_done is not None and step_id <= self._last_done:
            return _Flight()  # nobody listens any more
        return self._flights.setdefault(step_id, _Flight())

    def _over(self, task: "asyncio.Task[StepResult]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever ran the step may be gone

    def _fail(self, reason: str) -> None:
        if not self._failed.done():
            self._failed.set_result(reason)

    async def _run(self, step: Step, on_layer: OnLayer) -> StepResult:
        flight = self._flight(step.step_id)
        try:
            result = await self._paced(step, flight, on_layer)
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

    async def _paced(self, step: Step, flight: _Flight, on_layer: OnLayer) -> StepResult:
        start_ns = time.monotonic_ns()
        pace = self._pace(step)
        shares: list[Share] = []
        whole = True
        for stage, turn in enumerate(self._turns):
            waits = turn.locked()
            async with turn:
                if waits:
                    pace.not_before(_now())
                shares = shares or [self._sequences.share(sequence) for sequence in step.sequences]
                # An aborted step goes through the other stages too, so that steps end in order.
                whole = whole and await self._stage(stage, step, flight, pace, shares, on_layer)
        return self._finished(step, shares, start_ns, pace) if whole else self._aborted(step, start_ns)

    def _pace(self, step: Step) -> _Pace:
        seconds = step_seconds(self._speeds, step, decode=self._emulation.decode)
        load_s = load_seconds(self._speeds, step, self.layout.token_bytes) if step.gated else 0.0
        begin = _now() - self._carry_s
        return _Pace(begin, begin, seconds / self.layout.layers, load_s / self.layout.layers)

    async def _stage(
        self, stage: int, step: Step, flight: _Flight, pace: _Pace, shares: Sequence[Share], on_layer: OnLayer
    ) -> bool:
        """All layers of a stage; False when the step was aborted before the last."""
        first, end = self._ranges[stage]
        finished = finished_blocks(step, self.layout.block_tokens)
        for layer in range(first, end):
            if step.gated:
                await self._gate(flight, layer, pace)
            if flight.aborted:
                return False
            start_ns = time.monotonic_ns()
            pace.layer()
            for share in shares:
                self._sequences.run(share, layer)
            for block, valid_tokens in finished:
                self._pool.seal(layer, block, valid_tokens)
            if step.layer_events or step.gated or layer == end - 1:
                await self._until(pace.due)
            if step.layer_events and on_layer is not None and flight.error is None:
                try:
                    on_layer(LayerDone(step.step_id, layer, start_ns, time.monotonic_ns()))
                except Exception as error:  # the caller's defect is the caller's to hear of
                    flight.error = error
        return True

    async def _gate(self, flight: _Flight, layer: int, pace: _Pace) -> None:
        """Waits until a layer's gate is open, or the step was given up, by somebody or by our patience."""
        if flight.open_layer < layer and not flight.aborted:
            try:
                async with asyncio.timeout(self._spec.gate_timeout_s):
                    while flight.open_layer < layer and not flight.aborted:
                        flight.changed.clear()
                        await flight.changed.wait()
            except TimeoutError:
                flight.aborted = True
            pace.not_before(_now())
        pace.not_before(pace.begin + (layer + 1) * pace.load_layer_s)

    def _finished(self, step: Step, shares: Sequence[Share], start_ns: int, pace: _Pace) -> StepResult:
        late = _now() - pace.due
        self._carry_s = min(late, CARRY_S) if self.stages == 1 else 0.0
        self.paced_s += pace.layer_s * self.layout.layers
        self.late_s += max(0.0, late - CARRY_S)
        for sequence in step.sequences:
            self._sequences.done(sequence, aborted=False)
        return StepResult(tuple(share.token for share in shares), False, start_ns, time.monotonic_ns())

    def _aborted(self, step: Step, start_ns: int) -> StepResult:
        for sequence in step.sequences:
            self._sequences.done(sequence, aborted=True)
        return StepResult((), True, start_ns, time.monotonic_ns())

    async def _until(self, due: float) -> None:
        await asyncio.sleep(0)  # others get their turn, however late we are
        left = due - _now()
        if left > TIMER_S:
            await _sleep(left)  # a timer that is a little early is made up for like one that is late


@asynccontextmanager
async def start_paced(spec: EngineSpec, emulation: Emulation) -> AsyncIterator[Engine]:
    """An emulated engine; leaving the context ends it and frees the pool. See `moonpool.engine.start.start_engine`.

    Raises:
        ConfigError: a value of `spec` is refused (stages, blocks, memory).
    """
    pool = KVPool.create(spec.layout, spec.blocks, stage_ranges(spec.layout.layers, spec.stages))
    try:
        log.warning("compute is emulated: times are a profile's, tokens mean nothing", **emulation.describe())
        engine = PacedEngine(spec, emulation, pool)
        try:
            yield engine
        finally:
            await engine.shutdown()
    finally:
        pool.close()
