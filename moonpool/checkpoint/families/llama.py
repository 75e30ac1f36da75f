"""Llama, and models that were converted to its architecture."""

from moonpool.checkpoint.families.base import GgufNames, ModelFamily

LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    model_type="llama",
    max_positions=2048,
    gguf=GgufNames(architecture="llama", paired_rows=True),
)
