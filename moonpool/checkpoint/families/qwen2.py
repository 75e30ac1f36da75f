"""Qwen 2 and 2.5."""

from moonpool.checkpoint.families.base import GgufNames, ModelFamily

QWEN2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
    kv_heads=32,
    window="flag",
    max_positions=32768,
    gguf=GgufNames(architecture="qwen2"),
)
