"""Llama, and models converted to Llama's architecture."""

from moonpool.base.families.base import GgufNames, ModelFamily, class_sizes, llama_decoder

LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    model_type="llama",
    decoder=llama_decoder,
    sizes=class_sizes(32000, 4096, 11008, 32, 32),
    defaults={"max_position_embeddings": 2048},
    gguf=GgufNames(architecture="llama", paired_rows=True),
)
