import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.steps import Step
from moonpool.engine.config import EngineConfig
from moonpool.engine.emulated.profile import Noise
from moonpool.engine.setup import engine_setup
from tests.unit.base.checkpoint.folder import write_config
from tests.unit.engine.emulated.rig import Clock, engine_of, history, part, spec_of


def config(folder: Path, **flags: object) -> EngineConfig:
    return EngineConfig.model_validate({"conductor": "h:1", "model": str(folder), "id": "prefill-0", **flags})


def test_without_noise_times_are_the_profiles() -> None:
    assert {Noise(seed=3).factor(step) for step in range(10)} == {1.0}


def test_jitter_differs_from_step_to_step_around_the_hidden_speed() -> None:
    steps = [Noise(seed=3, jitter=0.1).factor(step) for step in range(2_000)]
    assert 0.9 <= min(steps) < 0.91
    assert 1.09 < max(steps) <= 1.1
    assert sum(steps) / len(steps) == pytest.approx(1.0, abs=0.005)
    hidden = Noise(seed=3, speed_error=0.3).factor(0)
    assert hidden != 1.0
    both = Noise(seed=3, jitter=0.1, speed_error=0.3)
    assert [both.factor(step) for step in range(20)] == pytest.approx([hidden * jitter for jitter in steps[:20]])


def test_instances_have_speeds_of_their_own() -> None:
    factors = {Noise(seed=seed, speed_error=0.3).factor(0) for seed in range(100)}
    assert len(factors) == 100
    assert 0.7 <= min(factors) < 0.75
    assert 1.25 < max(factors) <= 1.3


async def test_a_step_takes_the_disturbed_time_and_the_reported_speeds_do_not_tell() -> None:
    clock = Clock()
    noise = Noise(seed=3, jitter=0.2, speed_error=0.3)
    plain = spec_of()
    assert plain.emulated is not None
    spec = replace(plain, emulated=replace(plain.emulated, noise=noise))
    prompt = history(list(range(8)))
    async with engine_of(plain, clock) as engine:
        await clock.run(asyncio.ensure_future(engine.run(Step(5, (part(prompt, 0, 8, (0, 1)),)))))
        exact, speeds = engine.step_s, engine.speeds
    async with engine_of(spec, clock) as engine:
        await clock.run(asyncio.ensure_future(engine.run(Step(5, (part(prompt, 0, 8, (0, 1)),)))))
        assert engine.step_s == pytest.approx(exact * noise.factor(5))
        assert engine.speeds == speeds


def test_flags_and_the_instances_id_decide(tmp_path: Path) -> None:
    write_config(tmp_path)
    flags = {"engine": "emulated:llama-70b-a800", "emulated_jitter": 0.1, "emulated_speed_error": 0.3}
    specs = [
        engine_setup(config(tmp_path, **flags, **other)).spec.emulated
        for other in ({}, {}, {"id": "prefill-1"}, {"emulated_seed": 1})
    ]
    noises = [spec.noise for spec in specs if spec is not None]
    assert noises[0] == noises[1]
    assert len({noise.seed for noise in noises}) == 3
    assert (noises[0].jitter, noises[0].speed_error) == (0.1, 0.3)
    for name in ("emulated_jitter", "emulated_speed_error"):
        with pytest.raises(ConfigError, match=name):
            engine_setup(config(tmp_path, **{name: 0.1}))


def test_a_slowdown_counts_between_its_signals_only() -> None:
    noise = Noise(seed=3, jitter=0.2, slowdown=10.0)
    for step in range(5):
        assert noise.factor(step, slowed=True) == pytest.approx(10.0 * noise.factor(step))
