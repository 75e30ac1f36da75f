"""Mistral. GGUF files of it are of the llama architecture."""

from moonpool.checkpoint.families.base import ModelFamily

MISTRAL = ModelFamily(
    architecture="MistralForCausalLM",
    model_type="mistral",
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    kv_heads=8,
    window="always",
    max_positions=4096 * 32,
)
