"""Calibration: exact coefficients from exact times, none negative, errors on sizes held out of the fit, and sizes."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.kv.layout import KVLayout
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import Step, StepResult
from moonpool.engine.calibration import PrefillTime, StepTimer, fit, fit_profile, measure_decode, measure_prefill
from moonpool.engine.emulated.profile import step_seconds

LAYOUT = KVLayout.uniform(4, 1, 4, 64, "float16")
SPEEDS = Speeds(0.004, 3e-5, 2e-8, 0.005, 2e-4, 1e-7, prefill_per_context_token_s=5e-7)
SHIPPED = Path(__file__).resolve().parents[3] / "moonpool/engine/emulated/profiles/tiny-cpu-2-cores.yaml"


@dataclass
class Exact:
    """Stands for an engine: steps take what `SPEEDS` say; the first try of each is three times as slow."""

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


async def test_coefficients_are_found_again_though_some_tries_are_slow() -> None:
    engine = Exact(decode=False)
    prefills = await measure_prefill(engine, StepTimer(engine), max_tokens=4096, repeats=3)  # type: ignore[arg-type]
    assert {time.size for time in prefills} >= {(16, 0), (1024, 2048)}
    assert max(time.tokens + time.prefix for time in prefills) <= 4096
    found = fit_profile(prefills)
    assert found.coefficients == pytest.approx((0.004, 3e-5, 2e-8, 5e-7), rel=1e-3)
    assert found.worst_error < 1e-3

    engine = Exact(decode=True)
    decodes = await measure_decode(engine, StepTimer(engine), max_tokens=2048, repeats=3)  # type: ignore[arg-type]
    assert {(time.sequences, time.context) for time in decodes} >= {(1, 64), (32, 32 * 2048)}
    assert fit_profile(decodes).coefficients == pytest.approx((0.005, 2e-4, 1e-7), rel=1e-3)


async def test_sizes_that_take_too_long_are_left_out() -> None:
    engine = Exact(decode=False)
    times = await measure_prefill(engine, StepTimer(engine), max_tokens=9999, repeats=2, longest_s=0.02)  # type: ignore[arg-type]
    assert {time.tokens for time in times if not time.prefix} == {16, 64, 128, 256}
    counts = [len(step.sequences[0].token_ids) // 4 for step in engine.steps if not step.sequences[0].start]
    assert counts == [16, 64, 128, 16, 64, 128, 256]  # a first try of 128 tokens takes 3 x 0.008 s


def test_no_coefficient_is_negative() -> None:
    rows = [(1.0, 1.0, 1.0), (1.0, 2.0, 4.0), (1.0, 3.0, 9.0), (1.0, 4.0, 16.0)]
    assert min(fit(rows, [4.0, 3.0, 2.0, 1.0])) == 0.0
    alike = fit([(1.0, 5.0, 7.0)] * 3, [1.0, 1.0, 1.0])  # cannot tell them apart: one of them explains all
    assert alike[0] + 5.0 * alike[1] + 7.0 * alike[2] == pytest.approx(1.0)


def grid(seconds: dict[tuple[int, int], float]) -> list[PrefillTime]:
    """Chunks of 10 to 40 tokens after 0 to 30, a second each, but for the sizes given."""
    sizes = [(chunk, prefix) for prefix in (0, 10, 20, 30) for chunk in (10, 20, 30, 40)]
    return [PrefillTime(*size, seconds.get(size, 1.0)) for size in sizes]


def test_errors_are_those_of_sizes_that_the_fit_has_not_seen() -> None:
    """Half of the sizes, in every row and column; a size that is held out changes the error and not the fit."""
    found = fit_profile(grid({}))
    assert {time.size for time in found.fitted}.isdisjoint(time.size for time in found.held_out)
    for axis in (0, 1):
        for times in (found.fitted, found.held_out):
            assert set(Counter(time.size[axis] for time in times).values()) == {2}
    odd = fit_profile(grid({(20, 0): 2.0}))
    assert odd.coefficients == found.coefficients == pytest.approx((1.0, 0.0, 0.0, 0.0))
    assert (odd.median_error, odd.worst_error) == pytest.approx((0.0, 0.5))
    assert str(odd) == "median 0.0%, worst 50.0%"
    assert fit_profile(grid({(10, 0): 2.0})).coefficients != found.coefficients


def test_one_size_cannot_be_fitted_and_tested() -> None:
    with pytest.raises(ConfigError, match="too few"):
        fit_profile([PrefillTime(16, 0, 1.0)])


def test_the_shipped_cpu_profile_is_within_ten_percent_at_the_median() -> None:
    """On held-out sizes, as its own head says."""
    found = re.search(r"prefill median ([\d.]+)%, worst [\d.]+%; decode median ([\d.]+)%", SHIPPED.read_text())
    assert found is not None
    assert max(map(float, found.groups())) <= 10.0
