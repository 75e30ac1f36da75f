"""Folders with quantised weights: what is loaded is what the stored numbers stand for, worked out one by one."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moonpool.checkpoint import inspect_checkpoint, load_config
from moonpool.checkpoint.tensor_info import QuantisedFormat
from moonpool.errors import CheckpointError, UnsupportedModel
from moonpool.models.dequantise import dequantise
from moonpool.models.loader import load_stage
from tests.unit.models.forward import Runner, Sequence_
from tests.unit.models.test_families import CASES, reference

Stored = Mapping[str, Tensor]
GENERATOR = torch.Generator().manual_seed(9)


def words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack values [rows, n] into words of 32 bits, value `order[i]` of each word's in place i."""
    held = 32 // bits
    grouped = values.to(torch.int64).view(values.shape[0], -1, held)
    packed = torch.zeros(grouped.shape[:2], dtype=torch.int64)
    for place in range(held):
        packed |= grouped[:, :, order[place] if order else place] << (bits * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def whole_numbers(limit: int, *shape: int) -> Tensor:
    return torch.randint(0, limit, shape, generator=GENERATOR)


def scales_of(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=GENERATOR) + 0.5) * 0.02


def fp8_blocks(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    values = torch.randn(outputs, inputs, generator=GENERATOR).to(torch.float8_e4m3fn)
    scales = scales_of(-(-outputs // 16), -(-inputs // 32))
    dense = torch.zeros(outputs, inputs)
    for row in range(outputs):
        for column in range(inputs):
            dense[row, column] = values[row, column].float() * scales[row // 16, column // 32]
    return {".weight": values, ".weight_scale_inv": scales}, dense


def fp8_rows(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    values, scales = torch.randn(outputs, inputs, generator=GENERATOR).to(torch.float8_e4m3fn), scales_of(outputs, 1)
    return {".weight": values, ".weight_scale": scales, ".input_scale": torch.ones(1)}, values.float() * scales


def int8_rows(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    values, scales = whole_numbers(255, outputs, inputs) - 127, scales_of(outputs, 1)
    return {".weight": values.to(torch.int8), ".weight_scale": scales}, values * scales


def gptq(outputs: int, inputs: int, bits: int = 4) -> tuple[Stored, Tensor]:
    values, zeros = whole_numbers(1 << bits, inputs, outputs), whole_numbers((1 << bits) - 1, inputs // 16, outputs) + 1
    scales, group = scales_of(inputs // 16, outputs), torch.randperm(inputs, generator=GENERATOR) // 16
    dense = torch.zeros(outputs, inputs)
    for row in range(inputs):
        dense[:, row] = (values[row] - zeros[group[row]]) * scales[group[row]]
    packed = words(values.t(), bits).t().contiguous()
    stored = {".qweight": packed, ".qzeros": words(zeros - 1, bits), ".scales": scales, ".g_idx": group.int()}
    return stored, dense


def awq(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    values, zeros, scales = (
        whole_numbers(16, inputs, outputs),
        whole_numbers(16, inputs // 16, outputs),
        scales_of(inputs // 16, outputs),
    )
    dense = torch.zeros(outputs, inputs)
    for row in range(inputs):
        dense[:, row] = (values[row] - zeros[row // 16]) * scales[row // 16]
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {".qweight": words(values, 4, order), ".qzeros": words(zeros, 4, order), ".scales": scales}, dense


def packed(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    values, scales = whole_numbers(16, outputs, inputs), scales_of(outputs, inputs // 16)
    shape = torch.tensor([outputs, inputs])
    stored = {".weight_packed": words(values, 4), ".weight_scale": scales, ".weight_shape": shape}
    return stored, (values - 8) * scales.repeat_interleave(16, 1)


PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": True, "group_size": 16}}},
}
ONE = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}}}
BLOCKS = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "block_structure": [16, 32]}}}}


def fp8_blocks_of_compressed_tensors(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    stored, dense = fp8_blocks(outputs, inputs)
    return {".weight": stored[".weight"], ".weight_scale": stored[".weight_scale_inv"]}, dense


FORMATS: Mapping[str, tuple[Mapping[str, Any], Callable[[int, int], tuple[Stored, Tensor]]]] = {
    "fp8, blocks": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, fp8_blocks),
    "fp8, rows": ({"quant_method": "compressed-tensors", "format": "float-quantized", **ONE}, fp8_rows),
    "fp8, blocks of compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", **BLOCKS},
        fp8_blocks_of_compressed_tensors,
    ),
    "int8, rows": ({"quant_method": "compressed-tensors", "format": "int-quantized", **ONE}, int8_rows),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, gptq),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": 16}, lambda o, i: gptq(o, i, 8)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, awq),
    "packed": (PACKED, packed),
}
TOKENS = [3 + 5 * i % 300 for i in range(40)]


def configure(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))


@torch.inference_mode()
def logits(path: Path) -> Tensor:
    return Runner(path, torch.float32).step([(Sequence_(list(TOKENS)), len(TOKENS))])


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_what_the_stored_numbers_stand_for(form: str, tmp_path: Path) -> None:
    """All projections of a Qwen model with experts; norms, embedding and head stay dense, as in published folders."""
    settings, quantise = FORMATS[form]
    reference(*CASES["qwen2_moe"]).save_pretrained(tmp_path / "dense")
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in list(tensors.items()):
        if ".layers." in name and name.endswith("_proj.weight"):
            parts, tensors[name] = quantise(*weight.shape)
            stored |= {f"{name.removesuffix('.weight')}{end}": part for end, part in parts.items()}
        else:
            stored[name] = weight
    save_file(tensors, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    folder = tmp_path / "quantised"
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "dense" / "config.json").read_bytes())
    configure(folder, settings)
    save_file({name: part.contiguous() for name, part in stored.items()}, folder / "model.safetensors")
    torch.testing.assert_close(logits(folder), logits(tmp_path / "dense"), rtol=0, atol=1e-6)
    assert inspect_checkpoint(folder).parameters == inspect_checkpoint(tmp_path / "dense").parameters


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    model_type, changed = CASES["gpt_oss"]
    reference(model_type, {**changed, "intermediate_size": 64}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = whole_numbers(256, experts, outputs, inputs // 32, 16).to(torch.uint8)
        scales = (whole_numbers(3, experts, outputs, inputs // 32) + 122).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configure(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    layer: Any = load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 4).layers[1]
    for expert, network in enumerate(layer.feed_forward.experts):
        dense = expected["model.layers.1.mlp.experts.down_proj"][expert].t()
        assert torch.equal(network.down.dense(), dense)
        both = expected["model.layers.1.mlp.experts.gate_up_proj"][expert].t()
        assert torch.equal(network.gate_up.dense(), torch.cat((both[0::2], both[1::2])))


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("quantization_config.bits", {"quant_method": "gptq", "bits": 3}),
        ("quantization_config.checkpoint_format", {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
        (
            "quantization_config.config_groups",
            {**PACKED, "config_groups": {"group_0": {"weights": {"num_bits": 4, "actorder": "group"}}}},
        ),
        ("quantization_config.version", {"quant_method": "awq", "bits": 4, "version": "gemv"}),
        ("quantization_config.format", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
        (
            "quantization_config.config_groups",
            {**PACKED, "config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": False}}}},
        ),
    ],
)
def test_other_methods_are_refused_by_name(field: str, settings: Mapping[str, Any], tmp_path: Path) -> None:
    reference("llama", {}).save_pretrained(tmp_path)
    configure(tmp_path, settings)
    with pytest.raises(UnsupportedModel) as caught:
        load_config(tmp_path)
    assert caught.value.field == field


def test_a_malformed_block_is_named(tmp_path: Path) -> None:
    reference("llama", {}).save_pretrained(tmp_path)
    configure(tmp_path, {"quant_method": "fp8", "weight_block_size": ["a", 128]})
    with pytest.raises(CheckpointError, match="weight_block_size must be two positive integers"):
        load_config(tmp_path)


def test_scales_that_are_not_of_rows_are_named() -> None:
    """Also where there are as many as rows: 6 rows, and scales of 2 by 3 blocks."""
    form = QuantisedFormat("fp8", {})
    with pytest.raises(RuntimeError, match=r"scales \[2, 3\] are not one for each row of \[6, 8\]"):
        dequantise(form, {"values": torch.ones(6, 8), "scales": torch.ones(2, 3)})


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    reference("llama", {}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configure(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(CheckpointError, match=rf"{name} has no scales \(.weight_scale_inv or"):
        load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 4)
