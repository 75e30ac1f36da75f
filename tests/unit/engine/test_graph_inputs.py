"""Inputs of captured work: values and padding arrive; of long tables, what is in use and no more."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.cuda_graphs import DecodeGraphs, GraphCache
from moonpool.engine.graph_inputs import GraphInputs
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.platforms.kv_memory import TieredKVMemory
from moonpool.engine.prompt_graphs import ChunkShape, PromptGraphs
from tests.unit.engine.test_devices import BLOCKS, SIZE, ids, later_stage

STALE = 0x77


@pytest.mark.parametrize("columns", [8, 8192])
def test_values_arrive_with_padding(columns: int) -> None:
    """Of two tables, with fewer rows and columns in use than there are."""
    table = (4, columns)
    inputs = GraphInputs({"block_tables": table, "token_ids": (6,), "block_ids": (6,), "slot_tables": table})
    memory = torch.full((inputs.nbytes,), STALE, dtype=torch.uint8)
    blocks, slots = np.array([[5, 6, 7], [8, 9, 0]], np.int32), np.array([[1, 2, 3], [4, 0, 0]], np.int32)
    given: dict[str, NDArray[Any]] = {
        "token_ids": np.arange(4),
        "block_ids": np.arange(10, 14),
        "block_tables": blocks,
        "slot_tables": slots,
    }
    inputs.send(given, memory, (3, 5))
    found = inputs.views(memory)
    assert found["token_ids"].tolist() == [0, 1, 2, 3, 0, 0]
    assert found["block_ids"].tolist() == [10, 11, 12, 13, -1, -1]
    for name, values in (("block_tables", blocks), ("slot_tables", slots)):
        used = found[name][:3, :5]
        assert used[:2, :3].tolist() == values.tolist()
        assert not used[2:].any()
        assert not used[:, 3:].any()


def test_of_long_tables_the_rest_stays() -> None:
    inputs = GraphInputs({"token_ids": (6,), "block_tables": (64, 8192)})
    memory = torch.full((inputs.nbytes,), STALE, dtype=torch.uint8)
    inputs.send({"block_tables": np.ones((2, 3), np.int32)}, memory, (3, 4))
    written = int((memory != STALE).sum())
    assert written <= 6 * 8 + 128 + 3 * 4 * 4


def test_a_table_that_is_wider_is_cut() -> None:
    inputs = GraphInputs({"token_ids": (1,), "block_tables": (2, 3)})
    memory = torch.zeros(inputs.nbytes, dtype=torch.uint8)
    inputs.send({"block_tables": np.arange(10, dtype=np.int32).reshape(2, 5)}, memory, (2, 5))
    assert inputs.views(memory)["block_tables"].tolist() == [[0, 1, 2], [5, 6, 7]]


LONG, ROWS = 16_384, 64
"""So many sequences of up to so many tokens have a long table."""


def sequences(*lengths: tuple[int, int]) -> list[SequenceStep]:
    """So many new tokens behind so many; blocks come again and again in a table."""
    tables = ([(first + i) % BLOCKS for i in range(-(-sum(length) // SIZE))] for first, length in enumerate(lengths))
    return [SequenceStep(ids(range(new)), old, tuple(table)) for (new, old), table in zip(lengths, tables, strict=True)]


def batch(parts: Sequence[SequenceStep]) -> PackedBatch:
    return PackedBatch.build([(part.token_ids, part.start, part.block_table) for part in parts], SIZE)


def fill(memory: TieredKVMemory) -> None:
    """What is read must have been written; what stands there does not matter."""
    for layer in memory.kv:
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(3)))


def test_prompts_with_long_tables(checkpoint: Path) -> None:
    """One after the other, so that a table has what another step left behind."""
    with later_stage(checkpoint) as (later, device, memory):
        fill(memory)
        first, end = later.layer_begin, later.layer_end
        graphs = PromptGraphs(device, later, memory, LONG, 128)
        graphs.capture(device.compute, lambda what: None)
        for lengths in ([(20, 4200), (1, 0), (50, 3), (2, 30)], [(1, 4130), (70, 2), (3, 0), (1, 1)]):
            given = batch(sequences(*lengths))
            hidden = torch.randn(given.num_tokens, later.config.hidden_size, generator=torch.Generator().manual_seed(2))
            shape = graphs.shape(given)
            assert shape == ChunkShape(128, LONG, ROWS)
            with torch.inference_mode():
                eager = later.run(hidden.clone(), given, memory.kv, first, end)[1]
                graphs.begin(shape, given, hidden)
                for layer in range(first, end):
                    graphs.run(shape, layer)
                assert torch.allclose(graphs.states(given.num_tokens), eager, atol=1e-5)


def test_decode_steps_with_long_tables(checkpoint: Path) -> None:
    with later_stage(checkpoint) as (later, device, memory):
        fill(memory)
        cache = GraphCache(LONG, most_rows=ROWS, most_graphs=2)
        graphs = DecodeGraphs(device, later, memory, cache, LONG)
        graphs.capture(device.compute, lambda what: None)
        for lengths in ([(1, 4300), (1, 0), (1, 600)], [(1, 5), (1, 4096)]):
            parts = sequences(*lengths)
            given, step = batch(parts), Step(1, tuple(parts))
            hidden = torch.randn(len(parts), later.config.hidden_size, generator=torch.Generator().manual_seed(2))
            shape = graphs.shape(step, given)
            assert shape is not None
            assert (shape.rows, shape.context) == (ROWS, LONG)
            with torch.inference_mode():
                eager = later.forward(hidden.clone(), given, memory.kv)
                assert torch.allclose(graphs.run(shape, given, hidden), eager, atol=1e-5)
