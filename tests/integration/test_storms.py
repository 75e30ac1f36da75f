"""Faults in every service while clients ask and leave: no wrong token, no hang beyond deadlines, everything back.

The faults and the requests follow from a seed, what they meet in the services does not. Minutes of the same:
`python -m tests.faults --seconds 300 --seed 7 --engine emulated:llama-70b-a800`.
"""

from pathlib import Path

import pytest

from tests.faults.scene import base_plan, judge_of
from tests.faults.storm import StormPlan, run_storm

EMULATED = "emulated:llama-70b-a800"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "seconds", "seed"),
    [
        (EMULATED, 15.0, 1),
        ("real", 15.0, 2),
        pytest.param(EMULATED, 120.0, 3, marks=pytest.mark.slow),
        pytest.param("real", 120.0, 4, marks=pytest.mark.slow),
    ],
)
def test_a_storm(
    engine: str, seconds: float, seed: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = StormPlan(seed=seed, seconds=seconds)
    report = run_storm(plan, base_plan(checkpoint, tmp_path, engine), judge_of(checkpoint, engine), monkeypatch.setenv)
    assert report.failures == [], report.summary()
    assert report.faults
    assert sum(outcome.ended == "complete" for outcome in report.outcomes) > seconds
