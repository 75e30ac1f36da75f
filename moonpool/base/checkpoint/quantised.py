"""Weights that a Hugging Face folder stores quantised: which tensors belong together, and by which method.

`QUANT_METHODS` has the methods that `quantization_config` names. Modules that a folder leaves dense
(`modules_to_not_convert`, `ignore`) are known by their tensors. Activations stay in the weights' type, even if a folder
quantises activations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.checkpoint.tensor_info import TensorInfo
from moonpool.base.checkpoint.weight_formats import (
    AwqFormat,
    Bnb4BitFormat,
    BnbInt8Format,
    CompressedFormat,
    FolderFormat,
    Fp4Format,
    GptqFormat,
    Mxfp4Format,
    Parts,
    ScaledFormat,
    Shape,
    StackedFp8Format,
)
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.fields import JsonFields

Formats = tuple[FolderFormat, ...]
QUANTISATION_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json that say how weights are stored; the second key is from compressed-tensors' first years."""

_BESIDE = re.compile(
    r"(_input_scale|\.(weight_shape|weight_format|input_scale(_ub)?|input_zero_point|input_global_scale|output_scale"
    r"|activation_scale|[kv]_scale))$"
)
"""Tensors for activations, KV and bookkeeping, which the dense weight does without."""


def quantised_formats(fields: JsonFields) -> Formats:
    """Return how weights are stored, by config.json; none: as they are.

    Raises:
        UnsupportedModel: a method or a field that cannot be read; names the key.
        CheckpointError: a field is malformed.
    """
    key = next((key for key in QUANTISATION_KEYS if fields.get(key)), None)
    if key is None:
        return ()
    settings = fields.get(key)
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{fields.source}: {key} must be an object, not {settings!r}")
    return _formats(JsonFields(settings, f"{fields.source}: {key}"), key)


def modelopt_formats(fields: JsonFields) -> Formats:
    """As `quantised_formats`, of `hf_quant_config.json`, which ModelOpt writes beside config.json."""
    settings = fields.get("quantization")
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{fields.source}: quantization must be an object, not {settings!r}")
    return _modelopt(JsonFields(settings, f"{fields.source}: quantization"), "quantization")


def _formats(settings: JsonFields, key: str) -> Formats:
    method = settings.get("quant_method")
    if method is None and any(settings.get(f"load_in_{bits}bit") for bits in (4, 8)):
        method = "bitsandbytes"  # folders from its first years
    if method not in QUANT_METHODS:
        raise UnsupportedModel(f"{key}.quant_method", f"{method!r} is none of {', '.join(QUANT_METHODS)}")
    return QUANT_METHODS[method](settings, key)


def _fp8(settings: JsonFields, key: str) -> Formats:
    return (ScaledFormat(block=_block(settings, "weight_block_size")),)


def _block(settings: JsonFields, key: str) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale; None: none are said.

    Raises:
        CheckpointError: they are not two positive integers.
    """
    block = settings.get(key)
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise CheckpointError(f"{settings.source}: {key} must be two positive integers, not {block!r}")
    return block[0], block[1]


def _gptq(settings: JsonFields, key: str) -> Formats:
    _one_of(settings, key, "bits", (2, 3, 4, 8))
    _one_of(settings, key, "pack_dtype", (None, "int32"))
    version = settings.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(f"{key}.checkpoint_format", f"{version!r} is none of gptq, gptq_v2")
    return (GptqFormat(v1=version == "gptq", group=_group(settings)),)


def _awq(settings: JsonFields, key: str) -> Formats:
    _one_of(settings, key, "bits", (4,))
    version = settings.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise UnsupportedModel(f"{key}.version", f"{version!r} is not gemm")
    return (AwqFormat(group=_group(settings)),)


def _auto_round(settings: JsonFields, key: str) -> Formats:
    packing = _one_of(settings, key, "packing_format", ("auto_round:auto_gptq", "auto_round:auto_awq"))
    group = _group(settings)
    return (AwqFormat(group=group) if packing == "auto_round:auto_awq" else GptqFormat(v1=True, group=group),)


def _bitsandbytes(settings: JsonFields, key: str) -> Formats:
    if not settings.flag("load_in_4bit", False):
        return (BnbInt8Format(),)
    _one_of(settings, key, "bnb_4bit_quant_storage", (None, "uint8"))
    return (Bnb4BitFormat(),)


def _modelopt(settings: JsonFields, key: str) -> Formats:
    if settings.get("quant_algo") == "MIXED_PRECISION":
        layers = settings.get("quantized_layers")
        for name, layer in (layers if isinstance(layers, Mapping) else {}).items():
            _one_of(
                JsonFields(layer, f"{settings.source}.{name}"), f"{key}.quantized_layers", "quant_algo", _ALGORITHMS
            )
    else:
        _one_of(settings, key, "quant_algo", _ALGORITHMS)
    return ScaledFormat(), Fp4Format(), StackedFp8Format()


_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")


def _compressed(settings: JsonFields, key: str) -> Formats:
    """Return compressed-tensors' formats, one for each module group."""
    for name, part in (("transform_config", "config_groups"), ("sparsity_config", "format")):
        found = settings.get(name)
        if isinstance(found, Mapping) and found.get(part) not in (None, {}, "dense"):
            raise UnsupportedModel(f"{key}.{name}", f"{found.get(part)!r} is not supported")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{settings.source}: config_groups must be an object with groups, not {groups!r}")
    found = [
        _compressed_group(JsonFields(group, f"{settings.source}: config_groups.{name}"), settings.get("format"), key)
        for name, group in groups.items()
        if isinstance(group, Mapping) and group.get("weights") is not None
    ]
    if sum(map(_means_a_class, found)) > 1:
        raise UnsupportedModel(f"{key}.config_groups", "several groups with classes of modules are not supported")
    return tuple(sorted(found, key=_means_a_class))  # patterns and names come before a class, which means all others


def _means_a_class(form: FolderFormat) -> bool:
    """Tell whether the targets name a class of modules, for example Linear."""
    return any(target[:1].isupper() for target in form.targets)


def _compressed_group(group: JsonFields, whole: Any, key: str) -> FolderFormat:
    stored, targets = group.get("format") or whole, group.get("targets") or ["Linear"]
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise CheckpointError(f"{group.source}.targets must be a list of names, not {targets!r}")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{group.source}.weights must be an object, not {weights!r}")
    scheme = JsonFields(weights, f"{group.source}.weights")
    if stored not in _COMPRESSED:
        raise UnsupportedModel(f"{key}.format", f"{stored!r} is none of {', '.join(_COMPRESSED)}")
    form = replace(_COMPRESSED[stored], targets=tuple(targets))
    if isinstance(form, ScaledFormat):
        return replace(form, block=_block(scheme, "block_structure"))
    if isinstance(form, CompressedFormat):
        return replace(
            form, bits=_one_of(scheme, f"{key}.config_groups", "num_bits", range(1, 9)), group=_group(scheme)
        )
    return form


def _group(settings: JsonFields) -> int:
    """Return the inputs that share a scale; 0: all."""
    size = settings.get("group_size")
    return size if type(size) is int and size > 0 else 0


_COMPRESSED: Mapping[str, FolderFormat] = {
    "float-quantized": ScaledFormat(),
    "int-quantized": ScaledFormat(),
    "naive-quantized": ScaledFormat(),
    "mxfp8-quantized": ScaledFormat(),
    "pack-quantized": CompressedFormat(),
    "nvfp4-pack-quantized": Fp4Format(divided=True),
    "mxfp4-pack-quantized": Fp4Format(parts={"scales": (".weight_scale",)}),
}


def _one_of(settings: JsonFields, key: str, name: str, known: Collection[Any]) -> Any:
    """Return a value.

    Raises:
        UnsupportedModel: not in `known`; names the key.
    """
    value = settings.get(name)
    if isinstance(value, bool) or value not in known:
        raise UnsupportedModel(f"{key}.{name}", f"{value!r} is none of {', '.join(map(str, known))}")
    return value


QUANT_METHODS: dict[str, Callable[[JsonFields, str], Formats]] = {
    "fp8": _fp8,
    "mxfp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": lambda _settings, _key: (Mxfp4Format(),),
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}


def dense_index(tensors: Mapping[str, TensorInfo], formats: Formats) -> dict[str, TensorInfo]:
    """Return a folder's tensors with each quantised weight under the dense name, in the dense shape.

    Raises:
        CheckpointError: a tensor that belongs to a weight is missing, or has another type.
    """
    index: dict[str, TensorInfo] = {}
    used: set[str] = set()
    for name, info in tensors.items():
        found = _format_of(name, info, formats)
        if found is None:
            continue
        form, stem = found
        parts = {"values": (name, info)}
        for role, ends in form.parts.items():
            part = next((f"{stem}{end}" for end in ends if f"{stem}{end}" in tensors), None)
            if part is not None:
                parts[role] = part, tensors[part]
            elif role not in form.optional:
                raise CheckpointError(f"{info.file}: tensor {name} has no {role} ({' or '.join(ends)})")
        used.update(part for part, _ in parts.values())
        index[form.dense_name(stem)] = replace(info, shape=_dense_shape(form, parts), format=form, parts=parts)
    return index | {name: info for name, info in tensors.items() if name not in used and not _BESIDE.search(name)}


def _format_of(name: str, info: TensorInfo, formats: Formats) -> tuple[FolderFormat, str] | None:
    """Return how a tensor's values are stored, and their module's name; None: the tensor has no such values."""
    for form in formats:
        end = next((end for end in form.values if name.endswith(end)), None)
        if end is None:
            continue
        stem = name.removesuffix(end)
        if info.dtype not in form.dtypes and end not in (".weight", "_proj"):
            raise CheckpointError(f"{info.file}: tensor {name} is stored as {info.dtype}, not {min(form.dtypes)}")
        if info.dtype in form.dtypes and _is_target(stem, form.targets):
            return form, stem
    return None


def _is_target(module: str, targets: tuple[str, ...]) -> bool:
    """Tell whether targets mean a module with quantised tensors, which is of any class that they name."""
    return not targets or any(
        re.match(target[3:], module) if target.startswith("re:") else target == module or target[:1].isupper()
        for target in targets
    )


def _dense_shape(form: FolderFormat, parts: Parts) -> Shape:
    """Return the weight's shape.

    Raises:
        CheckpointError: a stored shape is malformed.
    """
    try:
        return form.dense_shape(parts)
    except (IndexError, ZeroDivisionError, ValueError, KeyError, TypeError, OSError) as error:
        name, info = parts["values"]
        raise CheckpointError(f"{info.file}: the shape of tensor {name} cannot be told: {error}") from None
