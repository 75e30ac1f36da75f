"""What a model is: a frozen value that says all that computing it needs, and its identity.

Every feature that would change the result and is not implemented is refused by those who read a checkpoint
(`moonpool.checkpoint.folder`, `moonpool.checkpoint.gguf_config`), before any memory is allocated.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from blake3 import blake3

from moonpool.errors import CheckpointError, UnsupportedModel
from moonpool.kv.layout import QUANTISED, KVLayout

#: Element types that weights and activations may have.
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are changed for a longer context.

    `kind` is "linear" (all frequencies divided by `factor`) or "llama3" (low frequencies divided by `factor`, high
    ones kept, smooth between; the other fields bound the two regions), or "divisors" (each divided by one of its own).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """Sampling that the checkpoint's `generation_config.json` suggests; None where it says nothing.

    Where it says `do_sample: false`, only `repetition_penalty` counts, as in transformers.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None

    @property
    def given(self) -> dict[str, float | int]:
        """What it says, by the names of sampling parameters."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


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


def kv_layout(config: ModelConfig, dtype: str, block_tokens: int, kv_dtype: str = "auto") -> KVLayout:
    """Return how one block of this model's KV is arranged, all layers.

    Its element type is that of the weights, `dtype`, where `kv_dtype` is "auto"; else it is quantised, "int8" or "fp8".
    """
    return KVLayout(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=block_tokens,
        dtype=dtype if kv_dtype == "auto" else QUANTISED[kv_dtype],
    )


def check_shape(config: ModelConfig, source: str) -> None:
    """Refuse shapes that no weights can have.

    Raises:
        CheckpointError: names `source`.
    """
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads ({config.num_heads}) must be a multiple of num_key_value_heads "
            f"({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{source}: head_dim ({config.head_dim}) must be even")
