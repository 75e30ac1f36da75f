import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool
from moonpool.base.scheduling.latency import Speeds, decode_step_seconds, prefill_seconds
from moonpool.base.scheduling.steps import LayerDone, Step, StepResult
from moonpool.engine.calibration import DecodeTime, PrefillTime, TimedSizes, fit_decode, fit_prefill, measure
from moonpool.engine.interface import Engine
from moonpool.engine.messages import EngineSpec

TRUE = Speeds(0.01, 1e-4, 1e-7, 0.02, 1e-3, 1e-6, prefill_per_context_token_s=2e-6)


class ExactEngine:
    """Takes exactly the time that `TRUE` says, on paper."""

    layout = KVLayout.uniform(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32")
    stages = run_steps = 1
    max_num_batched_tokens = 512
    speeds = Speeds()
    pool: KVPool
    failed: "asyncio.Future[str]"

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.last = -(1 << 60)
        self.steps: list[Step] = []

    async def run(
        self,
        step: Step,
        *,
        on_layer: Callable[[LayerDone], None] | None = None,
        on_step: object = None,
        on_tokens: object = None,
    ) -> StepResult:
        assert self.last < step.step_id <= 0
        self.last = step.step_id
        self.steps.append(step)
        new = [len(s.token_ids) // 4 for s in step.sequences]
        for s, n in zip(step.sequences, new, strict=True):
            assert s.start + n <= len(s.block_table) * 16
            assert all(block < self.blocks for block in s.block_table)
        if len(step.sequences) == 1 and new[0] > 1:
            seconds = prefill_seconds(TRUE, new[0], step.sequences[0].start)
        else:
            seconds = decode_step_seconds(TRUE, len(new), sum(s.start + 1 for s in step.sequences))
        return StepResult((), False, 0, round(seconds * 1e9))

    async def fetch(self, blocks: Sequence[int]) -> None: ...

    def load(self) -> None: ...

    async def load_lora(self, lora: bytes, folder: str) -> int:
        raise NotImplementedError

    async def drop_lora(self, lora: bytes) -> None: ...

    def open_gate(self, step_id: int, layer: int) -> None: ...

    def drop(self, step_id: int, index: int) -> None: ...

    def stop_run(self, step_id: int, *, urgent: bool = False) -> None: ...

    def abort(self, step_id: int) -> None: ...

    async def idle(self) -> None: ...


async def test_coefficients_are_recovered() -> None:
    engine: Engine = ExactEngine(100)
    got = await measure(engine)
    for name in ("prefill_base_s", "prefill_per_token_s", "prefill_per_pair_s", "prefill_per_context_token_s"):
        assert getattr(got, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    for name in ("decode_base_s", "decode_per_sequence_s", "decode_per_context_token_s"):
        assert getattr(got, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name


async def test_on_a_device_sequences_have_blocks_of_their_own_and_all_timed_decode_steps_have_graphs() -> None:
    """Shared contexts would lie in a GPU's cache."""
    engine = ExactEngine(5000)
    spec = EngineSpec("none", "float32", engine.layout, 5000, max_num_batched_tokens=2048, graph_rows=24, device="cuda")
    sizes = TimedSizes.of(spec)
    got = await measure(engine, sizes=sizes)
    assert got.decode_per_context_token_s == pytest.approx(TRUE.decode_per_context_token_s, rel=1e-3)
    assert got.prefill_per_token_s == pytest.approx(TRUE.prefill_per_token_s, rel=1e-3)
    deep = [step.sequences for step in engine.steps if len(step.sequences) == 24 and step.sequences[0].start > 1024]
    assert deep
    for sequences in deep:
        tables = [block for sequence in sequences for block in sequence.block_table]
        assert len(set(tables)) == min(len(tables), 5000)
    assert max(len(step.sequences) for step in engine.steps) == 24
    decoded = [sequence for step in engine.steps for sequence in step.sequences if len(sequence.token_ids) == 4]
    assert all((share.start + 1) % 16 for share in decoded), "full blocks go to the host, and few real steps fill one"
    assert max(len(step.sequences[0].token_ids) // 4 for step in engine.steps) == 2048
    assert TimedSizes.of(replace(spec, device="cpu")) == TimedSizes()


@pytest.mark.parametrize(("blocks", "max_tokens"), [(1, 0), (2, 0), (100, 1), (100, 5)])
async def test_small_pools_and_short_models_are_measured_too(blocks: int, max_tokens: int) -> None:
    got = await measure(ExactEngine(blocks), max_tokens=max_tokens)
    assert min(got.prefill_base_s, got.prefill_per_token_s, got.decode_base_s, got.decode_per_sequence_s) >= 0.0
    assert prefill_seconds(got, 1, 0) > 0


def test_noise_never_makes_coefficients_negative_and_long_times_stay_right() -> None:
    short, long = PrefillTime(16, 0, 0.5), PrefillTime(512, 0, 0.4)
    few_behind, many_behind = PrefillTime(16, 1024, 0.2), PrefillTime(512, 1024, 0.3)
    assert fit_prefill(short, long, few_behind, many_behind) == (0.4, 0.0, 0.0, 0.0)
    base, per_token, per_pair, per_context = fit_prefill(
        PrefillTime(16, 0, 0.01), PrefillTime(64, 0, 0.02), PrefillTime(16, 1024, 10.0), PrefillTime(64, 1024, 9.0)
    )
    assert min(base, per_token, per_pair, per_context) >= 0.0
    assert per_context * 1024 == pytest.approx(0.5 * 8.98), "a slow moment does not say that attention costs nothing"
    assert per_pair * 2080 == pytest.approx(0.01)
    assert base + 64 * per_token + 2080 * per_pair == pytest.approx(0.02)
    assert fit_decode(DecodeTime(1, 16, 0.9), DecodeTime(8, 128, 0.5), DecodeTime(8, 8192, 0.4)) == (0.5, 0.0, 0.0)
