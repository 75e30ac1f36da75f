"""The `Engine` interface: run steps, open KV gates, drop sequences, abort, and learn that the engine died.

Services are written against this interface. Behind the interface are engine processes
(`moonpool.engine.process_engine`) or an emulated engine.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import LayerDone, Step, StepResult


@runtime_checkable
class Engine(Protocol):
    """A model on one or more stages over one KV pool."""

    @property
    def layout(self) -> KVLayout:
        """Arrangement of the KV."""

    @property
    def blocks(self) -> int:
        """Blocks in the pool."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens in the largest step, if no service setting says so."""

    @property
    def stages(self) -> int:
        """Stages = steps that may be in flight at once."""

    @property
    def pool(self) -> KVPool:
        """The paged memory, shared with the engine's processes."""

    @property
    def speeds(self) -> Speeds:
        """Measured at start; load and transfer rates are the defaults of `Speeds`."""

    @property
    def failed(self) -> "asyncio.Future[str]":
        """Done, with the reason, when the engine can run no more steps. Never cancelled, never an exception."""

    @property
    def run_steps(self) -> int:
        """Most steps in one run; 1 = each step must be given."""

    async def run(
        self,
        step: Step,
        *,
        on_layer: Callable[[LayerDone], None] | None = None,
        on_step: Callable[[StepResult], None] | None = None,
        on_tokens: Callable[[StepResult], None] | None = None,
    ) -> StepResult:
        """Run one step, or a run, and return when every stage is done.

        The step is sent when this coroutine first runs, so steps start in the order of the calls' first run. Up to
        `max_steps_in_flight` may be in flight. `on_layer` is called on the event loop for every `LayerDone`, always
        before the result returns; with several stages, a stage's layers are in order. `on_step` is called for each of
        a run's steps but the last, whose result is returned; a patient run's results may come with a later result
        (`StepResult.earlier`). `on_tokens` may be called with the tokens of a step that reports layers, before the
        result returns: the step still uses the step's blocks. None of them must raise. Cancelling the coroutine does
        not stop the step: abort the step, and treat the step's blocks as in use until a later step's result has come.

        Raises:
            Unavailable: The engine has failed, before or during the step.
            Internal: More than `max_steps_in_flight` steps in flight, or a step id that does not grow.
        """

    def open_gate(self, step_id: int, layer: int) -> None:
        """The step's prefix is in the pool, up to this layer. May precede `run`; late calls are ignored."""

    def drop(self, step_id: int, index: int) -> None:
        """One sequence's part of a step no longer counts: its results are ignored.

        After that the step's gates may open though this sequence's prefix is not there. May precede `run`; late calls
        are ignored.
        """

    async def fetch(self, blocks: Sequence[int]) -> None:
        """Return once the pool has all KV of some blocks: what is part-filled may be on the engine's device alone.

        Full blocks, and a prompt's last block after the prompt's last step, are there without this call. No running
        step writes to them.

        Raises:
            Unavailable: The engine has failed.
        """

    def load(self) -> "asyncio.Future[None] | None":
        """Done when all KV that was written into the pool before is where steps compute; None if all is there.

        A step without its prefix computes the same, but waits for the prefix. So a sequence joins others after this.
        The future raises Unavailable if the engine has failed.
        """

    async def load_lora(self, lora: bytes, folder: str) -> int:
        """Load a LoRA adapter on all stages; return the bytes that they hold of the adapter.

        `lora` is the id: the hash of the content that `folder` must have. From then on, steps may name the id.

        Raises:
            CheckpointError: The folder is missing, damaged, changed, or does not fit the model.
            UnsupportedModel: The adapter does something that is not computed, or the rank is too large.
            Unavailable: The engine has failed.
        """

    async def drop_lora(self, lora: bytes) -> None:
        """Forget a LoRA adapter that no later step names; return when the memory is free.

        Raises:
            Unavailable: The engine has failed.
        """

    def stop_run(self, step_id: int, *, urgent: bool = False) -> None:
        """End a run with the current step, or the step after; late calls are ignored.

        `urgent`: a client waits for single tokens, so the step must not wait for others.
        """

    def abort(self, step_id: int) -> None:
        """Give a step up before the next layer. May precede `run`; late calls are ignored; `run` still returns."""

    async def idle(self) -> None:
        """Return when no step is in flight, those of cancelled callers included."""
