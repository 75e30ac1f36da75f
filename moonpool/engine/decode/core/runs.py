"""Runs of decode steps: the run that the engine executes, how long the next run may be, and what a run teaches."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import field

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import Speeds, decode_step_seconds
from moonpool.base.scheduling.speed_tracker import SpeedTracker
from moonpool.base.scheduling.steps import REPORT_WITHIN_S, longest_wait_s
from moonpool.engine.decode.core.actions import StartRun, StopRun
from moonpool.engine.decode.core.batch import RunningBatch
from moonpool.engine.decode.core.copy_on_write import BlockCopy
from moonpool.engine.decode.core.events import RunDone, RunProgress
from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.decode.core.tbt_limiter import TbtLimiter
from moonpool.engine.scheduler.windows import pass_windows

OVERDUE_RATIO = 2.0
"""A step this many times longer than predicted lowers the engine's speed before the step ends."""


@frozen
class RunInFlight:
    """The run that the engine executes.

    Attributes:
        context: the batch's tokens in the step being computed.
        began: start of the step being computed, or report of the step before, seconds.
        copies: block copies made before the run.
        left: steps in the run that have not ended.
        is_stopped: the run was told to end with this step.
        is_hurried: the run was told not to yield to other work any more.
    """

    run: StartRun
    context: int
    began: float
    copies: list[BlockCopy] = field(default_factory=list)
    left: int = 1
    is_stopped: bool = False
    is_hurried: bool = False

    def advanced(self, now: float, steps: int, context: int) -> "RunInFlight":
        """Return the run after `steps` steps."""
        return RunInFlight(self.run, context, now, self.copies, self.left - steps, self.is_stopped, self.is_hurried)

    def overdue(self, now: float, speeds: Speeds) -> Speeds:
        """Return the engine's speeds, lower if the step being computed takes too long."""
        if self.run.chunks:
            return speeds
        expected_s = decode_step_seconds(speeds, len(self.run.batch), self.context)
        if self.run.patient:
            expected_s += longest_wait_s(expected_s) + (REPORT_WITHIN_S if self.run.steps > 1 else 0.0)
        late = (now - self.began) / expected_s if expected_s else 1.0
        return speeds.slowed_decode(late) if late > OVERDUE_RATIO else speeds

    def stopped(self, state: DecodeState, *waiting: list[DecodeRequest]) -> "RunInFlight":
        """Return the run, told to end with the step being computed; hurried if a waiting request is not patient."""
        hurried = self.run.patient and not all(request.patient for queue in waiting for request in queue)
        if (self.left == 1 or self.is_stopped) and hurried <= self.is_hurried:
            return self
        state.act(StopRun(self.run.step, hurried))
        return RunInFlight(self.run, self.context, self.began, self.copies, self.left, True, hurried)


def uninterrupted_steps(batch: RunningBatch, most: int, tbt: TbtLimiter) -> int:
    """Return steps that the batch can take before a decision other than about blocks is needed, if no event comes.

    A decision is needed when the batch becomes too slow for a promise, and after each step of a search.

    Args:
        batch: the first step's batch.
        most: upper limit.
        tbt: the promised times.
    """
    if most == 1 or batch.has_search:
        return 1
    limit, count, context = tbt.limit_s, len(batch), batch.context
    if not limit:
        return most
    return 1 + bisect_left(range(1, most), True, key=lambda n: tbt.step_s(count, context + n * count) > limit)


def sequences_short_ahead(
    batch: RunningBatch, state: DecodeState, steps: int
) -> Iterator[tuple[DecodeRequest, RequestSequence]]:
    """Return sequences that need a block during the next run, soonest first; the caller gives the block now.

    Only surplus blocks are given ahead, so requests that arrive or grow find as many blocks as without this.
    """
    settings, budget = state.settings, state.budget
    ahead = batch.blocks_ahead if batch.soonest(steps := min(steps, settings.ahead_steps)) else 0
    while (short := batch.soonest(steps)) is not None and ahead < budget.surplus:
        request, sequence = short
        pass_windows(sequence.table, batch.tokens_of(sequence) - 1, settings, state.blocks)
        if state.blocks.num_slots and budget.window_blocks_available < 1:
            return
        if len(sequence.table.blocks) == settings.blocks_for(request.total_tokens - 1):
            return  # the answer ends in this block: the last token is never computed
        ahead += 1
        yield short


def observe_run(tracker: SpeedTracker, now: float, flight: RunInFlight, event: RunProgress | RunDone) -> None:
    """Learn steps' speed, once per report, from their mean.

    A step with chunks teaches the chunks' speed; the progress's batch counts with the predicted time.
    """
    if not event.seconds:
        return
    batch, seconds = len(flight.run.batch), event.seconds / event.steps
    if flight.run.steps == 1:  # a token takes the way to the engine and back, not just the computation
        seconds = max(seconds, now - flight.began - event.waited_s)
    if flight.run.chunks:
        batch_s = decode_step_seconds(tracker.speeds, batch, flight.context) if batch else 0.0
        chunks = [(chunk.count, chunk.start, False) for chunk in flight.run.chunks]
        tracker.observe_prefill(chunks, seconds, known_s=batch_s)
        return
    drafted = sum(draft.tokens for draft in event.drafts) if isinstance(event, RunDone) else 0
    context = flight.context + batch * (event.steps - 1) // 2
    tracker.observe_decode(batch + drafted, context + drafted * context // batch, seconds)
