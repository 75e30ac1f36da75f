"""A checkpoint's own engine on virtual time: real steps, computed at once, that take as long as given speeds say.

One stage on the CPU, in the process that runs all nodes. Layers, sampling, masks and runs are the real ones; only the
engine process is not there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from moonpool import world
from moonpool.checkpoint import Tokenizer, load_config
from moonpool.engine.emulated.profile import step_seconds
from moonpool.engine.executor import RUN_STEPS
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import EngineSpec, StageDone, StageEvent
from moonpool.engine.model_runner import StageRunner
from moonpool.engine.pipeline import NoLinks
from moonpool.engine.structured_output import MaskBuilder
from moonpool.errors import Internal, Unavailable
from moonpool.kv.layout import KVLayout
from moonpool.kv.pool import KVPool, PoolPart
from moonpool.models.loader import KeptWeights, load_stage, torch_dtype
from moonpool.platforms.stage_platform import stage_platform
from moonpool.scheduling.latency import Speeds
from moonpool.scheduling.steps import LayerDone, Step, StepResult

SPEEDS = Speeds(
    prefill_base_s=0.01,
    prefill_per_token_s=5e-4,
    decode_base_s=0.01,
    decode_per_sequence_s=5e-4,
    load_bytes_per_s=5e7,
    transfer_bytes_per_s=5e7,
)
OnLayer = Callable[[LayerDone], None] | None
OnStep = Callable[[StepResult], None] | None


class CheckpointEngine:
    """Satisfies `moonpool.engine.interface.Engine`. A step is computed in the middle of the step's time."""

    def __init__(self, spec: EngineSpec, pool: KVPool, *, decode: bool) -> None:
        self._spec, self._pool, self._decode = spec, pool, decode
        self._gates = KVGates()
        self._open: dict[int, int] = {}
        """Highest open gate, by step."""
        self._aborted: set[int] = set()
        self._changed = asyncio.Event()
        self._emitted: list[StageEvent] = []
        self._runner = _runner(spec, pool, self._gates, self._emitted.append)
        self._task: asyncio.Task[StepResult] | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.speeds = SPEEDS

    @property
    def layout(self) -> KVLayout:
        return self._pool.layout

    @property
    def blocks(self) -> int:
        return self._pool.blocks

    @property
    def step_tokens(self) -> int:
        return self._spec.step_tokens

    @property
    def stages(self) -> int:
        return 1

    @property
    def pool(self) -> KVPool:
        return self._pool

    @property
    def run_steps(self) -> int:
        return RUN_STEPS

    async def run(self, step: Step, *, on_layer: OnLayer = None, on_step: OnStep = None) -> StepResult:
        """See `Engine.run`."""
        if self.failed.done():
            raise Unavailable(self.failed.result())
        if self._task is not None and not self._task.done():
            raise Internal(f"step {step.step_id} would be a second one in flight")
        task = self._task = asyncio.create_task(self._run(step, on_layer, on_step))
        task.add_done_callback(lambda over: over.cancelled() or over.exception())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Unavailable(self.failed.result()) from None
            raise

    async def fetch(self, blocks: Sequence[int]) -> None:
        """The pool has all KV."""

    def load(self) -> None:
        """Steps compute in the pool."""

    def open_gate(self, step_id: int, layer: int) -> None:
        self._gates.open(step_id, layer)
        self._open[step_id] = max(layer, self._open.get(step_id, layer))
        self._changed.set()

    def drop(self, step_id: int, index: int) -> None:
        self._gates.drop(step_id, index)

    def stop_run(self, step_id: int, *, urgent: bool = False) -> None:
        self._gates.stop_run(step_id, urgent=urgent)

    def abort(self, step_id: int) -> None:
        self._gates.abort(step_id)
        self._aborted.add(step_id)
        self._changed.set()

    def fail(self, reason: str) -> None:
        """The engine's process dies."""
        if not self.failed.done():
            self.failed.set_result(reason)
        if self._task is not None:
            self._task.cancel()

    async def shutdown(self) -> None:
        """Ends what runs; idempotent."""
        self.fail("the engine was shut down")
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._runner.close()

    async def _run(self, step: Step, on_layer: OnLayer, on_step: OnStep) -> StepResult:
        if step.gated:
            await self._gates_open(step.step_id)
        half_s = step_seconds(SPEEDS, step, decode=self._decode) / 2
        goes_on, begun = True, False
        while True:
            start_ns = world.monotonic_ns()
            await asyncio.sleep(half_s)
            self._emitted.clear()
            goes_on = self._runner.go_on() if begun else self._runner.run(replace(step, patient=False))
            begun = True
            done, layers = self._emitted[-1], self._emitted[:-1]
            for layer in layers:
                await asyncio.sleep(half_s / len(layers))
                assert isinstance(layer, LayerDone)
                if on_layer is not None:
                    on_layer(replace(layer, start_ns=start_ns, end_ns=world.monotonic_ns()))
            if not layers:
                await asyncio.sleep(half_s)
            assert isinstance(done, StageDone)
            result = _result(done, start_ns)
            if not goes_on:
                self._open = {step_id: layer for step_id, layer in self._open.items() if step_id > step.step_id}
                self._aborted = {step_id for step_id in self._aborted if step_id > step.step_id}
                return result
            if on_step is not None:
                on_step(result)

    async def _gates_open(self, step_id: int) -> None:
        """Wait until the whole prefix of a step is there, or the step is aborted."""
        try:
            async with asyncio.timeout(self._spec.gate_timeout_s):
                while self._open.get(step_id, -1) < self.layout.layers - 1 and step_id not in self._aborted:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.abort(step_id)


def _result(done: StageDone, start_ns: int) -> StepResult:
    """What the stage has told, in virtual time."""
    sampled = () if done.aborted else done.sampled
    rest = done.several, done.logprobs, done.scores, done.embeddings, done.failed
    return StepResult(sampled, done.aborted, start_ns, world.monotonic_ns(), *rest, late=done.late)


def _runner(spec: EngineSpec, pool: KVPool, gates: KVGates, emit: Callable[..., None]) -> StageRunner:
    """As a worker makes it."""
    folder = Path(spec.checkpoint)
    config = load_config(folder)
    torch.set_num_threads(1)
    dtype, kept = torch_dtype(spec.dtype), KeptWeights(spec.quantization, spec.int8_head)
    model = load_stage(folder, config, dtype, 0, config.num_layers, deterministic=spec.deterministic, kept=kept)
    [part] = pool.parts
    own = PoolPart.attach(os.dup(part.fd), spec.layout, spec.blocks, 0, config.num_layers, spec.slots)
    platform = stage_platform(None, own, _raise)
    masks = MaskBuilder(lambda: tokenizer_of(spec.checkpoint), config.vocab_size, config.eos_token_ids)
    return StageRunner(0, model, platform, NoLinks(), gates, emit, spec.gate_timeout_s, masks)


def _raise(error: BaseException) -> None:
    raise error


@cache
def tokenizer_of(checkpoint: str) -> Tokenizer:
    """A checkpoint's tokenizer; one for all engines of a process."""
    return Tokenizer.load(Path(checkpoint))


@asynccontextmanager
async def start_checkpoint(
    spec: EngineSpec, *, decode: bool, begun: Callable[[CheckpointEngine], None], **_: object
) -> AsyncIterator[CheckpointEngine]:
    """As `start_engine`. `begun` gets the engine."""
    assert spec.stages == 1, "one process has one stage"
    pool = KVPool.create(spec.layout, spec.blocks, [(0, spec.layout.layers)], slots=spec.slots)
    try:
        engine = CheckpointEngine(spec, pool, decode=decode)
        begun(engine)
        try:
            yield engine
        finally:
            await engine.shutdown()
    finally:
        pool.close()
