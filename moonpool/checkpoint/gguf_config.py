"""A GGUF file's metadata as a model's configuration, or a refusal that names the key."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from moonpool.checkpoint.config import DTYPES, ModelConfig, RopeScaling, check_shape
from moonpool.checkpoint.fields import Fields
from moonpool.checkpoint.gguf_file import GgufFile
from moonpool.checkpoint.support import FAMILIES
from moonpool.errors import CheckpointError, UnsupportedModel

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_DIVISORS = "rope_freqs.weight"
#: What the ids of end tokens are called, and texts of control tokens that end an answer whatever the ids say: files
#: name one end token, chat models have several. As in llama.cpp (`llama-vocab.cpp`, end of generation).
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>")
_CONTROL = 3
#: Keys that change the result where they are neither absent nor 0.
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


def gguf_config(path: Path) -> ModelConfig:
    """Read the configuration of the GGUF file `path`.

    Biases and a separate output head are those whose tensors are there. The declared dtype is the type that most
    elements have, bfloat16 where they are quantised.

    Raises:
        CheckpointError: the file is damaged, or a key is missing or malformed.
        UnsupportedModel: the model needs something that is not implemented; names the key.
    """
    return config_of(GgufFile.read(path))


def config_of(file: GgufFile) -> ModelConfig:
    """As `gguf_config`, of a file whose header has been read."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModel("general.architecture", f"{name!r} is none of {', '.join(ARCHITECTURES)}")
    fields = Fields(file.metadata, file.path.name)
    hidden, heads = fields.positive(f"{name}.embedding_length"), fields.positive(f"{name}.attention.head_count")
    head_dim = fields.positive(f"{name}.attention.key_length", max(1, hidden // heads))
    positions = fields.positive(f"{name}.context_length")
    _refuse(fields, name, head_dim, positions)
    tokens = Fields(file.metadata, f"{file.path.name}: tokenizer")
    config = ModelConfig(
        architecture=ARCHITECTURES[name],
        hidden_size=hidden,
        num_layers=fields.positive(f"{name}.block_count"),
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, name, heads),
        head_dim=head_dim,
        intermediate_size=fields.positive(f"{name}.feed_forward_length"),
        vocab_size=_vocabulary(file),
        rms_norm_eps=fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number(f"{name}.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, fields, name, head_dim),
        max_position_embeddings=positions,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=FAMILIES[ARCHITECTURES[name]].qk_norm,
        dtype=_dtype(file),
        eos_token_ids=_end_tokens(file, tokens),
        bos_token_id=_token_id(tokens, "tokenizer.ggml.bos_token_id"),
    )
    check_shape(config, file.path.name)
    return config


def _refuse(fields: Fields, name: str, head_dim: int, positions: int) -> None:
    """Refuse what would change the result and is not implemented."""
    for key in _REFUSED:
        if fields.get(f"{name}.{key}"):
            raise UnsupportedModel(f"{name}.{key}", f"{fields.get(f'{name}.{key}')!r} is not supported")
    for key, meaning in (
        ("attention.value_length", "values of another length than keys are not supported"),
        ("rope.dimension_count", "RoPE on a part of each head is not supported"),
    ):
        if fields.positive(f"{name}.{key}", head_dim) != head_dim:
            raise UnsupportedModel(f"{name}.{key}", meaning)
    if fields.number(f"{name}.rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{name}.rope.scaling.attn_factor", "scaled attention is not supported")
    window = fields.number(f"{name}.attention.sliding_window", 0.0)
    if 0 < window < positions:
        raise UnsupportedModel(
            f"{name}.attention.sliding_window", f"attention to the last {window:g} tokens only is not supported"
        )


def _kv_heads(fields: Fields, name: str, heads: int) -> int:
    """Return the KV heads; files may list them layer by layer."""
    key = f"{name}.attention.head_count_kv"
    listed = fields.get(key)
    if not isinstance(listed, list):
        return fields.positive(key, heads)
    if len(set(listed)) != 1:
        raise UnsupportedModel(key, "layers with different numbers of KV heads are not supported")
    return Fields({key: listed[0]}, fields.source).positive(key)


def _vocabulary(file: GgufFile) -> int:
    """Return the rows of the embedding; the list of tokens may be shorter."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    return embedding.shape[0]


def _rope_scaling(file: GgufFile, fields: Fields, name: str, head_dim: int) -> RopeScaling | None:
    """Return the scaling: a tensor of divisors (how Llama 3's is written), or the linear one."""
    kind = fields.get(f"{name}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise UnsupportedModel(f"{name}.rope.scaling.type", f"{kind!r} is none of none, linear")
    if ROPE_DIVISORS in file.tensors:
        divisors = file.floats(ROPE_DIVISORS)
        if len(divisors) != head_dim // 2 or kind == "linear":
            raise UnsupportedModel(ROPE_DIVISORS, f"has {len(divisors)} elements, with scaling {kind!r}")
        return RopeScaling("divisors", 1.0, divisors=divisors)
    if kind == "linear":
        return RopeScaling("linear", fields.number(f"{name}.rope.scaling.factor"))
    return None


def _dtype(file: GgufFile) -> str:
    """Return the type that most elements have."""
    elements: Counter[str] = Counter()
    for tensor in file.tensors.values():
        elements[_STORED.get(tensor.type.name, _QUANTISED)] += prod(tensor.shape)
    return max(DTYPES, key=lambda dtype: elements[dtype])


def _token_id(fields: Fields, key: str) -> int | None:
    """Return a token's id, None where there is none."""
    value = fields.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise CheckpointError(f"{fields.source}: {key} must be a token id, not {value!r}")
    return value


def _end_tokens(file: GgufFile, fields: Fields) -> tuple[int, ...]:
    """Return the tokens that end an answer, the one that the file names first."""
    ids = [_token_id(fields, f"tokenizer.ggml.{key}") for key in _END_IDS]
    tokens, kinds = (file.metadata.get(f"tokenizer.ggml.{key}") or [] for key in ("tokens", "token_type"))
    ids += [i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if _ends(token, kind)]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _ends(token: Any, kind: Any) -> bool:
    return kind == _CONTROL and token in _END_TEXTS
