"""Decode steps and prompts on whole models: eager and as graphs, and where a decode step's host time goes.

Parts of a step on the launching thread, in ms: `need` (looking after KV), `fill` (a graph's inputs), `replay`, `head`,
`sample`, `wait` (for the remainder), `rest` (all other Python; without graphs, `rest` launches the layers). `sample`
reads the tokens, so `sample` waits for the device's work on the whole step.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from benchmarks.ceilings import On
from moonpool.engine.cuda_graphs import DecodeGraphs
from moonpool.engine.model_runner import StageRunner
from moonpool.engine.models.stage import StageModel
from moonpool.engine.platforms.kv_memory import KVMemory
from moonpool.engine.sampling.sampler import Sampler
from tools.gpu_check.host_time import HostTime
from tools.gpu_check.runners import BLOCK, Stage, stage
from tools.gpu_check.serving import SMALL, TINY_EXACT
from tools.gpu_check.where import Figures, Where, expect, stage_main

LIMIT_S = 80
SHAPES = (SMALL, replace(SMALL, shape="smollm2-135m"))
BATCHES = (1, 8, 64, 256)
CONTEXT, STEPS, WARM = 1024, 32, 8
PROMPTS = (64, 256, 1024)
PARTS = ("need", "fill", "replay", "head", "sample", "wait")
SLACK = 1.05
"""A graph may be slower than eager steps by this factor: the noise."""
KV_METHODS = [name for name, method in vars(KVMemory).items() if callable(method) and not name.startswith("_")]


@dataclass(frozen=True, slots=True)
class Decode:
    """Steps over `batch` sequences with `context` tokens."""

    stage: Stage
    batch: int
    context: int


def check(where: Where, figures: Figures) -> None:
    """Measure each shape and batch; fail if a graph is slower than eager steps."""
    shapes, batches, context = ((TINY_EXACT,), (1, 4), 128) if where.tiny else (SHAPES, BATCHES, CONTEXT)
    prompts = (64,) if where.tiny else PROMPTS
    copy_rate = On(where.torch_device, 1).copied() if where.on_gpu else 0.0
    if not where.on_gpu:
        figures["parts but need and wait"] = "skipped: staged computes in a thread of its own"
    times: dict[str, tuple[float, float]] = {}
    for served in shapes:
        with stage(where, served, max(batches) * context, context, figures) as loaded:
            ways = {"eager": loaded.runner(), "graph": loaded.runner_of_graphs(max(batches), max(prompts))}
            for batch in batches:
                name = f"{served.shape}, batch {batch}"
                step = Decode(loaded, batch, context)
                eager, graph = (measure(step, runner, f"{name}, {way}", figures) for way, runner in ways.items())
                if copy_rate:
                    kv = sum(layer[: batch * context // BLOCK].nbytes for layer in loaded.place.memory.kv)
                    rate = (loaded.model.weight_bytes + kv) / graph * 1e3
                    figures[f"{name}: weights and KV read, of a copy's rate"] = round(rate / copy_rate, 3)
                times[name] = eager, graph
            for tokens in prompts:
                name = f"{served.shape}, prompt of {tokens}"
                eager, graph = (prompt_ms(loaded, runner, tokens) for runner in ways.values())
                figures[f"{name}, ms"] = f"{eager:.3f} eager, {graph:.3f} as graphs of layers"
                times[name] = eager, graph
    if where.on_gpu:
        judge(times)


def prompt_ms(stage: Stage, runner: StageRunner, tokens: int) -> float:
    """Return milliseconds for the step of a prompt, its first token chosen."""
    for _ in range(WARM):
        runner.run(stage.prompt(tokens))
    began = time.perf_counter()
    for _ in range(WARM):
        runner.run(stage.prompt(tokens))
    return 1e3 * (time.perf_counter() - began) / WARM


def judge(times: Mapping[str, tuple[float, float]]) -> None:
    """Check milliseconds for eager steps and for graphs, by name.

    Raises:
        CheckError: a graph is slower.
    """
    slower = [
        f"{name}: {graph:.2f} ms, eager {eager:.2f} ms"
        for name, (eager, graph) in times.items()
        if graph > SLACK * eager
    ]
    expect(not slower, f"graphs are slower: {'; '.join(slower)}")


def measure(decode: Decode, runner: StageRunner, name: str, figures: Figures) -> float:
    """Report milliseconds for a step and the step's parts; return those of a step."""
    watch, made = HostTime(), 0
    for owner, method, part in _watched(decode.stage):
        watch.watch(owner, method, part)
    try:
        goes_on = runner.run(decode.stage.decode_steps(decode.batch, decode.context, WARM + STEPS))
        for _ in range(WARM - 1):
            goes_on = runner.go_on()
        watch.clear()
        began = time.perf_counter()
        while goes_on:
            goes_on, made = runner.go_on(), made + 1
        took = time.perf_counter() - began
    finally:
        watch.close()
    expect(made == STEPS, f"{name}: {made} steps were made, not {STEPS}")
    # The first step is given to the device before, and none behind the last.
    replayed = made - 1 if runner.graphs is not None else 0
    expect(watch.calls["fill"] == replayed, f"{name}: {watch.calls['fill']} of {made} steps were graphs")
    step = 1e3 * took / made
    parts = {part: 1e3 * watch.seconds[part] / made for part in PARTS}
    parts["rest"] = step - sum(parts.values())
    figures[f"{name}, ms"] = round(step, 3)
    figures[f"{name}, parts"] = ", ".join(f"{part} {ms:.3f}" for part, ms in parts.items())
    return step


def _watched(stage: Stage) -> list[tuple[type, str, str]]:
    """Class, method, part of a step."""
    return [
        *((type(stage.place.memory), method, "need") for method in KV_METHODS),
        (DecodeGraphs, "go_on", "fill"),
        (torch.cuda.CUDAGraph, "replay", "replay"),
        (StageModel, "logits", "head"),
        (Sampler, "sample", "sample"),
        (type(stage.place.stream.record()), "wait", "wait"),
    ]


if __name__ == "__main__":
    stage_main("decode_steps", check)
