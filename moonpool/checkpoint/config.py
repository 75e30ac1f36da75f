"""A checkpoint's `config.json` and `generation_config.json` as one frozen value, or a refusal that names the field.

Every feature that would change the result and is not implemented is refused here, before any memory is allocated.

Both spellings are read: `rope_theta`/`rope_scaling`/`torch_dtype` and the `rope_parameters`/`dtype` of transformers 5.
Where a key is absent, the default is the one of transformers' configuration class of that architecture.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from moonpool.checkpoint.fields import Fields, read_json
from moonpool.checkpoint.support import FAMILIES, architecture_of, refuse_sliding_window, refuse_unsupported
from moonpool.errors import CheckpointError, UnsupportedModel
from moonpool.kv.layout import KVLayout

#: Element types that weights, activations and KV may have.
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are changed for a longer context.

    `kind` is "linear" (all frequencies divided by `factor`) or "llama3" (low frequencies divided by `factor`, high
    ones kept, smooth between; the other fields bound the two regions).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """Sampling that the checkpoint's `generation_config.json` suggests; None where it says nothing.

    `temperature` is 0 when it says `do_sample: false`.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family.

    `qkv_bias`, `output_bias` and `mlp_bias` say which projections have one; `qk_norm` that queries and keys are
    normalised per head before RoPE. `dtype` is the type the weights are declared in. No sequence may be longer than
    `max_position_embeddings`.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_sampling: DefaultSampling = DefaultSampling()


def load_config(path: Path | str) -> ModelConfig:
    """Read the configuration of the checkpoint folder `path`.

    Raises:
        CheckpointError: the folder has no readable configuration, or a field is missing or malformed.
        UnsupportedModel: the model needs something that is not implemented; names the field.
    """
    folder = Path(path)
    fields = Fields(read_json(folder / "config.json"), "config.json")
    architecture = architecture_of(fields)
    family = FAMILIES[architecture]
    refuse_unsupported(fields)
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    layers = fields.positive("num_hidden_layers")
    positions = fields.positive("max_position_embeddings", family.max_positions)
    refuse_sliding_window(fields, family, layers, positions)
    theta, scaling = _rope(fields, positions)
    generation = _generation_fields(folder)
    attention_bias = fields.flag("attention_bias", False)
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.positive("num_key_value_heads", family.kv_heads or heads, null=heads),
        head_dim=fields.positive("head_dim", family.head_dim or hidden // heads, null=hidden // heads),
        intermediate_size=fields.positive("intermediate_size"),
        vocab_size=fields.positive("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=fields.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        dtype=_declared_dtype(fields),
        eos_token_ids=_token_ids(generation, "eos_token_id") or _token_ids(fields, "eos_token_id"),
        bos_token_id=next(iter(_token_ids(generation, "bos_token_id") or _token_ids(fields, "bos_token_id")), None),
        default_sampling=_default_sampling(generation),
    )
    _check_shape(config)
    return config


def config_hash(config: ModelConfig) -> bytes:
    """Return 32 bytes that are equal exactly where two configurations compute the same function of the weights.

    The declared dtype, the end tokens and the suggested sampling are left out: they change neither KV nor logits.
    """
    fields = dataclasses.asdict(config)
    for name in ("dtype", "eos_token_ids", "bos_token_id", "default_sampling"):
        del fields[name]
    return blake3(b"moonpool config 1\0" + json.dumps(fields, sort_keys=True).encode()).digest()


def resolve_dtype(config: ModelConfig, dtype: str = "auto") -> str:
    """Return the element type to run in: `dtype`, or the checkpoint's own for "auto".

    Raises:
        UnsupportedModel: `dtype` is none of "auto", "float32", "bfloat16", "float16".
    """
    if dtype == "auto":
        return config.dtype
    if dtype not in DTYPES:
        raise UnsupportedModel("dtype", f"{dtype!r} is none of auto, {', '.join(DTYPES)}")
    return dtype


def kv_layout(config: ModelConfig, dtype: str, block_tokens: int) -> KVLayout:
    """Return how one block of this model's KV is arranged, all layers, in element type `dtype`."""
    return KVLayout(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
    )


def _rope(fields: Fields, positions: int) -> tuple[float, RopeScaling | None]:
    """Return the base and the scaling, from either spelling; a set `rope_scaling` wins, as in transformers."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    raw = fields.get(name) or {}
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"config.json: {name} must be an object, not {raw!r}")
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise UnsupportedModel(name, "RoPE that differs between layers is not supported")
    rope = Fields(raw, f"config.json: {name}")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{name}.partial_rotary_factor", "RoPE on a part of each head is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", rope.number("factor"))
    if kind != "llama3":
        raise UnsupportedModel(f"{name}.rope_type", f"{kind!r} is none of default, linear, llama3")
    original = fields.positive("original_max_position_embeddings", positions)
    scaling = RopeScaling(
        "llama3",
        rope.number("factor"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
        rope.positive("original_max_position_embeddings", original),
    )
    if not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise CheckpointError(f"config.json: {name}.low_freq_factor must be positive and below high_freq_factor")
    return theta, scaling


def _declared_dtype(fields: Fields) -> str:
    """Return the declared element type; float32 where none is declared."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.get(name)
    if dtype is None:
        return "float32"
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedModel(name, f"{dtype!r} is none of {', '.join(DTYPES)}")
    return dtype


def _generation_fields(folder: Path) -> Fields:
    """Return `generation_config.json`, empty where the folder has none."""
    path = folder / "generation_config.json"
    return Fields(read_json(path) if path.exists() else {}, path.name)


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    """Return one id, several or none as a tuple."""
    value = fields.get(name)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise CheckpointError(f"{fields.source}: {name} must be token ids, not {value!r}")
    return tuple(dict.fromkeys(ids))


def _default_sampling(fields: Fields) -> DefaultSampling:
    """Return what `generation_config.json` suggests."""

    def optional(name: str) -> float | None:
        return None if fields.get(name) is None else fields.number(name)

    def optional_int(name: str) -> int | None:
        value: Any = optional(name)
        return None if value is None else int(value)

    greedy = fields.get("do_sample") is False
    return DefaultSampling(
        temperature=0.0 if greedy else optional("temperature"),
        top_p=optional("top_p"),
        top_k=optional_int("top_k"),
        min_p=optional("min_p"),
        repetition_penalty=optional("repetition_penalty"),
        max_tokens=optional_int("max_new_tokens"),
    )


def _check_shape(config: ModelConfig) -> None:
    """Refuse shapes that no weights can have."""
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads ({config.num_heads}) must be a multiple of num_key_value_heads "
            f"({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"config.json: head_dim ({config.head_dim}) must be even")
