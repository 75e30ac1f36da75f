"""A GGUF file: header, configuration, tensors under their Hugging Face names, tokenizer and chat template.

A large model may come in parts, `NAME-00001-of-00003.gguf` and so on: the first part has the metadata and stands for
all. Source: GGUF's specification, `docs/gguf.md` of ggml; versions 2 and 3, little-endian. No tensor data is read.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from moonpool.base.checkpoint.config import (
    DTYPES,
    END_OF_TURN,
    DefaultSampling,
    ModelConfig,
    TokenizerParts,
    check_shape,
)
from moonpool.base.checkpoint.folder_tokenizer import LLAMA3_PATTERN, QWEN2_PATTERN
from moonpool.base.checkpoint.tensor_info import TensorInfo
from moonpool.base.checkpoint.weight_formats import GGUF_TYPES, GgufType
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families import FAMILIES, gguf_family
from moonpool.base.families.base import ModelFamily
from moonpool.base.families.deepseek import DEEPSEEK_V3
from moonpool.base.families.fields import JsonFields
from moonpool.base.families.mixtral import MIXTRAL
from moonpool.base.families.rope import longest
from moonpool.base.families.spec import DecoderSpec, RopeScaling

GGUF_SUFFIX = ".gguf"
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32


class GgufTensor(NamedTuple):
    """One tensor: type, shape with rows first, the byte at which the data begins, and file."""

    type: GgufType
    shape: tuple[int, ...]
    begin: int
    file: Path


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of the file `path` and of further parts; metadata and tensors have the file's own names."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the header of `path`, and of further parts if any.

        Raises:
            CheckpointError: a file is missing, damaged, cut short or no GGUF file, or not the first part.
            UnsupportedModel: a version, a byte order or a tensor's type that cannot be read.
        """
        first, *others = (_read_one(part) for part in gguf_parts(path))
        tensors = dict(first.tensors)
        for part in others:
            for name, tensor in part.tensors.items():
                if name in tensors:
                    raise CheckpointError(f"{part.path}: tensor {name} is in {tensors[name].file.name} too")
                tensors[name] = tensor
        wanted, count = (first.metadata.get(f"split.{key}") for key in ("tensors.count", "count"))
        if (count or 1) != 1 + len(others):
            raise CheckpointError(f"{path}: is one of {count} parts, which its name does not say")
        if others and wanted is not None and wanted != len(tensors):
            raise CheckpointError(f"{path}: the parts have {len(tensors)} tensors, {wanted} are expected")
        return cls(path, first.metadata, tensors)

    def floats(self, name: str) -> tuple[float, ...]:
        """Return the F32 tensor `name`'s elements.

        Raises:
            CheckpointError: stored in another type.
        """
        tensor = self.tensors[name]
        if tensor.type.name != "F32":
            raise CheckpointError(f"{self.path}: tensor {name} is stored as {tensor.type.name}, not F32")
        count = _product(tensor.shape)
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.begin)
            return struct.unpack(f"<{count}f", stream.read(4 * count))


def is_gguf(path: Path | str) -> bool:
    """Tell whether `path` names a GGUF file, by the ending."""
    return str(path).endswith(GGUF_SUFFIX)


def gguf_parts(path: Path) -> list[Path]:
    """Return the model's files, if `path` is the model or the model's first part.

    Raises:
        CheckpointError: another part, or a part is missing.
    """
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}{GGUF_SUFFIX}") for number in range(1, count + 1)
    ]
    if path != parts[0]:
        raise CheckpointError(f"{path}: is part {int(match['number'])} of a model; name the first, {parts[0].name}")
    for part in parts:
        if not part.exists():
            raise CheckpointError(f"{path}: part {part.name} is missing")
    return parts


def gguf_name(path: Path) -> str:
    """A GGUF file's name without the ending and part number."""
    match = _PART_NAME.fullmatch(path.name)
    return path.name.removesuffix(GGUF_SUFFIX) if match is None else match["stem"]


def _read_one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_value(path, _Cursor(data))
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{path}: not a whole GGUF file: {error}") from None


class _Cursor:
    """Reads values one after the other; raises ValueError or struct.error past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.size = len(data)
        self.position = 0

    def raw(self, count: int) -> bytes:
        end = self.position + count
        if end > self.size:
            raise ValueError(f"it ends at byte {self.size}, within its header")
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def values(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + form, self._data, self.position)
        self.position += struct.calcsize("<" + form)
        return found

    def number(self, form: str) -> int:
        value: int = self.values(form)[0]
        return value

    def text(self) -> str:
        return self.raw(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        """Return a value, of the type that the file has just named."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(*self.values("IQ"))
        if kind not in _SCALARS:
            raise ValueError(f"metadata of type {kind}")
        return self.values(_SCALARS[kind])[0]

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"metadata is an array of type {kind}")
        return list(self.values(f"{count}{_SCALARS[kind]}"))


def _read_value(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.raw(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise UnsupportedModel("GGUF.version", f"{path}: {version} is none of {_VERSIONS}, little-endian")
    tensor_count, metadata_count = cursor.values("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"{key} is there twice")
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [_read_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment <= 0:
        raise ValueError(f"general.alignment must be a positive integer, not {alignment!r}")
    data = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"tensor {name} is there twice")
        begin = data + offset
        tensors[name] = GgufTensor(_checked_type(name, shape, kind, begin, cursor.size), shape, begin, path)
    return GgufFile(path, metadata, tensors)


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape (rows first; files have the reverse order), type and offset for one tensor."""
    name = cursor.text()
    dimensions = cursor.number("I")
    if dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {dimensions} dimensions")
    shape = cursor.values(f"{dimensions}Q")[::-1]
    kind, offset = cursor.values("IQ")
    return name, shape, kind, offset


def _checked_type(name: str, shape: tuple[int, ...], number: int, begin: int, size: int) -> GgufType:
    """Return a tensor's type; refuse an unreadable type, and data past the file's end."""
    if number not in GGUF_TYPES:
        known = ", ".join(kind.name for kind in GGUF_TYPES.values())
        raise UnsupportedModel(name, f"is stored as type {number}, which is none of {known}")
    kind = GGUF_TYPES[number]
    if shape and shape[-1] % kind.elements:
        raise ValueError(f"tensor {name} has rows of {shape[-1]} elements, {kind.name} stores {kind.elements} together")
    if begin + _product(shape) // kind.elements * kind.bytes > size:
        raise ValueError(f"tensor {name} lies past its end")
    return kind


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


ROPE_DIVISORS = "rope_freqs.weight"


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


def gguf_config(path: Path) -> ModelConfig:
    """Read the configuration of the GGUF file `path`.

    Biases and a separate output head exist if their tensors do. The declared dtype is the type that most elements have,
    bfloat16 where they are quantised.

    Raises:
        CheckpointError: the file is damaged, or a key is missing or malformed.
        UnsupportedModel: the model needs something that is not implemented; names the key.
    """
    return config_of(GgufFile.read(path))


def config_of(file: GgufFile) -> ModelConfig:
    """As `gguf_config`, for a file with a header that has been read."""
    family = _family(file)
    assert family.gguf is not None
    found = _config_keys(file, family)
    fields = family.fields(found, file.path.name)
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
    name = family.gguf.architecture
    fields = JsonFields(file.metadata, file.path.name)
    hidden, heads = fields.positive(f"{name}.embedding_length"), fields.positive(f"{name}.attention.head_count")
    head_dim = fields.positive(f"{name}.attention.key_length", max(1, hidden // heads))
    positions = fields.positive(f"{name}.context_length")
    _refuse(fields, family, head_dim, positions)
    found: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": fields.positive(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(fields, name, heads, some=bool(family.gguf.recurrent)),
        "head_dim": head_dim,
        "rope_theta": fields.number(f"{name}.rope.freq_base", 10000.0),
        "partial_rotary_factor": fields.positive(f"{name}.rope.dimension_count", head_dim) / head_dim,
        "max_position_embeddings": positions,
    }
    if (inner := fields.get(f"{name}.feed_forward_length")) is not None or not fields.get(f"{name}.expert_count"):
        found["intermediate_size"] = inner
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
    if (scaling := _rope_scaling(fields, name)) is not None:
        found["rope_scaling"] = scaling
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
    if family.gguf.whole_norms:
        decoder = replace(decoder, final_norm=replace(decoder.final_norm, offset=0.0)).each(
            lambda _, layer: replace(layer, norm=replace(layer.norm, offset=0.0)).with_attention(
                qk_norm=layer.attention.qk_norm and replace(layer.attention.qk_norm, offset=0.0)
            )
        )
    if ROPE_DIVISORS not in file.tensors:
        return decoder
    divisors, rope = file.floats(ROPE_DIVISORS), decoder.ropes[0]
    if len(divisors) != rope.width // 2 or rope.scaling is not None:
        raise UnsupportedModel(ROPE_DIVISORS, f"has {len(divisors)} elements, with other scaling beside it")
    scaled = replace(rope, scaling=RopeScaling("divisors", 1.0, divisors=divisors))
    return replace(decoder, ropes=(scaled, *decoder.ropes[1:]))


def _refuse(fields: JsonFields, family: ModelFamily, head_dim: int, positions: int) -> None:
    """Refuse what would change the result and is not implemented, or not for this family."""
    assert family.gguf is not None
    name, known = family.gguf.architecture, family.gguf.keys.values()
    for key in _REFUSED:
        if key not in known and fields.get(f"{name}.{key}"):
            raise UnsupportedModel(f"{name}.{key}", f"{fields.get(f'{name}.{key}')!r} is not supported")
    length = fields.positive(f"{name}.attention.value_length", head_dim)
    if length != head_dim and "attention.value_length" not in known:
        raise UnsupportedModel(f"{name}.attention.value_length", "values of another length than keys are not supported")
    if fields.number(f"{name}.rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{name}.rope.scaling.attn_factor", "scaled attention is not supported")
    window = fields.number(f"{name}.attention.sliding_window", 0.0)
    if "attention.sliding_window" not in known and 0 < window < positions:
        raise UnsupportedModel(
            f"{name}.attention.sliding_window", f"attention to the last {window:g} tokens only is not supported"
        )


def _kv_heads(fields: JsonFields, name: str, heads: int, *, some: bool) -> int:
    """Return the KV heads; files may list them layer by layer. `some`: layers may have none."""
    key = f"{name}.attention.head_count_kv"
    listed = fields.get(key)
    if not isinstance(listed, list):
        return fields.positive(key, heads)
    if some:
        listed = [count for count in listed if count]
    if len(set(listed)) != 1:
        raise UnsupportedModel(key, "layers with different numbers of KV heads are not supported")
    return JsonFields({key: listed[0]}, fields.source).positive(key)


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
    ids += [i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if _end_ids(token, kind)]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _end_ids(token: Any, kind: Any) -> bool:
    return kind == _CONTROL_TOKEN and token in END_OF_TURN


_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<leaf>\w+(?:\.\w+)?)\.(?P<kind>weight|bias)")
_PAIRED = ("attn_q", "attn_k")
_WHOLE_NAMES = ("attn_sinks", "exp_probs_b")
"""Tensors with folder names that do not end with .weight or .bias."""


def gguf_index(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor in a GGUF file by Hugging Face name.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedModel: the file has a tensor that the model would not use; names the tensor.
    """
    file = GgufFile.read(path)
    config = config_of(file)
    family = FAMILIES[config.architecture]
    assert family.gguf is not None
    paired = config.head_dim if family.gguf.paired_rows else 0
    index: dict[str, TensorInfo] = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_DIVISORS or (family.gguf.further_layers and _layer(name) >= config.num_layers):
            continue
        ours, leaf = translated(name, family)
        row = leaf == "exp_probs_b" and family.names.correction_row
        info = TensorInfo(
            tensor.file,
            tensor.type.name,
            (1, prod(tensor.shape)) if row else _shape(tensor.shape, family.gguf.recurrent.get(leaf, "")),
            begin=tensor.begin,
            paired_rows=paired if leaf in _PAIRED else 0,
            format=tensor.type if tensor.type.elements > 1 else None,
        )
        index |= _by_expert(ours, info, tensor.type) if leaf.endswith("_exps") else {ours: info}
    return index


def _shape(shape: tuple[int, ...], role: str) -> tuple[int, ...]:
    """Return the shape that a folder has: converters leave out a convolution's dimension of 1."""
    return (shape[0], 1, shape[1]) if role == "conv" and len(shape) == 2 else shape


def _layer(name: str) -> int:
    """Return the layer that a tensor belongs to; -1: none."""
    match = re.match(r"blk\.(\d+)\.", name)
    return -1 if match is None else int(match[1])


def _by_expert(name: str, info: TensorInfo, kind: GgufType) -> dict[str, TensorInfo]:
    """Return each expert's part of a tensor that holds all experts, [experts, outputs, inputs]."""
    count, *shape = info.shape
    size = prod(shape) // kind.elements * kind.bytes
    return {
        name.format(expert=expert): replace(info, shape=tuple(shape), begin=info.begin + expert * size)
        for expert in range(count)
    }


def translated(name: str, family: ModelFamily) -> tuple[str, str]:
    """Return a tensor's Hugging Face name, and the part of GGUF's name that tells the tensor's role.

    A tensor for all experts has `{expert}` in the name.

    Raises:
        UnsupportedModel: the family has no such tensor, or no GGUF files.
    """
    names, gguf = family.names, family.gguf
    if gguf is None:
        raise UnsupportedModel(name, f"{family.architecture} has no GGUF names here")
    match = _TENSOR_NAME.fullmatch(name)
    known = {} if match is None else gguf.outer if match["layer"] is None else {**gguf.layer, **gguf.renamed}
    ours: str = "" if match is None else getattr(names, known.get(match["leaf"], ""), "")
    if match is not None and match["leaf"] in gguf.recurrent:
        (ours,) = names.recurrent[gguf.recurrent[match["leaf"]]]
    if match is None or not ours:
        raise UnsupportedModel(name, "this tensor has no place in a model of this architecture")
    leaf = match["leaf"]
    if match["layer"] is None:
        return f"{ours.removesuffix('.weight')}.{match['kind']}", leaf
    if leaf.endswith("_exps"):
        ours = f"{names.expert}{ours}"
    ending = "" if leaf in _WHOLE_NAMES else f".{match['kind']}"
    return f"{names.layer.format(index=match['layer'])}{ours}{ending}", leaf


_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_NAMES = ("gpt-2", "gpt2", "default")
_DIGIT_NAMES = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen", "megrez")
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def gguf_tokenizer(path: Path) -> TokenizerParts:
    """Read the tokenizer, the chat templates and the special tokens that the template may name.

    Raises:
        CheckpointError: the file or the tokenizer is damaged.
        UnsupportedModel: this tokenizer kind is not built; names the key.
    """
    metadata = GgufFile.read(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _MAKERS:
        raise UnsupportedModel("tokenizer.ggml.model", f"{kind!r} is none of {', '.join(_MAKERS)}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens must be a list of texts")
    special = _special_tokens(path, metadata, tokens)
    try:
        backend = _MAKERS[kind](metadata, tokens)
        _add_whole_tokens(backend, metadata, tokens)
        backend.post_processor = _post_processor(metadata, kind, special)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from None
    return TokenizerParts(backend, _chat_templates(path, metadata), special)


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in _listed(metadata, "merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Where the text was cut by these expressions, a piece that is a token as a whole is that token.
    whole = name in _LLAMA3_NAMES or name == "tekken"
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    backend.pre_tokenizer = _pre_tokenizer(name)
    if name in _QWEN2_NAMES:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _listed(metadata: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list that this tokenizer kind needs."""
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list):
        raise ValueError(f"tokenizer.ggml.{key} is missing")
    return values


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Return what splits text before merging."""
    if name in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _DIGIT_NAMES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    expressions = {
        **dict.fromkeys(_LLAMA3_NAMES, LLAMA3_PATTERN),
        **dict.fromkeys(_QWEN2_NAMES, QWEN2_PATTERN),
        "tekken": _TEKKEN,
    }
    if name not in expressions:
        known = ", ".join((*_GPT2_NAMES, *_DIGIT_NAMES, *expressions))
        raise UnsupportedModel("tokenizer.ggml.pre", f"{name!r} is none of {known}")
    split = pre_tokenizers.Split(Regex(expressions[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a SentencePiece BPE tokenizer; bytes without a separate token have byte tokens."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    scored = zip(tokens, _listed(metadata, "scores"), kinds, strict=True)
    merges = _merges(vocabulary, {token: score for token, score, kind in scored if kind == _NORMAL})
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    scheme = "first" if prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return backend


def _merges(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the merges that scores stand for: every way to join two tokens to a third token, best third first.

    In the order of transformers' `generate_merges`.
    """

    def ways() -> Iterator[tuple[str, str]]:
        for token in scores:
            cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
            found = (pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary)
            yield from sorted(found, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))

    return sorted(ways(), key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0]), -len(pair[1])))


_MAKERS: dict[str, Callable[[Mapping[str, Any], Sequence[str]], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _add_whole_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Make tokens that the file marks match as a whole: control tokens, which are special, and user-defined tokens."""
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    marked = list(zip(tokens, kinds, strict=False))
    control = [token for token, kind in marked if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    defined = [token for token, kind in marked if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _post_processor(
    metadata: Mapping[str, Any], kind: str, special: Mapping[str, str]
) -> processors.PostProcessor | None:
    """Return what puts begin and end tokens around a text; without a flag, what llama.cpp does."""
    begins = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    asked = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", begins),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    used = {name: special[name] for name, wanted in asked.items() if wanted and name in special}
    if not used:
        return None
    around = [used.get("bos_token"), "$A", used.get("eos_token")]
    ids = {special[name]: metadata[f"tokenizer.ggml.{_SPECIAL[name]}"] for name in used}
    pieces = [f"{piece}:0" for piece in around if piece is not None]
    return processors.TemplateProcessing(single=pieces, special_tokens=list(ids.items()))


def _special_tokens(path: Path, metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    """Return `bos_token` and the like, as templates see them."""
    special = {}
    for name, key in _SPECIAL.items():
        index = metadata.get(f"tokenizer.ggml.{key}")
        if index is None:
            continue
        if type(index) is not int or not 0 <= index < len(tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.{key} must be one of {len(tokens)} tokens, not {index!r}")
        special[name] = tokens[index]
    return special


_TEMPLATE_KEY = "tokenizer.chat_template"


def _chat_templates(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name; a further template's key ends with the template's name."""
    keys = {key.removeprefix(_TEMPLATE_KEY).lstrip(".") or "default": key for key in metadata if _is_template(key)}
    for key in keys.values():
        if not isinstance(metadata[key], str):
            raise CheckpointError(f"{path}: {key} must be text")
    return {name: metadata[key] for name, key in keys.items()}


def _is_template(key: str) -> bool:
    return key == _TEMPLATE_KEY or key.startswith(f"{_TEMPLATE_KEY}.")
