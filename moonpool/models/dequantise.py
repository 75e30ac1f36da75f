"""Dense weights of the quantised forms that Hugging Face folders have (`moonpool.checkpoint.quantised`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moonpool.checkpoint.tensor_info import QuantisedFormat

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Values of a 4-bit float, E2M1 of the OCP Microscaling specification."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word that each of its eight columns has."""


def dequantise(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the dense weight, float32, that the stored tensors stand for."""
    return _METHODS[form.method](form, parts)


def _fp8(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """Values times scales: one for all, one a row, or one a block."""
    values, scales = parts["values"].float(), parts["scales"].float()
    if form.block is not None and scales.dim() == 2:
        rows, columns = form.block
        scales = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return values * scales[: values.shape[0], : values.shape[1]]
    if scales.numel() > 1 and scales.shape not in ((len(values),), (len(values), 1)):
        raise RuntimeError(f"scales {list(scales.shape)} are not one for each row of {list(values.shape)}")
    return values * (scales.view(-1, 1) if scales.numel() > 1 else scales)


def _mxfp4(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """Blocks of 32 values of 4 bits with a power of two each, [experts, outputs, blocks, 16]; inputs come first."""
    del form
    blocks = parts["values"]
    pairs = torch.stack((_FP4[(blocks & 15).long()], _FP4[(blocks >> 4).long()]), dim=-1).flatten(-2)
    scaled = torch.ldexp(pairs, (parts["scales"].int() - 127)[..., None])
    return scaled.flatten(-2).transpose(1, 2)


def _gptq(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """Words [inputs / n, outputs]; scales and zero points [groups, outputs]; `groups`: each input's group."""
    values = _unpacked(parts["values"].t(), form.bits).t()  # [inputs, outputs]
    zeros = (_unpacked(parts["zeros"], form.bits) + int(form.v1)) % (1 << form.bits)
    inputs, groups = values.shape[0], parts["scales"].shape[0]
    group = parts["groups"].long() if "groups" in parts else torch.arange(inputs) // (inputs // groups)
    return ((values - zeros[group]) * parts["scales"].float()[group]).t()


def _awq(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """Words [inputs, outputs / 8]; scales [groups, outputs] and zero points [groups, outputs / 8]."""
    values, zeros = (_in_order(_unpacked(parts[role], form.bits)) for role in ("values", "zeros"))
    size = values.shape[0] // zeros.shape[0]
    zeros, scales = (part.repeat_interleave(size, 0) for part in (zeros, parts["scales"].float()))
    return ((values - zeros) * scales).t()


def _packed(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """compressed-tensors: words [outputs, inputs / n], values stored with an offset; scales [outputs, groups]."""
    values = _unpacked(parts["values"], form.bits) - (1 << (form.bits - 1))
    scales = parts["scales"].float()
    return values * scales.repeat_interleave(values.shape[1] // scales.shape[1], 1)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the values of words [..., n], the lowest bits first: [..., n * 32 / bits] float32."""
    shifts = torch.arange(0, 32, bits)
    return ((words.to(torch.int64)[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2).float()


def _in_order(values: Tensor) -> Tensor:
    return values.view(values.shape[0], -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)


_METHODS: Mapping[str, Callable[[QuantisedFormat, Mapping[str, Tensor]], Tensor]] = {
    "fp8": _fp8,
    "int8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "packed": _packed,
}
