"""What a step reads of a device, for every family: nothing, but for layers that say so.

Tensors of torch's device "meta" have no content, so reading them fails, as it would in a captured graph. Triton's
kernels, which read nothing on the host, are left out.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.checkpoint.config import ModelConfig
from moonpool.base.families.spec import GPU_HEAD_DIM, GPU_LATENT
from moonpool.base.kv.keys import tokens_to_bytes
from moonpool.engine.cuda_graphs import DecodeGraphs, GraphCache
from moonpool.engine.kernels import triton
from moonpool.engine.kernels.choice import VARIABLE
from moonpool.engine.kernels.triton import ops, recurrent, sampling
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.lora import lora_slots
from moonpool.engine.models.pictures import PicturePositions
from moonpool.engine.models.stage import StageModel
from moonpool.engine.platforms.cpu import CpuStream
from moonpool.engine.prompt_graphs import PromptGraphs
from tests.unit.engine.models.test_families import CASES, reference

BLOCK, BLOCKS, LONGEST = 16, 8, 512
META = torch.device("meta")


@pytest.fixture(autouse=True)
def _triton_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that Triton is chosen for a device that is no GPU
    for name in ops.__all__:
        monkeypatch.setattr(ops, name, lambda *args, **options: None)
    for name in ("convolve", "scan"):
        monkeypatch.setattr(recurrent, name, lambda *args, **options: None)
    for name in ("weights_of", "keep_leading"):
        monkeypatch.setattr(sampling, name, lambda *args, **options: None)
    monkeypatch.setattr(sampling, "pick", lambda weights, rows, numbers: rows)


def on_meta(folder: Path, case: str) -> StageModel:
    reference(*CASES[case]).save_pretrained(folder)
    config = load_config(folder)
    model = load_stage(folder, config, torch.float32, 0, config.num_layers, META)
    assert isinstance(model, StageModel)
    return model


def pools(config: ModelConfig) -> list[torch.Tensor]:
    """Each layer's KV."""
    layout = kv_layout(config, "float32", BLOCK)
    groups = {layer: group for group in layout.groups for layer in group.layers}
    of = [groups[layer] for layer in range(config.num_layers)]
    shapes = ((BLOCKS, group.kv_heads, group.planes, BLOCK, group.head_dim) for group in of)
    return [torch.empty(shape, device=META) for shape in shapes]


class MetaGraph:
    """A graph of work that is done once, before it is captured."""

    nbytes = 0

    def replay(self) -> None: ...


class MetaDevice:
    """What graphs need of a device."""

    torch_device = META

    def capture(self, work: Callable[[], None]) -> MetaGraph:
        return MetaGraph()


class MetaMemory:
    """What graphs need of the KV."""

    block_size, scales = BLOCK, None

    def __init__(self, config: ModelConfig, *, slots: bool) -> None:
        self.kv, self.slot_of = pools(config), np.zeros(BLOCKS, np.int64) if slots else None


def captured(model: StageModel, *, slots: bool) -> tuple[str, str, str]:
    """Capture decode steps, head and sampling, and layers of prompts; return what could not be captured of each.

    With LoRA adapters, where the model takes them.
    """
    cache = GraphCache(LONGEST, most_rows=1, adapters=model.lora_slots is not None)
    memory = MetaMemory(model.config, slots=slots)
    graphs = DecodeGraphs(MetaDevice(), model, memory, cache, LONGEST)  # type: ignore[arg-type]
    graphs.capture(CpuStream(), lambda what: None)
    prompts = PromptGraphs(MetaDevice(), model, memory, LONGEST, 64)  # type: ignore[arg-type]
    prompts.capture(CpuStream(), lambda what: None)
    return cache.stopped, graphs.not_sampled, prompts.not_captured


def chunk_batch() -> PackedBatch:
    """A chunk of 20 tokens beside a decode step's token."""
    parts = [(tokens_to_bytes(range(3, 23)), 0, (0, 1)), (tokens_to_bytes([7]), 17, (2, 3))]
    return PackedBatch.build(parts, BLOCK, META)


@torch.no_grad()
def compute(model: StageModel, batch: PackedBatch) -> None:
    hidden = model.forward(batch.token_ids, batch, pools(model.config))
    assert hidden.shape == (batch.num_tokens, model.config.hidden_size)


@pytest.mark.parametrize("case", CASES)
def test_steps_read_nothing_of_a_device(case: str, tmp_path: Path) -> None:
    model = on_meta(tmp_path, case)
    decoder = model.config.decoder
    if not decoder.other:
        model.lora_slots = lora_slots(model.config, model.layers, 0, count=2, max_rank=4)
        model.picture_positions = PicturePositions(SimpleNamespace(components=()))  # type: ignore[arg-type]
    layers, head, prompts = captured(model, slots=any(layer.attention.window is not None for layer in decoder.every))
    for why in (layers, prompts):
        assert ("meta" in why) == bool(decoder.not_captured), why
    assert not head
    compute(model, chunk_batch())


def test_the_longest_head_is_that_of_the_kernels() -> None:
    assert GPU_HEAD_DIM == triton.MAX_HEAD_DIM
    assert GPU_LATENT == (triton.MAX_VALUE_DIM, triton.MAX_REST)


class Adds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts additions in place."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.add_.Tensor
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("case", "apart"), [("llama", 1), ("gemma2", 1), ("olmo2", 8), ("cohere", 1)])
def test_what_a_layer_adds_is_added_by_the_next_ones_norm(case: str, apart: int, tmp_path: Path) -> None:
    """Of layers in one call; the last one's is added apart, and what no norm reads."""
    model = on_meta(tmp_path, case)
    assert len(model.layers) == 4
    with Adds() as adds, torch.no_grad():  # type: ignore[no-untyped-call]
        batch = chunk_batch()
        hidden = model.embed(batch.token_ids)
        model.run(hidden, batch, pools(model.config), 0, 4)
    assert adds.count == apart


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations that a GPU would be given."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func is not torch.ops.aten.empty.memory_format
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("case", "launches"),
    [
        ("llama", 9), ("qwen3", 9), ("gemma3", 12), ("phi", 9), ("hunyuan", 9), ("glm4", 11),
        ("ministral3", 10), ("llama, adapters", 25),
    ],
)  # fmt: skip
def test_launches_of_a_layer(case: str, launches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a decode step with one part of the keys. Norms of heads, rotation and KV write are one launch."""
    name, _, adapters = case.partition(", ")
    model, found = on_meta(tmp_path, name), list[str]()
    for name in ops.__all__:
        monkeypatch.setattr(ops, name, lambda *args, _name=name, **options: found.append(_name))
    batch = PackedBatch.build([(tokens_to_bytes([7]), 17, (2, 3))], BLOCK, META)
    if adapters:
        slots = lora_slots(model.config, model.layers, 0, count=2, max_rank=4)
        batch.loras = slots.of_rows(torch.zeros(1, dtype=torch.int64, device=META))
    hidden, kv = torch.empty((1, model.config.hidden_size), device=META), pools(model.config)
    counts = list[int]()
    for last in (4, 3, 4):  # what layers share is computed first
        found.clear()
        with Launches() as torchs, torch.no_grad():  # type: ignore[no-untyped-call]
            model.run(hidden, batch, kv, 0, last)
        counts.append(torchs.count + len(found))
    assert counts[2] - counts[1] == launches
