"""A Hugging Face folder: configuration, tokenizer, chat template, and the headers of its safetensors files.

Both spellings of `config.json` are read: `rope_theta`/`rope_scaling`/`torch_dtype`, and the `rope_parameters`/`dtype`
of transformers 5. If a key is absent, the default of transformers' configuration class holds. No tensor data is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from moonpool.checkpoint.config import (
    DTYPES,
    DefaultSampling,
    JsonFields,
    ModelConfig,
    RopeScaling,
    TensorInfo,
    check_shape,
    read_json,
)
from moonpool.checkpoint.families import family_of
from moonpool.checkpoint.families.base import ModelFamily
from moonpool.errors import CheckpointError, UnsupportedModel

_MAX_HEADER_BYTES = 100_000_000  # the limit that safetensors itself has
_INDEX = "model.safetensors.index.json"


def folder_weights(folder: Path) -> list[Path]:
    """Return the safetensors files of the checkpoint in `folder`, sorted by name.

    Raises:
        CheckpointError: there are none, one that the index names is missing, or only pickle files are there.
    """
    index = folder / _INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing")
        files = [_plain_name(index, name) for name in sorted({str(name) for name in weight_map.values()})]
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(f"{folder}: no model.safetensors and no {_INDEX}{_pickle_hint(folder)}")
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{folder}: {file.name}, named by {_INDEX}, is missing")
    return files


def folder_index(folder: Path) -> dict[str, TensorInfo]:
    """Return every tensor of the checkpoint by name, from the files' headers only.

    Raises:
        CheckpointError: a file is missing, damaged, shorter than its header says, or a tensor is in two files.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in folder_weights(folder):
        for name, info in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{folder}: tensor {name} is in {tensors[name].file.name} and in {file.name}")
            tensors[name] = info
    return tensors


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors that one safetensors file declares.

    Raises:
        CheckpointError: the file is no safetensors file or is cut short.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{file}: not a whole safetensors file (header of {length} bytes)")
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {}
            for name, entry in header.items():
                if entry["data_offsets"][1] > size - 8 - length:
                    raise CheckpointError(f"{file}: cut short: tensor {name} lies past the end of the file")
                tensors[name] = TensorInfo(file, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
            return tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise CheckpointError(f"{file}: not a safetensors file: {error}") from None


def _plain_name(index: Path, name: str) -> Path:
    """Return the file beside `index`; an index must not lead out of its folder."""
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise CheckpointError(f"{index}: {name!r} is not the name of a safetensors file in this folder")
    return index.parent / name


def _pickle_hint(folder: Path) -> str:
    """Say that pickle files were seen and are not loaded."""
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern)]
    return f"; {min(pickles)} is a pickle file, and those are never loaded" if pickles else ""


def folder_config(folder: Path) -> ModelConfig:
    """Read the configuration of the checkpoint folder `folder`.

    Raises:
        CheckpointError: the folder has no readable configuration, or a field is missing or malformed.
        UnsupportedModel: the model needs something that is not implemented; names the field.
    """
    fields = JsonFields(read_json(folder / "config.json"), "config.json")
    family = family_of(fields.get("architectures"), fields.get("model_type"))
    _refuse_unsupported(fields)
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    layers = fields.positive("num_hidden_layers")
    positions = fields.positive("max_position_embeddings", family.max_positions)
    _refuse_sliding_window(fields, family, layers, positions)
    theta, scaling = _rope(fields, positions)
    generation = _generation_fields(folder)
    attention_bias = fields.flag("attention_bias", False)
    config = ModelConfig(
        architecture=family.architecture,
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
    check_shape(config, "config.json")
    return config


def _refuse_unsupported(fields: JsonFields) -> None:
    """Refuse options that would change the result and are not implemented.

    Raises:
        UnsupportedModel: names the key.
    """
    for name in ("quantization_config", "compression_config"):
        if fields.get(name):
            method = fields.get(name)
            label = method.get("quant_method", "unnamed") if isinstance(method, Mapping) else method
            raise UnsupportedModel(name, f"quantised weights ({label}) are not supported")
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel("hidden_act", f"activation {activation!r} is not supported, only silu")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor", "RoPE on a part of each head is not supported")


def _refuse_sliding_window(fields: JsonFields, family: ModelFamily, layers: int, positions: int) -> None:
    """Refuse a sliding window that a layer would use.

    A window that no sequence can outgrow (`>= max_position_embeddings`) changes nothing and is accepted.

    Raises:
        UnsupportedModel: names the key.
    """
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        other = sorted({str(kind) for kind in kinds if kind != "full_attention"}) if isinstance(kinds, list) else kinds
        raise UnsupportedModel("layer_types", f"{other} are not supported, only full_attention")
    if family.window == "none" or (family.window == "flag" and not fields.flag("use_sliding_window", False)):
        return
    # transformers: the class default of an absent key is 4096, null switches the window off.
    window = fields.get("sliding_window", 4096)
    if window is None or fields.positive("sliding_window", 4096) >= positions:
        return
    if family.window == "flag" and (kinds is not None or fields.number("max_window_layers", 28) >= layers):
        return
    raise UnsupportedModel("sliding_window", f"attention to the last {window} tokens only is not supported")


def folder_tokenizer(folder: Path) -> tuple[tokenizers.Tokenizer, str | None, Mapping[str, str]]:
    """Read the tokenizer, the chat template and the special tokens that the template may name.

    Raises:
        CheckpointError: `tokenizer.json` is missing or damaged.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        raise CheckpointError(f"{folder}: no tokenizer.json in this folder")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from None
    settings_file = folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    return backend, _find_chat_template(folder, settings), _special_tokens(settings)


def _rope(fields: JsonFields, positions: int) -> tuple[float, RopeScaling | None]:
    """Return the base and the scaling, from either spelling; a set `rope_scaling` wins, as in transformers."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    raw = fields.get(name) or {}
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"config.json: {name} must be an object, not {raw!r}")
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise UnsupportedModel(name, "RoPE that differs between layers is not supported")
    rope = JsonFields(raw, f"config.json: {name}")
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


def _declared_dtype(fields: JsonFields) -> str:
    """Return the declared element type; float32 where none is declared."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.get(name)
    if dtype is None:
        return "float32"
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedModel(name, f"{dtype!r} is none of {', '.join(DTYPES)}")
    return dtype


def _generation_fields(folder: Path) -> JsonFields:
    """Return `generation_config.json`, empty where the folder has none."""
    path = folder / "generation_config.json"
    return JsonFields(read_json(path) if path.exists() else {}, path.name)


def _token_ids(fields: JsonFields, name: str) -> tuple[int, ...]:
    """Return one id, several or none as a tuple."""
    value = fields.get(name)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise CheckpointError(f"{fields.source}: {name} must be token ids, not {value!r}")
    return tuple(dict.fromkeys(ids))


def _default_sampling(fields: JsonFields) -> DefaultSampling:
    """Return what `generation_config.json` suggests."""

    def optional(name: str) -> float | None:
        return None if fields.get(name) is None else fields.number(name)

    def optional_int(name: str) -> int | None:
        value: Any = optional(name)
        return None if value is None else int(value)

    if fields.get("do_sample") is False:
        return DefaultSampling(repetition_penalty=optional("repetition_penalty"))
    return DefaultSampling(
        temperature=optional("temperature"),
        top_p=optional("top_p"),
        top_k=optional_int("top_k"),
        repetition_penalty=optional("repetition_penalty"),
    )


def _find_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the default template, from `chat_template.jinja`, else `chat_template.json`, else `settings`."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    legacy = folder / "chat_template.json"
    template = (read_json(legacy) if legacy.exists() else settings).get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder}: chat_template must be text")
    return template


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` and the like, as templates see them."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
    special = {}
    for name in names:
        value = settings.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            special[name] = value
    return special
