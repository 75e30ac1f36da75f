"""Qwen 3."""

from moonpool.checkpoint.families.base import GgufNames, ModelFamily

QWEN3 = ModelFamily(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    mlp_bias=False,
    qk_norm=True,
    kv_heads=32,
    head_dim=128,
    window="flag",
    max_positions=32768,
    gguf=GgufNames(architecture="qwen3"),
)
