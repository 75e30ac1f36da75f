"""What a step costs the thread that gives a device its work: `python -m benchmarks.steps [--json]`.

Steps of one stage of 32 layers in this process, with a device that does nothing: graphs are captured, and a replay
returns at once. What is left is the host's share of a decode step, and of a prompt step, which has a graph for each
layer. Times are of the thread's processor, so that other work on the machine counts little.
"""

import argparse
import itertools
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.frame import Progress, Row, bounded, run
from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.kv.pool import KVPool
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.cuda_graphs import DecodeGraphs, GraphCache
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import StageEvent
from moonpool.engine.model_runner import StageRunner
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.models.stage import StageModel
from moonpool.engine.pipeline import NoLinks
from moonpool.engine.platforms.base import CapturedGraph, DeviceCapacity
from moonpool.engine.platforms.callback_thread import CallbackThread
from moonpool.engine.platforms.cpu import CpuStream
from moonpool.engine.platforms.kv_memory import TieredKVMemory
from moonpool.engine.platforms.stage_platform import StagePlatform
from moonpool.engine.process_engine import RUN_STEPS
from moonpool.engine.prompt_graphs import PromptGraphs

LAYERS, CONTEXT, BLOCK_SIZE, PROMPT = 32, 256, 64, 1024
WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95),
}
WANTED_US = {64: 150.0, 256: 400.0}
"""Microseconds of the host a step, by rows."""
WANTED_LAYER_US = 40.0
"""Microseconds of the host a captured layer."""


class NothingCaptured:
    """A graph whose replay does nothing, and is counted."""

    nbytes = 0

    def __init__(self, device: "IdleDevice") -> None:
        self._device = device

    def replay(self) -> None:
        """Count."""
        self._device.replays += 1


class IdleDevice:
    """A device that does at once what is eager, and nothing that is captured."""

    def __init__(self) -> None:
        self.torch_device, self.replays = torch.device("cpu"), 0
        self.compute, self.load_stream, self.store_stream = CpuStream(), CpuStream(), CpuStream()

    def enter_thread(self) -> None:
        """Any thread may give work."""

    def capacity(self) -> DeviceCapacity:
        """As much as is asked for."""
        return DeviceCapacity(1 << 40, 1 << 40, 1)

    def memory(self, shape: tuple[int, ...], beside: int) -> Tensor:
        """Memory of the host."""
        return torch.zeros(shape, dtype=torch.uint8)

    def register(self, memory: Tensor) -> None:
        """All memory is."""

    def goes_on(self) -> None: ...

    def copy_slices(self, target: Tensor, source: Tensor, slices: Tensor) -> None:
        """Copy nothing."""

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """Capture nothing."""
        return NothingCaptured(self)

    def close(self) -> None:
        """There is no thread."""


class Steps:
    """Decode steps of one stage on an idle device."""

    def __init__(self, model: StageModel, pool: KVPool, rows: int) -> None:
        self.device, self.events = IdleDevice(), list[StageEvent]()
        [part] = pool.parts
        callbacks = CallbackThread(_fail)
        memory = TieredKVMemory(part, self.device, callbacks)
        place = StagePlatform(self.device.torch_device, self.device.compute, memory, callbacks, self.device)
        self.runner = StageRunner(0, model, place, NoLinks(), KVGates(), self.events.append, 5.0)
        longest = CONTEXT + RUN_STEPS + 1
        captures = GraphCache(longest, most_rows=rows)
        self.runner.graphs = DecodeGraphs(self.device, model, memory, captures, longest)
        self.runner.graphs.capture(self.device.compute, lambda what: None)
        self.runner.prompt_graphs = PromptGraphs(self.device, model, memory, PROMPT, PROMPT)
        self.runner.prompt_graphs.capture(self.device.compute, lambda what: None)
        self._numbers, self._rows = itertools.count(1), rows

    def run(self, params: SamplingParams, steps: int = RUN_STEPS) -> Callable[[], bool]:
        """Begin a run; return what computes its next step, and tells whether there is one more."""
        blocks = -(-(CONTEXT + steps) // BLOCK_SIZE)
        sequences = tuple(
            SequenceStep(
                array("i", [row + 3]).tobytes(),
                CONTEXT,
                tuple(range(row * blocks, (row + 1) * blocks)),
                SampleSpec(params, seed=row),
            )
            for row in range(self._rows)
        )
        self.events.clear()
        self.runner.run(Step(next(self._numbers), sequences, steps=steps))
        return self.runner.go_on

    def prompt(self, tokens: int, *, told: bool) -> Callable[[], bool]:
        """Return what computes a step of a prompt without a token behind; `told`: layer by layer, as KV leaves."""
        table = tuple(range(-(-tokens // BLOCK_SIZE)))
        step = Step(next(self._numbers), (SequenceStep(bytes(4 * tokens), 0, table, None),), layer_events=told)
        return partial(self.runner.run, step)


@contextmanager
def idle_steps(rows: int, layers: int = LAYERS) -> Iterator[Steps]:
    """Steps of so many rows, of a model of so many layers."""
    with tempfile.TemporaryDirectory() as folder:
        create("tiny-llama", Path(folder) / "model", dtype="float32", overrides={"num_hidden_layers": layers})
        config = load_config(Path(folder) / "model")
        model = load_stage(Path(folder) / "model", config, torch.float32, 0, layers)
        blocks = rows * -(-(CONTEXT + RUN_STEPS) // BLOCK_SIZE)
        pool = KVPool.create(kv_layout(config, "float32", BLOCK_SIZE), blocks, [(0, layers)])
        try:
            steps = Steps(model, pool, rows)
            yield steps
            steps.runner.close()
        finally:
            pool.close()


def _fail(error: BaseException) -> None:
    raise error


def step_us(steps: Steps, params: SamplingParams) -> float:
    """Microseconds of this thread a step, in the later steps of a run."""
    go_on, count = steps.run(params), 0
    begin = time.thread_time()
    while go_on():
        count += 1
    return 1e6 * (time.thread_time() - begin) / (count + 1)


def layer_us(compute: Callable[[], bool]) -> float:
    """Microseconds of this thread a layer, of a prompt step."""
    begin = time.thread_time()
    compute()
    return 1e6 * (time.thread_time() - begin) / LAYERS


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    torch.set_num_threads(1)  # as an engine beside another one; threads that wait for cores count as time
    with idle_steps(64) as steps:
        for told in (False, True):
            for _ in range(3):
                layer_us(steps.prompt(PROMPT, told=told))
            times = [layer_us(steps.prompt(PROMPT, told=told)) for _ in range(4 * options.runs)]
            name = f"prompt step of {PROMPT} tokens, a layer" + (", told and stored" if told else "")
            yield bounded(name, "us of the host", times, "wanted at most", WANTED_LAYER_US)
        times = [step_us(steps, WAYS["greedy"]) / LAYERS for _ in range(1 + options.runs)][1:]
        yield bounded("decode step, 64 rows, a layer", "us of the host", times, "wanted at most", WANTED_LAYER_US)
    for rows, wanted in WANTED_US.items():
        with idle_steps(rows) as steps:
            for way, params in WAYS.items():
                step_us(steps, params)
                times = [step_us(steps, params) for _ in range(options.runs)]
                yield bounded(f"decode step, {rows} rows, {way}", "us of the host", times, "wanted at most", wanted)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows, each told when it is there."""
    found = []
    for row in rows_of(options):
        progress(f"{row.name}: {row.value:.0f} {row.unit}, ratio {row.ratio:.2f}")
        found.append(row)
    return found


if __name__ == "__main__":
    run("steps", measure)
