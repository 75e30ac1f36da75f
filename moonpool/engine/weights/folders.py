"""Weights in codes of Hugging Face folders: a class for each format of `moonpool.base.checkpoint.weight_formats`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moonpool.base.checkpoint.weight_formats import (
    AwqFormat,
    Bnb4BitFormat,
    BnbInt8Format,
    CompressedFormat,
    FolderFormat,
    Fp4Format,
    GptqFormat,
    Mxfp4Format,
    ScaledFormat,
)
from moonpool.base.json_parts import parse_json
from moonpool.engine.weights.base import Parts, WeightReader
from moonpool.engine.weights.codes import FP4, packed_weight, scale_numbers, stored_scales
from moonpool.engine.weights.packed import PackedWeight

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""A word's nibble for each of the word's eight columns."""
_BNB_INT8_UNIT = 7.874015718698502e-3
"""1 / 127 as bitsandbytes rounds."""
_MXFP4_INPUTS = 32
"""Of an MXFP4 block."""


class ScaledReader(WeightReader):
    """Values, less zero points if any, times scales: one for all, one a row, one a row's group, or one a block."""

    def __init__(self, form: ScaledFormat) -> None:
        self._format = form

    def dense(self, parts: Parts) -> Tensor:
        values = parts["values"].float()
        if "zeros" in parts:
            values = values - _spread(parts["zeros"].float(), values.shape, self._format.block)
        return values * _spread(scale_numbers(parts["scales"]), values.shape, self._format.block)

    def packed(self, parts: Parts) -> PackedWeight | None:
        stored, scales = parts["values"], scale_numbers(parts["scales"])
        outputs, inputs = stored.shape
        block = self._format.block
        if scales.numel() == 1:
            scales = scales.view(1, 1).expand(outputs, 1)
        elif scales.dim() == 1:
            scales = scales[:, None]
        elif block is not None and scales.shape == (-(-outputs // block[0]), -(-inputs // block[1])):
            if inputs % block[1]:
                return None
            scales = scales.repeat_interleave(block[0], 0)[:outputs]
        if scales.shape[0] != outputs:
            return None
        if stored.dtype == torch.int8:
            codes = stored.view(torch.uint8) ^ 128
            if "zeros" not in parts:
                return packed_weight(codes, 8, scales, zero=128)
            return _with_zeros(codes, 8, scales, parts["zeros"].float().view(scales.shape) + 128)
        values = torch.arange(256, dtype=torch.uint8).view(stored.dtype).float()
        return packed_weight(stored.view(torch.uint8), 8, scales, values=values)


class GptqReader(WeightReader):
    """Words [inputs * bits / 32, outputs]; scales and zero points [groups, outputs]; `groups`: each input's group."""

    def __init__(self, form: GptqFormat) -> None:
        self._format = form

    def dense(self, parts: Parts) -> Tensor:
        scales = parts["scales"].float()
        bits = 32 * parts["zeros"].shape[1] // scales.shape[1]
        values = _unpacked(parts["values"].t(), bits).t().float()  # [inputs, outputs]
        zeros = (_unpacked(parts["zeros"], bits).float() + int(self._format.v1)) % (1 << bits)
        group = _group_of(self._format, parts, values.shape[0])
        return ((values - zeros[group]) * scales[group]).t()

    def packed(self, parts: Parts) -> PackedWeight | None:
        scales = parts["scales"].float().t()
        bits = 32 * parts["zeros"].shape[1] // len(scales)
        codes = _unpacked(parts["values"].t(), bits)
        if not _in_groups(self._format, parts, codes.shape[1]):
            return None
        zeros = (_unpacked(parts["zeros"], bits).t().int() + int(self._format.v1)) % (1 << bits)
        return _with_zeros(codes, _kept_bits(bits), scales, zeros.float())


class AwqReader(WeightReader):
    """Words [inputs, outputs / 8]; scales [groups, outputs] and zero points [groups, outputs / 8]."""

    def __init__(self, form: AwqFormat) -> None:
        self._format = form

    def dense(self, parts: Parts) -> Tensor:
        values, zeros = (_in_order(_unpacked(parts[role], self._format.bits)).float() for role in ("values", "zeros"))
        group = _group_of(self._format, parts, values.shape[0])
        return ((values - zeros[group]) * parts["scales"].float()[group]).t()

    def packed(self, parts: Parts) -> PackedWeight | None:
        codes, zeros = (_in_order(_unpacked(parts[role], self._format.bits)).t() for role in ("values", "zeros"))
        return _with_zeros(codes, 4, parts["scales"].float().t(), zeros.float())


class CompressedReader(WeightReader):
    """compressed-tensors: words of signed values, along the inputs; of zero points, along the outputs."""

    def __init__(self, form: CompressedFormat) -> None:
        self._format = form

    def dense(self, parts: Parts) -> Tensor:
        scales, middle = parts["scales"].float(), 1 << (self._format.bits - 1)
        outputs, inputs = (int(size) for size in parts["shape"])
        values = _unpacked(parts["values"], self._format.bits)[:, :inputs].float() - middle
        group = _group_of(self._format, parts, inputs)
        if "zeros" in parts:
            zeros = _unpacked(parts["zeros"].t(), self._format.bits)[:, :outputs].t().float() - middle
            values = values - zeros[:, group]
        return values * scales[:, group]

    def packed(self, parts: Parts) -> PackedWeight | None:
        scales, bits = parts["scales"].float(), self._format.bits
        outputs, inputs = (int(size) for size in parts["shape"])
        if not _in_groups(self._format, parts, inputs):
            return None
        codes, kept = _unpacked(parts["values"], bits)[:, :inputs], _kept_bits(bits)
        if "zeros" not in parts:
            return packed_weight(codes, kept, scales.view(outputs, -1), zero=1 << (bits - 1))
        zeros = _unpacked(parts["zeros"].t(), bits)[:, :outputs].t()
        return _with_zeros(codes, kept, scales.view(outputs, -1), zeros.float())


class Fp4Reader(WeightReader):
    """NVFP4 and MXFP4: bytes [outputs, inputs / 2] of two values each; scales [outputs, groups], and one for all."""

    def __init__(self, form: Fp4Format) -> None:
        self._format = form

    def dense(self, parts: Parts) -> Tensor:
        scales = scale_numbers(parts["scales"])
        if "whole" in parts:
            whole = parts["whole"].float().view(1, 1)
            scales = scales / whole if self._format.divided else scales * whole
        values = _pairs(parts["values"], FP4)
        return values * _spread(scales, values.shape, None)

    def packed(self, parts: Parts) -> PackedWeight | None:
        scales = scale_numbers(parts["scales"])
        if "whole" in parts:
            whole = parts["whole"].float().view(1, 1)
            scales = scales / whole if self._format.divided else scales * whole
        stored = parts["values"]
        return packed_weight(torch.stack((stored & 15, stored >> 4), dim=-1), 4, scales, values=FP4)


class Mxfp4Reader(WeightReader):
    """Blocks with 32 values of 4 bits and a power of two each, [experts, outputs, blocks, 16]; inputs come first."""

    def __init__(self, form: Mxfp4Format) -> None:
        self._format = form

    def dense(self, parts: Parts) -> Tensor:
        scaled = torch.ldexp(_pairs(parts["values"], FP4), (parts["scales"].int() - 127)[..., None])
        return scaled.flatten(-2).transpose(1, 2)

    def packed(self, parts: Parts) -> PackedWeight | None:
        scales, units = stored_scales(scale_numbers(parts["scales"]).flatten(0, 1))
        return PackedWeight(parts["values"].flatten(2).flatten(0, 1), 4, _MXFP4_INPUTS, scales, values=FP4, units=units)


class BnbInt8Reader(WeightReader):
    """bitsandbytes: whole numbers of 8 bits, and a scale for each output."""

    def __init__(self, form: BnbInt8Format) -> None:
        self._format = form

    def dense(self, parts: Parts) -> Tensor:
        return parts["values"].float() * parts["scales"].float().view(-1, 1) * _BNB_INT8_UNIT

    def packed(self, parts: Parts) -> PackedWeight | None:
        return packed_weight(
            parts["values"].view(torch.uint8) ^ 128, 8, parts["scales"].float()[:, None] * _BNB_INT8_UNIT, zero=128
        )


class Bnb4BitReader(WeightReader):
    """bitsandbytes: bytes of two values each, high nibble first, that choose from a table; a scale a run of values."""

    def __init__(self, form: Bnb4BitFormat) -> None:
        self._format = form

    def dense(self, parts: Parts) -> Tensor:
        state = parse_json(bytes(parts["state"].tolist()))
        stored, table = parts["values"].flatten(), parts["table"].float()
        values = torch.stack((table[(stored >> 4).long()], table[(stored & 15).long()]), dim=-1).flatten()
        shape = [int(size) for size in state["shape"]]
        values = values[: torch.Size(shape).numel()]  # a last half byte may be left over
        scales = _bnb_scales(parts, state).repeat_interleave(int(state["blocksize"]))
        return (values * scales[: len(values)]).view(shape)

    def packed(self, parts: Parts) -> PackedWeight | None:
        state = parse_json(bytes(parts["state"].tolist()))
        outputs, inputs = (int(size) for size in state["shape"])
        if inputs % int(state["blocksize"]):
            return None  # scales of runs that go on in the next row
        stored = parts["values"].view(outputs, -1)
        codes = torch.stack((stored >> 4, stored & 15), dim=-1)
        return packed_weight(codes, 4, _bnb_scales(parts, state).view(outputs, -1), values=parts["table"].float())


def _spread(scales: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """Return `scales` in a shape that broadcasts to [outputs, inputs] or is that."""
    if scales.numel() == 1:
        return scales.view(1, 1)
    rows, columns = shape
    if scales.dim() == 1:
        scales = scales[:, None]
    if block is None and scales.shape[0] == rows and columns % scales.shape[1] == 0:
        return scales.repeat_interleave(columns // scales.shape[1], 1)
    if block is None or scales.shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise RuntimeError(f"scales {list(scales.shape)} are not those of rows, groups or blocks of {[rows, columns]}")
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]


def _pairs(stored: Tensor, table: Tensor) -> Tensor:
    """Return the two values of each byte, low nibble first: [..., n] to [..., 2 * n]."""
    return torch.stack((table[(stored & 15).long()], table[(stored >> 4).long()]), dim=-1).flatten(-2)


def _group_of(form: FolderFormat, parts: Parts, inputs: int) -> Tensor:
    """Return the group of each input."""
    if "groups" in parts:
        return parts["groups"].long()
    return torch.arange(inputs) // (form.group or inputs)


def _in_groups(form: FolderFormat, parts: Parts, inputs: int) -> bool:
    """Tell whether groups are runs of inputs."""
    return torch.equal(_group_of(form, parts, inputs), _group_of(form, {}, inputs))


def _with_zeros(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor) -> PackedWeight | None:
    """Return the weight scale * (code - zero) for zero points [outputs, groups], which lie among the codes."""
    first = int(zeros.flatten()[0])
    if bool((zeros == first).all()) and 0 <= first < 1 << bits:
        return packed_weight(codes, bits, scales, zero=first)
    middle = 1 << (bits - 1)
    return packed_weight(codes, bits, scales, zero=middle, offsets=(middle - zeros) * scales)


def _kept_bits(bits: int) -> int:
    """Return the bits in which codes of some bits are held."""
    return next(kept for kept in (4, 5, 6, 8) if kept >= bits)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the values in words [rows, n], each row a bit stream, lowest bit first: uint8 [rows, ...]."""
    count = words.shape[1] * 32 // bits
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2).to(torch.uint8)
    begins = torch.arange(count) * bits
    wide = words.long() & 0xFFFFFFFF
    wide = wide | (torch.nn.functional.pad(wide[:, 1:], (0, 1)) << 32)  # each word with the next higher word
    return ((wide[:, begins // 32] >> (begins % 32)) & ((1 << bits) - 1)).to(torch.uint8)


def _in_order(values: Tensor) -> Tensor:
    """Return AWQ's columns in their order."""
    return values.view(values.shape[0], -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)


def _bnb_scales(parts: Parts, state: Mapping[str, Any]) -> Tensor:
    """Return bitsandbytes' scales, float32 [runs].

    Nested scales are bytes that choose from a separate table, with a scale a run, plus a mean.
    """
    scales = parts["scales"]
    if "nested_scales" not in parts:
        return scales.float()
    chosen = parts["nested_table"].float()[scales.long()]
    nested = parts["nested_scales"].float().repeat_interleave(int(state["nested_blocksize"]))[: len(chosen)]
    return chosen * nested + torch.tensor(state["nested_offset"], dtype=torch.float32)
