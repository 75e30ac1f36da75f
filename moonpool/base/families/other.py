"""Architectures that no family here describes: transformers' own modelling code computes them, if possible.

Only what KV needs is read of `config.json`: layers, KV heads, head size. All other keys count by their digest, so that
two configurations never share KV.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blake3 import blake3

from moonpool.base.errors import UnsupportedModel
from moonpool.base.families.base import ModelFamily
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.spec import AttentionSpec, DecoderSpec, FeedForwardSpec, LayerSpec, NormSpec

WHOLE_PROMPT_DIGITS, WHOLE_PROMPT_BASE = 8, 128
"""A token id in the place of KV: so many digits to this base, which every element type holds exactly."""
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model", "model_dim", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "max_sequence_length"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
}
ROBERTA_KIND = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "ernie_m")
"""Model types whose positions begin behind the padding token's id, and whose pairs have one type of tokens."""
_ENDS = ("ForCausalLM", "LMHeadModel")
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def other_family(architecture: str, model_type: object) -> ModelFamily | None:
    """Return the family of an architecture that is not described here; None if the name is not a decoder's."""
    if not architecture.endswith(_ENDS) or not isinstance(model_type, str):
        return None
    return ModelFamily(architecture=architecture, model_type=model_type, decoder=_decoder, defaults={}, other=True)


def whole_prompt_family(architecture: str, model_type: str) -> ModelFamily:
    """Return the family of a model that computes whole prompts, of which only token ids lie in the pool."""
    return ModelFamily(architecture=architecture, model_type=model_type, decoder=_token_ids, defaults={}, other=True)


def whole_prompt_length(fields: JsonFields) -> int:
    """Return the longest sequence of such a model: the positions, and the one answered token, which has no position.

    RoBERTa's positions begin behind the padding token's id.
    """
    positions = fields.positive("max_position_embeddings")
    if str(fields.get("model_type")) in ROBERTA_KIND:
        positions -= fields.get("pad_token_id", 1) + 1
    return positions + 1


def common_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's fields with the keys' common names beside config.json's own."""
    found = dict(data)
    for name, others in _OTHER_NAMES.items():
        value = next((data[other] for other in others if data.get(other) is not None), None)
        if found.get(name) is None and value is not None:
            found[name] = value
    return found


def _decoder(fields: JsonFields) -> DecoderSpec:
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        if fields.get(name) is None:
            raise UnsupportedModel("architectures", f"no family describes it, and config.json has no {name}")
    if fields.get("quantization_config"):
        raise UnsupportedModel("quantization_config", "quantised weights are not supported for this architecture")
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    size = fields.positive("head_dim", hidden // heads, null=hidden // heads)
    kv_heads = fields.positive("num_key_value_heads", heads, null=heads)
    layer = LayerSpec(
        AttentionSpec(heads, kv_heads, size, size**-0.5, rope=None),
        FeedForwardSpec(fields.positive("intermediate_size", 4 * hidden, null=4 * hidden)),
        NormSpec(),
    )
    layers = (layer,) * fields.positive("num_hidden_layers")
    return replace(DecoderSpec(layers, (), layer.norm), other=_digest(fields))


def _token_ids(fields: JsonFields) -> DecoderSpec:
    """Return one layer whose KV has room for a token id."""
    if fields.get("quantization_config"):
        raise UnsupportedModel("quantization_config", "quantised weights are not supported for this architecture")
    hidden = fields.positive("hidden_size")
    inner = FeedForwardSpec(fields.positive("intermediate_size", 4 * hidden, null=4 * hidden))
    layer = LayerSpec(AttentionSpec(1, 1, WHOLE_PROMPT_DIGITS, 1.0, rope=None), inner, NormSpec())
    return replace(DecoderSpec((layer,), (), layer.norm), other=_digest(fields))


def _digest(fields: JsonFields) -> str:
    said = {name: value for name, value in fields.all().items() if name not in _VOLATILE}
    return blake3(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
