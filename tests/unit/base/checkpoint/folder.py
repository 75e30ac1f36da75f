"""Small checkpoint folders without torch, for tests."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_config(folder: Path, **changed: Any) -> Path:
    """Write a Llama config.json; a value of `...` removes the field."""
    fields = {name: value for name, value in {**LLAMA, **changed}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def write_weights(file: Path, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> Path:
    """Write a safetensors file from (type, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file
