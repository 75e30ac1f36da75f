"""Packed weights from files: GGUF blocks, and tensors in quantised folders.

Codes and scales are the file's, so that a packed weight stands for the same numbers as the file. Types that are not
listed here (IQ1, IQ2 and IQ3 choose from grids) and inputs in no order become dense.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moonpool.base.checkpoint.tensor_info import QuantisedFormat
from moonpool.engine.models.dequantise import (
    BNB_INT8_UNIT,
    FP4,
    bnb_scales,
    group_of,
    in_order,
    scale_numbers,
    unpacked,
)
from moonpool.engine.models.packed import PackedWeight

_INPUTS = 32
"""Of an MXFP4 block."""
_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)
"""Values of IQ4_NL and IQ4_XS, as in ggml."""


def packed_of_gguf(kind: str, stored: Tensor) -> PackedWeight | None:
    """Return the weight from rows of blocks, uint8 [outputs, bytes per row]; None: no codes hold this block type."""
    if kind not in _BLOCKS:
        return None
    size, unpack = _BLOCKS[kind]
    return unpack(stored.view(len(stored), -1, size))


def packed_of_folder(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> PackedWeight | None:
    """Return the weight that the stored tensors stand for; None: no codes in groups of inputs hold the weight.

    Raises:
        RuntimeError, IndexError, KeyError, ValueError: shapes or values do not belong together.
    """
    return _FOLDERS[form.method](form, parts) if form.method in _FOLDERS else None


def _weight(
    codes: Tensor,
    bits: int,
    scales: Tensor | _Whole,
    zero: int = 0,
    offsets: Tensor | _Whole | None = None,
    values: Tensor | None = None,
) -> PackedWeight | None:
    """Return the weight from codes, one a byte; None: the scales' groups differ in size."""
    codes, (scales, units) = codes.flatten(1), _stored(scales)
    inputs, groups = codes.shape[1], scales.shape[1]
    group = inputs // groups
    if inputs % groups or inputs % 2 or (group % 16 and groups > 1):
        return None
    added, offset_units = (None, None) if offsets is None else _stored(offsets)
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return PackedWeight(codes, bits, group, scales, zero, added, values, units, offset_units)


class _Whole(NamedTuple):
    """Whole numbers [outputs, ..., groups], -128 to 127, of units [outputs, blocks, 1] that float16 holds."""

    numbers: Tensor
    units: Tensor


def _stored(scales: Tensor | _Whole) -> tuple[Tensor, Tensor | None]:
    """Return scales [outputs, groups] in the narrowest type that holds them, and their units."""
    if isinstance(scales, _Whole):
        return scales.numbers.flatten(1).to(torch.int8), scales.units.flatten(1).half()
    scales = scales.flatten(1)
    half = scales.half()
    return (half if torch.equal(half.float(), scales.float()) else scales.float()), None


def _float16(blocks: Tensor, begin: int) -> Tensor:
    """Return the float16 at byte `begin` of each block, as float32 [outputs, blocks, 1]."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16).float()


def _split(stored: Tensor, parts: int, size: int) -> Tensor:
    """Return bytes [..., n] as [..., parts, size]."""
    return stored.reshape(*stored.shape[:-1], parts, size)


def _nibbles(stored: Tensor) -> Tensor:
    """Return the bytes' low nibbles [..., n], then the high nibbles: [..., 2 * n]."""
    return torch.cat((stored & 15, stored >> 4), dim=-1)


def _shifted(stored: Tensor, bits: int) -> Tensor:
    """Return all bytes' first `bits` bits [..., n], then the next bits: [..., 8 / bits * n]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return ((stored[..., None, :] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _bits(stored: Tensor) -> Tensor:
    """Return the bits of each byte, the lowest first."""
    return ((stored[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _q4_0(blocks: Tensor) -> PackedWeight | None:
    return _weight(_nibbles(blocks[..., 2:]), 4, _float16(blocks, 0), zero=8)


def _q4_1(blocks: Tensor) -> PackedWeight | None:
    return _weight(_nibbles(blocks[..., 4:]), 4, _float16(blocks, 0), offsets=_float16(blocks, 2))


def _q5_0(blocks: Tensor) -> PackedWeight | None:
    codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return _weight(codes, 5, _float16(blocks, 0), zero=16)


def _q5_1(blocks: Tensor) -> PackedWeight | None:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return _weight(codes, 5, _float16(blocks, 0), offsets=_float16(blocks, 2))


def _q8_0(blocks: Tensor) -> PackedWeight | None:
    return _weight(blocks[..., 2:] ^ 128, 8, _float16(blocks, 0), zero=128)


def _q2_k(blocks: Tensor) -> PackedWeight | None:
    scales, codes = blocks[..., :16], _shifted(_split(blocks[..., 16:80], 2, 32), 2)
    return _weight(
        codes, 4, _Whole(scales & 15, _float16(blocks, 80)), offsets=_Whole(scales >> 4, -_float16(blocks, 82))
    )


def _q3_k(blocks: Tensor) -> PackedWeight | None:
    high, low = _shifted(blocks[..., :32], 1), _shifted(_split(blocks[..., 32:96], 2, 32), 2).flatten(-2)
    scales = _nibbles(blocks[..., 96:104]) | _shifted(blocks[..., 104:108], 2) << 4
    return _weight(low | high << 2, 4, _Whole(scales.to(torch.int8) - 32, _float16(blocks, 108)), zero=4)


def _k_scales(blocks: Tensor) -> tuple[_Whole, _Whole]:
    """Return scales and offsets [outputs, blocks, 8] of Q4_K and Q5_K; 6 bits each are in bytes 4 to 15."""
    first, second, last = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, last & 15 | (first >> 2) & 48), dim=-1)
    offsets = torch.cat((second & 63, last >> 4 | (second >> 2) & 48), dim=-1)
    return _Whole(scales, _float16(blocks, 0)), _Whole(offsets, -_float16(blocks, 2))


def _q4_k(blocks: Tensor) -> PackedWeight | None:
    scales, offsets = _k_scales(blocks)
    return _weight(_nibbles(_split(blocks[..., 16:], 4, 32)), 4, scales, offsets=offsets)


def _q5_k(blocks: Tensor) -> PackedWeight | None:
    scales, offsets = _k_scales(blocks)
    low = _nibbles(_split(blocks[..., 48:], 4, 32)).flatten(-2)
    return _weight(low | _shifted(blocks[..., 16:48], 1) << 4, 5, scales, offsets=offsets)


def _q6_k(blocks: Tensor) -> PackedWeight | None:
    low = _nibbles(_split(blocks[..., :128], 2, 64)).flatten(-2)
    high = _shifted(_split(blocks[..., 128:192], 2, 32), 2).flatten(-2)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return _weight(low | high << 4, 6, _Whole(scales, _float16(blocks, 208)), zero=32)


def _iq4_nl(blocks: Tensor) -> PackedWeight | None:
    return _weight(_nibbles(blocks[..., 2:]), 4, _float16(blocks, 0), values=_IQ4)


def _iq4_xs(blocks: Tensor) -> PackedWeight | None:
    low, high = blocks[..., 4:8], blocks[..., 2:4]
    scales = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2)
    pairs = (high[..., None] >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3
    whole = (scales | pairs.flatten(-2) << 4).to(torch.int8) - 32
    return _weight(_nibbles(_split(blocks[..., 8:], 8, 16)), 4, _Whole(whole, _float16(blocks, 0)), values=_IQ4)


def _gguf_mxfp4(blocks: Tensor) -> PackedWeight | None:
    return _weight(_nibbles(blocks[..., 1:]), 4, scale_numbers(blocks[..., :1]), values=FP4)


def _gguf_nvfp4(blocks: Tensor) -> PackedWeight | None:
    stored = blocks[..., :4] & 127
    scales = stored.view(torch.float8_e4m3fn).float().masked_fill(stored == 127, 0)
    return _weight(_nibbles(_split(blocks[..., 4:], 4, 8)), 4, scales, values=FP4)


def _tq1_0(blocks: Tensor) -> PackedWeight | None:
    """Five base-3 digits a byte, as a fraction of 256."""

    def digits(stored: Tensor, count: int) -> Tensor:
        powers = torch.tensor([3**place for place in range(count)], dtype=torch.uint8)[:, None]
        return (((stored[..., None, :] * powers).int() * 3) >> 8).to(torch.uint8).flatten(-2)

    codes = torch.cat((digits(blocks[..., :32], 5), digits(blocks[..., 32:48], 5), digits(blocks[..., 48:52], 4)), -1)
    return _weight(codes, 4, _float16(blocks, 52), zero=1)


def _tq2_0(blocks: Tensor) -> PackedWeight | None:
    return _weight(_shifted(_split(blocks[..., :64], 2, 32), 2), 4, _float16(blocks, 64), zero=1)


_BLOCKS: Mapping[str, tuple[int, Callable[[Tensor], PackedWeight | None]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
    "TQ1_0": (54, _tq1_0),
    "TQ2_0": (66, _tq2_0),
    "MXFP4": (17, _gguf_mxfp4),
    "NVFP4": (36, _gguf_nvfp4),
}


def _scaled(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> PackedWeight | None:
    stored, scales = parts["values"], scale_numbers(parts["scales"])
    outputs, inputs = stored.shape
    block = form.block
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
            return _weight(codes, 8, scales, zero=128)
        return _with_zeros(codes, 8, scales, parts["zeros"].float().view(scales.shape) + 128)
    values = torch.arange(256, dtype=torch.uint8).view(stored.dtype).float()
    return _weight(stored.view(torch.uint8), 8, scales, values=values)


def _with_zeros(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor) -> PackedWeight | None:
    """Return the weight scale * (code - zero) for zero points [outputs, groups], which lie among the codes."""
    first = int(zeros.flatten()[0])
    if bool((zeros == first).all()) and 0 <= first < 1 << bits:
        return _weight(codes, bits, scales, zero=first)
    middle = 1 << (bits - 1)
    return _weight(codes, bits, scales, zero=middle, offsets=(middle - zeros) * scales)


def _fp4(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> PackedWeight | None:
    scales = scale_numbers(parts["scales"])
    if "whole" in parts:
        whole = parts["whole"].float().view(1, 1)
        scales = scales / whole if form.divided else scales * whole
    stored = parts["values"]
    return _weight(torch.stack((stored & 15, stored >> 4), dim=-1), 4, scales, values=FP4)


def _mxfp4(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> PackedWeight | None:
    """All experts' rows, one expert below the other."""
    del form
    scales, units = _stored(scale_numbers(parts["scales"]).flatten(0, 1))
    return PackedWeight(parts["values"].flatten(2).flatten(0, 1), 4, _INPUTS, scales, values=FP4, units=units)


def _kept_bits(bits: int) -> int:
    """Return the bits in which codes of some bits are held."""
    return next(kept for kept in (4, 5, 6, 8) if kept >= bits)


def _in_groups(form: QuantisedFormat, parts: Mapping[str, Tensor], inputs: int) -> bool:
    """Tell whether groups are runs of inputs."""
    return torch.equal(group_of(form, parts, inputs), group_of(form, {}, inputs))


def _gptq(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> PackedWeight | None:
    scales = parts["scales"].float().t()
    bits = 32 * parts["zeros"].shape[1] // len(scales)
    codes = unpacked(parts["values"].t(), bits)
    if not _in_groups(form, parts, codes.shape[1]):
        return None
    zeros = (unpacked(parts["zeros"], bits).t().int() + int(form.v1)) % (1 << bits)
    return _with_zeros(codes, _kept_bits(bits), scales, zeros.float())


def _awq(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> PackedWeight | None:
    codes, zeros = (in_order(unpacked(parts[role], form.bits)).t() for role in ("values", "zeros"))
    return _with_zeros(codes, 4, parts["scales"].float().t(), zeros.float())


def _compressed(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> PackedWeight | None:
    scales, bits = parts["scales"].float(), form.bits
    outputs, inputs = (int(size) for size in parts["shape"])
    if not _in_groups(form, parts, inputs):
        return None
    codes, kept = unpacked(parts["values"], bits)[:, :inputs], _kept_bits(bits)
    if "zeros" not in parts:
        return _weight(codes, kept, scales.view(outputs, -1), zero=1 << (bits - 1))
    zeros = unpacked(parts["zeros"].t(), bits)[:, :outputs].t()
    return _with_zeros(codes, kept, scales.view(outputs, -1), zeros.float())


def _bnb_int8(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> PackedWeight | None:
    del form
    return _weight(
        parts["values"].view(torch.uint8) ^ 128, 8, parts["scales"].float()[:, None] * BNB_INT8_UNIT, zero=128
    )


def _bnb_4bit(form: QuantisedFormat, parts: Mapping[str, Tensor]) -> PackedWeight | None:
    del form
    state = json.loads(bytes(parts["state"].tolist()))
    outputs, inputs = (int(size) for size in state["shape"])
    if inputs % int(state["blocksize"]):
        return None  # scales of runs that go on in the next row
    stored = parts["values"].view(outputs, -1)
    codes = torch.stack((stored >> 4, stored & 15), dim=-1)
    return _weight(codes, 4, bnb_scales(parts, state).view(outputs, -1), values=parts["table"].float())


_FOLDERS: Mapping[str, Callable[[QuantisedFormat, Mapping[str, Tensor]], PackedWeight | None]] = {
    "scaled": _scaled,
    "packed": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "fp4": _fp4,
    "mxfp4": _mxfp4,
    "bnb_int8": _bnb_int8,
    "bnb_4bit": _bnb_4bit,
}
