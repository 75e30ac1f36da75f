"""Calibration: exact coefficients from exact times, none negative, and which sizes are measured."""

from dataclasses import dataclass, field

import pytest

from moonpool.cost import Speeds
from moonpool.engine import calibration
from moonpool.engine.calibration import fit, fit_decode_profile, fit_prefill_profile, measure_decode, measure_prefill
from moonpool.engine.emulated.profile import step_seconds
from moonpool.engine.handle import StepResult
from moonpool.engine.warmup import StepTimer
from moonpool.kv.layout import KVLayout
from moonpool.sched.steps import Step

LAYOUT = KVLayout(4, 1, 4, 64, "float16")
SPEEDS = Speeds(0.004, 3e-5, 2e-8, 0.005, 2e-4, 1e-7)


@dataclass
class Exact:
    """Stands for an engine: steps take what `SPEEDS` say; the first try of each is disturbed."""

    decode: bool
    blocks: int = 80
    layout: KVLayout = LAYOUT
    steps: list[Step] = field(default_factory=list)

    async def run(self, step: Step) -> StepResult:
        assert all(step.step_id > other.step_id for other in self.steps[-1:])
        first = all(step.sequences != other.sequences for other in self.steps)
        self.steps.append(step)
        seconds = step_seconds(SPEEDS, step, decode=self.decode) * (3 if first else 1)
        return StepResult((), False, 0, round(seconds * 1e9))


async def test_coefficients_are_found_again() -> None:
    engine = Exact(decode=False)
    prefills = await measure_prefill(engine, StepTimer(engine), max_tokens=4096, repeats=2)  # type: ignore[arg-type]
    assert {(time.tokens, time.prefix) for time in prefills} >= {(16, 0), (1024, 2048)}
    assert max(time.tokens + time.prefix for time in prefills) <= 4096
    found = fit_prefill_profile(prefills)
    assert found.coefficients == pytest.approx((0.004, 3e-5, 2e-8), rel=1e-3)
    assert found.worst_error < 1e-3

    engine = Exact(decode=True)
    decodes = await measure_decode(engine, StepTimer(engine), max_tokens=2048, repeats=2)  # type: ignore[arg-type]
    assert {(time.sequences, time.context) for time in decodes} >= {(1, 64), (32, 32 * 2048)}
    assert fit_decode_profile(decodes).coefficients == pytest.approx((0.005, 2e-4, 1e-7), rel=1e-3)


async def test_sizes_that_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LONGEST_STEP_S", 0.02)  # 128 tokens take 3 x 0.008 s in the first round
    engine = Exact(decode=False)
    times = await measure_prefill(engine, StepTimer(engine), max_tokens=9999, repeats=2)  # type: ignore[arg-type]
    assert {time.tokens for time in times if not time.prefix} == {16, 64, 128, 256}
    counts = [len(step.sequences[0].token_ids) // 4 for step in engine.steps if not step.sequences[0].start]
    assert counts == [16, 64, 128, 16, 64, 128, 256]  # in the second round it is undisturbed


def test_no_coefficient_is_negative() -> None:
    rows = [(1.0, 1.0, 1.0), (1.0, 2.0, 4.0), (1.0, 3.0, 9.0), (1.0, 4.0, 16.0)]
    found = fit(rows, [4.0, 3.0, 2.0, 1.0])
    assert min(found.coefficients) == 0.0
    assert found.mean_error <= found.worst_error == max(map(abs, found.errors))
    alike = fit([(1.0, 5.0, 7.0)] * 3, [1.0, 1.0, 1.0])  # cannot tell them apart: one of them explains all
    assert alike.worst_error < 1e-9
    assert str(alike) == "mean 0.0%, worst 0.0%"
