"""Named model shapes, as the fields of Hugging Face configurations. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = Mapping[str, Any]

_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _shape(
    architecture: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> Shape:
    model_type = architecture.removesuffix("ForCausalLM").lower()
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **({"sliding_window": None} if model_type == "mistral" else {}),
        **({"use_sliding_window": False} if model_type.startswith("qwen") else {}),
        **more,
    }


#: Shapes that `moonpool model create` knows. Those named after a model have its shape, with random weights.
SHAPES: Mapping[str, Shape] = {
    # For tests: some 100,000 parameters.
    "tiny-llama": _shape("LlamaForCausalLM", 64, 128, 4, 4, 2, 512),
    "tiny-llama3": _shape(
        "LlamaForCausalLM",
        64,
        128,
        4,
        4,
        2,
        512,
        rope_theta=500000.0,
        rope_scaling={**_LLAMA3_SCALING, "original_max_position_embeddings": 64},
    ),
    "tiny-mistral": _shape("MistralForCausalLM", 64, 128, 4, 4, 1, 512),
    "tiny-qwen2": _shape("Qwen2ForCausalLM", 64, 128, 4, 4, 2, 512, tie_word_embeddings=True),
    "tiny-qwen3": _shape("Qwen3ForCausalLM", 64, 128, 4, 4, 2, 512, head_dim=32, tie_word_embeddings=True),
    # For measurements on a laptop.
    "small": _shape("LlamaForCausalLM", 512, 1408, 8, 8, 4, 32000, max_position_embeddings=8192),
    "smollm2-135m": _shape(
        "LlamaForCausalLM",
        576,
        1536,
        30,
        9,
        3,
        49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": _shape(
        "Qwen2ForCausalLM",
        896,
        4864,
        24,
        14,
        2,
        151936,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    ),
    "qwen3-0.6b": _shape(
        "Qwen3ForCausalLM",
        1024,
        3072,
        28,
        16,
        8,
        151936,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    ),
    "llama-3.2-1b": _shape(
        "LlamaForCausalLM",
        2048,
        8192,
        16,
        32,
        8,
        128256,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={**_LLAMA3_SCALING, "factor": 32.0},
        tie_word_embeddings=True,
    ),
    "llama-3-8b": _shape(
        "LlamaForCausalLM",
        4096,
        14336,
        32,
        32,
        8,
        128256,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    ),
    "mistral-7b": _shape(
        "MistralForCausalLM",
        4096,
        14336,
        32,
        32,
        8,
        32768,
        head_dim=128,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
    ),
}
