"""Runs: steps that the engine takes one after the other without asking."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import field

from moonpool.cost import Speeds, SpeedTracker, decode_step_seconds
from moonpool.frozen import frozen
from moonpool.sched.steps import TELL_S, longest_wait_s
from services.decode.core.actions import Action, Cut, Run
from services.decode.core.batch import Batch
from services.decode.core.config import CoreConfig
from services.decode.core.events import StepDone, Stepped
from services.decode.core.groups import Copied
from services.decode.core.pace import Pace
from services.decode.core.request import Member, Request
from services.decode.core.room import Room

OVERDUE = 2.0
"""Times what it was expected to take, after which a step that is not over counts for its engine's speed."""


@frozen
class Flight:
    """The run that the engine has."""

    run: Run
    context: int
    """Tokens attended to by the batch in the step that is being computed."""
    began: float
    """When the step that is being computed was ordered, or the one before it was told to be over."""
    copies: list[Copied] = field(default_factory=list)
    """Made before it."""
    left: int = 1
    """Steps of the run that are not over."""
    is_cut: bool = False
    """It was told to end with this step."""
    is_hurried: bool = False
    """And to let nothing else go before."""

    def advanced(self, now: float, steps: int, context: int) -> "Flight":
        """So many steps are over, and it goes on."""
        return Flight(self.run, context, now, self.copies, self.left - steps, self.is_cut, self.is_hurried)

    def overdue(self, now: float, speeds: Speeds) -> Speeds:
        """The engine's speeds, slower where the step that is being computed takes too long."""
        if self.run.chunks:
            return speeds
        expected_s = decode_step_seconds(speeds, len(self.run.batch), self.context)
        if self.run.patient:
            expected_s += longest_wait_s(expected_s) + (TELL_S if self.run.steps > 1 else 0.0)
        late = (now - self.began) / expected_s if expected_s else 1.0
        return speeds.slowed_decode(late) if late > OVERDUE else speeds

    def cut(self, out: list[Action], *waiting: list[Request]) -> "Flight":
        """Ends with the step that is being computed, and that at once where one of those who wait is not patient."""
        hurried = self.run.patient and not all(it.patient for its in waiting for it in its)
        if (self.left == 1 or self.is_cut) and hurried <= self.is_hurried:
            return self
        out.append(Cut(self.run.step, hurried))
        return Flight(self.run, self.context, self.began, self.copies, self.left, is_cut=True, is_hurried=hurried)


def quiet_steps(batch: Batch, most: int, pace: Pace) -> int:
    """Steps that the batch can take before there is anything to decide but blocks, unless something happens.

    Until the batch becomes too slow for a promise, when somebody has to leave it or the promise can be kept no longer.
    Groups are asked about after each step.

    Args:
        batch: as the first step takes it.
        most: steps at most.
        pace: the promised times.
    """
    if most == 1 or not batch.is_plain:
        return 1
    limit, count, context = pace.limit_s, len(batch), batch.context
    if not limit:
        return most
    return 1 + bisect_left(range(1, most), True, key=lambda n: pace.step_s(count, context + n * count) > limit)


def short_ahead(batch: Batch, room: Room, config: CoreConfig, steps: int) -> Iterator[tuple[Request, Member]]:
    """Sequences that get a block now because they need it during the next run, soonest first; their caller gives it.

    As many blocks are ahead of their tokens as nobody is expected to need, so that who comes or grows finds room as if
    there were none, and a full pool has none.
    """
    ahead = batch.blocks_ahead if batch.soonest(steps := min(steps, config.ahead_steps)) else 0
    while (short := batch.soonest(steps)) is not None and ahead < room.unexpected:
        request, member = short
        if len(member.table) == config.blocks_for(request.total_tokens - 1):
            return  # its answer ends there: the last token is never computed
        ahead += 1
        yield short


def observe(tracker: SpeedTracker, now: float, flight: Flight, event: Stepped | StepDone) -> None:
    """Learns from steps how long they take: of a run once, from its mean step.

    Of a step with chunks these are what is learnt; the batch beside them takes what is known of it.
    """
    if not event.seconds:
        return
    batch, seconds = len(flight.run.batch), event.seconds / event.steps
    if flight.run.steps == 1:  # tokens wait for the whole way to the engine and back, not just for its computing
        seconds = max(seconds, now - flight.began - event.waited_s)
    if flight.run.chunks:
        batch_s = decode_step_seconds(tracker.speeds, batch, flight.context) if batch else 0.0
        chunks = [(chunk.count, chunk.start, False) for chunk in flight.run.chunks]
        tracker.observe_prefill(chunks, seconds, known_s=batch_s)
        return
    tracker.observe_decode(batch, flight.context + batch * (event.steps - 1) // 2, seconds)
