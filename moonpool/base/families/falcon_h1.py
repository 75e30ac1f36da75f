"""Falcon-H1: in each layer Mamba-2 and attention side by side, and factors nearly everywhere.

A layer of a checkpoint is two layers here, because each has KV: Mamba-2, then attention beside, with the network.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.base import GgufNames, ModelFamily, TensorNames, llama_decoder
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.granite import MAMBA_KEYS, refuse_step_limits
from moonpool.base.families.spec import DecoderSpec, LayerSpec, RecurrentSpec


def _decoder(fields: JsonFields) -> DecoderSpec:
    refuse_step_limits(fields)
    if fields.flag("projectors_bias", False) or fields.flag("attention_bias", False):
        raise UnsupportedModel("attention_bias", "biases beside factors are not supported for Falcon-H1")
    normed = fields.flag("mamba_rms_norm", False)
    if normed and fields.flag("mamba_norm_before_gate", True):
        raise UnsupportedModel("mamba_norm_before_gate", "a norm before the gate is not supported")
    decoder = llama_decoder(fields)
    heads, inner = fields.positive("mamba_n_heads"), fields.get("mamba_d_ssm")
    expanded = fields.positive("mamba_expand", 2) * fields.positive("hidden_size")
    width = expanded if inner is None else fields.positive("mamba_d_ssm")
    taken = fields.number("ssm_in_multiplier", 1.0)
    mamba = RecurrentSpec(
        "mamba2",
        fields.positive("mamba_d_conv"),
        heads=heads,
        key_heads=fields.positive("mamba_n_groups"),
        key_dim=fields.positive("mamba_d_state"),
        value_dim=width // heads,
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
        norm_eps=decoder.final_norm.eps,
        gate_first=True,
        without_norm=not normed,
        input_factors=tuple(taken * factor for factor in _factors(fields, "ssm_multipliers", 5)),
        output_factor=fields.number("ssm_out_multiplier", 1.0),
    )
    if mamba.bias and taken != 1.0:
        raise UnsupportedModel("mamba_proj_bias", "a bias beside ssm_in_multiplier is not supported")
    gate, result = _factors(fields, "mlp_multipliers", 2)
    factor = fields.number("attention_in_multiplier", 1.0)
    keys = fields.number("key_multiplier", 1.0) * factor**2

    def both(index: int, layer: LayerSpec) -> tuple[LayerSpec, LayerSpec]:
        layer = replace(layer, stored_at=(index, index))
        attends = layer.with_attention(
            scale=layer.attention.scale * keys,
            value_factor=factor * fields.number("attention_out_multiplier", 1.0),
        ).with_feed_forward(gate_factor=gate, output_factor=result)
        first = replace(attends, recurrent=mamba, feed_forward_norm=False).with_feed_forward(inner=0)
        return first, replace(attends, attention_norm=False, beside=True)

    layers = tuple(part for index, layer in enumerate(decoder.layers) for part in both(index, layer))
    return replace(
        decoder,
        layers=layers,
        embedding_factor=fields.number("embedding_multiplier", 1.0),
        logits_factor=fields.number("lm_head_multiplier", 1.0),
    )


def _factors(fields: JsonFields, key: str, count: int) -> tuple[float, ...]:
    """Return a list of factors, all 1 if absent."""
    given = fields.get(key)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, list) or len(given) != count:
        raise CheckpointError(f"{fields.source}: {key} must be a list of {count} numbers, not {given!r}")
    return tuple(JsonFields({key: value}, fields.source).number(key) for value in given)


def _from_gguf(found: dict[str, Any]) -> Mapping[str, Any]:
    """Return the keys of config.json. Converters multiply the weights by all factors."""
    return {"mamba_d_ssm": found["inner"], "mamba_rms_norm": found["normed_states"], "mamba_norm_before_gate": False}


FALCON_H1 = ModelFamily(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    decoder=_decoder,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
    },
    names=TensorNames(
        norm="model.final_layernorm",
        feed_forward_norm="pre_ff_layernorm",
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        recurrent={
            "inputs": ("mamba.in_proj",),
            "conv": ("mamba.conv1d",),
            "decay": ("mamba.A_log",),
            "step_bias": ("mamba.dt_bias",),
            "skip": ("mamba.D",),
            "norm": ("mamba.norm",),
            "output": ("mamba.out_proj",),
        },
    ),
    gguf=GgufNames(
        architecture="falcon-h1",
        keys=MAMBA_KEYS,
        complete=_from_gguf,
        recurrent={
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_a": "mamba.A_log",
            "ssm_dt": "mamba.dt_bias",
            "ssm_d": "mamba.D",
            "ssm_norm": "mamba.norm",
            "ssm_out": "mamba.out_proj",
        },
    ),
)
