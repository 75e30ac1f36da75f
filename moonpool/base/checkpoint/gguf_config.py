"""The configuration of a model in a GGUF file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from moonpool.base.checkpoint.config import (
    DTYPES,
    DefaultSampling,
    ModelConfig,
    check_shape,
    ends_answer,
)
from moonpool.base.checkpoint.gguf import GgufFile
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families import gguf_family
from moonpool.base.families.base import GgufNames, ModelFamily
from moonpool.base.families.deepseek import DEEPSEEK_V3
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.mixtral import MIXTRAL
from moonpool.base.families.rope import chosen_factors, longest
from moonpool.base.families.spec import DecoderSpec, RecurrentSpec, RopeScaling

ROPE_DIVISORS = "rope_freqs.weight"
SECOND_NORM = "blk.0.attn_norm_2.weight"
"""A norm of Falcon's attention, where the first one is the network's."""
LONGROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_CONTROL_TOKEN = 3


#: Keys that change the result where they are neither absent nor 0, and are refused where the family does not read them.
_REFUSED = (
    "expert_count",
    "attention.scale",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
)
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_QUANTISED = "bfloat16"
_SIGMOID = 2
"""Value of `expert_gating_func`."""


def gguf_config(path: Path, max_model_len: int = 0) -> ModelConfig:
    """Read the configuration of the GGUF file `path`, for sequences of up to `max_model_len` tokens if not 0.

    Biases and a separate output head exist if their tensors do. The declared dtype is the type that most elements have,
    bfloat16 where they are quantised.

    Raises:
        CheckpointError: the file is damaged, or a key is missing or malformed.
        UnsupportedModel: the model needs something that is not implemented; names the key.
    """
    return config_of(GgufFile.read(path), max_model_len)


def config_of(file: GgufFile, max_model_len: int = 0) -> ModelConfig:
    """As `gguf_config`, for a file with a header that has been read."""
    family = _family(file)
    assert family.gguf is not None
    found = _config_keys(file, family)
    fields = chosen_factors(family.fields(found, file.path.name), max_model_len)
    tokens = JsonFields(file.metadata, f"{file.path.name}: tokenizer")
    config = ModelConfig(
        architecture=family.architecture,
        hidden_size=found["hidden_size"],
        vocab_size=_vocabulary(file),
        decoder=_decoder(file, family, family.decoder(fields)),
        max_position_embeddings=longest(fields),
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype=_most_common_dtype(file),
        eos_token_ids=_end_tokens(file, tokens),
        bos_token_id=_token_id(file, tokens, "tokenizer.ggml.bos_token_id"),
        default_sampling=_default_sampling(JsonFields(file.metadata, file.path.name)),
    )
    check_shape(config, file.path.name)
    return config


def _default_sampling(fields: JsonFields) -> DefaultSampling:
    """Return what the file suggests, by the keys that llama.cpp reads."""

    def suggested(key: str) -> float | None:
        name = f"general.sampling.{key}"
        return None if fields.get(name) is None else fields.number(name)

    top_k = suggested("top_k")
    return DefaultSampling(
        temperature=suggested("temp"),
        top_p=suggested("top_p"),
        top_k=None if top_k is None else int(top_k),
        repetition_penalty=suggested("penalty_repeat"),
        min_p=suggested("min_p"),
    )


def _family(file: GgufFile) -> ModelFamily:
    """Return the file's family. Mixtral's files have the llama architecture, DeepSeek V3's have V2's."""
    name = file.metadata.get("general.architecture")
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return MIXTRAL
    if name == "deepseek2" and file.metadata.get("deepseek2.expert_gating_func") == _SIGMOID:
        return DEEPSEEK_V3
    return gguf_family(name)


def _config_keys(file: GgufFile, family: ModelFamily) -> dict[str, Any]:
    """Return what config.json would have."""
    assert family.gguf is not None
    name = str(file.metadata["general.architecture"])
    fields = JsonFields(file.metadata, file.path.name)
    hidden, heads = fields.positive(f"{name}.embedding_length"), _heads(fields, family, name, "attention.head_count")
    head_dim = fields.positive(f"{name}.attention.key_length", max(1, hidden // heads))
    positions = fields.positive(f"{name}.context_length")
    _refuse(file, family, name, head_dim, positions)
    found: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": fields.positive(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _heads(fields, family, name, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": _vocabulary(file),
        "rope_theta": fields.number(f"{name}.rope.freq_base", 10000.0),
        "partial_rotary_factor": fields.positive(f"{name}.rope.dimension_count", head_dim) / head_dim,
        "max_position_embeddings": positions,
    }
    if (inner := fields.get(f"{name}.feed_forward_length")) is not None or not fields.get(f"{name}.expert_count"):
        unlike = isinstance(inner, list) and "feed_forward_length" not in family.gguf.keys.values()
        if unlike and len(set(inner)) != 1:
            raise UnsupportedModel(f"{name}.feed_forward_length", "layers of different widths are not supported")
        found["intermediate_size"] = max(inner) if isinstance(inner, list) and inner else inner
        JsonFields(found, fields.source).positive("intermediate_size")
    else:  # files whose layers all have experts may give only the experts' width
        found["intermediate_size"] = fields.positive(f"{name}.expert_feed_forward_length")
    epsilon = fields.get(f"{name}.attention.layer_norm_rms_epsilon", fields.get(f"{name}.attention.layer_norm_epsilon"))
    if epsilon is None:
        raise CheckpointError(f"{fields.source}: {name}.attention.layer_norm_rms_epsilon is missing")
    found |= dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"), epsilon)
    found |= {
        ours: file.metadata[f"{name}.{key}"]
        for ours, key in family.gguf.keys.items()
        if f"{name}.{key}" in file.metadata
    }
    if family.gguf.further_layers:
        found["num_hidden_layers"] -= int(fields.number(f"{name}.{family.gguf.further_layers}", 0))
    found["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    found["num_ln_in_parallel_attn"] = 1 + (SECOND_NORM in file.tensors)
    found["normed_states"] = "blk.0.ssm_norm.weight" in file.tensors
    values = {f"blk.{index}.attn_v.weight" in file.tensors for index in _attending(file)}
    found["attention_k_eq_v"] = values == {True, False}
    if (scaling := _rope_scaling(fields, name)) is not None:
        found["rope_scaling"] = scaling
    if all(factors in file.tensors for factors in LONGROPE_FACTORS):
        short, long = (list(file.floats(factors)) for factors in LONGROPE_FACTORS)
        factor = fields.number(f"{name}.rope.scaling.attn_factor", 1.0)
        found["original_max_position_embeddings"] = fields.positive(
            f"{name}.rope.scaling.original_context_length", positions
        )
        found["rope_scaling"] = {
            "rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": factor,
        }  # fmt: skip
    return {**found, **family.gguf.complete(found)}


def _decoder(file: GgufFile, family: ModelFamily, decoder: DecoderSpec) -> DecoderSpec:
    """Return `decoder` with what the file's tensors say: biases, RoPE's divisors, norms that hold their offset."""
    assert family.gguf is not None
    biases = {leaf: f"blk.0.{leaf}.bias" in file.tensors for leaf in ("attn_q", "attn_qkv", "attn_output", "ffn_up")}
    decoder = decoder.each(
        lambda _, layer: layer.with_attention(
            qkv_bias=biases["attn_q"] or biases["attn_qkv"], output_bias=biases["attn_output"]
        ).with_feed_forward(bias=biases["ffn_up"])
    )
    if family.gguf.recurrent:
        decoder = decoder.each(lambda _, layer: replace(layer, recurrent=_converted(layer.recurrent, family.gguf)))
    if family.gguf.whole_norms:
        decoder = replace(decoder, final_norm=replace(decoder.final_norm, offset=0.0)).each(
            lambda _, layer: replace(layer, norm=replace(layer.norm, offset=0.0)).with_attention(
                qk_norm=layer.attention.qk_norm and replace(layer.attention.qk_norm, offset=0.0)
            )
        )
    if ROPE_DIVISORS not in file.tensors:
        return decoder
    divisors, rope = file.floats(ROPE_DIVISORS), decoder.ropes[0]
    if set(divisors[rope.width // 2 :]) == {1.0}:  # padded for layers that rotate whole heads
        divisors = divisors[: rope.width // 2]
    if len(divisors) != rope.width // 2 or rope.scaling is not None:
        raise UnsupportedModel(ROPE_DIVISORS, f"has {len(divisors)} elements, with other scaling beside it")
    scaled = replace(rope, scaling=RopeScaling("divisors", 1.0, divisors=divisors))
    return replace(decoder, ropes=(scaled, *decoder.ropes[1:]))


def _attending(file: GgufFile) -> list[int]:
    """Return the layers that have keys of their own."""
    return [int(name.split(".")[1]) for name in file.tensors if name.endswith(".attn_k.weight")]


def _converted(spec: RecurrentSpec | None, gguf: GgufNames | None) -> RecurrentSpec | None:
    """Return a recurrent part as llama.cpp's converter leaves its tensors."""
    if spec is None or spec.kind == "short_conv":
        return spec
    return replace(spec, decay_stored=True, in_turn=gguf is not None and gguf.in_turn)


def _refuse(file: GgufFile, family: ModelFamily, name: str, head_dim: int, positions: int) -> None:
    """Refuse what would change the result and is not implemented, or not for this family.

    `name`: the file's architecture, with which keys begin.
    """
    assert family.gguf is not None
    known, fields = family.gguf.keys.values(), JsonFields(file.metadata, file.path.name)
    for key in _REFUSED:
        if key not in known and fields.get(f"{name}.{key}"):
            raise UnsupportedModel(f"{name}.{key}", f"{fields.get(f'{name}.{key}')!r} is not supported")
    length = fields.positive(f"{name}.attention.value_length", head_dim)
    if length != head_dim and "attention.value_length" not in known:
        raise UnsupportedModel(f"{name}.attention.value_length", "values of another length than keys are not supported")
    if fields.number(f"{name}.rope.scaling.attn_factor", 1.0) != 1.0 and LONGROPE_FACTORS[0] not in file.tensors:
        raise UnsupportedModel(f"{name}.rope.scaling.attn_factor", "scaled attention is not supported")
    window = fields.number(f"{name}.attention.sliding_window", 0.0)
    if "attention.sliding_window" not in known and 0 < window < positions:
        raise UnsupportedModel(
            f"{name}.attention.sliding_window", f"attention to the last {window:g} tokens only is not supported"
        )


def _heads(fields: JsonFields, family: ModelFamily, name: str, key: str, default: int | None = None) -> int:
    """Return the heads that `key` tells; files may list them layer by layer. Recurrent layers have no KV heads."""
    assert family.gguf is not None
    whole = f"{name}.{key}"
    listed = fields.get(whole)
    if not isinstance(listed, list):
        return fields.positive(whole, default)
    listed = [count for count in listed if count or not family.gguf.recurrent]
    if len(set(listed)) != 1 and (family.gguf.recurrent or key not in family.gguf.keys.values()):
        raise UnsupportedModel(whole, "layers with different numbers of heads are not supported")
    return JsonFields({whole: listed[0]}, fields.source).positive(whole)


def _vocabulary(file: GgufFile) -> int:
    """Return the embedding's rows; the token list may be shorter."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    return embedding.shape[0]


def _rope_scaling(fields: JsonFields, name: str) -> Mapping[str, Any] | None:
    """Return `rope_scaling` of config.json; the divisors of Llama 3's files are a tensor."""
    kind = fields.get(f"{name}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(f"{name}.rope.scaling.type", f"{kind!r} is none of none, linear, yarn")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": fields.number(f"{name}.rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.positive(f"{name}.rope.scaling.original_context_length")
    return scaling


def _most_common_dtype(file: GgufFile) -> str:
    """Return the type that most elements have."""
    elements: Counter[str] = Counter()
    for tensor in file.tensors.values():
        elements[_STORED.get(tensor.type.name, _QUANTISED)] += prod(tensor.shape)
    return max(DTYPES, key=lambda dtype: elements[dtype])


def _token_id(file: GgufFile, fields: JsonFields, key: str) -> int | None:
    """Return a token's id, None where there is none. Files say so with an id outside the vocabulary, too."""
    value = fields.get(key)
    if value is not None and type(value) is not int:
        raise CheckpointError(f"{fields.source}: {key} must be a token id, not {value!r}")
    return value if value is not None and 0 <= value < _vocabulary(file) else None


def _end_tokens(file: GgufFile, fields: JsonFields) -> tuple[int, ...]:
    """Return the tokens that end an answer; the token that the file names comes first."""
    ids = [_token_id(file, fields, f"tokenizer.ggml.{key}") for key in _END_IDS]
    tokens, kinds = (file.metadata.get(f"tokenizer.ggml.{key}") or [] for key in ("tokens", "token_type"))
    control = {str(tokens[i]): i for i, kind in enumerate(kinds[: len(tokens)]) if kind == _CONTROL_TOKEN}
    ends = ends_answer(control)
    ids += [i for token, i in control.items() if token in ends]
    return tuple(dict.fromkeys(i for i in ids if i is not None))
