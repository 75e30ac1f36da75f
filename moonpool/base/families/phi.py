"""Phi 1 to 2 (parallel parts, layer norms), and Phi 3 and 4 (Llama with fused projections)."""

from dataclasses import replace

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, layer_kinds, llama_decoder, windowed
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import DecoderSpec, NormSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    if fields.flag("qk_layernorm", False):
        raise UnsupportedModel("qk_layernorm", "norms of queries and keys are not supported for Phi")
    norm = NormSpec("layer", fields.number("layer_norm_eps"), bias=True)
    return replace(llama_decoder(fields), final_norm=norm, head_bias=True).each(
        lambda _, layer: (
            replace(layer, norm=norm, parallel=True, feed_forward_norm=False)
            .with_attention(qkv_bias=True, output_bias=True)
            .with_feed_forward(gated=False, bias=True)
        )
    )


def _decoder3(fields: JsonFields) -> DecoderSpec:
    decoder = llama_decoder(fields).each(
        lambda _, layer: layer.with_attention(qkv_bias=False, output_bias=False).with_feed_forward(bias=False)
    )
    layers = len(decoder.layers)
    return windowed(fields, decoder, layer_kinds(fields, layers, ["sliding_attention"] * layers))


PHI = ModelFamily(
    architecture="PhiForCausalLM",
    model_type="phi",
    decoder=_decoder,
    defaults={
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5,
    },
    names=TensorNames(
        norm="model.final_layernorm", output="self_attn.dense", up="mlp.fc1", down="mlp.fc2"
    ),
    gguf=GgufNames(architecture="phi2"),
)  # fmt: skip
PHI3 = ModelFamily(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    decoder=_decoder3,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    names=TensorNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    gguf=GgufNames(
        architecture="phi3",
        keys={"sliding_window": "attention.sliding_window"},
        complete=lambda found: {"sliding_window": found.get("sliding_window") or None},  # Phi 4's files say 0
        renamed={"ffn_up": "gate_up"},
    ),
)
