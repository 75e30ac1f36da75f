"""Granite, dense and with experts: factors of embeddings, residual sums, attention and logits."""

from dataclasses import replace

from moonpool.families.base import GgufNames, ModelFamily, TensorNames, llama_decoder
from moonpool.families.fields import JsonFields
from moonpool.families.spec import DecoderSpec, ExpertsSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    residual, scale = fields.number("residual_multiplier", 1.0), fields.number("attention_multiplier", 1.0)
    decoder = replace(
        llama_decoder(fields),
        embedding_factor=fields.number("embedding_multiplier", 1.0),
        logits_factor=1.0 / fields.number("logits_scaling", 1.0),
    )
    return decoder.each(lambda _, layer: replace(layer, residual_factor=residual).with_attention(scale=scale))


def _moe_decoder(fields: JsonFields) -> DecoderSpec:
    experts = ExpertsSpec(
        fields.positive("num_local_experts"),
        fields.positive("num_experts_per_tok"),
        fields.positive("intermediate_size"),
        "softmax_chosen",
    )
    return _decoder(fields).each(lambda _, layer: layer.with_feed_forward(experts=experts))


_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale",
}
GRANITE = ModelFamily(
    architecture="GraniteForCausalLM",
    model_type="granite",
    decoder=_decoder,
    defaults={"max_position_embeddings": 2048},
    gguf=GgufNames(architecture="granite", paired_rows=True, keys=_KEYS),
)
GRANITE_MOE = ModelFamily(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    decoder=_moe_decoder,
    defaults={"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    names=TensorNames(
        router="block_sparse_moe.router.layer",
        experts_gate_up="block_sparse_moe.input_linear.weight",
        experts_down="block_sparse_moe.output_linear.weight",
    ),
    gguf=GgufNames(
        architecture="granitemoe",
        paired_rows=True,
        keys={**_KEYS, "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    ),
)
