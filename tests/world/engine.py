"""A checkpoint's own engine on virtual time: real steps, computed at once, that take as long as given speeds say.

The engine is `ProcessEngine`; the processes of its stages are `Stage` objects in the process that runs all nodes.
Layers, sampling, masks and runs are the real ones, and messages are the bytes of the channel. Further ranks of a stage
are `FurtherRank` objects; each computes on a thread while the stage's first rank does.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from moonpool.base import world
from moonpool.base.checkpoint import Tokenizer, load_config
from moonpool.base.kv.pool import PoolPart
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import ENCODER, LayerDone, Step
from moonpool.engine.channel import AsyncChannel, encode
from moonpool.engine.emulated.profile import step_seconds
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import (
    AbortStageStep,
    DropSequence,
    EngineSpec,
    OpenKVGateMessage,
    Shutdown,
    StageDone,
    StageEvent,
    StageTokens,
    StopRunMessage,
    WorkerFailed,
)
from moonpool.engine.model_runner import StageRunner
from moonpool.engine.models.loader import load_stage, torch_dtype
from moonpool.engine.models.tensor_reader import KeptWeights
from moonpool.engine.parallel.page import RankPage
from moonpool.engine.parallel.ranks import Ranks
from moonpool.engine.platforms.stage_platform import stage_platform
from moonpool.engine.pool_memory import PoolMemory
from moonpool.engine.process_engine import ProcessEngine
from moonpool.engine.start_engine import rank_page
from moonpool.engine.structured_output import MaskBuilder
from moonpool.engine.worker_process import WorkerProcess

SPEEDS = Speeds(
    prefill_base_s=0.01,
    prefill_per_token_s=5e-4,
    decode_base_s=0.01,
    decode_per_sequence_s=5e-4,
    load_bytes_per_s=5e7,
    transfer_bytes_per_s=5e7,
)
LENGTH_BYTES = 4
"""Of a message's length, before the message."""
REAL_S = 60.0
"""Longest wait of a thread for the other ranks, which compute at the same time."""
KILLED = -9
"""Exit status after SIGKILL."""


@dataclass(slots=True)
class Hidden:
    """Hidden states on their way from one stage to the next, by step; None for a step that was aborted."""

    sent: deque[tuple[int, torch.Tensor | None]] = field(default_factory=deque)
    came: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class VirtualLinks:
    """Satisfies `Links`. What is sent comes with `deliver`."""

    before: Hidden | None
    after: Hidden | None
    _given: list[tuple[int, torch.Tensor | None]] = field(default_factory=list)

    async def ready(self) -> None:
        """Wait for the stage before."""
        if self.before is not None:
            while not self.before.sent:
                self.before.came.clear()
                await self.before.came.wait()

    def receive(self, step_id: int, rows: int) -> torch.Tensor | None:
        assert self.before is not None
        sent, hidden = self.before.sent.popleft()
        assert sent == step_id, f"step {sent} came in place of step {step_id}"
        assert hidden is None or hidden.shape[0] == rows
        return hidden

    def send(self, step_id: int, hidden: torch.Tensor | None) -> None:
        self._given.append((step_id, hidden))

    def deliver(self) -> None:
        """Hand on what was sent."""
        if self.after is not None:
            self.after.sent.extend(self._given)
            self.after.came.set()
        self._given.clear()

    def flush(self) -> None:
        """Everything sent will be received."""


class Rank:
    """The process of one rank of a stage, as `ChildProcess` has it, and its end of the channel.

    Attributes:
        pid: the process's number, from 1: 0 is for stages on other hosts.
        slowdown: steps take so many times as long.
        status: of a process that has ended.
    """

    def __init__(self, pid: int, stage: int, rank: int, ranks: int) -> None:
        self.pid, self.slowdown = pid, 1.0
        self.status: int | None = None
        self.runs = asyncio.Event()
        self.runs.set()
        self._told = asyncio.StreamReader()
        channel = AsyncChannel(self._told, cast("asyncio.StreamWriter", self))
        self.worker = WorkerProcess(stage, self, channel, rank, alone=ranks == 1)

    def poll(self) -> int | None:
        return self.status

    def wait(self, timeout: float | None = None) -> int:
        assert self.status is not None, "only an ended process is waited for"
        return self.status

    def send_signal(self, sig: int) -> None:
        raise AssertionError("an engine's processes get no signals")

    def kill(self) -> None:
        if self.status is None:
            self.end_with(KILLED)

    def stop(self) -> None:
        """As SIGSTOP."""
        self.runs.clear()

    def resume(self) -> None:
        """As SIGCONT."""
        self.runs.set()

    def quicken(self) -> None:
        """The process is as fast as others again."""
        self.slowdown = 1.0

    def end_with(self, status: int) -> None:
        self.status = status
        self._told.feed_eof()

    def tell(self, event: StageEvent | WorkerFailed) -> None:
        self._told.feed_data(encode(event))

    def write(self, data: bytes) -> None:
        """Take an order."""

    def is_closing(self) -> bool:
        return self.status is not None

    def close(self) -> None:
        self.kill()

    async def wait_closed(self) -> None:
        """There is nothing to wait for."""


class FurtherRank(Rank):
    """A rank that is not its stage's first. It computes when the first does, and is told all that the first is."""

    def __init__(
        self, pid: int, stage: int, ranks: Ranks, runner: Callable[[Ranks, list[StageEvent]], StageRunner]
    ) -> None:
        super().__init__(pid, stage, ranks.rank, ranks.ranks)
        self.emitted: list[StageEvent] = []
        self.runner = runner(ranks, self.emitted)
        self.threads = ThreadPoolExecutor(1)

    def end_with(self, status: int) -> None:
        super().end_with(status)
        self.threads.shutdown(wait=False)


class Stage(Rank):
    """The process of a stage's first rank.

    A step is computed in the middle of the step's time.

    Attributes:
        further: the stage's other ranks.
    """

    def __init__(
        self,
        spec: EngineSpec,
        number: int,
        part: PoolPart,
        links: Sequence[VirtualLinks],
        ranks: Sequence[Ranks],
        *,
        decode: bool,
    ) -> None:
        """Take links and views of the stage's page, for each rank; of one rank there is no page."""
        super().__init__(number * spec.ranks + 1, number, 0, spec.ranks)
        self._spec, self._links, self._decode = spec, links, decode
        self._end = part.layer_end
        self._gates = KVGates()
        self._opened: dict[int, int] = {}
        """Highest open gate, by step."""
        self._aborted: set[int] = set()
        self._changed = asyncio.Event()
        self._orders: asyncio.Queue[Step | Shutdown] = asyncio.Queue()
        self._emitted: list[StageEvent] = []
        own = ranks[0] if ranks else None
        self._runner = _runner(spec, number, part, self._gates, links[0], self._emitted.append, own)

        def further(ranks: Ranks, emitted: list[StageEvent]) -> StageRunner:
            return _runner(spec, number, part, KVGates(), links[ranks.rank], emitted.append, ranks)

        self.further = [FurtherRank(self.pid + each.rank, number, each, further) for each in ranks[1:]]
        self._task = asyncio.create_task(self._work(), name=f"stage {number}")

    def kill(self) -> None:
        super().kill()
        self._task.cancel()

    # --- what a channel writes to ----------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        message = pickle.loads(data[LENGTH_BYTES:])
        match message:
            case OpenKVGateMessage():
                self._gates.open(message.step_id, message.layer)
                self._opened[message.step_id] = max(message.layer, self._opened.get(message.step_id, message.layer))
            case DropSequence():
                self._gates.drop(message.step_id, message.index)
            case StopRunMessage():
                self._gates.stop_run(message.step_id, urgent=message.urgent)
            case AbortStageStep():
                self._abort(message.step_id)
            case Step() | Shutdown():
                self._orders.put_nowait(message)
            case _:
                raise AssertionError(f"a stage does not know {message}")
        self._changed.set()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._task])

    # --- what it does ----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            while isinstance(order := await self._orders.get(), Step):
                await self._run(order)
        except Exception as error:
            self.tell(WorkerFailed(f"{type(error).__name__}: {error}"))
            self.end_with(1)
        else:
            self._runner.close()
            self.end_with(0)
            for rank in self.further:
                if rank.status is None:
                    rank.runner.close()
                    rank.end_with(0)

    async def _run(self, step: Step) -> None:
        if step.gated:
            await self._gates_open(step.step_id)
        await self._links[0].ready()
        stages = self._spec.stages
        goes_on, begun = True, False
        while goes_on:
            slowdown = max(rank.slowdown for rank in (self, *self.further))
            half_s = step_seconds(SPEEDS, step, decode=self._decode) / 2 / stages * slowdown
            start_ns = world.monotonic_ns()
            await self._pass(half_s)
            goes_on = self._compute(None if begun else replace(step, patient=False))
            begun = True
            done = self._emitted[-1]
            tokens = [event.done for event in self._emitted if isinstance(event, StageTokens)]
            layers = [event for event in self._emitted if isinstance(event, LayerDone)]
            assert len(tokens) + len(layers) + 1 == len(self._emitted)
            for layer in layers:
                await self._pass(half_s / len(layers))
                self.tell(replace(layer, start_ns=start_ns, end_ns=world.monotonic_ns()))
            if not layers:
                await self._pass(half_s)
            assert isinstance(done, StageDone)
            for link in self._links:
                link.deliver()
            pictures = tuple(replace(each, ns=1000 if each.source == ENCODER else 0) for each in done.pictures)
            done = replace(done, share=1.0, waited_ns=0, pictures=pictures)
            for sampled in tokens:
                end_ns = world.monotonic_ns()
                sampled = replace(sampled, share=1.0, waited_ns=0, pictures=pictures)
                self.tell(StageTokens(replace(sampled, start_ns=start_ns, end_ns=end_ns)))
                await self._pass(half_s / 2)  # for which the KV's hashes take
            self.tell(replace(done, start_ns=start_ns, end_ns=world.monotonic_ns()))
            for rank in self.further:
                over = rank.emitted[-1]
                assert isinstance(over, StageDone)
                if over.over:
                    rank.tell(replace(over, share=1.0, waited_ns=0, start_ns=start_ns, end_ns=world.monotonic_ns()))
        self._opened = {step_id: layer for step_id, layer in self._opened.items() if step_id > step.step_id}
        self._aborted = {step_id for step_id in self._aborted if step_id > step.step_id}

    def _compute(self, step: Step | None) -> bool:
        """Compute a step, or the next one of a run, on all ranks; return whether the run goes on."""
        self._emitted.clear()
        others = []
        for rank in self.further:
            rank.emitted.clear()
            others.append(rank.threads.submit(copy_context().run, _computed, rank.runner, step))
        goes_on = _computed(self._runner, step)
        assert all(other.result() == goes_on for other in others)
        return goes_on

    async def _pass(self, seconds: float) -> None:
        """Let time pass, more while a rank is stopped, and all if one has ended: the others wait for its numbers."""
        await asyncio.sleep(seconds)
        for rank in (self, *self.further):
            await rank.runs.wait()
            if rank.status is not None:
                await asyncio.Event().wait()

    def _abort(self, step_id: int) -> None:
        self._gates.abort(step_id)
        self._aborted.add(step_id)

    async def _gates_open(self, step_id: int) -> None:
        """Wait until the whole prefix of a step is there for this stage's layers, or the step is aborted."""
        try:
            async with asyncio.timeout(self._spec.gate_timeout_s):
                while self._opened.get(step_id, -1) < self._end - 1 and step_id not in self._aborted:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._abort(step_id)


def _computed(runner: StageRunner, step: Step | None) -> bool:
    return runner.go_on() if step is None else runner.run(step)


def _runner(
    spec: EngineSpec,
    number: int,
    part: PoolPart,
    gates: KVGates,
    links: VirtualLinks,
    emit: Callable[..., None],
    ranks: Ranks | None,
) -> StageRunner:
    """As a worker makes it."""
    folder = Path(spec.checkpoint)
    config = load_config(folder)
    torch.set_num_threads(1)
    dtype, kept = torch_dtype(spec.dtype), KeptWeights(spec.quantization, spec.int8_head)
    begin, end = part.layer_begin, part.layer_end
    model = load_stage(folder, config, dtype, begin, end, deterministic=spec.deterministic, kept=kept, ranks=ranks)
    own = PoolPart.attach(os.dup(part.fd), spec.layout, spec.blocks, begin, end, spec.slots)
    platform = stage_platform(None, own, _raise, ranks=ranks)
    masks: MaskBuilder | None = None
    if model.is_last and (ranks is None or ranks.first):
        masks = MaskBuilder(lambda: tokenizer_of(spec.checkpoint), config.vocab_size, config.eos_token_ids)
    return StageRunner(number, model, platform, links, gates, emit, spec.gate_timeout_s, masks)


def _raise(error: BaseException) -> None:
    raise error


@cache
def tokenizer_of(checkpoint: str) -> Tokenizer:
    """A checkpoint's tokenizer; one for all engines of a process."""
    return Tokenizer.load(Path(checkpoint))


def _chain(stages: int) -> list[VirtualLinks]:
    """The links of all stages, of one rank."""
    between = [None, *(Hidden() for _ in range(stages - 1)), None]
    return [VirtualLinks(*ends) for ends in itertools.pairwise(between)]


@asynccontextmanager
async def start_stages(
    spec: EngineSpec, *, decode: bool, begun: Callable[[Sequence[Rank]], None], **_: Any
) -> AsyncIterator[ProcessEngine]:
    """As `start_engine`. `begun` gets the processes, stage by stage and rank by rank."""
    memory = PoolMemory(spec.stage_layers)
    try:
        memory.make(spec.layout, spec.blocks, spec.slots)
        assert memory.pool is not None
        chains = [_chain(spec.stages) for rank in range(spec.ranks)]
        processes: list[Rank] = []
        with ExitStack() as pages:
            for number, part in enumerate(memory.pool.parts):
                page = rank_page(spec.ranks, pages)
                views = [RankPage(page, rank, spec.ranks, REAL_S) for rank in range(spec.ranks) if spec.ranks > 1]
                links = [chain[number] for chain in chains]
                stage = Stage(spec, number, part, links, list(map(Ranks, views)), decode=decode)
                processes += [stage, *stage.further]
        engine = ProcessEngine(spec, memory, [process.worker for process in processes])
        engine.speeds = SPEEDS
        engine.listen()
        begun(processes)
        try:
            yield engine
        finally:
            await engine.shutdown()
    finally:
        memory.close()
