"""Adapters in slots: a row's sums are those of the adapter alone, whatever the other slots hold."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.checkpoint.lora import read_adapter
from moonpool.base.errors import CheckpointError
from moonpool.base.kv.keys import tokens_to_bytes
from moonpool.engine.footprint import lora_bytes
from moonpool.engine.models.batch import BatchLoras, PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.lora import StageLora, load_lora, lora_slots
from moonpool.engine.models.random_checkpoint import LORA_SLOTS, create_lora
from moonpool.engine.models.stage import StageModel
from tests.unit.engine.models.test_families import CASES, reference

BLOCK, MAX_RANK = 16, 12
PARTS = [(tokens_to_bytes(range(3, 23)), 0, (0, 1)), (tokens_to_bytes(range(40, 55)), 0, (2,))]
LATENT = ("q_a", "q_b", "kv_a", "output")
SHARED = ("q", "v", "output", "shared_gate", "shared_up", "shared_down")


def states(model: StageModel, loras: BatchLoras | None) -> Tensor:
    """What is behind the layers, of two prompts."""
    layout, pools = kv_layout(model.config, "float32", BLOCK), []
    for layer in range(layout.layers):
        group = layout.group(layer)
        pools.append(torch.zeros(4, group.kv_heads, group.planes, group.slots(BLOCK), group.head_dim))
    batch = PackedBatch.build(PARTS, BLOCK)
    batch.loras = loras
    with torch.inference_mode():
        return model.forward(batch.token_ids, batch, pools)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("case", "places"),
    [("llama", LORA_SLOTS), ("gemma3", ("q", "output", "up")), ("deepseek_v3", LATENT), ("qwen2_moe", SHARED),
     ("qwen3_next", ("output",))],
)  # fmt: skip
def test_sums_are_those_of_each_adapter_alone(
    case: str, places: tuple[str, ...], deterministic: bool, tmp_path: Path
) -> None:
    reference(*CASES[case]).save_pretrained(tmp_path / "model")
    config = load_config(tmp_path / "model")
    model = load_stage(tmp_path / "model", config, torch.float32, 0, config.num_layers, deterministic=deterministic)
    assert isinstance(model, StageModel)
    folders = [create_lora(tmp_path / str(seed), config, seed, places, rank=4 * seed + 4) for seed in (1, 2)]
    slots = lora_slots(config, model.layers, 0, count=3, max_rank=MAX_RANK)
    spec: Any = SimpleNamespace(dtype="float32", max_loras=3, max_lora_rank=MAX_RANK)
    assert 3 * slots.slot_bytes <= lora_bytes(config, spec, 0, config.num_layers), "room is kept for so much"

    def load(folder: Path, *, into_slot: bool) -> StageLora:
        where = config, model.layers, 0
        wanted = read_adapter(folder).id
        return load_lora(folder, wanted, *where, max_rank=MAX_RANK, slots=slots if into_slot else None)

    of = [load(folders[0], into_slot=False), None]
    exact, plain, starts = states(model, BatchLoras(of, [0, 20, 35], "cpu")), states(model, None), [0, 20, 35]
    first = load(folders[0], into_slot=True)
    alone = states(model, slots.of_sequences([first.slot, -1], starts))
    assert (alone - exact).abs().max() < 1e-4 * exact.abs().max()
    assert (plain - exact)[:20].abs().max() > 1e-2 * exact.abs().max()
    assert (alone - plain)[20:].abs().max() < 1e-4 * exact.abs().max()
    load(folders[1], into_slot=True)
    assert torch.equal(states(model, slots.of_sequences([first.slot, -1], starts)), alone)


def test_an_adapter_that_would_spoil_other_rows_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    config = load_config(path := checkpoint("tiny-llama"))
    model = load_stage(path, config, torch.float32, 0, config.num_layers)
    folder = create_lora(tmp_path / "a", config, 1, ("v",))
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".1." in name and "lora_B" in name)
    tensors[name][3, 2] = torch.inf
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"layers\.1\..*v_proj has numbers that are not finite"):
        load_lora(folder, read_adapter(folder).id, config, model.layers, 0, max_rank=8)
