"""Stages of a model in the tests' own process."""

from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.kv.pool import KVPool
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import StageDone, StageEvent
from moonpool.engine.model_runner import StageRunner
from moonpool.engine.models.loader import load_stage
from moonpool.engine.pipeline import NoLinks
from moonpool.engine.platforms.base import Device
from moonpool.engine.platforms.stage_platform import stage_platform

BLOCKS = 8
GREEDY = SampleSpec()


class ListLinks:
    """What the stage before sends is what the stage after receives."""

    def __init__(self) -> None:
        self.sent: deque[tuple[int, Tensor | None]] = deque()

    def receive(self, step_id: int, rows: int) -> Tensor | None:
        sent_step, hidden = self.sent.popleft()
        assert sent_step == step_id
        assert hidden is None or hidden.shape[0] == rows
        return hidden

    def send(self, step_id: int, hidden: Tensor | None) -> None:
        self.sent.append((step_id, hidden))

    def flush(self) -> None: ...


class Stages:
    """All stages of a model in this process; on a device, of one stage only, events come when it is closed."""

    def __init__(self, path: Path, pool: KVPool, device: Device | None) -> None:
        config = load_config(path)
        self.events: list[StageEvent] = []
        self.failures: list[BaseException] = []
        self.gates = [KVGates() for _ in pool.parts]
        self.links = ListLinks()
        self.pool = pool
        self.runners = []
        for stage, part in enumerate(pool.parts):
            model = load_stage(path, config, torch.float32, part.layer_begin, part.layer_end)
            links = NoLinks() if len(pool.parts) == 1 else _End(self.links, last=model.is_last)
            place = stage_platform(device, part, self.failures.append)
            self.runners.append(StageRunner(stage, model, place, links, self.gates[stage], self.events.append, 0.05))

    def run(self, step: Step) -> list[StageDone]:
        """A step of all stages, or a run of one."""
        goes_on = [runner.run(step) for runner in self.runners][-1]
        while goes_on:
            goes_on = self.runners[-1].go_on()
        done = [event for event in self.events if isinstance(event, StageDone)]
        assert not self.links.sent
        return done


class _End:
    def __init__(self, links: ListLinks, *, last: bool) -> None:
        self.receive, self.flush = links.receive, links.flush
        self._links, self._last = links, last

    def send(self, step_id: int, hidden: Tensor | None) -> None:
        if not self._last:
            self._links.send(step_id, hidden)


@contextmanager
def stages(path: Path, count: int, device: Device | None = None) -> Iterator[Stages]:
    layout = kv_layout(load_config(path), "float32", 16)
    half = layout.layers // 2
    ranges = [(0, layout.layers)] if count == 1 else [(0, half), (half, layout.layers)]
    pool = KVPool.create(layout, BLOCKS, ranges)
    opened = Stages(path, pool, device)
    yield opened
    for runner in opened.runners:
        runner.platform.close()
    pool.close()


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


PROMPT = tuple(range(5, 45))


def whole(step_id: int = 1, *, gated: bool = False, layer_events: bool = False) -> Step:
    return Step(step_id, (SequenceStep(ids(*PROMPT), 0, (4, 1, 6), GREEDY),), gated, layer_events)
