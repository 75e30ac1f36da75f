"""The tensors of a GGUF file under the names that Hugging Face checkpoints give them."""

from __future__ import annotations

import re
from pathlib import Path

from moonpool.checkpoint.gguf_config import ROPE_DIVISORS, config_of
from moonpool.checkpoint.gguf_file import GgufFile
from moonpool.checkpoint.weights import TensorInfo
from moonpool.errors import UnsupportedModel

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<leaf>\w+)\.(?P<kind>weight|bias)")
_PAIRED = ("attn_q", "attn_k")


def gguf_index(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of a GGUF file by its Hugging Face name.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedModel: the file has a tensor that the model would not use; names it.
    """
    file = GgufFile.read(path)
    config = config_of(file)
    # llama.cpp turns every second element of a head in RoPE, Hugging Face those half a head apart. Its converter
    # reorders the rows of q and k of the llama architecture for that, and of no other.
    paired = config.head_dim if config.architecture == "LlamaForCausalLM" else 0
    index = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_DIVISORS:
            continue
        ours, leaf = _translated(name)
        head_rows = paired if leaf in _PAIRED else 0
        index[ours] = TensorInfo(tensor.file, tensor.type.name, tensor.shape, begin=tensor.begin, paired_rows=head_rows)
    return index


def _translated(name: str) -> tuple[str, str]:
    """Return the Hugging Face name of a tensor, and its part of GGUF's name that says what it does."""
    match = _NAME.fullmatch(name)
    names = {} if match is None else _OUTER if match["layer"] is None else _LAYER
    if match is None or match["leaf"] not in names:
        raise UnsupportedModel(name, "this tensor has no place in a model of this architecture")
    prefix = "" if match["layer"] is None else f"model.layers.{match['layer']}."
    return f"{prefix}{names[match['leaf']]}.{match['kind']}", match["leaf"]
