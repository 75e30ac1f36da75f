"""Runs: steps that the engine takes one after the other without asking."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from moonpool.cost import SpeedTracker, decode_step_seconds
from services.decode.core.actions import Action, Cut, Run
from services.decode.core.batch import Batch
from services.decode.core.events import StepDone, Stepped
from services.decode.core.groups import Copied


@dataclass(frozen=True, slots=True)
class Flight:
    """The run that the engine has."""

    run: Run
    context: int
    """Tokens attended to by the batch in the step that is being computed."""
    began: float
    """When the run was ordered."""
    copies: list[Copied] = field(default_factory=list)
    """Made before it."""
    left: int = 1
    """Steps of the run that are not over."""
    is_cut: bool = False
    """It was told to end with this step."""

    def advanced(self, steps: int, context: int) -> "Flight":
        """So many steps are over, and it goes on."""
        return replace(self, context=context, left=self.left - steps)

    def cut(self, out: list[Action]) -> "Flight":
        """Ends with the step that is being computed."""
        if self.left == 1 or self.is_cut:
            return self
        out.append(Cut(self.run.step))
        return replace(self, is_cut=True)


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
        seconds = max(seconds, now - flight.began)
    if flight.run.chunks:
        batch_s = decode_step_seconds(tracker.speeds, batch, flight.context) if batch else 0.0
        chunks = [(chunk.count, chunk.start, False) for chunk in flight.run.chunks]
        tracker.observe_prefill(chunks, seconds, known_s=batch_s)
        return
    tracker.observe_decode(batch, flight.context + batch * (event.steps - 1) // 2, seconds)
