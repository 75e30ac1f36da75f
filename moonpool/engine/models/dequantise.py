"""Dense weights of the quantised forms that Hugging Face folders have (`moonpool.base.checkpoint.quantised`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moonpool.base.checkpoint.tensor_info import QuantisedFormat

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The values of a 4-bit float, E2M1 in the OCP Microscaling specification."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""A word's nibble for each of the word's eight columns."""
BNB_INT8_UNIT = 7.874015718698502e-3
"""1 / 127 as bitsandbytes rounds."""


def dequantise(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the dense weight, float32, that the stored tensors stand for.

    Raises:
        RuntimeError, IndexError, KeyError, ValueError: shapes or values do not belong together.
    """
    return _METHODS[form.method](form, parts)


def _scaled(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """Values, less zero points if any, times scales: one for all, one a row, one a row's group, or one a block."""
    values = parts["values"].float()
    if "zeros" in parts:
        values = values - _spread(parts["zeros"].float(), values.shape, form.block)
    return values * _spread(scale_numbers(parts["scales"]), values.shape, form.block)


def _spread(scales: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """Return `scales` in a shape that broadcasts to [outputs, inputs] or is that."""
    rows, columns = shape
    if scales.numel() == 1:
        return scales.view(1, 1)
    if scales.dim() == 1:
        scales = scales[:, None]
    if block is None and scales.shape[0] == rows and columns % scales.shape[1] == 0:
        return scales.repeat_interleave(columns // scales.shape[1], 1)
    if block is None or scales.shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise RuntimeError(f"scales {list(scales.shape)} are not those of rows, groups or blocks of {[rows, columns]}")
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]


def scale_numbers(stored: Tensor) -> Tensor:
    """Return scales as float32; bytes are powers of two (E8M0)."""
    if stored.dtype == torch.uint8:
        return torch.ldexp(torch.ones(stored.shape), stored.int() - 127)
    return stored.float()


def _fp4(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """NVFP4 and MXFP4: bytes [outputs, inputs / 2] of two values each; scales [outputs, groups], and one for all."""
    scales = scale_numbers(parts["scales"])
    if "whole" in parts:
        whole = parts["whole"].float().view(1, 1)
        scales = scales / whole if form.divided else scales * whole
    values = _pairs(parts["values"], FP4)
    return values * _spread(scales, values.shape, None)


def _mxfp4(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """Blocks with 32 values of 4 bits and a power of two each, [experts, outputs, blocks, 16]; inputs come first."""
    del form
    scaled = torch.ldexp(_pairs(parts["values"], FP4), (parts["scales"].int() - 127)[..., None])
    return scaled.flatten(-2).transpose(1, 2)


def _pairs(stored: Tensor, table: Tensor) -> Tensor:
    """Return the two values of each byte, low nibble first: [..., n] to [..., 2 * n]."""
    return torch.stack((table[(stored & 15).long()], table[(stored >> 4).long()]), dim=-1).flatten(-2)


def _gptq(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """Words [inputs * bits / 32, outputs]; scales and zero points [groups, outputs]; `groups`: each input's group."""
    scales = parts["scales"].float()
    bits = 32 * parts["zeros"].shape[1] // scales.shape[1]
    values = unpacked(parts["values"].t(), bits).t().float()  # [inputs, outputs]
    zeros = (unpacked(parts["zeros"], bits).float() + int(form.v1)) % (1 << bits)
    group = group_of(form, parts, values.shape[0])
    return ((values - zeros[group]) * scales[group]).t()


def group_of(form: QuantisedFormat, parts: Mapping[str, Tensor], inputs: int) -> Tensor:
    """Return the group of each input."""
    if "groups" in parts:
        return parts["groups"].long()
    return torch.arange(inputs) // (form.group or inputs)


def _awq(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """Words [inputs, outputs / 8]; scales [groups, outputs] and zero points [groups, outputs / 8]."""
    values, zeros = (in_order(unpacked(parts[role], form.bits)).float() for role in ("values", "zeros"))
    group = group_of(form, parts, values.shape[0])
    return ((values - zeros[group]) * parts["scales"].float()[group]).t()


def _packed(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """compressed-tensors: words of signed values, along the inputs; of zero points, along the outputs."""
    scales, middle = parts["scales"].float(), 1 << (form.bits - 1)
    outputs, inputs = (int(size) for size in parts["shape"])
    values = unpacked(parts["values"], form.bits)[:, :inputs].float() - middle
    group = group_of(form, parts, inputs)
    if "zeros" in parts:
        zeros = unpacked(parts["zeros"].t(), form.bits)[:, :outputs].t().float() - middle
        values = values - zeros[:, group]
    return values * scales[:, group]


def _bnb_int8(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    del form
    return parts["values"].float() * parts["scales"].float().view(-1, 1) * BNB_INT8_UNIT


def _bnb_4bit(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """bitsandbytes: bytes of two values each, high nibble first, that choose from a table; a scale a run of values."""
    del form
    state = json.loads(bytes(parts["state"].tolist()))
    stored, table = parts["values"].flatten(), parts["table"].float()
    values = torch.stack((table[(stored >> 4).long()], table[(stored & 15).long()]), dim=-1).flatten()
    shape = [int(size) for size in state["shape"]]
    values = values[: torch.Size(shape).numel()]  # a last half byte may be left over
    scales = bnb_scales(parts, state).repeat_interleave(int(state["blocksize"]))
    return (values * scales[: len(values)]).view(shape)


def bnb_scales(parts: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """Return bitsandbytes' scales, float32 [runs].

    Nested scales are bytes that choose from a separate table, with a scale a run, plus a mean.
    """
    scales = parts["scales"]
    if "nested_scales" not in parts:
        return scales.float()
    chosen = parts["nested_table"].float()[scales.long()]
    nested = parts["nested_scales"].float().repeat_interleave(int(state["nested_blocksize"]))[: len(chosen)]
    return chosen * nested + torch.tensor(state["nested_offset"], dtype=torch.float32)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the values in words [rows, n], each row a bit stream, lowest bit first: uint8 [rows, ...]."""
    count = words.shape[1] * 32 // bits
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2).to(torch.uint8)
    begins = torch.arange(count) * bits
    wide = words.long() & 0xFFFFFFFF
    wide = wide | (torch.nn.functional.pad(wide[:, 1:], (0, 1)) << 32)  # each word with the next higher word
    return ((wide[:, begins // 32] >> (begins % 32)) & ((1 << bits) - 1)).to(torch.uint8)


def in_order(values: Tensor) -> Tensor:
    """Return AWQ's columns in their order."""
    return values.view(values.shape[0], -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)


_METHODS: Mapping[str, Callable[[QuantisedFormat, Mapping[str, Tensor]], Tensor]] = {
    "scaled": _scaled,
    "packed": _packed,
    "gptq": _gptq,
    "awq": _awq,
    "fp4": _fp4,
    "mxfp4": _mxfp4,
    "bnb_int8": _bnb_int8,
    "bnb_4bit": _bnb_4bit,
}
