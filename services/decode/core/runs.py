"""Runs: steps that the engine takes one after the other without asking."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import field

from moonpool.cost import Speeds, SpeedTracker, decode_step_seconds
from moonpool.frozen import frozen
from moonpool.sched.steps import TELL_S, longest_wait_s
from services.decode.core.actions import Action, Cut, Run
from services.decode.core.batch import Batch
from services.decode.core.config import CoreConfig
from services.decode.core.events import StepDone, Stepped
from services.decode.core.groups import Copied
from services.decode.core.request import Member, Request

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


def short_of_blocks(batch: Batch, config: CoreConfig) -> list[tuple[Request, Member]]:
    """Sequences that need a block within the next `ahead_steps`; nobody where a run has one step only."""
    if not config.ahead_steps or not batch.is_plain:
        return []
    soon = batch.soon(config.ahead_steps)
    # The last token of an answer is never computed.
    return [(it, member) for it, member in soon if len(member.table) < config.blocks_for(it.total_tokens - 1)]


def quiet_steps(batch: Batch, most: int, tbt_s: Callable[[int, int], float]) -> int:
    """Steps that the batch can take before there is anything to decide, unless something happens.

    Until a member needs a block, and until the batch becomes too slow for a promise, when somebody would have to leave
    it. Groups are asked about after each step.

    Args:
        batch: as the first step takes it.
        most: steps at most.
        tbt_s: seconds of a step over so many sequences with so much context.
    """
    if most == 1 or not batch.is_plain:
        return 1
    most, limit = batch.covered(most), batch.tbt_slo_s
    if not limit or all(request.tbt_slo_s for request in batch.requests):
        return most
    count, context = len(batch), batch.context
    return 1 + bisect_left(range(1, most), True, key=lambda n: tbt_s(count, context + n * count) > limit)


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
