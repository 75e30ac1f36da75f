"""Decode steps of a stage as graphs: captured once, replayed over static buffers. Belongs to the computing lane.

The buffers have room for the largest step; a graph reads the first rows of them. Rows behind the step's sequences write
no KV (block -1) and are looked at by nobody. What a graph gives lies in memory that all graphs share, so it is copied
before the next one is replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moonpool.engine.captures import MOST_ROWS, Captures, GraphShape, Way
from moonpool.engine.devices.lanes import Device, Graph
from moonpool.engine.devices.memory import KVMemory
from moonpool.model.batch import PackedBatch
from moonpool.model.stage import StageModel
from moonpool.sched.steps import Step

log = logging.getLogger(__name__)

_PADDING = {"token_ids": 0, "positions": 0, "context_lens": 1, "block_ids": -1, "offsets": 0}
"""What rows without a sequence have: they read one slot of the pool and write none."""


class DecodeGraphs:
    """The graphs of one stage.

    Args:
        device: captures.
        model: the stage.
        memory: its KV.
        captures: says what is captured.
        longest: tokens of the longest sequence.
    """

    def __init__(self, device: Device, model: StageModel, memory: KVMemory, captures: Captures, longest: int) -> None:
        self._device, self._model, self._memory, self._captures = device, model, memory, captures
        self._graphs: dict[GraphShape, Graph] = {}
        size = memory.kv.shape[4]
        where = device.torch_device
        self._hidden = torch.zeros(MOST_ROWS, model.config.hidden_size, dtype=model.dtype, device=where)
        numbers = torch.zeros(MOST_ROWS, dtype=torch.int64, device=where)
        self._static = PackedBatch(
            token_ids=numbers.clone(),
            positions=numbers.clone(),
            query_start=torch.arange(MOST_ROWS + 1, dtype=torch.int32, device=where),
            context_lens=numbers.int(),
            block_tables=torch.zeros(MOST_ROWS, -(-longest // size), dtype=torch.int32, device=where),
            block_ids=numbers.clone(),
            offsets=numbers.clone(),
            last_rows=torch.arange(MOST_ROWS, device=where),
            block_tokens=size,
        )

    def shape(self, step: Step, batch: PackedBatch) -> GraphShape | None:
        """The shape of the graph of a step, or of a further one of its run; None where it runs layer by layer.

        `batch`: the step's, on the host.
        """
        sequences = len(batch.context_lens)
        if step.gated or step.layer_events or batch.num_tokens != sequences:
            return None
        return self._captures.shape(sequences, int(batch.context_lens.max()))

    def run(self, shape: GraphShape, batch: PackedBatch, hidden: Tensor) -> Tensor:
        """Compute all layers of a step; return its hidden states [T, hidden], which belong to the caller.

        Args:
            shape: of the step.
            batch: the step's, on the host.
            hidden: states [T, hidden] of the stage before; not looked at on the first stage.
        """
        self._fill(shape, batch, hidden)
        work = partial(self._layers, shape)
        way = self._captures.way(shape)
        if way is Way.CAPTURE:
            self._capture(shape, work)
        graph = self._graphs.get(shape)
        if graph is None:
            result = work()
        else:
            graph.replay()
            result = graph.result
        return result[: batch.num_tokens].clone()

    def _fill(self, shape: GraphShape, batch: PackedBatch, hidden: Tensor) -> None:
        rows, width = batch.num_tokens, min(batch.block_tables.shape[1], self._static.block_tables.shape[1])
        for name, padding in _PADDING.items():
            given: Tensor = getattr(batch, name)
            padded = given.new_full((shape.rows,), padding)
            padded[:rows] = given
            getattr(self._static, name)[: shape.rows].copy_(padded)
        tables = batch.block_tables.new_zeros((shape.rows, width))
        tables[:rows] = batch.block_tables[:, :width]
        self._static.block_tables[: shape.rows, :width].copy_(tables)
        if not self._model.is_first:
            self._hidden[:rows].copy_(hidden)

    def _layers(self, shape: GraphShape) -> Tensor:
        """What is captured: nothing here depends on what the buffers hold."""
        static, blocks = self._static, -(-shape.context // self._static.block_tokens)
        part = {name: getattr(static, name)[: shape.rows] for name in (*_PADDING, "last_rows")}
        batch = PackedBatch(
            **part,
            query_start=static.query_start[: shape.rows + 1],
            block_tables=static.block_tables[: shape.rows, :blocks],
            block_tokens=static.block_tokens,
            most_context=shape.context,
        )
        model, memory = self._model, self._memory
        hidden = model.embed(batch.token_ids) if model.is_first else self._hidden[: shape.rows]
        begin, end = model.layer_begin, model.layer_end
        return model.run(hidden, batch, memory.kv, begin, end, scales=memory.scales)[1]

    def _capture(self, shape: GraphShape, work: Callable[[], Tensor]) -> None:
        try:
            graph = self._device.capture(work)
        except RuntimeError as error:  # as torch's errors of CUDA are, running out of memory among them
            self._captures.failed(f"{shape} cannot be captured: {error}")
        else:
            if self._captures.captured(shape, graph.nbytes):
                self._graphs[shape] = graph
        if self._captures.stopped:
            # Engine processes set up no logging: warnings get to standard error, anything less is dropped.
            log.warning("no more graphs of decode steps: %s", self._captures.stopped)
