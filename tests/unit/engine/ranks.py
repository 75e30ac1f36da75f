"""The ranks of all stages of a model, as threads of the tests' own process."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.kv.memory import shared_memory
from moonpool.base.kv.pool import KVPool
from moonpool.base.scheduling.steps import LayerDone, Step, stage_ranges
from moonpool.engine.cuda_graphs import DecodeGraphs, GraphCache
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import StageDone, StageEvent
from moonpool.engine.model_runner import StageRunner
from moonpool.engine.models.loader import load_stage, torch_dtype
from moonpool.engine.models.lora import lora_slots
from moonpool.engine.models.tensor_reader import DENSE_WEIGHTS, KeptWeights
from moonpool.engine.parallel.group_ranks import GroupRanks
from moonpool.engine.parallel.page import RankPage, page_bytes
from moonpool.engine.parallel.ranks import Ranks
from moonpool.engine.pipeline import Links, NoLinks
from moonpool.engine.platforms.base import Device
from moonpool.engine.platforms.stage_platform import stage_platform
from moonpool.engine.platforms.staged import StagedDevice
from moonpool.engine.prompt_graphs import PromptGraphs
from tests.unit.engine.stages import ListLinks

BLOCKS, SIZE = 8, 16
TIMEOUT_S = 60.0


class _ChainLinks:
    """A stage's ends of the chain of its rank: what comes in, and what goes out."""

    def __init__(self, before: ListLinks | None, behind: ListLinks | None) -> None:
        self._before, self._behind = before, behind

    def receive(self, step_id: int, rows: int) -> Tensor | None:
        assert self._before is not None
        return self._before.receive(step_id, rows)

    def send(self, step_id: int, hidden: Tensor | None) -> None:
        if self._behind is not None:
            self._behind.send(step_id, hidden)

    def flush(self) -> None: ...


class RankedStages:
    """Stages of so many ranks each, over one pool; with a seed, on devices that order work as GPUs might.

    Attributes:
        gates: of each stage's ranks.
        events: what each stage's ranks emit.
    """

    def __init__(
        self,
        path: Path,
        pool: KVPool,
        ranks: int,
        dtype: str,
        kept: KeptWeights,
        seed: int | None,
        captures: bool,
        max_loras: int,
    ) -> None:
        config, self.pool = load_config(path), pool
        stages = len(pool.parts)
        self.gates = [[KVGates() for _ in range(ranks)] for _ in pool.parts]
        self.events: list[list[list[StageEvent]]] = [[[] for _ in range(ranks)] for _ in pool.parts]
        self.failures: list[BaseException] = []
        chains = [[ListLinks() for _ in range(ranks)] for _ in range(stages - 1)]
        self.runners: list[list[StageRunner]] = []
        for stage, part in enumerate(pool.parts):
            devices = opened(seed, stage, ranks)
            row = []
            for rank, (its, device) in enumerate(zip(met(ranks, devices), devices, strict=True)):
                model = load_stage(
                    path, config, torch_dtype(dtype), part.layer_begin, part.layer_end, kept=kept, ranks=its
                )
                if device is not None and max_loras:
                    of = model.whole, model.layers, part.layer_begin
                    model.lora_slots = lora_slots(*of, count=max_loras, max_rank=16, ranks=its)
                place = stage_platform(device, part, self.failures.append, ranks=its)
                links: Links = NoLinks()
                if stages > 1:
                    before = chains[stage - 1][rank] if stage else None
                    links = _ChainLinks(before, chains[stage][rank] if stage + 1 < stages else None)
                emit = self.events[stage][rank].append
                runner = StageRunner(stage, model, place, links, self.gates[stage][rank], emit, 5.0)
                if device is not None and captures:
                    longest, cache = BLOCKS * SIZE, GraphCache(BLOCKS * SIZE, most_rows=4, adapters=max_loras > 0)
                    runner.graphs = DecodeGraphs(device, model, place.memory, cache, longest)
                    runner.prompt_graphs = PromptGraphs(device, model, place.memory, longest, 64)
                row.append(runner)
            self.runners.append(row)
        self._threads = ThreadPoolExecutor(ranks)
        for row in self.runners if captures else ():
            for done in [self._threads.submit(_capture, runner) for runner in row]:
                done.result()

    def run(self, step: Step) -> StageDone:
        """Run a step of all stages, or a run of one stage; return what the last stage's first rank says."""
        for row in self.runners:
            for ended in [self._threads.submit(_to_the_end, runner, step) for runner in row]:
                ended.result()
            for runner in row:
                runner.platform.callbacks.send(lambda: None).wait()  # behind the reports
        assert not self.failures
        done = [[event for event in its if isinstance(event, StageDone)] for its in self.events[-1]]
        assert all(its[-1].over for its in done)
        assert all(its[-1].aborted == done[0][-1].aborted for its in done)
        return done[0][-1]

    def close(self) -> None:
        self._threads.shutdown()
        for row in self.runners:
            for runner in row:
                runner.platform.close()

    def sampled(self, step_id: int) -> list[tuple[int | None, ...]]:
        """Tokens of each step of a run, as the last stage's first rank tells."""
        done = [event for event in self.events[-1][0] if isinstance(event, StageDone) and event.step_id == step_id]
        return [step.sampled for event in done for step in (*event.earlier, event)]

    def layers(self) -> list[int]:
        """Layers that were reported by the stages' first ranks."""
        return [event.layer for row in self.events for event in row[0] if isinstance(event, LayerDone)]


def opened(seed: int | None, stage: int, ranks: int) -> list[StagedDevice | None]:
    if seed is None:
        return [None] * ranks
    devices = [StagedDevice(seed + stage * ranks + rank) for rank in range(ranks)]
    for device in devices if ranks > 1 else ():
        device.goes_on()
    return list(devices)


def met(ranks: int, devices: Sequence[Device | None]) -> list[Ranks | None]:
    """Return the ranks of a stage, which have found each other."""
    if ranks == 1:
        return [None]
    fd = shared_memory()
    os.truncate(fd, page_bytes(ranks))
    pages = [RankPage(fd, rank, ranks, TIMEOUT_S) for rank in range(ranks)]
    os.close(fd)
    if devices[0] is None:
        return [Ranks(page) for page in pages]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as threads:
        join, place = partial(GroupRanks, captured=True), (f"{folder}/store", "gloo", torch.device("cpu"))
        each = [threads.submit(join, page, *place) for page in pages]
        return [its.result() for its in each]


def _capture(runner: StageRunner) -> None:
    assert runner.platform.device is not None
    runner.platform.device.enter_thread()
    assert runner.graphs is not None
    assert runner.prompt_graphs is not None
    runner.graphs.capture(runner.platform.stream, lambda what: None)
    runner.prompt_graphs.capture(runner.platform.stream, lambda what: None)


def _to_the_end(runner: StageRunner, step: Step) -> None:
    if runner.platform.device is not None:
        runner.platform.device.enter_thread()
    goes_on = runner.run(step)
    while goes_on:
        goes_on = runner.go_on()


@contextmanager
def ranked(
    path: Path,
    ranks: int,
    *,
    stages: int = 1,
    dtype: str = "float32",
    kv_dtype: str = "auto",
    kept: KeptWeights = DENSE_WEIGHTS,
    seed: int | None = None,
    captures: bool = False,
    max_loras: int = 0,
) -> Iterator[RankedStages]:
    torch.set_num_threads(1)
    layout = kv_layout(load_config(path), dtype, SIZE, kv_dtype)
    pool = KVPool.create(layout, BLOCKS, stage_ranges(layout.layers, stages))
    found = RankedStages(path, pool, ranks, dtype, kept, seed, captures, max_loras)
    yield found
    found.close()
    pool.close()
