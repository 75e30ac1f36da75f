"""What spans say of a decode instance's steps."""

from collections.abc import Sequence

from moonpool.sched.steps import StepResult
from moonpool.telemetry.spans import Recorder
from services.decode.core.actions import Run
from services.decode.live import LiveSequence


def record_step(spans: Recorder, run: Run, sequences: Sequence[LiveSequence], result: StepResult) -> None:
    """A step was computed for these sequences."""
    if spans.enabled:
        spans.add(
            "decode.step",
            result.start_ns,
            result.end_ns,
            step=run.step,
            requests=[sequence.request.request_id for sequence in sequences],
            sequences=len(sequences),
            computed_again=sum(chunk.count for chunk in run.chunks),
        )
