"""A checkpoint's own engine on virtual time: real steps, computed at once, that take as long as given speeds say.

The engine is `ProcessEngine`; the processes of its stages are `Stage` objects in the process that runs all nodes.
Layers, sampling, masks and runs are the real ones, and messages are the bytes of the channel. Further ranks of a stage
are `FurtherRank` objects; each computes on a thread while the stage's first rank does. A stage on another host is begun
there (`HostedStages`), by the host's own program.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import queue
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
    BlocksFetched,
    DropSequence,
    EngineSpec,
    FetchBlocks,
    Footprint,
    HiddenStates,
    KVLoaded,
    LoadKV,
    OpenKVGateMessage,
    Shutdown,
    StageDone,
    StageEvent,
    StageSpec,
    StageTokens,
    StopRunMessage,
    WorkerFailed,
    WorkerReady,
)
from moonpool.engine.model_runner import StageRunner
from moonpool.engine.models.loader import load_stage, torch_dtype
from moonpool.engine.models.tensor_reader import KeptWeights
from moonpool.engine.parallel.page import RankPage
from moonpool.engine.parallel.ranks import Ranks
from moonpool.engine.pipeline import ChannelLinks
from moonpool.engine.platforms.stage_platform import stage_platform
from moonpool.engine.pool_memory import PoolMemory
from moonpool.engine.process_engine import ProcessEngine
from moonpool.engine.remote.stage_host import StageProcesses
from moonpool.engine.start_engine import RemoteStages, rank_page
from moonpool.engine.start_listener import NO_LISTENER
from moonpool.engine.structured_output import MaskBuilder
from moonpool.engine.worker_process import Worker, WorkerProcess

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
FOOTPRINT = Footprint(0, 0, 0, 0, 0)
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

    def take(self, message: HiddenStates) -> None:
        raise AssertionError("hidden states are no messages here")

    def flush(self) -> None:
        """Everything sent will be received."""


class MessageLinks:
    """Satisfies `Links`: hidden states come and go as messages, where a stage is on another host."""

    def __init__(self, spec: StageSpec, emit: Callable[[HiddenStates], None]) -> None:
        self._first = spec.stage == 0
        self._received = queue.Queue[HiddenStates]()
        self._came = asyncio.Event()
        self._given: list[HiddenStates] = []
        self._emit = emit
        engine, config = spec.engine, load_config(Path(spec.engine.checkpoint))
        self._links = ChannelLinks(
            spec.stage, engine.stages, self._received, None if spec.rank else self._given.append,
            hidden_size=config.hidden_size, dtype=torch_dtype(engine.dtype), timeout_s=0.0,
        )  # fmt: skip

    def take(self, message: HiddenStates) -> None:
        """Take what the stage before has sent."""
        self._received.put(message)
        self._came.set()

    async def ready(self) -> None:
        """Wait for the stage before."""
        while not self._first and self._received.empty():
            self._came.clear()
            await self._came.wait()

    def receive(self, step_id: int, rows: int) -> torch.Tensor | None:
        return self._links.receive(step_id, rows)

    def send(self, step_id: int, hidden: torch.Tensor | None) -> None:
        self._links.send(step_id, hidden)

    def deliver(self) -> None:
        """Hand on what was sent."""
        for message in self._given:
            self._emit(message)
        self._given.clear()

    def flush(self) -> None:
        """Everything sent will be received."""


AnyLinks = VirtualLinks | MessageLinks


class Rank:
    """The process of one rank of a stage, as `ChildProcess` has it, and its end of the channel.

    Attributes:
        pid: the process's number, from 1: 0 is for stages on other hosts.
        slowdown: steps take so many times as long.
        status: of a process that has ended.
    """

    def __init__(self, pid: int, spec: StageSpec) -> None:
        self.pid, self.slowdown = pid, 1.0
        self.status: int | None = None
        self.runs = asyncio.Event()
        self.runs.set()
        self._told = asyncio.StreamReader()
        channel = AsyncChannel(self._told, cast("asyncio.StreamWriter", self))
        self.worker = WorkerProcess(spec.stage, self, channel, spec.rank, alone=spec.engine.ranks == 1)

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

    def tell(self, event: StageEvent | HiddenStates | WorkerReady | WorkerFailed) -> None:
        self._told.feed_data(encode(event))

    def write(self, data: bytes) -> None:
        """Take an order."""
        self.obey(pickle.loads(data[LENGTH_BYTES:]))

    def obey(self, message: Any) -> None:
        """Do what an order says, or begin to."""
        if isinstance(message, StageSpec):
            self.tell(WorkerReady(0.0, 0, FOOTPRINT, "in a virtual world"))
        elif isinstance(message, LoadKV) and message.number:
            self.tell(KVLoaded(message.number, self.worker.stage))

    def is_closing(self) -> bool:
        return self.status is not None

    def close(self) -> None:
        self.kill()

    async def wait_closed(self) -> None:
        """There is nothing to wait for."""


class FurtherRank(Rank):
    """A rank that is not its stage's first. It computes when the first does, and is told all that the first is."""

    def __init__(
        self, pid: int, spec: StageSpec, links: AnyLinks, runner: StageRunner, emitted: list[StageEvent]
    ) -> None:
        super().__init__(pid, spec)
        self._links, self.runner, self.emitted = links, runner, emitted
        self.threads = ThreadPoolExecutor(1)

    def obey(self, message: Any) -> None:
        if isinstance(message, HiddenStates):
            self._links.take(message)
        elif isinstance(message, FetchBlocks):
            self.tell(BlocksFetched(message.number, self.worker.stage))
        else:
            super().obey(message)

    def end_with(self, status: int) -> None:
        super().end_with(status)
        self.threads.shutdown(wait=False)


class Stage(Rank):
    """The process of a stage's first rank.

    A step is computed in the middle of the step's time.

    Attributes:
        further: the stage's other ranks.
    """

    def __init__(self, spec: StageSpec, memory: int, page: int, chain: Sequence[AnyLinks], *, decode: bool) -> None:
        """Take descriptors as a process inherits them, and links for each rank; none: hidden states are messages."""
        engine = spec.engine
        super().__init__(spec.stage * engine.ranks + 1, spec)
        self._spec, self._decode = engine, decode
        specs = [replace(spec, rank=rank) for rank in range(engine.ranks)]
        self._links = list(chain) or [MessageLinks(each, self.tell) for each in specs]
        self._end = spec.layer_end
        self._gates = KVGates()
        self._opened: dict[int, int] = {}
        """Highest open gate, by step."""
        self._aborted: set[int] = set()
        self._changed = asyncio.Event()
        self._orders: asyncio.Queue[Step | FetchBlocks | Shutdown] = asyncio.Queue()
        self._emitted: list[StageEvent] = []
        self._runner = _runner(specs[0], memory, page, self._gates, self._links[0], self._emitted.append)
        self.further: list[FurtherRank] = []
        for each, links in zip(specs[1:], self._links[1:], strict=True):
            emitted: list[StageEvent] = []
            runner = _runner(each, memory, page, KVGates(), links, emitted.append)
            self.further.append(FurtherRank(self.pid + each.rank, each, links, runner, emitted))
        self._task = asyncio.create_task(self._work(), name=f"stage {spec.stage}")

    def kill(self) -> None:
        super().kill()
        self._task.cancel()

    # --- what a channel writes to ----------------------------------------------------------------------------------

    def obey(self, message: Any) -> None:
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
            case HiddenStates():
                self._links[0].take(message)
            case Step() | FetchBlocks() | Shutdown():
                self._orders.put_nowait(message)
            case StageSpec() | LoadKV():
                super().obey(message)
            case _:
                raise AssertionError(f"a stage does not know {message}")
        self._changed.set()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._task])

    # --- what it does ----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            while not isinstance(order := await self._orders.get(), Shutdown):
                if isinstance(order, Step):
                    await self._run(order)
                else:
                    self.tell(BlocksFetched(order.number, self.worker.stage))
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
    spec: StageSpec, memory: int, page: int, gates: KVGates, links: AnyLinks, emit: Callable[..., None]
) -> StageRunner:
    """As a worker makes it."""
    engine, begin, end = spec.engine, spec.layer_begin, spec.layer_end
    folder = Path(engine.checkpoint)
    config = load_config(folder)
    torch.set_num_threads(1)
    ranks = Ranks(RankPage(page, spec.rank, engine.ranks, REAL_S)) if engine.ranks > 1 else None
    dtype, kept = torch_dtype(engine.dtype), KeptWeights(engine.quantization, engine.int8_head)
    model = load_stage(folder, config, dtype, begin, end, deterministic=engine.deterministic, kept=kept, ranks=ranks)
    own = PoolPart.attach(os.dup(memory), engine.layout, engine.blocks, begin, end, engine.slots)
    platform = stage_platform(None, own, _raise, ranks=ranks)
    masks: MaskBuilder | None = None
    if model.is_last and (ranks is None or ranks.first):
        masks = MaskBuilder(lambda: tokenizer_of(engine.checkpoint), config.vocab_size, config.eos_token_ids)
    return StageRunner(spec.stage, model, platform, links, gates, emit, engine.gate_timeout_s, masks)


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


class HostedStages(StageProcesses):
    """The processes of a stage on a host. `begun` gets them, rank by rank, when the first one begins."""

    def __init__(self, *, decode: bool, begun: Callable[[Sequence[Rank]], None]) -> None:
        self._decode, self._begun = decode, begun
        self._processes: Sequence[Rank] = ()

    async def start(self, spec: StageSpec, memory: int, page: int) -> WorkerProcess:
        if spec.rank == 0:
            first = Stage(spec, memory, page, (), decode=self._decode)
            self._processes = [first, *first.further]
            self._begun(self._processes)
        return self._processes[spec.rank].worker

    def stopped(self, worker: WorkerProcess) -> bool:
        return not self._processes[worker.rank].runs.is_set()


@asynccontextmanager
async def start_stages(
    spec: EngineSpec,
    *,
    decode: bool,
    begun: Callable[[Sequence[Rank]], None],
    remote: RemoteStages | None = None,
    **_: Any,
) -> AsyncIterator[ProcessEngine]:
    """As `start_engine`. `begun` gets the processes of this host, stage by stage and rank by rank."""
    memory = PoolMemory(spec.stage_layers)
    try:
        memory.make(spec.layout, spec.blocks, spec.slots)
        others = [] if remote is None else await remote.joined(spec, NO_LISTENER)
        chains = [_chain(spec.stages) for rank in range(spec.ranks)]
        processes: list[Rank] = []
        workers: list[Worker] = []
        with ExitStack() as pages:
            for number, (begin, end) in enumerate(spec.stage_layers):
                place = StageSpec(spec, number, 0, begin, end, "")
                if number >= spec.stages - len(others):
                    workers.append(others[number - spec.stages])
                    workers[-1].channel.send(place)
                    continue
                page = rank_page(spec.ranks, pages)
                links = () if others else [chain[number] for chain in chains]
                stage = Stage(place, memory.files[number], page, links, decode=decode)
                processes += [stage, *stage.further]
                for rank, process in enumerate((stage, *stage.further)):
                    workers.append(process.worker)
                    process.worker.channel.send(replace(place, rank=rank))
        engine = ProcessEngine(spec, memory, workers)
        try:
            await engine.ready(NO_LISTENER)
            engine.speeds = SPEEDS
            engine.listen()
            begun(processes)
            yield engine
        finally:
            await engine.shutdown()
    finally:
        memory.close()
