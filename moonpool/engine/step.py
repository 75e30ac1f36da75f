"""One stage's share of one step: layer by layer, behind gates, with events, and sampling at the end."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moonpool.engine.gates import Gates
from moonpool.engine.messages import StepDone
from moonpool.engine.pipeline import Links
from moonpool.errors import Unsupported
from moonpool.kv.pool import PoolPart
from moonpool.model.batch import PackedBatch
from moonpool.model.load import torch_dtype
from moonpool.model.sampler import most_likely, sample
from moonpool.model.stage import StageModel
from moonpool.sampling import SampleSpec
from moonpool.sched.steps import LayerDone, Several, Step, finished_blocks


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
    kv: Tensor = field(init=False)  # [layers of the stage, blocks, kv_heads, 2, block_tokens, head_dim]
    block_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.kv = pool_tensor(self.part)
        self.block_tokens = self.part.layout.block_tokens

    @torch.inference_mode()
    def run(self, step: Step) -> None:
        """Runs one step to its end, done or aborted; emits its events, `StepDone` last."""
        start_ns = time.monotonic_ns()
        for source, block in step.copies:
            self.part.copy(source, block)
        batch = PackedBatch.build([(s.token_ids, s.start, s.block_table) for s in step.sequences], self.block_tokens)
        hidden = self._input(step, batch)
        if hidden is not None:
            hidden = self._layers(step, hidden, batch)
        # Sent whatever has happened, so that the next stage knows.
        self.links.send(step.step_id, hidden)
        sampled: tuple[int | None, ...] = ()
        several: dict[int, Several] = {}
        if hidden is not None and self.model.is_last:
            sampled, several = self._sample(step, hidden, batch)
        # Gates are done before the report: its receiver may open gates of the next step at once.
        self.gates.done(step.step_id)
        self.emit(StepDone(step.step_id, self.stage, sampled, hidden is None, start_ns, time.monotonic_ns(), several))

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

    def _sample(
        self, step: Step, hidden: Tensor, batch: PackedBatch
    ) -> tuple[tuple[int | None, ...], dict[int, Several]]:
        dropped = self.gates.dropped(step.step_id)
        wanted = [(i, s.sample) for i, s in enumerate(step.sequences) if s.sample is not None and i not in dropped]
        sampled: list[int | None] = [None] * len(step.sequences)
        several: dict[int, Several] = {}
        if wanted:
            logits = self.model.logits(hidden[batch.last_rows[[i for i, _ in wanted]]])
            for (i, spec), found in zip(wanted, _choose(logits, [spec for _, spec in wanted]), strict=True):
                sampled[i] = found.tokens[0]
                if spec.best or len(found.tokens) > 1:
                    several[i] = found
        return tuple(sampled), several


def _choose(logits: Tensor, specs: list[SampleSpec]) -> list[Several]:
    """Each row's tokens; for beams the most likely ones, which are not drawn."""
    beams = {row: _best(logits[row], spec) for row, spec in enumerate(specs) if spec.best}
    if not beams:
        return [Several(tuple(tokens)) for tokens in sample(logits, specs)]
    others = [row for row in range(len(specs)) if row not in beams]
    drawn = sample(logits[others], [specs[row] for row in others])
    found = beams | {row: Several(tuple(tokens)) for row, tokens in zip(others, drawn, strict=True)}
    return [found[row] for row in range(len(specs))]


def _best(row: Tensor, spec: SampleSpec) -> Several:
    tokens, log_probabilities = most_likely(row, spec)
    return Several(tuple(tokens), tuple(log_probabilities))
