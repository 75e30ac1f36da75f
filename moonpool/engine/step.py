"""One stage's share of one step: layer by layer, behind gates, with events, and at the end what its tokens are."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moonpool.engine.choosing import Found, choose
from moonpool.engine.gates import Gates
from moonpool.engine.masks import Masks
from moonpool.engine.messages import StepDone
from moonpool.engine.pipeline import Links
from moonpool.errors import Unsupported
from moonpool.kv.pool import PoolPart
from moonpool.model.batch import PackedBatch
from moonpool.model.load import torch_dtype
from moonpool.model.stage import StageModel
from moonpool.sched.steps import LayerDone, Step, finished_blocks


def pool_tensor(part: PoolPart) -> Tensor:
    """A stage's pool as a tensor [layers, blocks, kv_heads, 2, block_tokens, head_dim] over the same memory.

    Raises:
        Unsupported: KV is quantised (`scale_bytes` is not 0).
    """
    layout = part.layout
    if layout.scale_bytes:
        raise Unsupported("quantised KV cannot be computed with yet")
    shape = (
        part.layer_end - part.layer_begin,
        part.blocks,
        layout.kv_heads,
        2,
        layout.block_tokens,
        layout.head_dim,
    )
    dtype = torch_dtype(layout.dtype)
    return torch.frombuffer(part.map, dtype=dtype, count=part.nbytes // dtype.itemsize).view(shape)


@dataclass(slots=True)
class StageRunner:
    """Runs steps on one stage, one after the other."""

    stage: int
    model: StageModel
    part: PoolPart
    links: Links
    gates: Gates
    emit: Callable[[LayerDone | StepDone], None]
    gate_timeout_s: float
    masks: Masks | None = None
    """Of the last stage; None = answers have no format."""
    kv: Tensor = field(init=False)  # [layers of the stage, blocks, kv_heads, 2, block_tokens, head_dim]
    block_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.kv = pool_tensor(self.part)
        self.block_tokens = self.part.layout.block_tokens

    def close(self) -> None:
        """Waits until everything sent has been received, and ends the stage's threads."""
        self.links.flush()
        if self.masks is not None:
            self.masks.close()

    @torch.inference_mode()
    def run(self, step: Step) -> None:
        """Runs one step to its end, done or aborted; emits its events, `StepDone` last."""
        start_ns = time.monotonic_ns()
        for source, block in step.copies:
            self.part.copy(source, block)
        batch = PackedBatch.build([(s.token_ids, s.start, s.block_table) for s in step.sequences], self.block_tokens)
        masks = self.masks.begin(step) if self.masks is not None else {}
        hidden = self._input(step, batch)
        if hidden is not None:
            hidden = self._layers(step, hidden, batch)
        # Sent whatever has happened, so that the next stage knows.
        self.links.send(step.step_id, hidden)
        found = Found()
        if hidden is not None and self.model.is_last:
            found = choose(self.model, step, hidden, batch, self.gates.dropped(step.step_id), masks)
        # Gates are done before the report: its receiver may open gates of the next step at once.
        self.gates.done(step.step_id)
        times = start_ns, time.monotonic_ns()
        self.emit(
            StepDone(
                step.step_id,
                self.stage,
                tuple(found.sampled),
                hidden is None,
                *times,
                several=found.several,
                logprobs=found.logprobs,
                scores=found.scores,
                failed=found.failed,
            )
        )

    def _input(self, step: Step, batch: PackedBatch) -> Tensor | None:
        if self.model.is_first:
            return self.model.embed(batch.token_ids)
        return self.links.receive(step.step_id, batch.num_tokens)

    def _layers(self, step: Step, hidden: Tensor, batch: PackedBatch) -> Tensor | None:
        """All layers of this stage: hidden states [T, hidden], or None when the step was aborted before the last."""
        finished = finished_blocks(step, self.block_tokens)
        for layer in range(self.model.layer_begin, self.model.layer_end):
            if step.gated and not self.gates.wait(step.step_id, layer, self.gate_timeout_s):
                return None
            if self.gates.aborted(step.step_id):
                return None
            start_ns = time.monotonic_ns()
            hidden = self.model.layer(layer, hidden, batch, self.kv[layer - self.model.layer_begin])
            for block, valid_tokens in finished:
                self.part.seal(layer, block, valid_tokens)
            if step.layer_events:
                self.emit(LayerDone(step.step_id, layer, start_ns, time.monotonic_ns()))
        return hidden
