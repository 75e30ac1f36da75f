"""Weights that a Hugging Face folder stores quantised: which tensors belong together, and by which method.

Methods are those that `quantization_config` names. Modules that a folder leaves dense (`modules_to_not_convert`,
`ignore`) are known by their tensors. Activations stay in the weights' type, even if a folder quantises activations. No
tensor data is read here but the shapes that bitsandbytes and compressed-tensors store as tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.checkpoint.tensor_info import QuantisedFormat, QuantisedTensor, TensorInfo
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.fields import JsonFields

Formats = tuple[QuantisedFormat, ...]
QUANTISATION_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json that say how weights are stored; the second key is from compressed-tensors' first years."""

_FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
_SCALED = QuantisedFormat(
    method="scaled",
    values=(".weight",),
    dtypes=_FLOAT8 | {"I8"},
    parts={"scales": (".weight_scale_inv", ".weight_scale"), "zeros": (".weight_zero_point",)},
    optional=frozenset({"zeros"}),
)
_GPTQ = QuantisedFormat(
    method="gptq",
    values=(".qweight",),
    dtypes=frozenset({"I32"}),
    parts={"scales": (".scales",), "zeros": (".qzeros",), "groups": (".g_idx",)},
    optional=frozenset({"groups"}),
    bits=0,
)
_AWQ = replace(_GPTQ, method="awq", parts={"scales": (".scales",), "zeros": (".qzeros",)}, bits=4)
_PACKED = QuantisedFormat(
    method="packed",
    values=(".weight_packed",),
    dtypes=frozenset({"I32"}),
    parts={
        "scales": (".weight_scale",),
        "zeros": (".weight_zero_point",),
        "groups": (".weight_g_idx",),
        "shape": (".weight_shape",),
    },
    optional=frozenset({"zeros", "groups"}),
)
_FP4 = QuantisedFormat(
    method="fp4",
    values=(".weight_packed", ".weight"),
    dtypes=frozenset({"U8"}),
    parts={"scales": (".weight_scale",), "whole": (".weight_global_scale", ".weight_scale_2")},
    bits=4,
)
_MXFP4 = QuantisedFormat(
    method="mxfp4", values=("_blocks",), dtypes=frozenset({"U8"}), parts={"scales": ("_scales",)}, bits=4
)
_BNB_INT8 = QuantisedFormat(
    method="bnb_int8", values=(".weight",), dtypes=frozenset({"I8"}), parts={"scales": (".SCB", ".weight.SCB")}
)
_BNB_4BIT = QuantisedFormat(
    method="bnb_4bit",
    values=(".weight",),
    dtypes=frozenset({"U8"}),
    parts={
        "scales": (".weight.absmax",),
        "table": (".weight.quant_map",),
        "state": (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4"),
        "nested_scales": (".weight.nested_absmax",),
        "nested_table": (".weight.nested_quant_map",),
    },
    optional=frozenset({"nested_scales", "nested_table"}),
    bits=4,
)
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
    if method not in _READERS:
        raise UnsupportedModel(f"{key}.quant_method", f"{method!r} is none of {', '.join(_READERS)}")
    return _READERS[method](settings, key)


def _fp8(settings: JsonFields, key: str) -> Formats:
    return (replace(_SCALED, block=_block(settings, "weight_block_size")),)


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
    return (replace(_GPTQ, v1=version == "gptq", group=_group(settings)),)


def _awq(settings: JsonFields, key: str) -> Formats:
    _one_of(settings, key, "bits", (4,))
    version = settings.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise UnsupportedModel(f"{key}.version", f"{version!r} is not gemm")
    return (replace(_AWQ, group=_group(settings)),)


def _auto_round(settings: JsonFields, key: str) -> Formats:
    packing = _one_of(settings, key, "packing_format", ("auto_round:auto_gptq", "auto_round:auto_awq"))
    form = _AWQ if packing == "auto_round:auto_awq" else replace(_GPTQ, v1=True)
    return (replace(form, group=_group(settings)),)


def _bitsandbytes(settings: JsonFields, key: str) -> Formats:
    if not settings.flag("load_in_4bit", False):
        return (_BNB_INT8,)
    _one_of(settings, key, "bnb_4bit_quant_storage", (None, "uint8"))
    return (_BNB_4BIT,)


def _modelopt(settings: JsonFields, key: str) -> Formats:
    if settings.get("quant_algo") == "MIXED_PRECISION":
        layers = settings.get("quantized_layers")
        for name, layer in (layers if isinstance(layers, Mapping) else {}).items():
            _one_of(
                JsonFields(layer, f"{settings.source}.{name}"), f"{key}.quantized_layers", "quant_algo", _ALGORITHMS
            )
    else:
        _one_of(settings, key, "quant_algo", _ALGORITHMS)
    return _SCALED, _FP4


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


def _means_a_class(form: QuantisedFormat) -> bool:
    """Tell whether the targets name a class of modules, for example Linear."""
    return any(target[:1].isupper() for target in form.targets)


def _compressed_group(group: JsonFields, whole: Any, key: str) -> QuantisedFormat:
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
    if form.method == "scaled":
        return replace(form, block=_block(scheme, "block_structure"))
    if form.method == "packed":
        return replace(
            form, bits=_one_of(scheme, f"{key}.config_groups", "num_bits", range(1, 9)), group=_group(scheme)
        )
    return form


def _group(settings: JsonFields) -> int:
    """Return the inputs that share a scale; 0: all."""
    size = settings.get("group_size")
    return size if type(size) is int and size > 0 else 0


_MXFP4_PACKED = replace(_FP4, parts={"scales": (".weight_scale",)})
_COMPRESSED: Mapping[str, QuantisedFormat] = {
    "float-quantized": _SCALED,
    "int-quantized": _SCALED,
    "naive-quantized": _SCALED,
    "mxfp8-quantized": _SCALED,
    "pack-quantized": _PACKED,
    "nvfp4-pack-quantized": replace(_FP4, divided=True),
    "mxfp4-pack-quantized": _MXFP4_PACKED,
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


_READERS: Mapping[Any, Callable[[JsonFields, str], Formats]] = {
    "fp8": _fp8,
    "mxfp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": lambda _settings, _key: (_MXFP4,),
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
            its = next((f"{stem}{end}" for end in ends if f"{stem}{end}" in tensors), None)
            if its is not None:
                parts[role] = its, tensors[its]
            elif role not in form.optional:
                raise CheckpointError(f"{info.file}: tensor {name} has no {role} ({' or '.join(ends)})")
        used.update(its for its, _ in parts.values())
        dense = stem if form.method == "mxfp4" else f"{stem}.weight"
        index[dense] = replace(info, shape=_dense_shape(form, parts), quantised=QuantisedTensor(form, parts))
    return index | {name: info for name, info in tensors.items() if name not in used and not _BESIDE.search(name)}


def _format_of(name: str, info: TensorInfo, formats: Formats) -> tuple[QuantisedFormat, str] | None:
    """Return how a tensor's values are stored, and their module's name; None: the tensor has no such values."""
    for form in formats:
        end = next((end for end in form.values if name.endswith(end)), None)
        if end is None:
            continue
        stem = name.removesuffix(end)
        if info.dtype not in form.dtypes and end != ".weight":
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


def _dense_shape(form: QuantisedFormat, parts: Mapping[str, tuple[str, TensorInfo]]) -> tuple[int, ...]:
    """Return [outputs, inputs].

    Raises:
        CheckpointError: a stored shape is malformed.
    """
    shape, scales = parts["values"][1].shape, parts["scales"][1].shape
    try:
        if form.method == "gptq":
            bits = 32 * parts["zeros"][1].shape[1] // scales[1]
            return shape[1], shape[0] * 32 // bits
        if form.method == "awq":
            return shape[1] * 8, shape[0]
        if form.method == "packed":
            whole = scales[1] * form.group == shape[1] * 32 // form.bits
            return (shape[0], scales[1] * form.group) if whole else _stored_shape(parts["shape"][1])
        if form.method == "fp4":
            return shape[0], shape[1] * 2
        if form.method == "mxfp4":  # [experts, outputs, inputs / 32, 16 bytes]; the dense form has the inputs first
            return shape[0], shape[2] * 32, shape[1]
        if form.method == "bnb_4bit":
            return _state_shape(parts["state"][1])
    except (IndexError, ZeroDivisionError, ValueError, KeyError, TypeError, OSError) as error:
        name, info = parts["values"]
        raise CheckpointError(f"{info.file}: the shape of tensor {name} cannot be told: {error}") from None
    return shape


def _stored_shape(info: TensorInfo) -> tuple[int, ...]:
    """Return the whole numbers that a tensor of I32 or I64 holds."""
    size = {"I32": 4, "I64": 8}[info.dtype]
    data = _read(info, size)
    return tuple(int.from_bytes(data[at : at + size], "little", signed=True) for at in range(0, len(data), size))


def _state_shape(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape that bitsandbytes writes into a tensor as JSON."""
    state = json.loads(_read(info, 1))
    return tuple(int(size) for size in state["shape"])


def _read(info: TensorInfo, element_bytes: int) -> bytes:
    with info.file.open("rb") as stream:
        stream.seek(info.begin)
        return stream.read(info.elements * element_bytes)
