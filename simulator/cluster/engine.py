"""The engine of a simulated decode instance: takes the steps that the core orders, many at once where it may.

Steps take the time of the profile. Several of a run are one event, a leap: they end when steps taken one by one would.
A run is one leap, unless its way to the engine takes time, a block becomes full in it, or another engine of the
machine begins or ends to compute.
"""

from collections.abc import Callable

from moonpool.cost import prefill_seconds
from moonpool.kv.keys import BlockKey
from services.decode.core.actions import Run
from services.decode.core.events import StepDone, Stepped
from services.decode.core.machine import DecodeCore
from simulator.cluster.company import Company
from simulator.cluster.config import ClusterConfig
from simulator.cluster.sequences import DecodeSequence, DecodeUse
from simulator.cluster.steps import Leap, StepTimes
from simulator.kernel.calls import exponential
from simulator.kernel.clock import PS, World, ps

STOPPED = 1
"""Why answers end."""


class Engine:
    """Takes the steps of one core, until it is lost.

    Args:
        core: orders them.
        sequences: those of the instance, by the core's numbers.
        use: counts what is done.
        post: tells the core.
        ended: called when a run is over, with the sequences that ended or made their first tokens in it, and whether
            the instance's load or keys have changed.
        begun: called when sequences have made their first tokens in a run that goes on.
        company: of the machine's engines.
        number: of the instance; each draws for itself how long the way to it takes.
    """

    def __init__(
        self,
        world: World,
        config: ClusterConfig,
        core: DecodeCore,
        sequences: dict[int, DecodeSequence],
        use: DecodeUse,
        post: Callable[[Stepped | StepDone], None],
        ended: Callable[[list[DecodeSequence], bool], None],
        begun: Callable[[list[DecodeSequence]], None],
        company: Company,
        number: int,
    ) -> None:
        self._number = number
        self._world, self._config, self._core, self._sequences, self._use = world, config, core, sequences, use
        self._post, self._ended, self._begun = post, ended, begun
        self._times = StepTimes.of(config.profile.speeds)
        self._run: Run | None = None
        self._leap = Leap(0, 0, 0, 0)
        self._told = 0
        """Steps of the leap that are counted."""
        self._left = 0
        """Steps of the run behind the leap."""
        self._ahead = core.config.ahead_steps > 0
        """A run goes on where a block becomes full; its leaps end there."""
        self._member = company.joins(self._look_again)

    @property
    def idle(self) -> bool:
        """Whether no step is being computed."""
        return self._run is None

    def close(self) -> None:
        """The instance is lost."""
        self._run = None
        self._member.computes(False)

    def settle(self) -> None:
        """Counts the steps that are over by now, and tells the core."""
        if self._run is None:
            return
        steps = self._leap.over_by(self._world.now) - self._told
        if steps:
            seconds = self._advance(self._run, steps)
            filled = self._filled(self._batch(self._run)) if self._ahead else ()
            self._post(Stepped(self._run.step, steps, seconds, filled))

    def begin(self, run: Run) -> None:
        """Begins a run."""
        self._member.computes(True)
        batch = self._batch(run)
        steps = min([run.steps, *(member.left for member in batch)])
        way = ps(exponential(self._config.delays.run_s, self._config.seed, self._number, run.step))
        self._run, self._left = run, steps
        self._go_on(self._first_step(run) + way, 1 if way else steps)
        if steps > 1 and (new := [member for member in batch if not member.told]):
            self._world.at(self._leap.time_of(1), self._first, (run, new))

    def cut(self) -> None:
        """Ends the run with the step that is being computed."""
        self._left = 0
        self._shorten()

    def _go_on(self, first: int, steps: int) -> None:
        """Leaps over steps of the run at the pace of now, the first of which takes `first` where it is alone."""
        assert self._run is not None
        if self._ahead:
            size = self._config.block_tokens
            steps = min([steps, *(it.until_filled(size) for it in self._batch(self._run))])
        more, pace = self._times.per_context_token * len(self._run.batch), self._member.pace
        if pace != 1.0:
            first, more = round(pace * first), round(pace * more)
        self._told, self._left = 0, max(0, self._left - steps)
        self._leap = Leap(self._world.now, steps, max(1, first), more)
        self._world.at(self._leap.end, self._over, self._leap, first=True)

    def _shorten(self) -> int:
        """Lets the leap end with the step that is being computed; returns by how many steps."""
        less = self._leap.steps - self._told - 1
        if less > 0:
            leap = self._leap
            self._leap = Leap(leap.start, self._told + 1, leap.first, leap.more)
            self._world.at(self._leap.end, self._over, self._leap, first=True)
        return max(0, less)

    def _look_again(self) -> None:
        """Steps take another time from now on, but for the one that is being computed."""
        self.settle()
        if self._run is not None:
            self._left += self._shorten()

    def _first_step(self, run: Run) -> int:
        """Picoseconds of the run's first step; as emulated engines count, one token of a chunk is as any other."""
        ones = [chunk.start + 1 for chunk in run.chunks if chunk.count == 1]
        speeds = self._config.profile.speeds
        again = sum(
            prefill_seconds(speeds, chunk.count, chunk.start, steps=0, begins=False)
            for chunk in run.chunks
            if chunk.count > 1
        )
        return self._step(run, len(ones), sum(ones)) + ps(again)

    def _step(self, run: Run, ones: int = 0, context: int = 0) -> int:
        """Picoseconds of the next step of a run, with some more tokens and their context."""
        return self._times.step(len(run.batch) + ones, self._core.planner.batch.context + context)

    def _first(self, begun: tuple[Run, list[DecodeSequence]]) -> None:
        run, members = begun
        if run is self._run:
            self.settle()
            self._begun(members)

    def _over(self, leap: Leap) -> None:
        run = self._run
        if leap is not self._leap or run is None:
            return
        if self._left:
            self.settle()  # which may cut the run: then it ends with its next step
            self._go_on(self._step(run), max(1, self._left))
            return
        steps = leap.steps - self._told
        seconds = self._advance(run, steps)
        batch = self._batch(run)
        again = [self._sequences[chunk.id] for chunk in run.chunks if chunk.sample]
        for member in again:
            member.advance(self._world.now, (), self._world.now)
        self._run = None
        self._tell(run, [*batch, *again], steps, seconds)
        if self._run is None:
            self._member.computes(False)

    def _tell(self, run: Run, sampled: list[DecodeSequence], steps: int, seconds: float) -> None:
        over, filled = [member for member in sampled if not member.left], self._filled(sampled)
        news = [member for member in sampled if not (member.left and member.told)]
        self._ended(news, bool(over or filled or run.chunks))
        ended = tuple((member.number, STOPPED) for member in over)
        self._post(StepDone(run.step, False, seconds, ended, filled, steps))

    def _batch(self, run: Run) -> list[DecodeSequence]:
        return [self._sequences[number] for number in run.batch]

    def _filled(self, members: list[DecodeSequence]) -> tuple[tuple[int, BlockKey], ...]:
        """Blocks that have become full with the last step."""
        size = self._config.block_tokens
        return tuple([(it.number, key) for it in members if (key := it.filled(size)) is not None])

    def _advance(self, run: Run, steps: int) -> float:
        """Counts steps of the run; returns their seconds."""
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
        self._use.slots_time += elapsed * blocks * self._config.block_tokens
        return elapsed / PS
