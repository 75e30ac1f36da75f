"""Which results of a run's steps are told together."""

import pytest

from moonpool.base.scheduling.steps import MAX_RESULTS_TOGETHER, REPORT_WITHIN_S, SequenceStep, Step
from moonpool.engine.messages import StageDone
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.step_run import StepRun

BEGAN_NS = 10**12


def told(patient: bool, step_s: float, steps: int) -> list[int]:
    """After which steps a run of so many tells of how many, where each takes so long; of the others 0."""
    share = SequenceStep(bytes(4), 0, (0,))
    packed = PackedBatch.build([(share.token_ids, share.start, share.block_table)], 16)
    run = StepRun(Step(1, (share,), patient=patient), packed, None, None, 0, steps - 1)
    counts, tokens = [], list[int | None]()
    for number in range(steps):
        end_ns = BEGAN_NS + round(number * step_s * 1e9)
        done = run.to_report(StageDone(1, 0, (number,), False, end_ns, end_ns, over=number == steps - 1))
        counts.append(0 if done is None else 1 + len(done.earlier))
        tokens += [result.sampled[0] for result in (*done.earlier, done)] if done is not None else []
    assert tokens == list(range(steps))
    return counts


def test_each_is_told_where_somebody_waits_for_it() -> None:
    assert told(False, 1e-4, 3) == [1, 1, 1]


@pytest.mark.parametrize("more", [0, 1, 2])
def test_those_of_a_patient_run_come_together_and_the_rest_with_its_last(more: int) -> None:
    whole = [0] * (MAX_RESULTS_TOGETHER - 1) + [MAX_RESULTS_TOGETHER]
    assert told(True, 1e-6, 2 * MAX_RESULTS_TOGETHER + more) == [
        *whole,
        *whole,
        *([0] * (more - 1) + [more] if more else []),
    ]


def test_none_waits_for_long() -> None:
    assert told(True, 0.4 * REPORT_WITHIN_S, 8) == [0, 0, 0, 4, 0, 0, 0, 4]
    assert told(True, 2 * REPORT_WITHIN_S, 4) == [0, 2, 0, 2]
