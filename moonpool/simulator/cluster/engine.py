"""Engines in virtual time: step times, a decode engine, a prefill pipeline, and engines that share a machine.

Steps take the time of the profile. Several decode steps in a run are one event, a leap, which ends at the same time as
single steps would. All times are whole picoseconds. A prefill step computes layer by layer, in the stages of a
pipeline.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.latency import Speeds, prefill_seconds
from moonpool.base.scheduling.steps import stage_ranges
from moonpool.engine.decode.core.actions import StartRun
from moonpool.engine.decode.core.events import FirstTokens, RunDone, RunProgress
from moonpool.engine.decode.core.scheduler import DecodeScheduler
from moonpool.simulator.clock import PS, SimulatedWorld, ps
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.cluster.requests import DecodeSequence, DecodeUse
from moonpool.simulator.network import exponential

STOPPED = 1
"""Why answers end."""


class SharedMachine:
    """One machine's engines.

    Args:
        slow: factor by which work takes longer while another engine computes; 1 = separate cores.
    """

    def __init__(self, slow: float = 1.0) -> None:
        self.slow = slow
        self._changed: list[Callable[[], None]] = []
        self._computing: set[int] = set()

    def joins(self, changed: Callable[[], None]) -> "MachineEngine":
        """Add an engine; `changed` is called when the engine's slowdown may have changed."""
        self._changed.append(changed)
        return MachineEngine(self, len(self._changed) - 1)

    def slowdown(self, member: int) -> float:
        """Factor by which a member's work takes longer now."""
        return self.slow if self.slow != 1.0 and self._computing - {member} else 1.0

    def note(self, member: int, *, computing: bool) -> None:
        """A member starts or stops computing."""
        if self.slow == 1.0 or (member in self._computing) == computing:
            return
        before = [self.slowdown(other) for other in range(len(self._changed))]
        (self._computing.add if computing else self._computing.discard)(member)
        for other, changed in enumerate(self._changed):
            if other != member and self.slowdown(other) != before[other]:
                changed()


class MachineEngine:
    """One engine on a machine."""

    __slots__ = ("_machine", "_number")

    def __init__(self, machine: SharedMachine, number: int) -> None:
        self._machine, self._number = machine, number

    @property
    def slowdown(self) -> float:
        """How many times as long as alone the work takes now."""
        return self._machine.slowdown(self._number)

    def computes(self, computing: bool) -> None:
        """The engine computes, or does not any more."""
        self._machine.note(self._number, computing=computing)


@frozen
class StepTimes:
    """Picoseconds of decode steps, from an instance's speeds."""

    base: int
    per_sequence: int
    per_context_token: int

    @classmethod
    def of(cls, speeds: Speeds) -> "StepTimes":
        """An instance's step times."""
        return cls(ps(speeds.decode_base_s), ps(speeds.decode_per_sequence_s), ps(speeds.decode_per_context_token_s))

    def step(self, sequences: int, context: int) -> int:
        """Time for one step over `sequences` sequences with `context` tokens in total."""
        return self.base + self.per_sequence * sequences + self.per_context_token * context


@frozen
class Leap:
    """Steps over the same sequences.

    The first step takes `first`, each further step takes `more` longer than the step before.
    """

    start: int
    steps: int
    first: int
    more: int

    def time_of(self, steps: int) -> int:
        """When the first `steps` steps are over."""
        return self.start + steps * self.first + self.more * (steps * (steps - 1) // 2)

    @property
    def end(self) -> int:
        """When all are over."""
        return self.time_of(self.steps)

    def over_by(self, now: int) -> int:
        """Steps that are over by a time."""
        elapsed = max(0, now - self.start)
        if self.more:  # the largest k with more k (k - 1) / 2 + first k <= elapsed
            linear = 2 * self.first - self.more
            over = (isqrt(linear * linear + 8 * self.more * elapsed) - linear) // (2 * self.more)
        else:
            over = elapsed // self.first
        return min(over, self.steps)

    def durations(self, begin: int, end: int) -> range | list[int]:
        """Times for steps `begin` to `end` within this leap."""
        if not self.more:
            return [self.first] * (end - begin)
        return range(self.first + begin * self.more, self.first + end * self.more, self.more)


@dataclass(frozen=True, slots=True)
class RunListener:
    """Listener to a `DecodeEngine`'s runs.

    Attributes:
        post: tells the core.
        ended: called after a run, with the sequences that ended or made their first tokens then, and whether the
            instance's load or keys have changed.
        begun: called when sequences have made their first tokens in a run that goes on.
    """

    post: Callable[[RunProgress | RunDone], None]
    ended: Callable[[list[DecodeSequence], bool], None]
    begun: Callable[[list[DecodeSequence]], None]


class DecodeEngine:
    """Takes one core's steps, until the instance is lost.

    Args:
        core: orders the steps.
        sequences: the instance's sequences, by the core's numbers.
        use: counts what is done.
        listener: hears of the runs.
        machine: engines that share cores.
        number: the instance's number; each instance has separate delays.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        config: ClusterConfig,
        core: DecodeScheduler,
        sequences: dict[int, DecodeSequence],
        use: DecodeUse,
        listener: RunListener,
        machine: SharedMachine,
        number: int,
    ) -> None:
        self._number = number
        self._world, self._config, self._core, self._sequences, self._use = world, config, core, sequences, use
        self._listener = listener
        self._times = StepTimes.of(config.profile.speeds)
        self._run: StartRun | None = None
        self._leap = Leap(0, 0, 0, 0)
        self._told = 0
        """Steps in the leap that are counted."""
        self._left = 0
        """Steps in the run behind the leap."""
        self._ahead = core.settings.ahead_steps > 0
        """A run goes on where a block becomes full; the run's leaps end there."""
        self._member = machine.joins(self._look_again)

    @property
    def idle(self) -> bool:
        """Whether no step is being computed."""
        return self._run is None

    def close(self) -> None:
        """The instance is lost."""
        self._run = None
        self._member.computes(False)

    def settle(self) -> None:
        """Count the steps that are over by now, and tell the core."""
        if self._run is None:
            return
        steps = self._leap.over_by(self._world.now) - self._told
        if steps:
            seconds = self._advance(self._run, steps)
            filled = self._filled(self._batch(self._run)) if self._ahead else ()
            self._listener.post(RunProgress(self._run.step, steps, seconds, filled))

    def begin(self, run: StartRun) -> None:
        """Begin a run."""
        self._member.computes(True)
        batch = self._batch(run)
        steps = min([run.steps, *(member.left for member in batch)])
        way = ps(exponential(self._config.delays.run_s, self._config.seed, self._number, run.step))
        self._run, self._left = run, steps
        self._go_on(self._first_step(run) + way, 1 if way else steps)
        if steps > 1 and (new := [member for member in batch if not member.told]):
            self._world.at(self._leap.time_of(1), self._first, (run, new))

    def cut(self) -> None:
        """End the run with the step that is being computed."""
        self._left = 0
        self._shorten()

    def _go_on(self, first: int, steps: int) -> None:
        """Leap over steps in the run at the present slowdown; the first takes `first` if the engine is alone."""
        assert self._run is not None
        if self._ahead:
            size = self._config.block_size
            steps = min([steps, *(sequence.until_filled(size) for sequence in self._batch(self._run))])
        more, slowdown = self._times.per_context_token * len(self._run.batch), self._member.slowdown
        if slowdown != 1.0:
            first, more = round(slowdown * first), round(slowdown * more)
        self._told, self._left = 0, max(0, self._left - steps)
        self._leap = Leap(self._world.now, steps, max(1, first), more)
        self._world.at(self._leap.end, self._over, self._leap, first=True)

    def _shorten(self) -> int:
        """Let the leap end with the step that is being computed; return by how many steps."""
        less = self._leap.steps - self._told - 1
        if less > 0:
            leap = self._leap
            self._leap = Leap(leap.start, self._told + 1, leap.first, leap.more)
            self._world.at(self._leap.end, self._over, self._leap, first=True)
        return max(0, less)

    def _look_again(self) -> None:
        """Change how long steps take from now on, except the step that is being computed."""
        self.settle()
        if self._run is not None:
            self._left += self._shorten()

    def _first_step(self, run: StartRun) -> int:
        """Picoseconds of the run's first step; as emulated engines count, all chunk tokens cost alike.

        The fixed time is that of `ChunkSteps`.
        """
        ones = [chunk.start + 1 for chunk in run.chunks if chunk.count == 1]
        speeds = self._config.profile.speeds
        again = sum(
            prefill_seconds(speeds, chunk.count, chunk.start, steps=0, begins=False)
            for chunk in run.chunks
            if chunk.count > 1
        )
        eager = bool(run.chunks) and self._config.chunk_steps.eager(len(run.batch))
        fixed = max(0, ps(speeds.prefill_base_s) - self._times.base) if eager else 0
        return self._step(run, len(ones), sum(ones)) + ps(again) + fixed

    def _step(self, run: StartRun, ones: int = 0, context: int = 0) -> int:
        """Picoseconds for a run's next step, with some more tokens and their context."""
        return self._times.step(len(run.batch) + ones, self._core.planner.batch.context + context)

    def _first(self, begun: tuple[StartRun, list[DecodeSequence]]) -> None:
        run, members = begun
        if run is self._run:
            self.settle()
            self._listener.begun(members)

    def _over(self, leap: Leap) -> None:
        run = self._run
        if leap is not self._leap or run is None:
            return
        if self._left:
            self.settle()  # may cut the run: then the run ends with the next step
            self._go_on(self._step(run), max(1, self._left))
            return
        steps = leap.steps - self._told
        seconds = self._advance(run, steps)
        batch = self._batch(run)
        again = [self._sequences[chunk.id] for chunk in run.chunks if chunk.sample]
        again += [other for member in again for other in self._born_with(member)]
        for member in again:
            member.advance(self._world.now, (), self._world.now)
        self._run = None
        self._tell(run, [*batch, *again], steps, seconds)
        if self._run is None:
            self._member.computes(False)

    def _tell(self, run: StartRun, sampled: list[DecodeSequence], steps: int, seconds: float) -> None:
        over, filled = [member for member in sampled if not member.left], self._filled(sampled)
        news = [member for member in sampled if not (member.left and member.told)]
        self._listener.ended(news, bool(over or filled or run.chunks))
        whole = [chunk.id for chunk in run.chunks if chunk.sample and self._is_whole(chunk.id)]
        first = tuple([self._first_tokens(number) for number in whole])
        born = {number + at for number, told in zip(whole, first, strict=True) for at in range(len(told.finishes))}
        ended = tuple((member.number, STOPPED) for member in over if member.number not in born)
        self._listener.post(RunDone(run.step, False, seconds, ended, filled, steps, first_tokens=first))

    def _is_whole(self, number: int) -> bool:
        """Whether a chunk belongs to a whole prompt: its last one gives the first tokens."""
        request = self._core.requests.get(number)
        return request is not None and request.lacks_first_token

    def _born_with(self, member: DecodeSequence) -> list[DecodeSequence]:
        """Further sequences that begin with the same whole prompt."""
        further = range(member.number + 1, member.number + member.sequence.width)
        return [self._sequences[number] for number in further] if self._is_whole(member.number) else []

    def _first_tokens(self, number: int) -> FirstTokens:
        member = self._sequences[number]
        return FirstTokens(number, tuple([0 if each.left else STOPPED for each in (member, *self._born_with(member))]))

    def _batch(self, run: StartRun) -> list[DecodeSequence]:
        return [self._sequences[number] for number in run.batch]

    def _filled(self, members: list[DecodeSequence]) -> tuple[tuple[int, BlockKey], ...]:
        """Blocks that have become full with the last step."""
        size = self._config.block_size
        return tuple([(member.number, key) for member in members if (key := member.filled(size)) is not None])

    def _advance(self, run: StartRun, steps: int) -> float:
        """Count steps in the run; return their seconds."""
        leap, begin, end = self._leap, self._told, self._told + steps
        first, gaps, last = leap.time_of(begin + 1), leap.durations(begin + 1, end), leap.time_of(end)
        blocks = tokens = 0
        for number in run.batch:
            member = self._sequences[number]
            member.advance(first, gaps, last)
            blocks += member.blocks
            tokens += member.tokens
        self._told = end
        elapsed, batch = last - leap.time_of(begin), len(run.batch)
        self._use.count(steps, batch, elapsed)
        self._use.tokens_time += elapsed * (tokens - batch * (steps + 1) / 2)
        self._use.slots_time += elapsed * blocks * self._config.block_size
        return elapsed / PS


@dataclass(slots=True, eq=False)
class PipelineStep:
    """A step that is being computed. Times are picoseconds."""

    io: int
    duration: int
    gate: int
    """Lets layers up to this layer be computed."""
    done: int = 0
    """Layers that are computed."""
    late: int = 0
    """How much longer the step has taken beside other engines."""
    computing: bool = False
    aborted: bool = False


class Pipeline:
    """Steps under way, until the instance is lost.

    Args:
        layers: KV layers.
        stages: that these are divided among.
        layer_done: called with a step's io and a layer that is computed.
        over: called with a step's io, whether the step was given up, and the step's computing seconds over all stages.
        machine: engines that share cores.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        layers: int,
        stages: int,
        layer_done: Callable[[int, int], None],
        over: Callable[[int, bool, float], None],
        machine: SharedMachine,
    ) -> None:
        self._world, self._layers = world, layers
        self._ends = [end for begin, end in stage_ranges(layers, stages) for _ in range(begin, end)]  # by layer
        self._layer_done, self._over = layer_done, over
        self._steps: list[PipelineStep] = []
        self._member = machine.joins(lambda: None)  # the slowdown is looked at with each layer

    def begin(self, io: int, duration: int, *, gated: bool) -> None:
        """The next step; a gated step's gates are opened afterwards."""
        self._member.computes(True)
        self._steps.append(PipelineStep(io, duration, -1 if gated else self._layers))
        self._go_on()

    def open_gate(self, io: int, layer: int) -> None:
        """Let a step compute all layers up to this layer; ended steps are ignored."""
        for step in self._steps:
            if step.io == io:
                step.gate = max(step.gate, layer)
                self._go_on()
                return

    def abort(self, io: int) -> None:
        """Give a step up before the next layer; ignored if the step is over."""
        for step in self._steps:
            if step.io == io:
                step.aborted = True
                self._go_on()
                return

    def close(self) -> None:
        """The instance is lost."""
        self._steps.clear()
        self._member.computes(False)

    def _go_on(self) -> None:
        while self._steps and not (step := self._steps[0]).computing and (step.aborted or step.done == self._layers):
            del self._steps[0]
            self._over(step.io, step.done < self._layers, (step.duration + step.late) / PS)
        left = self._layers  # layers that all steps ahead have left behind
        for step in self._steps:
            if self._may_compute(step, left):
                self._compute(step)
            left = min(left, step.done if step.computing or not step.aborted else self._layers)
        if not self._steps:
            self._member.computes(False)

    def _may_compute(self, step: PipelineStep, left: int) -> bool:
        if step.computing or step.aborted or step.done > step.gate or step.done == self._layers:
            return False
        return left >= self._ends[step.done]

    def _compute(self, step: PipelineStep) -> None:
        step.computing = True
        alone = step.duration * (step.done + 1) // self._layers - step.duration * step.done // self._layers
        slowdown = self._member.slowdown
        took = alone if slowdown == 1.0 else round(slowdown * alone)
        step.late += took - alone
        self._world.at(self._world.now + took, self._computed, step, first=True)

    def _computed(self, step: PipelineStep) -> None:
        if step not in self._steps:
            return
        step.computing = False
        if not step.aborted:
            step.done += 1
            self._layer_done(step.io, step.done - 1)
        self._go_on()
