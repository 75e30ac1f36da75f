"""A checkpoint's own engine on virtual time: real steps, computed at once, that take as long as given speeds say.

The engine is `ProcessEngine`; the processes of its stages are `Stage` objects in the process that runs all nodes.
Layers, sampling, masks and runs are the real ones, and messages are the bytes of the channel.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from moonpool.base import world
from moonpool.base.checkpoint import Tokenizer, load_config
from moonpool.base.kv.pool import PoolPart
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import ENCODER, LayerDone, Step, stage_ranges
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
from moonpool.engine.platforms.stage_platform import stage_platform
from moonpool.engine.pool_memory import PoolMemory
from moonpool.engine.process_engine import ProcessEngine
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


class Stage:
    """A stage's process, as `ChildProcess` has it, and its end of the channel.

    A step is computed in the middle of the step's time.

    Attributes:
        pid: the stage's number, from 1: 0 is for stages on other hosts.
        slowdown: steps take so many times as long.
    """

    def __init__(self, spec: EngineSpec, number: int, part: PoolPart, links: VirtualLinks, *, decode: bool) -> None:
        self.pid, self.slowdown = number + 1, 1.0
        self._spec, self._links, self._decode = spec, links, decode
        self._end = part.layer_end
        self._gates = KVGates()
        self._opened: dict[int, int] = {}
        """Highest open gate, by step."""
        self._aborted: set[int] = set()
        self._changed = asyncio.Event()
        self._orders: asyncio.Queue[Step | Shutdown] = asyncio.Queue()
        self._emitted: list[StageEvent] = []
        self._runner = _runner(spec, number, part, self._gates, links, self._emitted.append)
        self._told = asyncio.StreamReader()
        self._runs = asyncio.Event()
        self._runs.set()
        self._status: int | None = None
        self._task = asyncio.create_task(self._work(), name=f"stage {number}")
        channel = AsyncChannel(self._told, cast("asyncio.StreamWriter", self))
        self.worker = WorkerProcess(number, self, channel)

    # --- a process -------------------------------------------------------------------------------------------------

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        assert self._status is not None, "only an ended stage is waited for"
        return self._status

    def send_signal(self, sig: int) -> None:
        raise AssertionError("an engine's processes get no signals")

    def kill(self) -> None:
        if self._status is None:
            self._end_with(KILLED)
            self._task.cancel()

    def stop(self) -> None:
        """As SIGSTOP."""
        self._runs.clear()

    def resume(self) -> None:
        """As SIGCONT."""
        self._runs.set()

    def quicken(self) -> None:
        """The stage is as fast as others again."""
        self.slowdown = 1.0

    def _end_with(self, status: int) -> None:
        self._status = status
        self._told.feed_eof()

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

    def is_closing(self) -> bool:
        return self._status is not None

    def close(self) -> None:
        self.kill()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._task])

    # --- what it does ----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            while isinstance(order := await self._orders.get(), Step):
                await self._run(order)
        except Exception as error:
            self._tell(WorkerFailed(f"{type(error).__name__}: {error}"))
            self._end_with(1)
        else:
            self._runner.close()
            self._end_with(0)

    async def _run(self, step: Step) -> None:
        if step.gated:
            await self._gates_open(step.step_id)
        await self._links.ready()
        stages = self._spec.stages
        goes_on, begun = True, False
        while goes_on:
            half_s = step_seconds(SPEEDS, step, decode=self._decode) / 2 / stages * self.slowdown
            start_ns = world.monotonic_ns()
            await self._pass(half_s)
            self._emitted.clear()
            goes_on = self._runner.go_on() if begun else self._runner.run(replace(step, patient=False))
            begun = True
            done = self._emitted[-1]
            tokens = [event.done for event in self._emitted if isinstance(event, StageTokens)]
            layers = [event for event in self._emitted if isinstance(event, LayerDone)]
            assert len(tokens) + len(layers) + 1 == len(self._emitted)
            for layer in layers:
                await self._pass(half_s / len(layers))
                self._tell(replace(layer, start_ns=start_ns, end_ns=world.monotonic_ns()))
            if not layers:
                await self._pass(half_s)
            assert isinstance(done, StageDone)
            self._links.deliver()
            pictures = tuple(replace(each, ns=1000 if each.source == ENCODER else 0) for each in done.pictures)
            done = replace(done, share=1.0, waited_ns=0, pictures=pictures)
            for sampled in tokens:
                end_ns = world.monotonic_ns()
                sampled = replace(sampled, share=1.0, waited_ns=0, pictures=pictures)
                self._tell(StageTokens(replace(sampled, start_ns=start_ns, end_ns=end_ns)))
                await self._pass(half_s / 2)  # for which the KV's hashes take
            self._tell(replace(done, start_ns=start_ns, end_ns=world.monotonic_ns()))
        self._opened = {step_id: layer for step_id, layer in self._opened.items() if step_id > step.step_id}
        self._aborted = {step_id for step_id in self._aborted if step_id > step.step_id}

    def _tell(self, event: StageEvent | WorkerFailed) -> None:
        self._told.feed_data(encode(event))

    async def _pass(self, seconds: float) -> None:
        """Let time pass, and more while the process is stopped."""
        await asyncio.sleep(seconds)
        await self._runs.wait()

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


def _runner(
    spec: EngineSpec, number: int, part: PoolPart, gates: KVGates, links: VirtualLinks, emit: Callable[..., None]
) -> StageRunner:
    """As a worker makes it."""
    folder = Path(spec.checkpoint)
    config = load_config(folder)
    torch.set_num_threads(1)
    dtype, kept = torch_dtype(spec.dtype), KeptWeights(spec.quantization, spec.int8_head)
    begin, end = part.layer_begin, part.layer_end
    model = load_stage(folder, config, dtype, begin, end, deterministic=spec.deterministic, kept=kept)
    own = PoolPart.attach(os.dup(part.fd), spec.layout, spec.blocks, begin, end, spec.slots)
    platform = stage_platform(None, own, _raise)
    masks: MaskBuilder | None = None
    if model.is_last:
        masks = MaskBuilder(lambda: tokenizer_of(spec.checkpoint), config.vocab_size, config.eos_token_ids)
    return StageRunner(number, model, platform, links, gates, emit, spec.gate_timeout_s, masks)


def _raise(error: BaseException) -> None:
    raise error


@cache
def tokenizer_of(checkpoint: str) -> Tokenizer:
    """A checkpoint's tokenizer; one for all engines of a process."""
    return Tokenizer.load(Path(checkpoint))


@asynccontextmanager
async def start_stages(
    spec: EngineSpec, *, decode: bool, begun: Callable[[Sequence[Stage]], None], **_: Any
) -> AsyncIterator[ProcessEngine]:
    """As `start_engine`. `begun` gets the stages."""
    memory = PoolMemory(stage_ranges(spec.layout.layers, spec.stages))
    try:
        memory.make(spec.layout, spec.blocks, spec.slots)
        assert memory.pool is not None
        between = [None, *(Hidden() for _ in range(spec.stages - 1)), None]
        links = [VirtualLinks(*ends) for ends in itertools.pairwise(between)]
        parts = zip(memory.pool.parts, links, strict=True)
        stages = [Stage(spec, number, *part, decode=decode) for number, part in enumerate(parts)]
        engine = ProcessEngine(spec, memory, [stage.worker for stage in stages])
        engine.speeds = SPEEDS
        engine.listen()
        begun(stages)
        try:
            yield engine
        finally:
            await engine.shutdown()
    finally:
        memory.close()
