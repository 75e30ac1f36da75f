"""dots.llm1: Qwen3's attention with DeepSeek V3's experts."""

from moonpool.base.families.base import GgufNames, ModelFamily, layer_kinds, llama_decoder, windowed
from moonpool.base.families.deepseek import SHARED_EXPERT_KEYS, shared_experts, with_dense_layers
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields).each(lambda _, layer: layer.with_attention(qk_norm=layer.norm))
    decoder = with_dense_layers(fields, decoder, shared_experts(fields))
    layers = len(decoder.layers)
    return windowed(fields, decoder, layer_kinds(fields, layers, ["full_attention"] * layers))


DOTS1 = ModelFamily(
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    decoder=_decoder,
    defaults={"max_position_embeddings": 2048, "norm_topk_prob": False, "first_k_dense_replace": 0},
    gguf=GgufNames(architecture="dots1", keys=SHARED_EXPERT_KEYS),
)
