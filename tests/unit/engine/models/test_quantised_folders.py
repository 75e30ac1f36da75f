"""Folders with quantised weights: what is loaded is what the stored numbers stand for, worked out one by one.

Here are the formats whose tools do not run in tests; `test_quantised_tools.py` has the others.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.base.checkpoint import inspect_checkpoint, load_config, weights_fingerprint
from moonpool.base.checkpoint.formats import tensor_index
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.tensor_files import stored_tensors
from moonpool.engine.models.tensor_reader import KeptWeights
from moonpool.engine.weights.packed import PackedWeight
from tests.unit.engine.models.forward import Runner, Sequence_
from tests.unit.engine.models.test_families import CASES, reference

Stored = Mapping[str, Tensor]
GENERATOR = torch.Generator().manual_seed(9)


def words(values: Tensor, bits: int) -> Tensor:
    """Pack values [rows, n] into words of 32 bits: each row is one stream of bits, the lowest first."""
    rows = []
    for row in values.tolist():
        stream = sum(value << (bits * place) for place, value in enumerate(row))
        rows.append(list(stream.to_bytes(len(row) * bits // 8, "little")))
    return torch.tensor(rows, dtype=torch.uint8).view(torch.int32)


def whole_numbers(limit: int, *shape: int) -> Tensor:
    return torch.randint(0, limit, shape, generator=GENERATOR)


def scales_of(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=GENERATOR) + 0.5) * 0.02


def fp8_blocks(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    values = torch.randn(outputs, inputs, generator=GENERATOR).to(torch.float8_e4m3fn)
    scales = scales_of(-(-outputs // 16), -(-inputs // 32))
    dense = torch.zeros(outputs, inputs)
    for row in range(0, outputs, 16):
        for column in range(0, inputs, 32):
            block = slice(row, row + 16), slice(column, column + 32)
            dense[block] = values[block].float() * scales[row // 16, column // 32]
    return {".weight": values, ".weight_scale_inv": scales}, dense


def gptq(outputs: int, inputs: int, bits: int = 4, v1: bool = True, ordered: bool = True) -> tuple[Stored, Tensor]:
    values, zeros = whole_numbers(1 << bits, inputs, outputs), whole_numbers((1 << bits) - 1, inputs // 16, outputs) + 1
    scales = scales_of(inputs // 16, outputs).half()
    group = (torch.arange(inputs) if ordered else torch.randperm(inputs, generator=GENERATOR)) // 16
    dense = torch.zeros(outputs, inputs)
    for row in range(inputs):
        dense[:, row] = (values[row] - zeros[group[row]]) * scales[group[row]].float()
    packed = words(values.t(), bits).t().contiguous()
    stored = {".qweight": packed, ".qzeros": words(zeros - int(v1), bits), ".scales": scales, ".g_idx": group.int()}
    return stored, dense


def awq(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    values, zeros, scales = (
        whole_numbers(16, inputs, outputs),
        whole_numbers(16, inputs // 16, outputs),
        scales_of(inputs // 16, outputs).half(),
    )
    dense = torch.zeros(outputs, inputs)
    for row in range(inputs):
        dense[:, row] = (values[row] - zeros[row // 16]) * scales[row // 16].float()

    def turned(numbers: Tensor) -> Tensor:
        return numbers.view(len(numbers), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)

    return {".qweight": words(turned(values), 4), ".qzeros": words(turned(zeros), 4), ".scales": scales}, dense


def in_no_order(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    """compressed-tensors with `actorder: group`, which its library no longer writes."""
    values, scales = whole_numbers(16, outputs, inputs), scales_of(outputs, inputs // 16)
    group = torch.randperm(inputs, generator=GENERATOR) // 16
    stored = {
        ".weight_packed": words(values, 4),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([outputs, inputs]),
        ".weight_g_idx": group.int(),
    }
    return stored, (values - 8) * scales[:, group]


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    """ModelOpt's: the scale of the whole tensor multiplies the others."""
    codes = whole_numbers(16, outputs, inputs)
    scales = (torch.rand(outputs, inputs // 16, generator=GENERATOR) + 0.5).to(torch.float8_e4m3fn)
    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])[codes]
    dense = numbers * (scales.float() * 0.0125).repeat_interleave(16, 1)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    beside = {".weight_scale_2": torch.tensor(0.0125), ".input_scale": torch.tensor(1.0)}
    return {".weight": packed, ".weight_scale": scales, **beside}, dense


def fp8_tensor(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    values = torch.randn(outputs, inputs, generator=GENERATOR).to(torch.float8_e4m3fn)
    beside = {".input_scale": torch.tensor(1.0), ".k_scale": torch.tensor(1.0)}
    return {".weight": values, ".weight_scale": torch.tensor(0.015), **beside}, values.float() * torch.tensor(0.015)


def fp8_rows(outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    values, scales = torch.randn(outputs, inputs, generator=GENERATOR).to(torch.float8_e4m3fn), scales_of(outputs, 1)
    return {".weight": values, ".weight_scale": scales, ".input_scale_ub": torch.ones(1)}, values.float() * scales


PACKED: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}},
}
#: Settings, what quantises, and how packed weights hold the codes; inputs whose groups are in no order become dense.
FORMATS: Mapping[str, tuple[Mapping[str, Any], Callable[[int, int], tuple[Stored, Tensor]], str]] = {
    "fp8, blocks": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, fp8_blocks, "table8"),
    "fp8, rows": ({"quant_method": "fbgemm_fp8"}, fp8_rows, "table8"),
    **{
        f"gptq, {bits} bits": (
            {"quant_method": "gptq", "bits": bits, "group_size": 16},
            partial(gptq, bits=bits),
            "int8" if bits == 8 else "int4",
        )
        for bits in (2, 3, 4, 8)
    },
    "gptq, second version": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2", "desc_act": True},
        partial(gptq, v1=False, ordered=False),
        "",
    ),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 16, "packing_format": "auto_round:auto_gptq"},
        gptq,
        "int4",
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, awq, "int4"),
    "compressed-tensors, in no order": (PACKED, in_no_order, ""),
    "modelopt, nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, nvfp4, "table4"),
    "modelopt, fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor, "table8"),
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
    """All projections of a Qwen model with experts; what is no projection, and one module, stay dense."""
    settings, quantise, kind = FORMATS[form]
    model_type, changed = CASES["qwen2_moe"]
    smaller = {"moe_intermediate_size": 64, "num_experts": 4, "num_hidden_layers": 3}
    reference(model_type, {**changed, **smaller}).save_pretrained(tmp_path / "dense")
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in list(tensors.items()):
        if ".layers." in name and name.endswith("_proj.weight") and ".2.self_attn.o_proj" not in name:
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
    reader = stored_tensors(folder)
    packed = {name: reader.packed(name, info) for name, info in tensor_index(folder).items()}
    held = {weight.kind.partition("/")[0] for weight in packed.values() if isinstance(weight, PackedWeight)}
    assert held == ({kind} if kind else set())
    for name, found in packed.items():
        assert found is None or torch.equal(found.dequantise(), tensors[name]), name
    assert inspect_checkpoint(folder).parameters == inspect_checkpoint(tmp_path / "dense").parameters


@pytest.mark.parametrize("form", ["gptq, 4 bits", "gptq, 8 bits", "awq", "modelopt, nvfp4"])
def test_projections_and_a_quantised_head_keep_their_codes(form: str, tmp_path: Path) -> None:
    settings, quantise, _ = FORMATS[form]
    reference("llama", {}).save_pretrained(tmp_path)
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            parts, _ = quantise(*weight.shape)
            stored |= {f"{name.removesuffix('.weight')}{end}": part.contiguous() for end, part in parts.items()}
        else:
            stored[name] = weight
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configure(tmp_path, settings)
    kept, dense = (
        load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 4, kept=KeptWeights(how))
        for how in ("auto", "none")
    )
    assert kept.changed_weights == ""
    pairs: list[Any] = [(kept.head, dense.head)]
    for mine, theirs in zip(kept.layers, dense.layers, strict=True):
        parts_: list[Any] = [(layer.attention, layer.feed_forward) for layer in (mine, theirs)]
        for part, name in ((0, "qkv"), (0, "output"), (1, "gate_up"), (1, "down")):
            pairs.append(tuple(getattr(layer[part], name) for layer in parts_))
    for mine_, other in pairs:
        assert torch.equal(mine_.dense(), other.dense())
        assert mine_.nbytes < other.nbytes / 2


def test_the_file_of_modelopt_counts_where_config_json_says_nothing(tmp_path: Path) -> None:
    reference("llama", {}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    parts, dense = fp8_tensor(*tensors.pop(name).shape)
    tensors |= {f"{name.removesuffix('.weight')}{end}": part for end, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    plain = weights_fingerprint(tmp_path)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert weights_fingerprint(tmp_path) != plain
    layer: Any = load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 4).layers[2]
    assert torch.equal(layer.feed_forward.gate_up.dense()[-len(dense) :], dense)


def test_experts_of_llama_4_in_one_tensor_have_one_scale(tmp_path: Path) -> None:
    """As ModelOpt writes them; the other weights have names and scales of their own."""
    model = reference(*CASES["llama4"])
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            weight.data.copy_(weight.data.to(torch.float8_e4m3fn).float() * 0.75)
    model.save_pretrained(tmp_path)
    dense = logits(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    stacked = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert stacked
    for name in stacked:
        tensors[name] = (tensors[name] / 0.75).to(torch.float8_e4m3fn)
        tensors |= {f"{name}_weight_scale": torch.tensor(0.75), f"{name}_input_scale": torch.tensor(1.0)}
    save_file(tensors, file, metadata={"format": "pt"})
    configure(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"})
    assert torch.equal(logits(tmp_path), dense)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        *[
            ("quantization_config.quant_method", {"quant_method": method, "bits": 4})
            for method in ("hqq", "quanto", "torchao", "aqlm", "bitnet", "exl3", None)
        ],
        ("quantization_config.bits", {"quant_method": "gptq", "bits": 5}),
        ("quantization_config.pack_dtype", {"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}),
        ("quantization_config.checkpoint_format", {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
        ("quantization_config.version", {"quant_method": "awq", "bits": 4, "version": "gemv"}),
        ("quantization_config.packing_format", {"quant_method": "auto-round", "bits": 4}),
        (
            "quantization_config.bnb_4bit_quant_storage",
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
        ),
        ("quantization_config.quant_algo", {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}),
        ("quantization_config.format", {**PACKED, "format": "marlin-24"}),
        ("quantization_config.sparsity_config", {**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}),
        ("quantization_config.transform_config", {**PACKED, "transform_config": {"config_groups": {"R1": {}}}}),
        (
            "quantization_config.config_groups.num_bits",
            {**PACKED, "config_groups": {"a": {"weights": {"num_bits": 9}}}},
        ),
        (
            "quantization_config.config_groups",
            {**PACKED, "config_groups": dict.fromkeys("ab", PACKED["config_groups"]["group_0"])},
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


def test_weights_that_are_stored_inputs_first_are_refused(tmp_path: Path) -> None:
    """Tools store some of these turned and some not."""
    reference("gpt2", {}).save_pretrained(tmp_path)
    configure(tmp_path, {"quant_method": "fp8"})
    with pytest.raises(UnsupportedModel, match="quantization_config: not supported for GPT2LMHeadModel"):
        load_config(tmp_path)


def test_scales_that_are_not_of_the_weight_are_named(tmp_path: Path) -> None:
    """Also where there are as many as rows: 96 rows, and scales of 8 by 12."""
    reference("llama", {}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(8, 12)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configure(tmp_path, {"quant_method": "fbgemm_fp8"})
    with pytest.raises(CheckpointError, match=r"scales \[8, 12\] are not those of .* \[96, 64\]"):
        load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 4)


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    reference("llama", {}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configure(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(CheckpointError, match=rf"{name} has no scales \(.weight_scale_inv or"):
        load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 4)
