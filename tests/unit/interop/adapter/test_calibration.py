"""Profiles of running engines: an engine with known speeds, on a clock of its own, is measured rightly."""

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import pytest

from moonpool.base.scheduling.latency import attention_pairs, prefill_seconds
from moonpool.cli.calibrate import run_calibrate_engine
from moonpool.engine.calibration import DecodeTime, PrefillTime, fit_profile
from moonpool.engine.emulated.profile import load_profile
from moonpool.interop.adapter.base import EngineClient, EngineFacts, EngineLoad, EngineOutput, EnginePrompt
from moonpool.interop.adapter.calibration import EngineTimer, growth, measured_speeds
from tests.unit.conductor.stack import TINY
from tests.unit.interop.adapter.fake_vllm import MAX_TOKENS, fake_vllm

BLOCK = 64
PREFILL, DECODE = (0.004, 2e-5, 3e-9), (0.003, 2e-4, 1e-7)


class KnownEngine(EngineClient):
    """Caches whole blocks by salt; all answers take their steps together."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cached: dict[str, int] = {}
        self.waiting: dict[asyncio.Future[None], int] = {}
        self.running = 0

    async def describe(self) -> EngineFacts:
        return EngineFacts("known 1", "1", BLOCK, 4096, 8192, (), ())

    async def load(self) -> tuple[str, EngineLoad]:
        return "1", EngineLoad(0, 0, 0.0)

    async def generate(self, prompt: EnginePrompt) -> AsyncGenerator[EngineOutput, None]:
        tokens = len(prompt.token_ids)
        prefix = min(self.cached.get(prompt.salt, 0), (tokens - 1) // BLOCK * BLOCK)
        new = tokens - prefix
        self.now += PREFILL[0] + PREFILL[1] * new + PREFILL[2] * attention_pairs(new, prefix)
        self.cached[prompt.salt] = tokens // BLOCK * BLOCK
        self.running += 1
        try:
            yield EngineOutput((1,))
            await asyncio.sleep(0)
            for done in range(1, prompt.max_tokens):
                await self._step(tokens + done)
                yield EngineOutput((1,))
        finally:
            self.running -= 1

    async def _step(self, context: int) -> None:
        mine = asyncio.get_running_loop().create_future()
        self.waiting[mine] = context
        if len(self.waiting) == self.running:
            self.now += DECODE[0] + DECODE[1] * self.running + DECODE[2] * sum(self.waiting.values())
            for waiting in self.waiting:
                waiting.set_result(None)
            self.waiting.clear()
        await mine

    async def clear_cache(self) -> bool:
        return True

    async def aclose(self) -> None:
        pass


async def test_known_speeds_are_found() -> None:
    engine = KnownEngine()
    timer = EngineTimer(engine, await engine.describe(), 1000, 3, lambda: engine.now)
    prefills = [PrefillTime(*step.size, step.seconds) for step in await timer.prefill()]
    decodes = [DecodeTime(batch, batch * each, seconds) for (batch, each), seconds in await timer.decode()]
    assert len({time.size for time in prefills}) == 9
    prefill, decode = fit_profile(prefills), fit_profile(decodes)
    assert prefill.coefficients == pytest.approx((*PREFILL, 0.0), rel=0.05, abs=1e-9)
    assert decode.coefficients[:2] == pytest.approx(DECODE[:2], rel=0.05)
    assert prefill.worst_error < 0.01
    assert decode.worst_error < 0.02


async def test_predictions_begin_with_work_that_grows_faster_than_prompts() -> None:
    engine = KnownEngine()
    facts = EngineFacts("known 1", "1", BLOCK, 4096, 8192, (), ())
    speeds = await measured_speeds(engine, facts, 100, lambda: engine.now)
    for tokens in (100, 2000, 8000):
        known_s = PREFILL[0] + PREFILL[1] * tokens + PREFILL[2] * attention_pairs(tokens, 0)
        assert prefill_seconds(speeds, tokens, 0) == pytest.approx(known_s, rel=0.01)
    small = EngineFacts("known 1", "1", BLOCK, 16, 8192, (), ())  # takes no prompt of several times the second's length
    assert (await measured_speeds(engine, small, 100, lambda: engine.now)).prefill_per_pair_s == 0.0


def test_a_slow_moment_gives_no_work_that_shrinks_with_prompts() -> None:
    for times in ([(16, 0.5), (512, 0.1), (4096, 1.0)], [(16, 0.1), (512, 5.0), (4096, 1.0)], [(16, 2.0), (512, 1.0)]):
        base_s, per_token_s, per_pair_s = growth(times)
        assert min(base_s, per_token_s) > 0.0
        assert per_pair_s >= 0.0


async def test_a_running_servers_profile_is_one_that_the_simulator_reads(tmp_path: Path) -> None:
    out = tmp_path / "engine.yaml"
    async with fake_vllm(tmp_path, "one", 100) as engine:
        measure = partial(run_calibrate_engine, "vllm", engine.url, str(TINY), out, name="", hardware="", repeats=1)
        await asyncio.to_thread(measure)
    profile = load_profile(str(out))
    assert (profile.name, profile.max_tokens) == ("engine", MAX_TOKENS)
    assert profile.hardware.startswith("vllm 0.32.0")
    speeds = profile.speeds
    assert max(speeds.prefill_base_s, speeds.prefill_per_token_s, speeds.prefill_per_pair_s) > 0
