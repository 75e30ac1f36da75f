"""Writes a Hugging Face folder as a GGUF file by the `gguf` package's writer, as llama.cpp's converter would.

Or another GGUF file's matrices in another type.

For peers that read no other files, and for tests. Architectures llama, qwen2, qwen3 and qwen3moe.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType, GGUFValueType, TokenType
from numpy.typing import NDArray
from safetensors import safe_open

VALUE_TYPES: Mapping[type, GGUFValueType] = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
    list: GGUFValueType.ARRAY,
    **{getattr(np, kind.name.lower()): kind for kind in GGUFValueType if kind.name.lower().startswith(("int", "uint"))},
    np.float64: GGUFValueType.FLOAT64,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_ROUTERS = ("ffn_gate_inp",)
"""Matrices that the converter leaves in float32."""


def write_gguf(
    architecture: str,
    folder: Path,
    file: Path,
    kind: str = "F32",
    *,
    pre: str = "gpt-2",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[Any]] | None = None,
    leave_out: Sequence[str] = (),
    part_tensors: int = 0,
) -> Path:
    """Write a folder's model and tokenizer as GGUF, matrices in type `kind`; returns the file, or its first part.

    `metadata` adds or replaces integers, numbers and texts, `extra` adds tensors, `leave_out` names tensors that are
    left out. With `part_tensors` it comes in parts of so many at most.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=part_tensors)
    _add_config(writer, config)
    add_tokenizer(writer, folder, pre)
    for key, value in (metadata or {}).items():
        for added in writer.kv_data:
            added.pop(key, None)
        writer.add_key_value(key, value, VALUE_TYPES[type(value)])
    for name, values in _tensors(folder):
        stored, theirs = _as_converted(name, values, config), _name(name)
        if theirs not in leave_out:
            _add_tensor(writer, theirs, stored, "F32" if theirs.split(".")[-2] in _ROUTERS else kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    finish(writer)
    return writer.format_shard_names(file)[0] if part_tensors else file


def rewrite_gguf(source: Path, file: Path, kind: str, *, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write the model of a GGUF file with its matrices in type `kind`, from what their stored values stand for.

    `metadata` replaces integers, numbers and texts.
    """
    reader, changed = gguf.GGUFReader(source), metadata or {}
    writer = gguf.GGUFWriter(file, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    for field in reader.fields.values():
        if field.name == gguf.Keys.General.ARCHITECTURE or field.name.startswith("GGUF."):
            continue  # the writer says so itself
        inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, changed.get(field.name, field.contents()), field.types[0], inner)
    for tensor in reader.tensors:
        _add_tensor(writer, tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type), kind)
    finish(writer)
    return file


def _tensors(folder: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Numpy has no bfloat16, so all come by way of torch. A layer's experts are one tensor, expert by expert."""
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
        for name in names:
            stem, first, leaf = name.partition(".experts.0.")
            if first:
                experts = (f"{stem}.experts.{expert}.{leaf}" for expert in itertools.count())
                tensors = [weights.get_tensor(expert) for expert in itertools.takewhile(names.__contains__, experts)]
                yield f"{stem}.experts.{leaf}", torch.stack(tensors).float().numpy()
            elif ".experts." not in name:
                yield name, weights.get_tensor(name).float().numpy()


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str = "gpt-2") -> None:
    """Write the tokenizer and the chat template of a folder of the bundled model's kind."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    content = json.loads(backend.to_str())
    merges, special = content["model"]["merges"], {token["content"] for token in content["added_tokens"]}
    tokens = [backend.id_to_token(i) or "" for i in range(backend.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(settings.get("add_bos_token", False))
    writer.add_chat_template(settings["chat_template"])


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    layer, _, leaf = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[leaf]}.{kind}"


def _as_converted(name: str, values: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]:
    """The converter reorders the rows of q and k of Llama models (`LlamaModel.permute` in `convert_hf_to_gguf.py`)."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    leaf = name.split(".")[-2]
    if config["model_type"] != "llama" or leaf not in heads:
        return values
    halves = values.reshape(heads[leaf], 2, values.shape[0] // heads[leaf] // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: NDArray[Any], kind: str) -> None:
    number = GGMLQuantizationType[kind]
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, values)
    elif kind == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        stored = _random_blocks(values.shape, number) if kind.endswith("_K") else gguf.quantize(values, number)
        writer.add_tensor(name, stored, raw_dtype=number)


def _random_blocks(shape: Sequence[int], number: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Blocks that nobody quantised, for types that the package only dequantises: Q4_K (two scales come first) alone."""
    elements, size = gguf.GGML_QUANT_SIZES[number]
    assert number is GGMLQuantizationType.Q4_K
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
    scales = np.array([6e-4, 4e-3], dtype=np.float16).view(np.uint8)
    blocks[..., :4] = scales
    return blocks.reshape(*shape[:-1], -1)
