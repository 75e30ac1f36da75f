"""Prompt steps of a stage as CUDA graphs, one for each layer.

Between two graphs the host waits for the next layer's gate and sends the last layer's KV, as between layers that are
launched one by one.

A graph is captured for a shape: numbers of tokens and of sequences, and contexts up to a length. Steps are padded: rows
behind the last token are a further sequence's, which writes no KV (block -1). Wherever that would cost more than the
launches, there is no graph: a large step takes the device longer than its launches take the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moonpool.engine.capture import capture_all
from moonpool.engine.cuda_graphs import contexts_up_to
from moonpool.engine.footprint import MAX_PROMPT_GRAPH_BYTES
from moonpool.engine.graph_inputs import GraphInputs
from moonpool.engine.kernels.triton.variants import AttentionShape
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.inference_mode import in_inference_mode
from moonpool.engine.models.stage import StageModel
from moonpool.engine.platforms.base import CapturedGraph, Device, DeviceStream
from moonpool.engine.platforms.kv_memory import KVMemory

MAX_PROMPT_TOKENS = 4096
"""Tokens of a step that has graphs."""
MAX_LAYER_GRAPHS = 1024
"""Graphs of all shapes and layers: each takes milliseconds of the start, and memory that torch does not count."""
_TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, MAX_PROMPT_TOKENS)
_SEQUENCES = (4, 64)
"""Numbers of sequences: attention cuts its tiles by tokens a sequence."""
_SHORT = 256
"""Tokens up to which attention cuts the keys into parts by the context, so that shorter contexts have their graphs."""
_MAX_RESULT_BYTES = MAX_PROMPT_GRAPH_BYTES // 4
"""Results of parts of the keys in a step that has graphs: in deterministic mode parts are as short in long contexts."""
_BY_TOKEN = ("token_ids", "positions", "block_ids", "offsets")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class ChunkShape:
    """What a step's graphs compute: `tokens` of up to `sequences` sequences, of up to `context` tokens each.

    Some sequences may be `adapted`, by LoRA adapters.
    There are more tokens than sequences: so captured work tells a prompt's batch from one with a row for each sequence.
    """

    tokens: int
    context: int
    sequences: int
    adapted: bool = False

    def fits(self, tokens: int, sequences: int, context: int, *, adapted: bool = False) -> bool:
        """Tell whether such a step can be padded to this shape."""
        padding = int(tokens < self.tokens)
        if adapted != self.adapted:
            return False
        return tokens <= self.tokens and sequences + padding <= self.sequences and context <= self.context

    def has_room(self, attention: Sequence[AttentionShape]) -> bool:
        """Tell whether results of parts of the keys fit into the graphs' memory."""
        step = self.tokens, self.sequences, self.context
        return all(each.result_bytes(*step) <= _MAX_RESULT_BYTES for each in attention)


def prompt_shapes(
    most_tokens: int, longest: int, layers: int, attention: Sequence[AttentionShape] = (), *, adapters: bool = False
) -> list[ChunkShape]:
    """Return the shapes to capture, in order: large ones first, since later graphs use earlier graphs' memory.

    Args:
        most_tokens: of the largest step that is captured.
        longest: tokens of the longest sequence.
        layers: graphs of each shape; where there would be too many graphs, every other number of tokens is left out.
        attention: the layers' on a GPU; where results of parts of the keys would be too large, there is no shape.
        adapters: whether steps with LoRA adapters have shapes, too, behind all others.
    """
    kinds = (False, True) if adapters else (False,)
    sizes = [tokens for tokens in _TOKENS if tokens <= most_tokens]
    while True:
        shapes = sorted((shape for shape in _shapes(sizes, longest) if shape.has_room(attention)), reverse=True)
        if len(shapes) * layers * len(kinds) <= MAX_LAYER_GRAPHS or len(sizes) <= 1:
            return [replace(shape, adapted=adapted) for adapted in kinds for shape in shapes]
        sizes = sizes[::-2][::-1]  # the largest stays


def _shapes(sizes: list[int], longest: int) -> Iterator[ChunkShape]:
    for tokens in sizes:
        for context in contexts_up_to(longest) if tokens <= _SHORT else [longest]:
            for sequences in _SEQUENCES:
                yield ChunkShape(tokens, context, min(sequences, tokens // 2))


class PromptGraphs:
    """One stage's graphs.

    Args:
        device: captures.
        model: the stage.
        memory: the stage's KV.
        longest: tokens of the longest sequence.
        most_tokens: of the largest step that is captured.
        most_bytes: most memory that all graphs hold together.
    """

    def __init__(
        self,
        device: Device,
        model: StageModel,
        memory: KVMemory,
        longest: int,
        most_tokens: int,
        most_bytes: int = MAX_PROMPT_GRAPH_BYTES,
    ) -> None:
        self._device, self._model, self._memory = device, model, memory
        self._layers = range(model.layer_begin, model.layer_end)
        attention = model.attention_shapes(memory.kv)
        adapters = model.lora_slots is not None
        self._shapes = prompt_shapes(most_tokens, longest, len(self._layers), attention, adapters=adapters)
        self._graphs: dict[ChunkShape, Sequence[CapturedGraph]] = {}
        self._inputs = {shape: self._inputs_of(shape) for shape in self._shapes}
        self._bytes_left, self._nbytes = most_bytes, 0  # of the last shape
        where = device.torch_device
        most = max((inputs.nbytes for inputs in self._inputs.values()), default=0)
        self._memory_of_inputs = torch.empty(most, dtype=torch.uint8, device=where)
        rows = max((shape.tokens for shape in self._shapes), default=0)
        # What the stage before has sent, and what is behind the last layer.
        self._states = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=where)
        self._batch: PackedBatch | None = None  # of the step under way, within captured work
        self._hidden = self._states
        self._failed = False
        self.not_captured = ""
        """Why shapes have no graphs; empty = all have."""

    def shape(self, batch: PackedBatch) -> ChunkShape | None:
        """Return the least captured shape that fits a step's batch, on the host; None if its layers are launched."""
        step = batch.num_tokens, len(batch.context_lens), int(batch.context_lens.max())
        adapted = batch.loras is not None
        return min((shape for shape in self._graphs if shape.fits(*step, adapted=adapted)), default=None)

    @in_inference_mode
    def capture(self, stream: DeviceStream, say: Callable[[str], None]) -> None:
        """Capture all graphs.

        Args:
            stream: the compute stream, idle.
            say: told how far this has come.
        """
        for number, shape in enumerate(self._shapes):
            say(f"capturing graphs of prompt steps ({number} of {len(self._shapes)})")
            stream.run(partial(self._capture, shape))
            stream.record().wait()
            if self._failed:
                break
        if self.not_captured:
            log.warning("%d of %d graphs of prompt steps: %s", len(self._graphs), len(self._shapes), self.not_captured)

    def begin(self, shape: ChunkShape, batch: PackedBatch, hidden: Tensor) -> None:
        """Bring a step to the device.

        Args:
            shape: the step's.
            batch: the step's, on the host.
            hidden: states [T, hidden] of the stage before; not looked at on the first stage.
        """
        self._fill(shape, batch)
        if not self._model.is_first:
            self._states[: batch.num_tokens].copy_(hidden)

    def run(self, shape: ChunkShape, layer: int) -> None:
        """Compute a layer of the step that was begun; the first stage's first layer also embeds."""
        self._graphs[shape][layer - self._layers.start].replay()

    def states(self, tokens: int) -> Tensor:
        """Return the states [T, hidden] of the step's T tokens behind the last layer; they belong to the caller."""
        return self._states[:tokens].clone()

    def _inputs_of(self, shape: ChunkShape) -> GraphInputs:
        # Padding is one sequence, which may be longer than any other.
        table = (shape.sequences, -(-max(shape.context, shape.tokens) // self._memory.block_size))
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(_BY_TOKEN, (shape.tokens,))
        if self._memory.slot_of is not None:
            sizes |= {"slot_ids": (shape.tokens,), "slot_tables": table}
        if self._model.picture_positions is not None:
            sizes["rope_positions"] = (shape.tokens,)
        if shape.adapted:
            sizes["adapters"] = (shape.tokens,)
        sizes |= {"query_start": (shape.sequences + 1,), "context_lens": (shape.sequences,), "block_tables": table}
        return GraphInputs(sizes)

    def _fill(self, shape: ChunkShape, batch: PackedBatch | None) -> None:
        """Copy a batch to the graphs' inputs; None: only padding."""
        inputs, tokens, sequences = self._inputs[shape], 0, 0
        values = {}
        if batch is not None:
            tokens, sequences = batch.num_tokens, len(batch.context_lens)
            given = {name: getattr(batch, name) for name in inputs.names if name != "adapters"}
            if batch.loras is not None:
                given["adapters"] = batch.loras.rows
            if given.get("rope_positions", batch.positions) is None:
                given["rope_positions"] = batch.positions
            values = {name: value.numpy() for name, value in given.items()}
        starts = np.full(shape.sequences + 1, shape.tokens, np.int32)
        lengths = np.zeros(shape.sequences, np.int32)  # without rows a table is not looked at
        starts[0] = 0
        if batch is not None:
            starts[: sequences + 1], lengths[:sequences] = values["query_start"], values["context_lens"]
        padding = shape.tokens - tokens
        if padding:
            lengths[sequences] = padding
        wide = 0 if batch is None else batch.block_tables.shape[1]
        table = sequences + min(padding, 1), max(wide, -(-padding // self._memory.block_size))
        inputs.send(values | {"query_start": starts, "context_lens": lengths}, self._memory_of_inputs, table)

    def _layer(self, shape: ChunkShape, layer: int) -> None:
        """Compute a layer of a step: captured work, independent of the buffers' content."""
        model, memory = self._model, self._memory
        if self._batch is None or layer == self._layers.start:
            self._batch = self._batch_of(shape)
            self._hidden = self._states[: shape.tokens]
            if model.is_first:
                self._hidden = model.embed(self._batch.token_ids, self._batch.positions)
        self._hidden = model.run(self._hidden, self._batch, memory.kv, layer, layer + 1, scales=memory.scales)[1]
        if layer + 1 == self._layers.stop:
            self._states[: shape.tokens].copy_(self._hidden)
            # What layers share, such as angles, takes graphs' memory that other shapes may use from now on.
            self._batch, self._hidden = None, self._states

    def _batch_of(self, shape: ChunkShape) -> PackedBatch:
        inputs: dict[str, Any] = self._inputs[shape].views(self._memory_of_inputs)
        slots, adapters = self._model.lora_slots, inputs.pop("adapters", None)
        return PackedBatch(
            **({"slot_tables": inputs["block_tables"], "slot_ids": inputs["block_ids"]} | inputs),
            last_rows=inputs["query_start"][1:],
            block_size=self._memory.block_size,
            most_context=shape.context,
            loras=None if slots is None or adapters is None else slots.of_rows(adapters),
        )

    def _capture(self, shape: ChunkShape) -> None:
        """Capture a shape's graphs. Where they take too much memory, smaller shapes may still have room."""
        self._fill(shape, None)
        works = [partial(self._layer, shape, layer) for layer in self._layers]
        found = capture_all(self._device, works, self._has_room, self._model.ranks)
        self._batch, self._hidden = None, self._states
        if found.graphs:
            self._graphs[shape], self._bytes_left = found.graphs, self._bytes_left - self._nbytes
        elif found.failed:
            self.not_captured, self._failed = f"{shape} cannot be captured: {found.failed}", True
        else:
            self.not_captured = f"{shape}: graphs would hold {self._nbytes >> 20} MiB more"

    def _has_room(self, nbytes: int) -> bool:
        self._nbytes = nbytes
        return nbytes <= self._bytes_left
