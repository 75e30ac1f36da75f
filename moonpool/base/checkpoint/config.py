"""What a model is.

A frozen `ModelConfig` with all that computing the model needs, the model's identity, and where the tensors lie.

Checkpoint readers (`moonpool.base.checkpoint.huggingface`, `moonpool.base.checkpoint.gguf_config`) refuse every feature
that would change the result and is not implemented, before any memory is allocated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import tokenizers
from blake3 import blake3

from moonpool.base.checkpoint.pooling import Pooling
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.spec import DecoderSpec, FeedForwardSpec, LayerSpec, RopeSpec
from moonpool.base.kv.layout import QUANTISED, KVKind, KVLayout, LayerKV

END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
"""Special tokens' texts that end an answer even if no id says so: files often name one end token, chat models have
several. As in llama.cpp (`llama-vocab.cpp`, end of generation).
"""
_CHANNEL_ENDS = ("<|return|>", "<|call|>")
"""Ends of an answer in channels (gpt-oss). Where a vocabulary has both, `<|end|>` ends a message, and more follow."""
_MESSAGE_END = "<|end|>"
#: Element types that weights and activations may have.
DTYPES = ("float32", "bfloat16", "float16")
_LATER = (
    "recurrent", "output_gate", "chunked", "length_from", "weighted_inputs", "value_norm", "values_of_keys", "scalar",
    "beside", "kv_of", "per_layer", "tail", "per_layer_rows", "in_turn", "decay_stored",
    "value_width", "value_factor", "input_factors", "output_factor", "without_norm",
    "latent_width", "head_gate", "silu_limit", "shared_silu_limit", "gate_factor", "stored_at", "indexer", "index_topk",
    "decays", "head_norms", "norm_groups",
)  # fmt: skip
"""Fields that came after version 2 of the hash: a field counts only if used, so that other KV keeps its name."""


def ends_answer(special: Collection[str]) -> frozenset[str]:
    """Return which of a vocabulary's special tokens end an answer by their text, where the files leave the ends open.

    `special` are the texts of the special tokens.
    """
    found = frozenset(special) & frozenset(END_OF_TURN)
    has_channels = all(text in special for text in _CHANNEL_ENDS)
    return (found - {_MESSAGE_END}) | frozenset(_CHANNEL_ENDS) if has_channels else found


class TokenizerParts(NamedTuple):
    """What a checkpoint says about the tokenizer.

    Attributes:
        backend: the tokenizer.
        chat_templates: the chat templates' source by name, for example "default" and "tool_use".
        special: special tokens by name, as templates see them; "bos_token" for example.
    """

    backend: tokenizers.Tokenizer
    chat_templates: Mapping[str, str]
    special: Mapping[str, str]


ModelImpl = Literal["auto", "moonpool", "transformers"]
"""What computes a model: a family of Moonpool, or transformers' own modelling code; auto: a family if there is one."""


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """Sampling that the checkpoint suggests (`generation_config.json`, keys of a GGUF file), else the model's card.

    A value is None without a suggestion.

    Where `generation_config.json` says `do_sample: false`, only `repetition_penalty` counts, as in transformers.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None

    @property
    def given(self) -> dict[str, float | int]:
        """Suggested values, by the sampling parameters' names."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What `generation_config.json` says of every answer, whatever a request says.

    Attributes:
        max_tokens: most tokens of an answer (`max_new_tokens`); None: as many as the model takes.
        suppressed: tokens that are never chosen (`suppress_tokens`).
        unread: names of further settings that would change answers, and that are not honoured.
    """

    max_tokens: int | None = None
    suppressed: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A transformer: layers, sizes, and what the checkpoint says about answers.

    `dtype` is the type the weights are declared in. No sequence may be longer than `max_position_embeddings`.
    `pooling`: what a whole prompt becomes; None: the model answers with text, and an embedding is the last token's
    state after the last norm.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    decoder: DecoderSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_sampling: DefaultSampling = DefaultSampling()
    answer_rules: AnswerRules = AnswerRules()
    pooling: Pooling | None = None

    @property
    def generates(self) -> bool:
        """Whether the model answers with text."""
        return self.pooling is None or self.pooling.generates

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def num_heads(self) -> int:
        """Query heads in the layer with most."""
        return max(layer.attention.num_heads for layer in self.decoder.layers)

    @property
    def num_kv_heads(self) -> int:
        """KV heads per token in the pool, in the layer with most."""
        return max(layer.attention.num_kv_heads for layer in self.decoder.layers)

    @property
    def head_dim(self) -> int:
        """Elements per head in the KV pool, in the layer with the widest head."""
        return max(layer.attention.head_dim for layer in self.decoder.layers)

    @property
    def intermediate_size(self) -> int:
        """Widest inner states that a token has at a time; for experts, the chosen experts' states together."""
        return max(_inner_width(layer.feed_forward) for layer in self.decoder.every)


def _inner_width(spec: FeedForwardSpec) -> int:
    experts = spec.experts
    return spec.inner if experts is None else experts.inner * experts.chosen + experts.shared_inner


def config_hash(config: ModelConfig) -> bytes:
    """Return 32 bytes that are equal exactly if two configurations compute the same function of the weights.

    The declared dtype, the end tokens and the suggested sampling are left out: they change neither KV nor logits.
    """
    fields = _llama_fields(config)
    if fields is None:
        fields = dataclasses.asdict(config)
        for name in ("dtype", "eos_token_ids", "bos_token_id", "default_sampling", "answer_rules", "pooling"):
            del fields[name]
        del fields["decoder"]["whole_pictures"]  # the family's, and of pictures alone, whose keys have their digests
        _forget_unused(fields)
        return blake3(b"moonpool config 2\0" + json.dumps(fields, sort_keys=True).encode()).digest()
    return blake3(b"moonpool config 1\0" + json.dumps(fields, sort_keys=True).encode()).digest()


def _forget_unused(fields: Any) -> None:
    """Remove unused fields that came later, from an object and from all objects within."""
    if isinstance(fields, dict):
        for name in [name for name in _LATER if name in fields and not fields[name]]:
            del fields[name]
    for inner in fields.values() if isinstance(fields, dict) else fields:
        if isinstance(inner, dict | list | tuple):
            _forget_unused(inner)


def _llama_fields(config: ModelConfig) -> dict[str, Any] | None:
    """Return version 1's fields for a decoder that version 1 can describe: KV named by version 1 keeps the name."""
    decoder, layer, rope = config.decoder, config.decoder.layers[0], config.decoder.ropes[:1]
    attention, inner = layer.attention, layer.feed_forward
    plain = DecoderSpec(decoder.layers, decoder.ropes, layer.norm)
    if (
        decoder != plain
        or decoder.not_plain
        or not rope
        or rope[0] != RopeSpec(rope[0].theta, attention.head_dim, rope[0].scaling)
        or attention.scale != attention.head_dim**-0.5
        or (rope[0].scaling is not None and rope[0].scaling.kind == "yarn")
    ):
        return None
    scaling = None if rope[0].scaling is None else dataclasses.asdict(rope[0].scaling)
    if scaling is not None:
        del scaling["ramp"]
    return {
        "architecture": config.architecture,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": inner.inner,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": layer.norm.eps,
        "rope_theta": rope[0].theta,
        "rope_scaling": scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "qkv_bias": attention.qkv_bias,
        "output_bias": attention.output_bias,
        "mlp_bias": inner.bias,
        "qk_norm": attention.qk_norm is not None,
    }


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


def kv_layout(config: ModelConfig, dtype: str, block_size: int, kv_dtype: str = "auto") -> KVLayout:
    """Return how one block of this model's KV is arranged, all layers.

    The element type is the weights', `dtype`, if `kv_dtype` is "auto"; else KV is quantised, "int8" or "fp8". Recurrent
    states are float32. If all layers have windows, one layer's KV is kept whole (`DecoderSpec.whole_layer`).
    """
    stored = dtype if kv_dtype == "auto" else QUANTISED[kv_dtype]
    layers = [_layer_kv(layer, stored) for layer in config.decoder.layers]
    if (whole := config.decoder.whole_layer) is not None:
        layers[whole] = layers[whole]._replace(kind="full", window=0)
    return KVLayout.of_layers(block_size, layers)


def _layer_kv(layer: LayerSpec, dtype: str) -> LayerKV:
    attention = layer.attention
    if layer.recurrent is not None:  # as many shares as the KV of other layers
        share = -(-layer.recurrent.state_elements // attention.num_kv_heads)
        return LayerKV(attention.num_kv_heads, share, "float32", "recurrent")
    if attention.latent is not None or layer.indexer is not None:
        return LayerKV(attention.num_kv_heads, attention.head_dim, dtype, "latent")
    kind: KVKind = "full" if attention.window is None else "window"
    return LayerKV(attention.num_kv_heads, attention.head_dim, dtype, kind, attention.window or 0)


def check_shape(config: ModelConfig, source: str) -> None:
    """Refuse shapes that no weights can have.

    Raises:
        CheckpointError: names `source`.
    """
    if all(layer.recurrent is not None for layer in config.decoder.layers):
        raise CheckpointError(f"{source}: a model without attention, whose layers are all recurrent, is not supported")
    for layer in config.decoder.layers:
        attention = layer.attention
        if attention.num_heads % attention.num_kv_heads:
            raise CheckpointError(
                f"{source}: num_attention_heads ({attention.num_heads}) must be a multiple of num_key_value_heads "
                f"({attention.num_kv_heads})"
            )
        if attention.head_dim % 2:
            raise CheckpointError(f"{source}: head_dim ({attention.head_dim}) must be even")
