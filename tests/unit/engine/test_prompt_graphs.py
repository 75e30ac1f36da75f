"""Prompts by graphs of layers: which shapes there are, which one a step takes, and that tokens and gates stay."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.scheduling.steps import LayerDone, SequenceStep
from moonpool.engine.footprint import EXACT_GRAPH_TOKENS
from moonpool.engine.kernels.choice import VARIABLE
from moonpool.engine.kernels.triton.variants import AttentionShape
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.stage import StageModel
from moonpool.engine.platforms.base import CapturedGraph
from moonpool.engine.platforms.cpu import CpuStream
from moonpool.engine.platforms.staged import StagedDevice
from moonpool.engine.prompt_graphs import MAX_LAYER_GRAPHS, ChunkShape, PromptGraphs, prompt_shapes
from tests.unit.engine.test_devices import BLOCKS, FEW, GREEDY, SIZE, ids, later_stage, rig
from tests.unit.engine.test_steps_ahead import Counted
from tools.compiled_kernels import HOPPER

LONGEST = BLOCKS * SIZE


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> StageModel:
    config = load_config(checkpoint)
    return load_stage(checkpoint, config, torch.float32, 0, config.num_layers)


def batch(*lengths: tuple[int, int]) -> PackedBatch:
    """Sequences of so many new tokens behind so many."""
    return PackedBatch.build([(ids(range(new)), old, range(-(-(new + old) // SIZE))) for new, old in lengths], SIZE)


@pytest.mark.parametrize("layers", [1, 32, 80])
@pytest.mark.parametrize("longest", [100, 32_768, 131_072])
@pytest.mark.parametrize("most", [64, 1000, 8192])
def test_there_are_shapes_for_all_steps_and_not_too_many(most: int, longest: int, layers: int) -> None:
    shapes = prompt_shapes(most, longest, layers)
    assert len(shapes) == len(set(shapes))
    assert len(shapes) * layers <= MAX_LAYER_GRAPHS
    assert [shape.tokens for shape in shapes] == sorted((shape.tokens for shape in shapes), reverse=True)
    largest = max(tokens for tokens in (64, 768, 4096) if tokens <= most)
    assert shapes[0].tokens == largest
    assert all(shape.sequences < shape.tokens for shape in shapes)
    for sequences in (1, 3, 31):
        assert any(shape.fits(largest, sequences, longest) for shape in shapes)
        assert any(shape.fits(1 + sequences, sequences, 1) for shape in shapes)


def test_deterministic_steps_have_no_shape_whose_results_of_parts_are_too_large() -> None:
    """Of an 8B model on an H100: few tokens behind long contexts, of which each 1,024 keys are a part."""
    shape = AttentionShape(torch.bfloat16, torch.bfloat16, 32, 8, 128, True, HOPPER.limits)
    every = prompt_shapes(1024, 131_072, 4)
    assert prompt_shapes(1024, 131_072, 4, [replace(shape, deterministic=False)]) == every
    exact = prompt_shapes(1024, 131_072, 4, [shape])
    left_out = set(every) - set(exact)
    assert left_out
    assert all(each.tokens < 512 and each.context > 16_384 for each in left_out)


def test_no_shape_without_a_step_that_is_large_enough() -> None:
    assert prompt_shapes(63, 1024, 4) == []


def test_padding_takes_a_sequences_place() -> None:
    shape = ChunkShape(64, 1024, 4)
    assert shape.fits(64, 4, 1024)
    assert not shape.fits(63, 4, 1024)
    assert shape.fits(63, 3, 1024)
    assert not shape.fits(64, 4, 1025)
    assert not shape.fits(65, 1, 65)


def test_a_step_takes_the_least_captured_shape(model: StageModel) -> None:
    with rig(model, StagedDevice(1)) as tested:
        graphs = PromptGraphs(tested.place.device, model, tested.place.memory, 2048, 256)  # type: ignore[arg-type]
        assert graphs.shape(batch((20, 0))) is None
        graphs.capture(tested.place.stream, lambda what: None)
        assert not graphs.not_captured
        found = [
            graphs.shape(batch(*lengths))
            for lengths in (
                [(20, 0)],
                [(20, 0)] * 3,
                [(16, 0)] * 4,
                [(15, 0)] * 4,
                [(1, 1100)],
                [(65, 0)],
                [(250, 0)],
                [(257, 0)],
                [(2, 0)] * 65,
                [(1, 2048)],
            )
        ]
    assert found == [
        ChunkShape(64, 1024, 4),
        ChunkShape(64, 1024, 4),
        ChunkShape(64, 1024, 4),
        ChunkShape(64, 1024, 32),
        ChunkShape(64, 2048, 4),
        ChunkShape(128, 1024, 4),
        ChunkShape(256, 1024, 4),
        None,
        None,
        None,
    ]


def draw_step(draw: random.Random) -> list[SequenceStep]:
    """A few sequences' first tokens, in blocks of their own."""
    blocks, found = draw.sample(range(BLOCKS), BLOCKS), list[SequenceStep]()
    while blocks and len(found) < 5:
        count = draw.choice([1, 2, draw.randint(1, 3 * SIZE)])
        table, blocks = tuple(blocks[: -(-count // SIZE)]), blocks[-(-count // SIZE) :]
        if count <= len(table) * SIZE:
            found.append(SequenceStep(ids([draw.randint(3, 200) for _ in range(count)]), 0, table, GREEDY))
    return found


@pytest.mark.parametrize("seed", FEW)
def test_tokens_are_those_of_launched_layers(model: StageModel, seed: int) -> None:
    """Of steps that fill their shape, are padded, or have no graphs."""
    draw, device = random.Random(seed), Counted(seed)
    with rig(model, None) as plain, rig(model, device, graphs=True) as tested:
        for _ in range(12):
            step = draw_step(draw)
            tokens = sum(len(part.token_ids) // 4 for part in step)
            events = draw.random() < 0.5
            device.replays = 0
            assert tested.run(*step, layer_events=events).sampled == plain.run(*step, layer_events=events).sampled
            assert device.replays == (model.config.num_layers if tokens <= 64 else 0) or tokens == len(step)
            done = [event.layer for event in tested.events if isinstance(event, LayerDone)]
            assert done == (list(range(model.config.num_layers)) if events else [])
            tested.events.clear()


@pytest.mark.parametrize("seed", FEW)
def test_a_layers_graph_waits_for_its_gate(model: StageModel, seed: int) -> None:
    """The step is given up when its second layer is to open: the graphs of the others are not replayed."""
    device = Counted(seed)
    with rig(model, device, graphs=True) as tested:
        tested.aborting, device.replays = True, 0
        step = SequenceStep(ids(range(5, 45)), 0, (4, 1, 6), GREEDY)
        assert tested.run(step, gated=True, layer_events=True).aborted
        tested.place.stream.record().wait()
        assert device.replays == 1


class Again:
    """A device of the host, whose graphs do their work anew."""

    torch_device = torch.device("cpu")

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        return SimpleNamespace(replay=work, nbytes=0)


@pytest.mark.parametrize(
    ("dtype", "mode", "most"), [(torch.float32, "", EXACT_GRAPH_TOKENS), (torch.bfloat16, "torch", 128)]
)
def test_deterministic_graphs_have_the_bits_of_launched_layers(
    checkpoint: Path, dtype: torch.dtype, mode: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every number of tokens and of sequences, with padding and without."""
    monkeypatch.setenv(VARIABLE, mode)
    config = load_config(checkpoint)
    exact, draw = load_stage(checkpoint, config, dtype, 0, config.num_layers), torch.Generator().manual_seed(4)
    exact.deterministic = True
    [group], blocks = kv_layout(config, "float32", SIZE).groups, most // SIZE + 64
    kv = torch.zeros((config.num_layers, blocks, group.kv_heads, group.planes, SIZE, group.head_dim), dtype=dtype)
    memory = SimpleNamespace(kv=kv, scales=None, slot_of=None, block_size=SIZE)
    graphs = PromptGraphs(Again(), exact, memory, 1024, most)  # type: ignore[arg-type]
    graphs.capture(CpuStream(), lambda what: None)
    taken = set[ChunkShape]()
    every = {(each.tokens, each.sequences) for each in prompt_shapes(most, 1024, config.num_layers)}
    for tokens in sorted({tokens for tokens, _ in every}):
        for sequences, padding in ((1, 0), (2, 1), (9, 0), (9, 3)):
            counts, tables, begin = [1] * (sequences - 1) + [tokens - padding - sequences + 1], [], 0
            for count in counts:
                tables.append(range(begin, begin - (-count // SIZE)))
                begin = tables[-1].stop
            parts = [
                (torch.randint(3, 200, (count,), generator=draw).tolist(), 0, table)
                for count, table in zip(counts, tables, strict=True)
            ]
            given = PackedBatch.build([(ids(own), start, table) for own, start, table in parts], SIZE)
            shape = graphs.shape(given)
            assert shape is not None
            taken.add(shape)
            with torch.inference_mode():
                eager = exact.forward(given.token_ids, given, kv)
                written = kv.clone()
                kv.zero_()
                graphs.begin(shape, given, eager)
                for layer in range(config.num_layers):
                    graphs.run(shape, layer)
                assert torch.equal(graphs.states(given.num_tokens), eager)
                assert torch.equal(kv, written)
                kv.zero_()
    assert {(each.tokens, each.sequences) for each in taken} == every


class Heavy(StagedDevice):
    """A device whose graphs hold as much as `sizes` says, one after the other; None: no memory is left."""

    def __init__(self, sizes: Sequence[int | None]) -> None:
        super().__init__(1)
        self.sizes = iter(sizes)

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        graph, size = super().capture(work), next(self.sizes, 0)
        if size is None:
            raise RuntimeError("out of memory")
        graph.nbytes = size
        return graph


def test_what_has_no_room_is_named_and_the_rest_stays(model: StageModel) -> None:
    layers = model.config.num_layers
    device = Heavy([*[0] * layers, *[60] * layers, *[0] * layers, None])
    with rig(model, device) as tested:
        graphs = PromptGraphs(device, model, tested.place.memory, LONGEST, 128, most_bytes=100)
        graphs.capture(tested.place.stream, lambda what: None)
        assert graphs.shape(batch(*[(9, 0)] * 9)) == ChunkShape(128, LONGEST, 64)
        assert graphs.shape(batch((100, 0))) == ChunkShape(128, LONGEST, 64)
        assert graphs.shape(batch((9, 0))) == ChunkShape(64, LONGEST, 32)
        assert "out of memory" in graphs.not_captured


def test_graphs_of_a_later_stage_give_what_its_layers_give(checkpoint: Path) -> None:
    with later_stage(checkpoint) as (later, device, memory):
        config, first = later.config, later.config.num_layers // 2
        graphs = PromptGraphs(device, later, memory, LONGEST, 64)
        graphs.capture(device.compute, lambda what: None)
        given = batch((20, 0), (1, 0))
        hidden = torch.randn(21, config.hidden_size, generator=torch.Generator().manual_seed(2))
        shape = graphs.shape(given)
        assert shape is not None
        with torch.inference_mode():
            eager = later.run(hidden.clone(), given, memory.kv, first, config.num_layers)[1]
            for _ in range(2):
                graphs.begin(shape, given, hidden)
                for layer in range(first, config.num_layers):
                    graphs.run(shape, layer)
                assert torch.equal(graphs.states(21), eager)
