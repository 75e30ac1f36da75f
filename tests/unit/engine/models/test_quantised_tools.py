"""Folders that the formats' own tools quantise: weights are those that the tools, or transformers, make dense again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, int8_vectorwise_quant, quantize_4bit
from compressed_tensors.compressors import ModelCompressor, decompress_module
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.quantization_config import Mxfp4Config

from moonpool.base.checkpoint import load_config
from moonpool.base.checkpoint.formats import tensor_index
from moonpool.engine.models.experts import MixtureOfExperts
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.tensor_files import stored_tensors
from moonpool.engine.models.tensor_reader import KeptWeights
from moonpool.engine.weights.packed import PackedWeight
from tests.unit.engine.models.forward import Runner, Sequence_
from tests.unit.engine.models.test_families import CASES, reference
from tests.unit.engine.models.test_parity import assert_greedy

PROMPT = [3 + 5 * i % 300 for i in range(40)]
DYNAMIC = {"input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True}}
DYNAMIC_FLOAT = {"input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}}
GROUP = {"strategy": "group", "group_size": 32}
#: Weights; activations where the format depends on them; how packed weights hold the codes.
SCHEMES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    "w4a16": ({"num_bits": 4, **GROUP}, {}, "int4"),
    "w4a16, zero points": ({"num_bits": 4, **GROUP, "symmetric": False}, {}, "int4"),
    "w3a16": ({"num_bits": 3, **GROUP}, {}, "int4"),
    "w6a16, zero points": ({"num_bits": 6, "strategy": "channel", "symmetric": False}, {}, "int6"),
    "w8a16": ({"num_bits": 8, "strategy": "channel"}, {}, "int8"),
    "w8a8": ({"num_bits": 8, "strategy": "channel"}, DYNAMIC, "int8"),
    "w8a8, zero points": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, DYNAMIC, "int8"),
    "fp8, tensor": ({"num_bits": 8, "type": "float", "strategy": "tensor"}, DYNAMIC_FLOAT, "table8"),
    "fp8, channel": ({"num_bits": 8, "type": "float", "strategy": "channel"}, DYNAMIC_FLOAT, "table8"),
    "fp8, block": (
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
        DYNAMIC_FLOAT,
        "table8",
    ),
    "mxfp4": ({"num_bits": 4, "type": "float", **GROUP, "scale_dtype": torch.uint8}, {}, "table4"),
    "mxfp8": ({"num_bits": 8, "type": "float", **GROUP, "scale_dtype": torch.uint8}, {}, "table8"),
    "nvfp4": ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, {}, "table4"),
}


def loaded(folder: Path) -> tuple[dict[str, Tensor], set[str]]:
    """Every tensor of the folder as the loader copies it, float32; and in which kinds the packed ones are held."""
    found: dict[str, Tensor] = {}
    held: set[str] = set()
    reader = stored_tensors(folder)
    for name, info in tensor_index(folder).items():
        found[name] = torch.empty(info.shape)
        reader.copy(name, info, found[name])
        if (packed := reader.packed(name, info)) is not None:
            assert isinstance(packed, PackedWeight)
            held.add(packed.kind)
            unit = 2.0**-23 if info.dtype == "I8" else 0.0  # bitsandbytes divides by 127 later
            dense = found[name] if found[name].dim() == 2 else found[name].transpose(1, 2).flatten(0, 1)
            torch.testing.assert_close(packed.dequantise(), dense, rtol=unit, atol=0)
    return found, held


def scale(module: Any) -> None:
    """Choose scales and zero points of one module by the least and the greatest weights that share them."""
    args, weight, scales = module.quantization_scheme.weights, module.weight, module.weight_scale
    if args.strategy == "block":
        rows, columns = args.block_structure
        shared = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
    else:
        shared = weight.reshape(scales.shape[0], -1) if scales.dim() < 2 or scales.shape[1] == 1 else weight
        shared = shared.unflatten(1, (scales.shape[1] if scales.dim() > 1 else 1, -1))
    whole = None
    if args.strategy == "tensor_group":
        whole = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.copy_(whole)
    found, zeros = calculate_qparams(shared.amin(-1), shared.amax(-1), args, whole)
    scales.copy_(found.view(scales.shape).bfloat16())  # as in published folders
    if not args.symmetric:
        module.weight_zero_point.copy_(zeros.view(scales.shape))


@pytest.mark.parametrize("name", SCHEMES)
@torch.no_grad()
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    weights, activations, kind = SCHEMES[name]
    model = reference("llama", {})
    dense = reference("llama", {})
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, **activations)
    settings = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head", "model.layers.1.mlp.up_proj"])
    apply_quantization_config(model, settings)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            scale(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    found, held = loaded(tmp_path)
    assert {form.partition("/")[0] for form in held} == {kind}
    kept = dense.state_dict()
    original = {at: weight.clone() for at, weight in kept.items()}
    for at, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            decompress_module(module)
            assert found[f"{at}.weight"].to(module.weight.dtype).equal(module.weight)
            kept[f"{at}.weight"].copy_(found[f"{at}.weight"])
            assert 0.0 < (module.weight - original[f"{at}.weight"]).abs().mean() < 0.05
    assert found.keys() == kept.keys()
    assert found["model.layers.1.mlp.up_proj.weight"].equal(original["model.layers.1.mlp.up_proj.weight"])
    assert_greedy(dense, PROMPT, Runner(tmp_path, torch.float32).generate([PROMPT], 12, 1000, 1000)[0])
    if kind == "table8":
        assert_kept(tmp_path)


@torch.no_grad()
def test_compressed_tensors_of_several_groups(tmp_path: Path) -> None:
    """As Kimi's folders: attention in FP8, the rest in 4 bits."""
    model = reference("llama", {})
    groups = {
        "rest": QuantizationScheme(targets=["Linear"], weights={"num_bits": 4, **GROUP}),
        "attention": QuantizationScheme(
            targets=["re:.*self_attn.*"],
            weights={"num_bits": 8, "type": "float", "strategy": "channel"},
            **DYNAMIC_FLOAT,
        ),
    }
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            scale(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    found, held = loaded(tmp_path)
    assert held == {"int4/32", "table8/64"}
    methods = set()
    for at, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            decompress_module(module)
            assert found[f"{at}.weight"].equal(module.weight)
            methods.add((at.split(".")[3], tensor_index(tmp_path)[f"{at}.weight"].dtype))
    assert methods == {("self_attn", "F8_E4M3"), ("mlp", "I32")}


@pytest.mark.parametrize(
    ("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True), ("int8", False)]
)
@torch.no_grad()
def test_bitsandbytes(kind: str, nested: bool, tmp_path: Path) -> None:
    dense = reference("llama", {})
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    settings = {"load_in_8bit": True} if kind == "int8" else settings
    stored = {}
    for name, weight in dense.state_dict().items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
        elif kind == "int8":
            values, scales, _ = int8_vectorwise_quant(weight.half())
            stored |= {name: values, name.replace("weight", "SCB"): scales, f"{name}_format": torch.tensor(0)}
            weight.copy_(int8_vectorwise_dequant(values, scales))
        else:
            values, state = quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
            stored |= {name: values} | {f"{name}.{key}": part for key, part in state.as_dict(packed=True).items()}
            # As one row: where rows end within a block, the tool's own code for AVX-512 takes another block's scale.
            state.shape = (weight.numel(),)
            weight.copy_(dequantize_4bit(values, state).view_as(weight))
    dense.config.quantization_config = {"quant_method": "bitsandbytes", **settings}
    dense.config.save_pretrained(tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    found, held = loaded(tmp_path)
    assert held == ({"int8/64", "int8/96"} if kind == "int8" else {"table4/64"})
    assert found.keys() == dense.state_dict().keys()
    for name, weight in dense.state_dict().items():
        assert found[name].equal(weight), name
    assert_greedy(dense, PROMPT, Runner(tmp_path, torch.float32).generate([PROMPT], 12, 1000, 1000)[0])
    if kind != "int8":
        assert_kept(tmp_path, "1 tensors of bnb_4bit (U8) are dense")  # scales of runs that go on in the next row


@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe"])
@torch.no_grad()
def test_fp8_in_blocks(case: str, tmp_path: Path) -> None:
    """As DeepSeek's, Kimi's and Qwen's folders; transformers makes the weights dense again."""
    reference(*CASES[case]).save_pretrained(tmp_path)
    stored = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        stored[name] = weight
        if name.endswith("_proj.weight"):
            blocks = weight.shape[0] // 16, weight.shape[1] // 16
            scales = torch.rand(blocks, generator=torch.Generator().manual_seed(len(stored))) * 0.01 + 0.001
            spread = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
            stored[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configure(tmp_path, {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]})
    how = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    assert_as_transformers(tmp_path, how)
    if case == "qwen3":  # the other's experts have inputs that no chunk fits
        assert_kept(tmp_path)


@torch.no_grad()
def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    model_type, changed = CASES["gpt_oss"]
    reference(model_type, {**changed, "intermediate_size": 64}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(119, 122, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    configure(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert_as_transformers(tmp_path, Mxfp4Config(dequantize=True))
    kept, plain = (
        load_stage(tmp_path, load_config(tmp_path), torch.float32, 0, 4, kept=KeptWeights(how))
        for how in ("auto", "none")
    )
    assert kept.changed_weights == ""
    assert sum(layer.nbytes for layer in kept.layers) < sum(layer.nbytes for layer in plain.layers) / 3
    for mine, theirs in zip(kept.layers, plain.layers, strict=True):
        assert isinstance(mine.feed_forward, MixtureOfExperts)
        assert isinstance(theirs.feed_forward, MixtureOfExperts)
        for own, other in zip(mine.feed_forward.experts, theirs.feed_forward.experts, strict=True):
            assert own.gate_up.dense().equal(other.gate_up.dense())
            assert own.down.dense().equal(other.down.dense())
    packed, dense = (
        Runner(tmp_path, torch.float32, quantization=how).step([(Sequence_(list(PROMPT)), len(PROMPT))])
        for how in ("auto", "none")
    )
    assert 0.0 < float((packed - dense).square().mean() / dense.square().mean()) < 1e-2


def assert_kept(folder: Path, changed: str = "") -> None:
    """Codes that stand for floats are kept, and give the logits of the dense weights up to the order of sums."""
    asked: tuple[Literal["auto"], Literal["none"]] = ("auto", "none")
    config = load_config(folder)
    kept, plain = (load_stage(folder, config, torch.float32, 0, 1, kept=KeptWeights(how)) for how in asked)
    assert kept.changed_weights == changed
    assert kept.layers[0].nbytes < plain.layers[0].nbytes / 2
    packed, dense = (
        Runner(folder, torch.float32, quantization=how).step([(Sequence_(list(PROMPT)), len(PROMPT))]) for how in asked
    )
    assert float((packed - dense).abs().max()) < 2e-5 * float(dense.abs().max())


def configure(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))


def assert_as_transformers(folder: Path, how: Any) -> None:
    """Weights are those that transformers makes dense, and so are greedy tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, dtype=torch.float32, attn_implementation="eager"
    )
    dense, (found, _) = model.state_dict(), loaded(folder)
    compared = found.keys() & dense.keys()
    assert any("mlp" in name for name in compared)
    for name in compared:
        assert found[name].equal(dense[name]), name
    assert_greedy(model, PROMPT, Runner(folder, torch.float32).generate([PROMPT], 12, 1000, 1000)[0])
