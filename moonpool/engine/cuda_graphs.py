"""Decode steps of a stage as CUDA graphs.

A graph is captured for a shape: a number of rows, and contexts up to a length, which the kernels' launches depend on.
Steps are padded to the next shape. Padding rows write no KV (block -1).

Behind the layers a graph moves its inputs to the sequences' next places. Further graphs have the head and plain
sampling, and put the tokens where the layers' graphs read them. So a run's next step needs nothing from the host
(`DecodeGraphs.go_on`). If a token ends the run, the inputs become rows without a sequence: a step that is given behind
the end writes nothing.

All graphs are captured before the stage is ready (`moonpool.engine.warm_up`): a capture waits for the device and stops
all streams for tenths of a second. A shape without a graph takes the next larger one, or runs eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moonpool.base.scheduling.steps import Step
from moonpool.engine.capture import Captures, capture_all
from moonpool.engine.footprint import LOGIT_ROWS, MAX_GRAPH_BYTES
from moonpool.engine.graph_inputs import GraphInputs
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.inference_mode import in_inference_mode
from moonpool.engine.models.stage import StageModel
from moonpool.engine.platforms.base import CapturedGraph, Device, DeviceStream
from moonpool.engine.platforms.kv_memory import KVMemory
from moonpool.engine.sampling.captured import CHOICES, CapturedSampling, Choice, PlainRows

MAX_GRAPH_ROWS = 256
"""Rows of a decode step that has a graph."""
MAX_GRAPHS = 64
_GRAPH_ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, MAX_GRAPH_ROWS + 1, 32))
_LEAST_CONTEXT, _WIDER = 1024, 4
_SAMPLED_ROWS = (1, 4, 16, 64, 128, MAX_GRAPH_ROWS)
"""Rows of a graph of the head: products of few rows take as long as the weights need."""
_BY_ROW = ("token_ids", "positions", "live", "block_ids", "offsets", "context_lens")
"""Inputs of a row; `live`: tokens of the row's step."""
_WITHOUT_SEQUENCE = {"live": 0, "block_ids": -1, "slot_ids": -1}
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a graph computes: `rows` sequences with a token each, of up to `context` tokens; some may be `adapted`."""

    rows: int
    context: int
    adapted: bool = False


def next_size(values: Sequence[int], at_least: int) -> int | None:
    """Return the first of rising values that is not less; None when all are."""
    return next((value for value in values if value >= at_least), None)


def contexts_up_to(longest: int) -> list[int]:
    """Return the contexts that graphs are captured for, rising; `longest` is the last."""
    contexts = [_LEAST_CONTEXT]
    while contexts[-1] < longest:
        contexts.append(contexts[-1] * _WIDER)
    return [*contexts[:-1], longest]


class GraphCache:
    """Which graphs a stage has, and which one a step takes.

    Args:
        longest: tokens of the longest sequence.
        most_rows: sequences of the largest decode step.
        most_graphs: captured at most; where there would be more, every other number of rows is left out.
        most_bytes: most memory that all graphs hold together.
        adapters: whether steps with LoRA adapters have graphs, too: those of others do not pay for adapters.
    """

    def __init__(
        self,
        longest: int,
        *,
        adapters: bool = False,
        most_rows: int = MAX_GRAPH_ROWS,
        most_graphs: int = MAX_GRAPHS,
        most_bytes: int = MAX_GRAPH_BYTES,
    ) -> None:
        self._contexts, self._kinds = contexts_up_to(longest), (False, True) if adapters else (False,)
        largest = next_size(_GRAPH_ROWS, most_rows) or MAX_GRAPH_ROWS
        self._rows = [rows for rows in _GRAPH_ROWS if rows <= largest]
        while len(self._rows) > 1 and len(self._rows) * len(self._contexts) > most_graphs:
            self._rows = self._rows[::-2][::-1]  # the largest stays
        self._most_bytes = most_bytes
        self._held = set[GraphShape]()
        self.nbytes = 0
        """Memory that the graphs hold."""
        self.stopped = ""
        """Why shapes are left without a graph; empty = all have one, or will have."""

    @property
    def shapes(self) -> list[GraphShape]:
        """Shapes to capture, in order: many rows first, since later graphs use earlier graphs' memory."""
        sizes = [(rows, context) for context in self._contexts for rows in reversed(self._rows)]
        return [GraphShape(*size, adapted) for adapted in self._kinds for size in sizes]

    def shape(self, rows: int, context: int, *, adapted: bool = False) -> GraphShape | None:
        """Return the least captured shape that fits a step over `rows` sequences, the longest with `context` tokens.

        `adapted`: some have a LoRA adapter.
        """
        found_rows, found_context = next_size(self._rows, rows), next_size(self._contexts, context)
        if found_rows is None or found_context is None:
            return None
        shape = GraphShape(found_rows, found_context, adapted)
        if shape in self._held:
            return shape
        same = (held for held in self._held if held.adapted == adapted)
        larger = (held for held in same if held.rows >= rows and held.context >= context)
        return min(larger, key=lambda held: (held.context, held.rows), default=None)

    def captured(self, shape: GraphShape) -> None:
        """A graph was captured, and is kept."""
        self._held.add(shape)

    def holds(self, nbytes: int) -> bool:
        """Count a graph's memory; returns whether the graph may be kept."""
        if self.nbytes + nbytes > self._most_bytes:
            self.stopped = f"graphs would hold more than {self._most_bytes >> 20} MiB"
            return False
        self.nbytes += nbytes
        return True

    def failed(self, why: str) -> None:
        """A graph could not be captured."""
        self.stopped = why


def _to_next_places(inputs: dict[str, Tensor], block_size: int) -> None:
    """Move each row with a sequence to the place of the sequence's next token, within captured work."""
    live, positions = inputs["live"], inputs["positions"]
    positions.add_(live)
    inputs["context_lens"].add_(live)
    torch.remainder(positions, block_size, out=inputs["offsets"])
    for ids, tables in (("block_ids", "block_tables"), ("slot_ids", "slot_tables")):
        if ids in inputs:
            # Behind the run's last step a row may stand behind its table; that place is not used.
            column = (positions // block_size).clamp_max_(inputs[tables].shape[1] - 1)
            found = inputs[tables].gather(1, column[:, None])[:, 0].long()
            inputs[ids].copy_(found.masked_fill_(live == 0, -1))


class DecodeGraphs:
    """One stage's graphs.

    Args:
        device: captures.
        model: the stage.
        memory: the stage's KV.
        captures: says what is to be captured.
        longest: tokens of the longest sequence.
    """

    def __init__(self, device: Device, model: StageModel, memory: KVMemory, captures: GraphCache, longest: int) -> None:
        self._device, self._model, self._memory, self._captures = device, model, memory, captures
        self._graphs: dict[GraphShape, CapturedGraph] = {}
        self._inputs_of: dict[GraphShape, GraphInputs] = {}
        self._block_size = memory.block_size
        where = device.torch_device
        self._hidden = torch.zeros(MAX_GRAPH_ROWS, model.config.hidden_size, dtype=model.dtype, device=where)
        most = self._inputs(GraphShape(MAX_GRAPH_ROWS, longest))
        self._memory_of_inputs = torch.empty(most.nbytes, dtype=torch.uint8, device=where)
        self._next_step = most.views(self._memory_of_inputs)
        self._query_start = torch.arange(MAX_GRAPH_ROWS + 1, dtype=torch.int32, device=where)
        self._last_rows = torch.arange(MAX_GRAPH_ROWS, device=where)
        self._states = torch.zeros_like(self._hidden)  # behind the layers
        self._sampling = CapturedSampling(MAX_GRAPH_ROWS, where)
        self._chosen = torch.zeros(2, MAX_GRAPH_ROWS, dtype=torch.int32, device=where)  # tokens; highest logits' bits
        self._ends: dict[tuple[int, Choice], CapturedGraph] = {}
        self.not_sampled = "" if model.is_first and model.is_last and model.head is not None else "no head in the stage"
        """Why no graph has head and sampling; empty = some have."""

    def shape(self, step: Step, batch: PackedBatch, later: int = 0) -> GraphShape | None:
        """Return the graph's shape for a step, or for a later step in the run; None if the step runs layer by layer.

        `batch`: the step's, on the host. `later`: further steps that the same shape is for.
        """
        sequences = len(batch.context_lens)
        if step.gated or step.layer_events or batch.num_tokens != sequences:
            return None
        adapted = batch.loras is not None
        return self._captures.shape(sequences, int(batch.context_lens.max()) + later, adapted=adapted)

    @in_inference_mode
    def capture(self, stream: DeviceStream, say: Callable[[str], None]) -> None:
        """Capture all graphs.

        Args:
            stream: the compute stream, idle.
            say: told how far this has come.
        """
        shapes = self._captures.shapes
        for number, shape in enumerate(shapes):
            say(f"capturing graphs of decode steps ({number} of {len(shapes)})")
            stream.run(partial(self._capture, shape))
            stream.record().wait()
            if self._captures.stopped:
                # Engine processes set up no logging: warnings get to standard error, anything less is dropped.
                log.warning("%d of %d graphs of decode steps: %s", number, len(shapes), self._captures.stopped)
                break
        if not self.not_sampled:
            say("capturing graphs of the head")
            stream.run(self._capture_ends)
            stream.record().wait()
            if self.not_sampled:
                log.warning("%d graphs of head and sampling: %s", len(self._ends), self.not_sampled)

    @property
    def samples_some(self) -> bool:
        """Whether graphs choose any step's tokens."""
        return bool(self._ends)

    def samples(self, count: int, choice: Choice) -> bool:
        """Tell whether graphs choose the tokens of `count` rows in this way."""
        return self._end_of(count, choice) is not None

    def begin_run(self, shape: GraphShape, batch: PackedBatch, rows: PlainRows) -> None:
        """Copy a run's first step, whose shape serves all steps, and what its rows want, to the device."""
        self._fill(shape, batch)
        self._sampling.begin(rows)

    def go_on(self, shape: GraphShape, count: int, choice: Choice, numbers: Tensor | None, found: Tensor) -> None:
        """Compute the run's next step: tokens and the bits of the highest logits of `count` rows go to `found`.

        Args:
            shape: given to `begin_run`, as were the rows.
            count: rows of the run.
            choice: how tokens are chosen.
            numbers: of the step's draws, [count] float64; None: nothing is drawn.
            found: int32 [2, count] on the host, pinned if the device is a GPU.
        """
        if numbers is not None:
            self._sampling.set_numbers(numbers)
        self._graphs[shape].replay()
        end = self._end_of(count, choice)
        assert end is not None
        end.replay()
        found.copy_(self._chosen[:, :count], non_blocking=True)

    def host_memory(self, count: int) -> Tensor:
        """Return memory for `found` of `go_on`."""
        pinned = self._device.torch_device.type == "cuda"
        return torch.zeros(2, count, dtype=torch.int32, pin_memory=pinned)

    def run(self, shape: GraphShape, batch: PackedBatch, hidden: Tensor) -> Tensor:
        """Compute all layers of a step; return the hidden states [T, hidden], which belong to the caller.

        Args:
            shape: the step's shape.
            batch: the step's, on the host.
            hidden: states [T, hidden] of the stage before; not looked at on the first stage.
        """
        self._fill(shape, batch)
        if not self._model.is_first:
            self._hidden[: batch.num_tokens].copy_(hidden)
        self._graphs[shape].replay()
        return self._states[: batch.num_tokens].clone()

    def _inputs(self, shape: GraphShape) -> GraphInputs:
        if shape not in self._inputs_of:
            table = (shape.rows, -(-shape.context // self._block_size))
            sizes: dict[str, tuple[int, ...]] = dict.fromkeys(_BY_ROW, (shape.rows,))
            if self._model.picture_positions is not None:
                sizes["rope_shifts"] = (shape.rows,)
            if self._model.lora_slots is not None:
                sizes["adapters"] = (shape.rows,)
            if self._memory.slot_of is not None:
                sizes |= {"slot_ids": (shape.rows,), "slot_tables": table}
            # What has no table lies at the same place for all shapes: graphs of the head write there.
            inputs = GraphInputs(sizes | {"block_tables": table}, least_bytes=8 * MAX_GRAPH_ROWS)
            self._inputs_of[shape] = inputs
        return self._inputs_of[shape]

    def _fill(self, shape: GraphShape, batch: PackedBatch | None) -> None:
        """Copy a batch to the graph's inputs; None: rows without a sequence."""
        inputs, values, columns = self._inputs(shape), {}, 1
        if batch is not None:
            columns = batch.block_tables.shape[1]
            given = {name: getattr(batch, name) for name in inputs.names if name not in ("live", "adapters")}
            given["adapters"] = None if batch.loras is None else batch.loras.rows
            values = {name: value.numpy() for name, value in given.items() if value is not None}
            values["live"] = np.ones(batch.num_tokens, np.int64)
        inputs.send(values, self._memory_of_inputs, (shape.rows, columns))

    def _layers(self, shape: GraphShape) -> None:
        """Compute the layers of a step: captured work, independent of the buffers' content."""
        inputs = self._inputs(shape).views(self._memory_of_inputs)
        batch = PackedBatch(
            token_ids=inputs["token_ids"],
            positions=inputs["positions"],
            context_lens=inputs["context_lens"],
            block_tables=inputs["block_tables"],
            block_ids=inputs["block_ids"],
            offsets=inputs["offsets"],
            query_start=self._query_start[: shape.rows + 1],
            last_rows=self._last_rows[: shape.rows],
            block_size=self._block_size,
            slot_tables=inputs.get("slot_tables", inputs["block_tables"]),
            slot_ids=inputs.get("slot_ids", inputs["block_ids"]),
            most_context=shape.context,
        )
        if (shifts := inputs.get("rope_shifts")) is not None:  # 0 but behind pictures
            batch.rope_positions = batch.positions + shifts
        if shape.adapted and self._model.lora_slots is not None:
            batch.loras = self._model.lora_slots.of_rows(inputs["adapters"])
        model, memory = self._model, self._memory
        hidden = model.embed(batch.token_ids, batch.positions) if model.is_first else self._hidden[: shape.rows]
        begin, end = model.layer_begin, model.layer_end
        hidden = model.run(hidden, batch, memory.kv, begin, end, scales=memory.scales)[1]
        _to_next_places(inputs, self._block_size)
        self._states[: shape.rows].copy_(hidden)

    def _end_of(self, count: int, choice: Choice) -> CapturedGraph | None:
        rows = next_size(_SAMPLED_ROWS, count)
        return None if rows is None else self._ends.get((rows, choice))

    def _end(self, rows: int, choice: Choice) -> None:
        """Choose tokens behind the layers, and give them to the next step: captured work.

        The first rank chooses, and gives the others the tokens.
        """
        ranks = self._model.ranks
        for begin in range(0, rows, LOGIT_ROWS):
            part = slice(begin, min(begin + LOGIT_ROWS, rows))
            logits = self._model.logits_on_all_ranks(self._states[part])
            if ranks is None or ranks.first:
                tokens, highest = self._sampling.choose(choice, logits, begin)
                self._chosen[0, part].copy_(tokens)
                self._chosen[1, part].copy_(highest.view(torch.int32))
        if ranks is not None:
            own = self._chosen[:, :rows] if ranks.first else None
            self._chosen[:, :rows].copy_(ranks.share(own, (2, rows), self._chosen.dtype))
        tokens, highest = self._chosen[:, :rows]
        self._next_step["token_ids"][:rows].copy_(tokens)
        over = self._sampling.over(tokens, highest.view(torch.float32))
        for name, value in _WITHOUT_SEQUENCE.items():
            if name in self._next_step:
                self._next_step[name].masked_fill_(over, value)

    def _capture_ends(self) -> None:
        """Capture head and sampling for all numbers of rows that steps have, the largest first."""
        most = max((shape.rows for shape in self._graphs), default=0)
        sizes = [rows for rows in _SAMPLED_ROWS if rows < most]
        sizes += [rows for rows in (next_size(_SAMPLED_ROWS, most),) if rows is not None and most]
        for rows in reversed(sizes):
            for choice in reversed(CHOICES):
                found = self._captured(partial(self._end, rows, choice))
                if not found.graphs:
                    failed = f"{rows} rows, {choice}, cannot be captured: {found.failed}"
                    self.not_sampled = failed if found.failed else self._captures.stopped
                    return
                [self._ends[rows, choice]] = found.graphs

    def _capture(self, shape: GraphShape) -> None:
        self._fill(shape, None)
        found = self._captured(partial(self._layers, shape))
        if found.failed:
            self._captures.failed(f"{shape} cannot be captured: {found.failed}")
        elif found.graphs:
            self._captures.captured(shape)
            [self._graphs[shape]] = found.graphs

    def _captured(self, work: Callable[[], None]) -> Captures:
        return capture_all(self._device, [work], self._captures.holds, self._model.ranks)
