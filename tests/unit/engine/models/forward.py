"""Drives stages over a paged pool as an engine does, for tests."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from moonpool.base.checkpoint import ModelConfig, kv_layout, load_config
from moonpool.base.quantization import Quantization
from moonpool.engine.models.batch import LayersKV, LayersScales, PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.stage import StageModel
from moonpool.engine.models.tensor_reader import KeptWeights

BLOCK = 16


@dataclass
class Sequence_:
    """A sequence in the pool: tokens so far, how many have KV, its blocks."""

    tokens: list[int]
    done: int = 0
    blocks: list[int] = field(default_factory=list)


class Runner:
    """One model in one or more stages over a pool whose free slots hold NaN, with blocks handed out in no order.

    `borders`: where stages begin, or at the next layer that can be the first. `stored`: the type of quantised KV; None:
    the weights'. `config`: of the model, where config.json does not say it.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        borders: Sequence[int] = (),
        blocks: int = 64,
        stored: torch.dtype | None = None,
        quantization: Quantization = "none",
        config: ModelConfig | None = None,
    ) -> None:
        self.config: ModelConfig = config or load_config(path)
        begins = [layer for layer in range(self.config.num_layers) if layer not in self.config.decoder.joined]
        ends = [0, *(next(layer for layer in begins if layer >= border) for border in borders), self.config.num_layers]
        self.stages: list[StageModel] = [
            load_stage(path, self.config, dtype, begin, end, kept=KeptWeights(quantization))
            for begin, end in pairwise(ends)
        ]
        layout = kv_layout(self.config, "float32", BLOCK)
        groups = [layout.group(layer) for layer in range(layout.layers)]
        shapes = [(blocks, group.kv_heads, group.planes, group.slots(BLOCK), group.head_dim) for group in groups]
        free = -1 if stored == torch.int8 else torch.nan
        dtypes = [torch.float32 if group.kind == "recurrent" else stored or dtype for group in groups]
        pools = [torch.full(shape, free, dtype=own) for shape, own in zip(shapes, dtypes, strict=True)]
        self.pool: LayersKV = torch.stack(pools) if len(set(shapes)) == 1 else pools
        self.scales: LayersScales | None = None
        if stored is not None:
            scales = [torch.full(shape[:4], torch.nan) for shape in shapes]
            self.scales = torch.stack(scales) if len(set(shapes)) == 1 else scales
        self.last = Sequence_([])
        self.free = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()

    def step(self, work: Sequence[tuple[Sequence_, int]], *, dropped: int = 0) -> Tensor:
        """Compute `count` further tokens of each sequence; returns logits [T, vocab] of every row.

        `dropped`: keys that each row does not see, its last ones: a fault, to see that it is found.
        """
        parts = []
        for sequence, count in work:
            while len(sequence.blocks) * BLOCK < sequence.done + count:
                sequence.blocks.append(self.free.pop())
            part = sequence.tokens[sequence.done : sequence.done + count]
            parts.append((array("i", part).tobytes(), sequence.done, sequence.blocks))
            sequence.done += count
        batch = PackedBatch.build(parts, BLOCK)
        batch.context_lens -= dropped
        hidden = batch.token_ids
        for stage in self.stages:
            stage.undo.begin()
            own = slice(stage.layer_begin, stage.layer_end)
            scales = None if self.scales is None else self.scales[own]
            hidden = stage.forward(hidden, batch, self.pool[own], scales=scales)
        return self.stages[-1].logits(hidden)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new: int,
        chunk: int,
        budget: int,
        *,
        preempted_after: int = 0,
        cached: Sequence_ | None = None,
    ) -> list[list[int]]:
        """Greedy output of all prompts, `chunk` prompt tokens of a sequence and `budget` rows a step at most.

        `preempted_after`: new tokens after which each sequence loses its KV once; 0: none does. `cached`: a sequence
        whose full blocks prompts that begin like it share. The last prompt's sequence is `self.last` afterwards.
        """
        sequences = [Sequence_(list(prompt)) for prompt in prompts]
        if cached is not None:
            for sequence in sequences:
                self._share(cached, sequence)
        self.last, there = sequences[-1], set(range(len(sequences))) if preempted_after else set()
        while True:
            work, rows = [], 0
            for index, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
                if index in there and len(sequence.tokens) == len(prompt) + preempted_after:
                    there.remove(index)
                    self.free += sequence.blocks
                    sequence.blocks, sequence.done = [], 0
                count = min(chunk, len(sequence.tokens) - sequence.done, budget - rows)
                if count > 0 and len(sequence.tokens) < len(prompt) + new:
                    work.append((sequence, count))
                    rows += count
            if not work:
                return [s.tokens[len(p) :] for s, p in zip(sequences, prompts, strict=True)]
            logits = self.step(work)
            ends = torch.tensor([count for _, count in work]).cumsum(0) - 1
            for (sequence, _), token in zip(work, logits[ends].argmax(-1).tolist(), strict=True):
                if sequence.done == len(sequence.tokens):
                    sequence.tokens.append(token)

    def _share(self, cached: Sequence_, sequence: Sequence_) -> None:
        """Let `sequence` begin with full blocks of `cached` that have its tokens; one token is left to compute."""
        pairs = zip(cached.tokens[: cached.done], sequence.tokens[:-1], strict=False)
        same = next(
            (index for index, (held, wanted) in enumerate(pairs) if held != wanted),
            min(cached.done, len(sequence.tokens) - 1),
        )
        sequence.blocks, sequence.done = cached.blocks[: same // BLOCK], same // BLOCK * BLOCK
