"""A stage's warm-up: nothing compiles behind it, and what is timed at start are replays of graphs."""

import importlib.util
import random
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.latency import decode_step_seconds, prefill_seconds
from moonpool.base.scheduling.steps import SequenceStep, Step, StepResult
from moonpool.engine import run_mode
from moonpool.engine.calibration import measure
from moonpool.engine.cuda_graphs import DecodeGraphs, GraphCache
from moonpool.engine.kernels import self_check
from moonpool.engine.kernels.choice import READS_HOST, REPLACED, VARIABLE
from moonpool.engine.messages import StageDone
from moonpool.engine.models import stage
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.platforms.base import CapturedGraph
from moonpool.engine.platforms.staged import StagedDevice
from moonpool.engine.prompt_graphs import PromptGraphs
from moonpool.engine.warm_up import warm_up
from moonpool.engine.worker import describe_compute
from tests.unit.engine.kernels.kernels_of_torch import Kernels
from tests.unit.engine.stages import GREEDY, Stages
from tools.compiled_kernels import HOPPER, caught

SIZE = 16
EAGER_NS, REPLAY_NS = 50_000_000, 1_000_000


SPECS = [
    None,
    GREEDY,
    SampleSpec(SamplingParams(temperature=1.0)),
    SampleSpec(SamplingParams(temperature=1.0, top_p=0.5, logprobs=2)),
    SampleSpec(SamplingParams(temperature=1.0, top_k=4, min_p=0.1)),
]


def opened(path: Path, device: StagedDevice, blocks: int, kv_dtype: str = "auto", prompts: int = 0) -> Stages:
    """A model of one stage with graphs of up to eight rows, and of prompts of up to so many tokens."""
    layout = kv_layout(load_config(path), "float32", SIZE, kv_dtype)
    stages = Stages(path, KVPool.create(layout, blocks, [(0, layout.layers)]), device)
    [runner] = stages.runners
    cache = GraphCache(blocks * SIZE, most_rows=8)
    runner.graphs = DecodeGraphs(device, runner.model, runner.platform.memory, cache, blocks * SIZE)
    if prompts:
        runner.prompt_graphs = PromptGraphs(device, runner.model, runner.platform.memory, blocks * SIZE, prompts)
    return stages


def close(stages: Stages) -> None:
    assert not stages.failures
    stages.runners[0].close()
    stages.pool.close()


class Clock:
    """Time passes when it is told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def thread_time_ns(self) -> int:
        return self.now_ns


class Timed(StagedDevice):
    """Capturing takes as long as twenty eager steps. A replay takes a fiftieth of one, and is none."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(1)
        self.clock = clock

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        self.clock.now_ns += 20 * EAGER_NS
        graph, clock = super().capture(work), self.clock

        class Replayed:
            nbytes = 0

            def replay(self) -> None:
                before = clock.now_ns
                graph.replay()
                clock.now_ns = before + REPLAY_NS

        return Replayed()


class Local:
    """An engine in this process, as far as measuring needs one."""

    def __init__(self, stages: Stages, layout: KVLayout, blocks: int) -> None:
        self._stages, self.layout, self.blocks = stages, layout, blocks

    async def run(self, step: Step) -> StepResult:
        self._stages.run(step)
        told = threading.Event()
        self._stages.runners[0].platform.memory.fetch((), told.set)  # behind the report
        told.wait()
        done = self._stages.events[-1]
        assert isinstance(done, StageDone)
        return StepResult(done.sampled, done.aborted, done.start_ns, done.end_ns)


async def test_the_speed_that_is_told_is_a_replays(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(run_mode, "time", clock)
    stages = opened(checkpoint, Timed(clock), 24)
    [runner] = stages.runners
    run = runner.model.run

    def slow(*args: object, **how: object) -> object:
        clock.now_ns += EAGER_NS
        return run(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(runner.model, "run", slow)
    said: list[str] = []
    warm_up(runner, 64, 24 * SIZE, said.append)
    assert said[-1].startswith("capturing graphs")
    speeds = await measure(Local(stages, stages.pool.layout, 24), max_tokens=24 * SIZE)  # type: ignore[arg-type]
    for sequences, context in ((1, 16), (8, 128), (8, 8 * 24 * SIZE)):
        found = decode_step_seconds(speeds, sequences, context)
        assert found == pytest.approx(2 * REPLAY_NS / 1e9), (sequences, context)  # layers, and the head
    assert prefill_seconds(speeds, 64, 0) >= EAGER_NS / 1e9
    close(stages)


def import_kernels() -> None:
    """Before the variable is set that would make Triton interpret them."""
    import moonpool.engine.kernels.triton.ops
    import moonpool.engine.kernels.triton.recurrent
    import moonpool.engine.kernels.triton.sampling  # noqa: F401


def draw_step(draw: random.Random, number: int, tokens: int, blocks: int) -> Step:
    """Any mix of decode steps and chunks."""
    sequences: list[SequenceStep] = []
    left = tokens
    for _ in range(draw.choice([1, 2, 8, 30])):
        rows = draw.choice([1, 1, draw.randint(1, 40), draw.randint(1, tokens)])
        if rows > left:
            break
        left -= rows
        context = draw.choice([rows, draw.randint(rows, 600), draw.randint(rows, blocks * SIZE)])
        table = tuple(range(-(-context // SIZE)))
        sequences.append(SequenceStep(bytes(4 * rows), context - rows, table, draw.choice(SPECS)))
    copies = draw.choice([(), ((3, 5),), ((3, 5), (4, 6))])
    return Step(number, tuple(sequences) or (SequenceStep(bytes(4), 0, (0,), GREEDY),), copies=copies)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("kv_dtype", "deterministic"), [pytest.param("auto", False, marks=pytest.mark.slow), ("auto", True), ("fp8", False)]
)
def test_no_step_launches_what_warm_up_did_not(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str, deterministic: bool
) -> None:
    """On a device that is said to be an H100: launches are noted, and none runs."""
    import_kernels()
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # or Triton is not available on a CPU
    monkeypatch.setenv(VARIABLE, "triton")
    blocks, tokens = 256, 512
    monkeypatch.setattr(stage, "limits_of", lambda _: HOPPER.limits)
    draw = random.Random(7)
    monkeypatch.setattr(self_check, "largest_error", lambda *what: 0.0)  # no launch has results
    with caught(HOPPER.limits) as launched:
        stages = opened(checkpoint, StagedDevice(1), blocks, kv_dtype, 64)
        [runner] = stages.runners
        runner.model.deterministic = deterministic
        warm_up(runner, tokens, blocks * SIZE, lambda what: None)
        known = {launch.specialised for launch in launched}
        launched.clear()
        for number in range(1, 80):
            stages.run(draw_step(draw, number, tokens, blocks))
        close(stages)
    taken = {launch.specialised for launch in launched}
    assert taken <= known, taken - known
    assert {name for name, *_ in taken} >= {
        "attention",
        "join_parts",
        "_copy",
        "_norm",
        "_norm_rope_write",
        "_silu_mul",
        "_pick",
        "_keep_leading",
    }
    assert sum(name == "attention" for name, *_ in taken) >= 3


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_stage_of_recurrent_layers_alone_compiles_every_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For single rows and for several, in a stage without attention."""
    import_kernels()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(stage, "limits_of", lambda _: HOPPER.limits)
    monkeypatch.setattr(self_check, "largest_error", lambda *what: 0.0)  # no launch has results
    create("tiny-qwen3-next", tmp_path / "model", seed=1, dtype="float32")
    layout = kv_layout(load_config(tmp_path / "model"), "float32", SIZE)
    pool = KVPool.create(layout, 4, [(0, 1), (1, layout.layers)])
    stages = Stages(tmp_path / "model", pool, StagedDevice(1))
    runner = stages.runners[0]
    [spec] = [layer.spec for layer in runner.model.layers]
    assert spec.recurrent is not None
    with caught(HOPPER.limits) as launched:
        warm_up(runner, 64, 4 * SIZE, lambda what: None)
        known = {launch.specialised for launch in launched}
        launched.clear()
        one, several = (SequenceStep(bytes(4 * rows), 20, (0, 1, 2)) for rows in (1, 5))
        for number, sequences in enumerate(((one,), (several,), (one, several), (one, one)), 1):
            runner.run(Step(number, sequences))
        taken = {launch.specialised for launch in launched}
    assert {name for name, *_ in taken} >= {"_convolve", "_scan"}
    assert taken <= known, taken - known
    for each in stages.runners:
        each.platform.callbacks.close()
    stages.runners[0].platform.device.close()  # type: ignore[union-attr]
    assert not stages.failures
    pool.close()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("model", "name", "operation"),
    [
        ("tiny-llama", "silu_mul", "silu_mul"),
        ("tiny-llama", "prefill_attention", "attention"),
        ("tiny-deepseek-v32", "choose_keys", "choose_keys"),
    ],
)
def test_a_kernel_that_is_wrong_is_found_and_answers_are_right(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model: str,
    name: str,
    operation: str,
) -> None:
    """On a device where Triton's kernels, which are torch's here, are right but for one."""
    checkpoint = create(model, tmp_path / "model", seed=3, dtype="float32")

    def answer(device: StagedDevice | None) -> list[tuple[int | None, ...]]:
        layout = kv_layout(load_config(checkpoint), "float32", SIZE)
        pool = KVPool.create(layout, 24, [(0, layout.layers)])
        stages = Stages(checkpoint, pool, None) if device is None else opened(checkpoint, device, 24)
        if device is not None:
            warm_up(stages.runners[0], 64, 24 * SIZE, lambda what: None)
            assert (stages.runners[0].graphs is None) == (operation in READS_HOST)
            wrong = ", ".join(sorted({operation, "sampling"}))
            assert f"{wrong}: torch, as Triton is wrong here" in describe_compute(stages.runners[0])
        table, tokens = (0, 1, 2), array("i", range(5, 45))
        stages.run(Step(1, (SequenceStep(tokens.tobytes(), 0, table, GREEDY),)))
        for token in (7, 8):
            stages.run(Step(token, (SequenceStep(array("i", [token]).tobytes(), len(tokens), table, GREEDY),)))
            tokens.append(token)
        close(stages)
        return [event.sampled for event in stages.events if isinstance(event, StageDone)]

    right = answer(None)
    REPLACED.add("sampling")  # Triton draws nothing here
    try:
        Kernels(monkeypatch).break_(name, behind=columns_swapped)
        assert answer(StagedDevice(3)) == right
        assert {"sampling", operation} == REPLACED
    finally:
        REPLACED.clear()
    assert f"gives wrong results on this device: {name}," in caplog.text


def columns_swapped(given: dict[str, Any]) -> None:
    written = given["places" if "places" in given else "out"]
    written.copy_(written.roll(1, -1).clone())


def test_a_later_stage_warms_up_alone(checkpoint: Path) -> None:
    config = load_config(checkpoint)
    layout = kv_layout(config, "float32", SIZE)
    middle = layout.layers // 2
    pool = KVPool.create(layout, 4, [(0, middle), (middle, layout.layers)])
    stages = Stages(checkpoint, pool, StagedDevice(2))
    for runner in stages.runners:
        warm_up(runner, 64, 4 * SIZE, lambda what: None)
        runner.platform.callbacks.close()
    stages.runners[0].platform.device.close()  # type: ignore[union-attr]
    assert not stages.failures
    assert not stages.events
    assert not torch.is_inference_mode_enabled()
    pool.close()
