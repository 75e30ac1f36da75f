"""What a model is.

A frozen `ModelConfig` with all that computing it needs, its identity, and where its tensors lie.

Readers of a checkpoint (`moonpool.checkpoint.huggingface`, `moonpool.checkpoint.gguf`) refuse every feature that
would change the result and is not implemented, before any memory is allocated.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from moonpool.errors import CheckpointError, UnsupportedModel
from moonpool.kv.layout import QUANTISED, KVLayout


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name} in this folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return data


class JsonFields:
    """A JSON object whose values are read by type; `source` says in errors where it comes from."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self._data = data
        self.source = source

    def get(self, name: str, default: Any = None) -> Any:
        """Return the raw value."""
        return self._data.get(name, default)

    def positive(self, name: str, default: int | None = None, *, null: int | None = None) -> int:
        """Return a positive integer; `default` when absent, `null` (else `default`) when it is null."""
        value = self._present(name, default, null)
        if type(value) is not int or value <= 0:
            raise CheckpointError(f"{self.source}: {name} must be a positive integer, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; `default` when absent or null."""
        value = self._present(name, default, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{self.source}: {name} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean; `default` when absent or null."""
        value = self._present(name, default, None)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.source}: {name} must be true or false, not {value!r}")
        return value

    def _present(self, name: str, default: Any, null: Any) -> Any:
        value = self._data.get(name)
        if value is None and name in self._data and null is not None:
            return null
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.source}: {name} is missing")
        return value


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


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: the file that holds it, its type there (for example "BF16" or "Q4_0") and its shape.

    Of GGUF files also the byte at which its data begins, and `paired_rows`: rows of a head, where those that RoPE turns
    together lie beside one another instead of half a head apart; 0 = they do not.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    paired_rows: int = 0

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count
