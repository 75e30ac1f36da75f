"""A Hugging Face folder: configuration, and the safetensors files' headers.

Both spellings of `config.json` are read: `rope_theta`/`rope_scaling`/`torch_dtype`, and transformers 5's
`rope_parameters`/`dtype`. If a key is absent, the default of transformers' configuration class holds. No tensor data is
read.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.base.checkpoint.config import (
    DTYPES,
    AnswerRules,
    DefaultSampling,
    ModelConfig,
    ModelImpl,
    check_shape,
)
from moonpool.base.checkpoint.folder_tokenizer import folder_end_tokens
from moonpool.base.checkpoint.pooling import decoder_of, folder_pooling
from moonpool.base.checkpoint.quantised import (
    QUANTISATION_KEYS,
    Formats,
    dense_index,
    modelopt_formats,
    quantised_formats,
)
from moonpool.base.checkpoint.tensor_info import TensorInfo
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families import family_of
from moonpool.base.families.base import ModelFamily
from moonpool.base.families.fields import JsonFields, read_json
from moonpool.base.families.other import common_names, other_family, whole_prompt_family, whole_prompt_length
from moonpool.base.families.rope import chosen_factors, longest
from moonpool.base.families.wrapped import decoder_names, text_part
from moonpool.base.json_parts import parse_json
from moonpool.base.sampling_params import MAX_SUPPRESSED_TOKENS

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
MAX_NAME_CHARS = 200
"""Characters in the name of a file that an index names."""
_MAX_STACKED = 4096  # experts of a layer in one tensor
_INDEX = "model.safetensors.index.json"


def folder_weights(folder: Path) -> list[Path]:
    """Return the safetensors files of the checkpoint in `folder`, sorted by name.

    A whole `model.safetensors` comes before an index, which may be left from an earlier save.

    Raises:
        CheckpointError: no file is there, a file that the index names is missing, or only pickle files are there.
    """
    index = folder / _INDEX
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing")
        files = [_plain_name(index, name) for name in sorted({str(name) for name in weight_map.values()})]
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

    Of a model with further parts, these are the decoder's tensors, under the names of the decoder alone.

    Raises:
        CheckpointError: a file is missing, damaged, shorter than its header says, or a tensor is in two files.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in folder_weights(folder):
        for name, info in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{folder}: tensor {name} is in {tensors[name].file.name} and in {file.name}")
            tensors[name] = info
    found = dense_index(_by_expert(tensors), folder_formats(folder))
    file = folder / "config.json"
    if not file.exists() or text_part(read_json(file)) is None:
        return found
    return {plain: replace(found[name], name=name) for name, plain in decoder_names(found).items()}


def _by_expert(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors, with each expert's part of those that hold all experts of a layer (Step 3.5).

    Scales of weights in codes are divided alike. Raises CheckpointError for more experts than any model has.
    """
    found, counts = dict[str, TensorInfo](), dict[str, int]()
    for name, info in tensors.items():
        if ".moe." in name and name.endswith(".weight") and len(info.shape) == 3:
            if info.shape[0] > _MAX_STACKED:
                why = f"has {info.shape[0]} experts, more than {_MAX_STACKED}"
                raise CheckpointError(f"{info.file}: tensor {name} {why}")
            counts[name.removesuffix(".weight")] = info.shape[0]
    for name, info in tensors.items():
        stem, _, kind = name.rpartition(".")
        count = counts.get(stem, 0)
        if not count or not info.shape or info.shape[0] != count:
            found[name] = info
            continue
        layer, _, leaf = stem.partition(".moe.")
        part = replace(info, shape=info.shape[1:])
        for expert in range(count):
            begin = info.begin + expert * int(part.stored_bytes)
            found[f"{layer}.moe.experts.{expert}.{leaf}.{kind}"] = replace(part, begin=begin)
    return found


def folder_formats(folder: Path) -> Formats:
    """Return how the folder stores quantised weights; none: not quantised.

    Raises:
        UnsupportedModel: a method or a field that cannot be read; names the setting.
        CheckpointError: a field is malformed.
    """
    found = quantisation_settings(folder)
    if found is None:
        return ()
    file, settings = found
    fields = JsonFields(settings, file)
    return quantised_formats(fields) if file == "config.json" else modelopt_formats(fields)


def quantisation_settings(folder: Path) -> tuple[str, Mapping[str, Any]] | None:
    """Return the quantisation settings for weights, as found in the file with that name; None: they are not."""
    file = folder / "config.json"
    config = read_json(file) if file.exists() else {}
    for fields in (config, text_part(config) or {}):
        if settings := {key: fields[key] for key in QUANTISATION_KEYS if fields.get(key)}:
            return file.name, settings
    file = folder / "hf_quant_config.json"
    return (file.name, read_json(file)) if file.exists() else None


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors that a safetensors file declares.

    Raises:
        CheckpointError: the file is not a safetensors file, or is cut short.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{file}: not a whole safetensors file (header of {length} bytes)")
            header = parse_json(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {}
            for name, entry in header.items():
                if entry["data_offsets"][1] > size - 8 - length:
                    raise CheckpointError(f"{file}: cut short: tensor {name} lies past the end of the file")
                shape, begin = tuple(int(n) for n in entry["shape"]), 8 + length + entry["data_offsets"][0]
                tensors[name] = TensorInfo(file, str(entry["dtype"]), shape, begin)
            return tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise CheckpointError(f"{file}: not a safetensors file: {error}") from None


def _plain_name(index: Path, name: str) -> Path:
    """Return the file beside `index`; an index must not lead out of the folder."""
    plain = Path(name).name == name and name.isprintable() and len(name) <= MAX_NAME_CHARS
    if not plain or not name.endswith(".safetensors"):
        raise CheckpointError(
            f"{index}: {name[:MAX_NAME_CHARS]!r} is not the name of a safetensors file in this folder"
        )
    return index.parent / name


def _pickle_hint(folder: Path) -> str:
    """Say that pickle files were seen and are not loaded."""
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern)]
    return f"; {min(pickles)} is a pickle file, and those are never loaded" if pickles else ""


def folder_config(folder: Path, model_impl: ModelImpl = "auto", max_model_len: int = 0) -> ModelConfig:
    """Read the configuration of the checkpoint folder `folder`.

    `model_impl`, `max_model_len`: see `moonpool.base.checkpoint.formats.load_config`.

    Raises:
        CheckpointError: the folder has no readable configuration, or a field is missing or malformed.
        UnsupportedModel: the model needs something that is not implemented; names the field.
    """
    data: Mapping[str, Any] = read_json(folder / "config.json")
    pooling = folder_pooling(folder, data)
    declared: Any = data.get("architectures")
    if pooling is not None and pooling.whole:
        if model_impl == "moonpool":
            raise UnsupportedModel("model_impl", f"no family describes {declared[0]}; auto falls back")
        family = whole_prompt_family(str(declared[0]), str(data.get("model_type")))
    else:
        if pooling is not None and not pooling.generates:
            declared = [decoder_of(declared[0])]
            if model_impl == "transformers":
                raise UnsupportedModel(
                    "model_impl", f"transformers is for whole decoders, not for {data['architectures']}"
                )
        text = text_part(data)
        family = _computed_by(family_of(declared, (text or data).get("model_type")), data, model_impl)
        if text is not None:
            data = {**family.sizes, **text, **_tied(folder, data, text, family.names.head)}
    fields = family.fields(common_names(data) if family.other else data, "config.json")
    if not family.other:
        fields = chosen_factors(fields, max_model_len)
    if folder_formats(folder) and family.names.inputs_first:
        raise UnsupportedModel("quantization_config", f"not supported for {family.architecture}")
    generation = _generation_fields(folder)
    config = ModelConfig(
        architecture=family.architecture,
        hidden_size=fields.positive("hidden_size"),
        vocab_size=fields.positive("vocab_size"),
        decoder=family.decoder(fields),
        max_position_embeddings=longest(fields)
        if pooling is None or not pooling.whole
        else whole_prompt_length(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=_declared_dtype(fields),
        eos_token_ids=_end_tokens(folder, fields, generation),
        bos_token_id=next(iter(_token_ids(generation, "bos_token_id") or _token_ids(fields, "bos_token_id")), None),
        default_sampling=_default_sampling(generation),
        answer_rules=_answer_rules(generation, fields.positive("vocab_size")),
        pooling=pooling,
    )
    check_shape(config, "config.json")
    return config


def _tied(folder: Path, data: Mapping[str, Any], text: Mapping[str, Any], head: str) -> dict[str, bool]:
    """Return whether the head of a model with further parts is the embedding, as a field; none: nothing tells.

    Folders say so for the whole model, for the text part, for both or nowhere: then the stored tensors tell.
    """
    key = "tie_word_embeddings"
    if data.get(key) is True or text.get(key) is True:
        return {key: True}
    try:
        stored = decoder_names(_stored_names(folder)).values()
    except CheckpointError:  # a folder without weights
        return {} if data.get(key) is None and text.get(key) is None else {key: False}
    return {key: head not in stored}


def _stored_names(folder: Path) -> set[str]:
    """Return the names of all tensors, of which an index tells those in many files."""
    if not (folder / "model.safetensors").exists() and (folder / _INDEX).exists():
        return set(read_json(folder / _INDEX).get("weight_map") or ())
    return {name for file in folder_weights(folder) for name in read_header(file)}


def _computed_by(family: ModelFamily, data: Mapping[str, Any], model_impl: ModelImpl) -> ModelFamily:
    """Return the family; if transformers' own code is to compute the architecture, the same without family.

    Raises:
        UnsupportedModel: the architecture is not computed so; names `model_impl`.
    """
    if model_impl == "auto" or (model_impl == "transformers") == family.other:
        return family
    if model_impl == "moonpool":
        raise UnsupportedModel("model_impl", f"no family describes {family.architecture}; auto falls back")
    name = (data.get("architectures") or [family.architecture])[0]
    found = other_family(str(name), data.get("model_type") or family.model_type)
    if found is None:
        raise UnsupportedModel("model_impl", f"transformers is for decoders alone, not for {name}")
    return found


_UNREAD: Mapping[str, tuple[float, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "diversity_penalty": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": (),
    "stop_strings": (),
    "typical_p": (1,),
}
"""Settings of `generation_config.json` that would change answers and are not honoured, with values that change none."""


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


def _end_tokens(folder: Path, fields: JsonFields, generation: JsonFields) -> tuple[int, ...]:
    """Return the tokens that end an answer: both configurations' and the tokenizer's together.

    Fine-tuned folders often change only one of the three places. Where the configuration of generation names several
    tokens, somebody has thought of all ends, and no token is an end by its text alone.
    """
    named = _token_ids(generation, "eos_token_id")
    given = (*named, *_token_ids(fields, "eos_token_id"))
    return tuple(dict.fromkeys((*given, *folder_end_tokens(folder, by_text=len(named) <= 1))))


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
        min_p=optional("min_p"),
    )


def _answer_rules(fields: JsonFields, vocab_size: int) -> AnswerRules:
    """Return what `generation_config.json` says of every answer."""
    most = None if fields.get("max_new_tokens") is None else fields.positive("max_new_tokens")
    suppressed = tuple(token for token in _token_ids(fields, "suppress_tokens") if token < vocab_size)
    if len(suppressed) > min(MAX_SUPPRESSED_TOKENS, vocab_size // 2):
        raise UnsupportedModel("suppress_tokens", f"{len(suppressed)} of {vocab_size} tokens are too many")
    unread = tuple(name for name, neutral in _UNREAD.items() if not _changes_nothing(fields.get(name), neutral))
    return AnswerRules(most, suppressed, unread)


def _changes_nothing(value: Any, neutral: tuple[float, ...]) -> bool:
    return value in (None, [], {}) or (isinstance(value, int | float) and value in neutral)
