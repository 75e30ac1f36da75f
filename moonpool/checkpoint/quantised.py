"""Weights that a Hugging Face folder stores quantised: which tensors belong together, and by which method.

The loader dequantises them (`moonpool.models.dequantise`); memory and speed are those of dense weights. Methods are
those that `quantization_config` names. No tensor data is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.checkpoint.tensor_info import QuantisedFormat, QuantisedTensor, TensorInfo
from moonpool.errors import CheckpointError, UnsupportedModel
from moonpool.families.fields import JsonFields

_FP8 = {"values": (".weight",), "scales": (".weight_scale_inv", ".weight_scale")}


def quantised_format(fields: JsonFields) -> QuantisedFormat | None:
    """Return how weights are stored; None: as they are.

    Raises:
        UnsupportedModel: a method that cannot be read; names the key.
    """
    for key in ("quantization_config", "compression_config"):
        settings = fields.get(key)
        if settings:
            if not isinstance(settings, Mapping):
                raise CheckpointError(f"{fields.source}: {key} must be an object, not {settings!r}")
            return _format(JsonFields(settings, f"{fields.source}: {key}"), key)
    return None


def _format(settings: JsonFields, key: str) -> QuantisedFormat:
    method = settings.get("quant_method", "unnamed")
    if method == "fp8":
        return QuantisedFormat("fp8", _FP8, block=_block(settings, "weight_block_size"))
    if method == "mxfp4":
        return QuantisedFormat("mxfp4", {"values": ("_blocks",), "scales": ("_scales",)}, 4)
    if method in ("gptq", "awq"):
        roles = {"values": (".qweight",), "scales": (".scales",), "zeros": (".qzeros",)}
        bits = settings.positive("bits")
        if bits not in (4, 8) or (method == "awq" and bits != 4):
            raise UnsupportedModel(f"{key}.bits", f"{method} weights of {bits} bits are not supported")
        if method == "awq":
            if settings.get("version", "gemm") != "gemm":
                raise UnsupportedModel(f"{key}.version", f"{settings.get('version')!r} is not gemm")
            return QuantisedFormat("awq", roles, bits)
        version = settings.get("checkpoint_format") or "gptq"
        if version not in ("gptq", "gptq_v2"):
            raise UnsupportedModel(f"{key}.checkpoint_format", f"{version!r} is none of gptq, gptq_v2")
        return QuantisedFormat("gptq", {**roles, "groups": (".g_idx",)}, bits, v1=version == "gptq")
    if method == "compressed-tensors":
        return _compressed(settings, key)
    raise UnsupportedModel(key, f"quantised weights ({method}) are not supported")


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


def _compressed(settings: JsonFields, key: str) -> QuantisedFormat:
    """Return the format of the compressed-tensors library."""
    form = settings.get("format")
    groups = settings.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    known = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized")
    if form not in known or len(weights) != 1 or not isinstance(weights[0], Mapping):
        raise UnsupportedModel(f"{key}.format", f"{form!r} with {len(weights)} groups of weights is not supported")
    scheme = JsonFields(weights[0], f"{settings.source}: weights")
    if scheme.get("actorder") not in (None, False, "weight", "static"):
        raise UnsupportedModel(f"{key}.config_groups", f"actorder {scheme.get('actorder')!r} is not supported")
    if form in ("float-quantized", "naive-quantized"):
        return QuantisedFormat("fp8", _FP8, block=_block(scheme, "block_structure"))
    if form == "int-quantized":
        return QuantisedFormat("int8", {"values": (".weight",), "scales": (".weight_scale",)})
    bits = scheme.positive("num_bits")
    if bits not in (4, 8) or not scheme.flag("symmetric", True):
        raise UnsupportedModel(f"{key}.config_groups", f"{bits} bits, symmetric or not, are not supported")
    return QuantisedFormat("packed", {"values": (".weight_packed",), "scales": (".weight_scale",)}, bits)


def dense_index(tensors: Mapping[str, TensorInfo], form: QuantisedFormat) -> dict[str, TensorInfo]:
    """Return the tensors of a folder with each quantised weight under its dense name, in its dense shape.

    Raises:
        CheckpointError: a tensor that belongs to a weight is missing.
    """
    index: dict[str, TensorInfo] = {}
    (end,) = form.suffixes["values"]
    beside = tuple(suffix for role, ends in form.suffixes.items() if role != "values" for suffix in ends)
    for name, info in tensors.items():
        stem = name.removesuffix(end)
        others = {role: _beside(tensors, stem, ends) for role, ends in form.suffixes.items() if role != "values"}
        if not name.endswith(end) or (form.method in ("fp8", "int8") and info.dtype not in ("F8_E4M3", "I8")):
            if not name.endswith((*beside, ".weight_shape", "_input_scale", ".input_scale")):
                index[name] = info
            continue
        missing = next((role for role, part in others.items() if part is None and role != "groups"), None)
        if missing is not None:
            raise CheckpointError(
                f"{info.file}: tensor {name} has no {missing} ({' or '.join(form.suffixes[missing])})"
            )
        parts = {"values": (name, info), **{role: part for role, part in others.items() if part is not None}}
        dense = stem if form.method == "mxfp4" else f"{stem}.weight"
        index[dense] = replace(info, shape=_dense_shape(form, parts), quantised=QuantisedTensor(form, parts))
    return index


def _beside(tensors: Mapping[str, TensorInfo], stem: str, ends: tuple[str, ...]) -> tuple[str, TensorInfo] | None:
    return next(((f"{stem}{end}", tensors[f"{stem}{end}"]) for end in ends if f"{stem}{end}" in tensors), None)


def _dense_shape(form: QuantisedFormat, parts: Mapping[str, Any]) -> tuple[int, ...]:
    shape: tuple[int, ...] = parts["values"][1].shape
    held = 32 // form.bits
    if form.method == "gptq":
        return shape[1], shape[0] * held
    if form.method == "awq":
        return shape[1] * held, shape[0]
    if form.method == "packed":
        return shape[0], shape[1] * held
    if form.method == "mxfp4":  # [experts, outputs, inputs / 32, 16 bytes], whose dense form has its inputs first
        return shape[0], shape[2] * 32, shape[1]
    return shape
