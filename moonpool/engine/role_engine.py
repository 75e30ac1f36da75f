"""An engine as one of its roles sees it: step ids of a new role begin at 1 and grow on at the engine."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import LayerDone, Step, StepResult
from moonpool.engine.interface import Engine


class RoleEngine:
    """An `Engine` that gives another engine's steps further numbers.

    Each role's scheduler counts its steps from 1, and an engine takes ids that grow.

    Args:
        engine: computes.
        before: the engine's steps so far.

    Attributes:
        engine: computes.
        steps: id of the last step that was given to the engine.
    """

    def __init__(self, engine: Engine, before: int = 0) -> None:
        self.engine = engine
        self.steps = self._before = before

    @property
    def layout(self) -> KVLayout:
        """Arrangement of the KV."""
        return self.engine.layout

    @property
    def blocks(self) -> int:
        return self.engine.blocks

    @property
    def max_num_batched_tokens(self) -> int:
        return self.engine.max_num_batched_tokens

    @property
    def stages(self) -> int:
        return self.engine.stages

    @property
    def pool(self) -> KVPool:
        return self.engine.pool

    @property
    def speeds(self) -> Speeds:
        return self.engine.speeds

    @property
    def failed(self) -> "asyncio.Future[str]":
        return self.engine.failed

    @property
    def run_steps(self) -> int:
        return self.engine.run_steps

    def run(
        self,
        step: Step,
        *,
        on_layer: Callable[[LayerDone], None] | None = None,
        on_step: Callable[[StepResult], None] | None = None,
        on_tokens: Callable[[StepResult], None] | None = None,
    ) -> Coroutine[Any, Any, StepResult]:
        """See `Engine.run`."""
        self.steps = max(self.steps, self._before + step.step_id)
        if not self._before:
            return self.engine.run(step, on_layer=on_layer, on_step=on_step, on_tokens=on_tokens)
        told, number = on_layer, step.step_id

        def layer(done: LayerDone) -> None:
            assert told is not None
            told(replace(done, step_id=number))

        step = replace(step, step_id=self._before + number)
        its_layer = None if told is None else layer
        return self.engine.run(step, on_layer=its_layer, on_step=on_step, on_tokens=on_tokens)

    def open_gate(self, step_id: int, layer: int) -> None:
        self.engine.open_gate(self._before + step_id, layer)

    def drop(self, step_id: int, index: int) -> None:
        self.engine.drop(self._before + step_id, index)

    async def fetch(self, blocks: Sequence[int]) -> None:
        await self.engine.fetch(blocks)

    def load(self) -> "asyncio.Future[None] | None":
        return self.engine.load()

    async def load_lora(self, lora: bytes, folder: str) -> int:
        return await self.engine.load_lora(lora, folder)

    async def drop_lora(self, lora: bytes) -> None:
        await self.engine.drop_lora(lora)

    def stop_run(self, step_id: int, *, urgent: bool = False) -> None:
        self.engine.stop_run(self._before + step_id, urgent=urgent)

    def abort(self, step_id: int) -> None:
        self.engine.abort(self._before + step_id)

    async def idle(self) -> None:
        await self.engine.idle()

    async def end(self) -> None:
        """Give the last step up if the step runs, and return when none runs: the role is over."""
        if self.steps > self._before:
            self.engine.abort(self.steps)
        await self.engine.idle()
