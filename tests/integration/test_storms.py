"""Faults in every process while clients send requests and leave: no wrong token, no late call, everything released.

Storms that gate every change are those of `tests/world`, on virtual time. These meet real processes and sockets.
The faults and the requests follow from a seed; what they meet in the services does not. Longer ones:
`python -m tests.faults --seconds 300 --seed 7 --engine emulated:llama-70b-a800`.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.engine.models.random_checkpoint import create
from tests.faults.report import StormPlan
from tests.faults.scene import base_plan, judge_of
from tests.faults.storm import run_storm
from tests.integration.conftest import SEED

EMULATED = "emulated:llama-70b-a800"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "plan"),
    [
        (EMULATED, StormPlan(seed=8, seconds=120.0, conductors=3)),
        ("real", StormPlan(seed=4, seconds=120.0)),
        ("real", StormPlan(seed=9, seconds=60.0, transports="tcp")),
        ("real", StormPlan(seed=11, seconds=60.0, transports="grpc")),
    ],
)
def test_a_storm_keeps_every_promise_and_really_happens(
    engine: str, plan: StormPlan, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = replace(base_plan(checkpoint, tmp_path, engine), conductors=plan.conductors)
    report = run_storm(plan, base, judge_of(checkpoint, engine), monkeypatch.setenv)
    assert report.failures == [], report.summary()
    assert report.shortfalls() == [], report.summary()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "both"), [(2, False), (1, True), (2, True)])
def test_a_storm_over_ranks_and_the_role_both(
    ranks: int, both: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is lost with any of its ranks; decode instances compute the prompts where there is no prefill."""
    base = base_plan(checkpoint, tmp_path, "real", ranks=ranks, both=both)
    report = run_storm(StormPlan(seed=13, seconds=60.0), base, judge_of(checkpoint, "real"), monkeypatch.setenv)
    assert report.failures == [], report.summary()
    assert report.shortfalls() == [], report.summary()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", ["tiny-gemma3", "tiny-mixtral", "tiny-deepseek-v32", "tiny-qwen3-next"])
def test_a_storm_over_each_kind_of_layers(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, experts, latent attention with experts, recurrent states."""
    model = create(shape, tmp_path / "model", seed=SEED, dtype="float32")
    plan = StormPlan(seed=12, seconds=60.0)
    report = run_storm(plan, base_plan(model, tmp_path / "data", "real"), judge_of(model, "real"), monkeypatch.setenv)
    assert report.failures == [], report.summary()
    assert report.shortfalls() == [], report.summary()


SHORT = StormPlan(
    seed=5,
    seconds=5.0,
    kinds=("kill-engine", "stop-engine", "reset"),
    targets=("prefill", "decode"),
    clients=3,
    gap_s=1.5,
)
"""An engine of decode is killed, one of prefill is stopped, connections are reset."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plan", "prefill"), [(SHORT, 1), (StormPlan(seed=9, seconds=60.0), 2)])
def test_a_storm_over_engines_in_a_hostile_order(
    plan: StormPlan, prefill: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = replace(base_plan(checkpoint, tmp_path, "real", device="staged:3"), prefill=prefill)
    report = run_storm(plan, base, judge_of(checkpoint, "real"), monkeypatch.setenv)
    assert report.failures == [], report.summary()
    assert report.shortfalls() == [], report.summary()
