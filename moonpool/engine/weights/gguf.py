"""Weights of GGUF files: the block types of ggml."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moonpool.base.checkpoint.weight_formats import GgufType
from moonpool.engine.weights.base import Parts, WeightReader
from moonpool.engine.weights.codes import FP4, WholeScales, packed_weight, scale_numbers
from moonpool.engine.weights.packed import PackedWeight

_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)
"""Values of IQ4_NL and IQ4_XS, as in ggml."""


class GgufReader(WeightReader):
    """Weights of a type of GGUF files: "values" are rows of blocks, uint8 [outputs, bytes per row].

    Codes and scales are the file's, so that a packed weight stands for the same numbers as the file. Types that
    `_BLOCKS` does not list (IQ1, IQ2 and IQ3 choose from grids) become dense.
    """

    def __init__(self, form: GgufType) -> None:
        self._type = form

    def dense(self, parts: Parts) -> Tensor:
        import gguf  # folders do without

        return torch.from_numpy(gguf.dequantize(parts["values"].numpy(), gguf.GGMLQuantizationType[self._type.name]))

    def packed(self, parts: Parts) -> PackedWeight | None:
        stored, unpack = parts["values"], _BLOCKS.get(self._type.name)
        return None if unpack is None else unpack(stored.view(len(stored), -1, self._type.bytes))


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
    return packed_weight(_nibbles(blocks[..., 2:]), 4, _float16(blocks, 0), zero=8)


def _q4_1(blocks: Tensor) -> PackedWeight | None:
    return packed_weight(_nibbles(blocks[..., 4:]), 4, _float16(blocks, 0), offsets=_float16(blocks, 2))


def _q5_0(blocks: Tensor) -> PackedWeight | None:
    codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return packed_weight(codes, 5, _float16(blocks, 0), zero=16)


def _q5_1(blocks: Tensor) -> PackedWeight | None:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return packed_weight(codes, 5, _float16(blocks, 0), offsets=_float16(blocks, 2))


def _q8_0(blocks: Tensor) -> PackedWeight | None:
    return packed_weight(blocks[..., 2:] ^ 128, 8, _float16(blocks, 0), zero=128)


def _q2_k(blocks: Tensor) -> PackedWeight | None:
    scales, codes = blocks[..., :16], _shifted(_split(blocks[..., 16:80], 2, 32), 2)
    return packed_weight(
        codes,
        4,
        WholeScales(scales & 15, _float16(blocks, 80)),
        offsets=WholeScales(scales >> 4, -_float16(blocks, 82)),
    )


def _q3_k(blocks: Tensor) -> PackedWeight | None:
    high, low = _shifted(blocks[..., :32], 1), _shifted(_split(blocks[..., 32:96], 2, 32), 2).flatten(-2)
    scales = _nibbles(blocks[..., 96:104]) | _shifted(blocks[..., 104:108], 2) << 4
    return packed_weight(low | high << 2, 4, WholeScales(scales.to(torch.int8) - 32, _float16(blocks, 108)), zero=4)


def _k_scales(blocks: Tensor) -> tuple[WholeScales, WholeScales]:
    """Return scales and offsets [outputs, blocks, 8] of Q4_K and Q5_K; 6 bits each are in bytes 4 to 15."""
    first, second, last = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, last & 15 | (first >> 2) & 48), dim=-1)
    offsets = torch.cat((second & 63, last >> 4 | (second >> 2) & 48), dim=-1)
    return WholeScales(scales, _float16(blocks, 0)), WholeScales(offsets, -_float16(blocks, 2))


def _q4_k(blocks: Tensor) -> PackedWeight | None:
    scales, offsets = _k_scales(blocks)
    return packed_weight(_nibbles(_split(blocks[..., 16:], 4, 32)), 4, scales, offsets=offsets)


def _q5_k(blocks: Tensor) -> PackedWeight | None:
    scales, offsets = _k_scales(blocks)
    low = _nibbles(_split(blocks[..., 48:], 4, 32)).flatten(-2)
    return packed_weight(low | _shifted(blocks[..., 16:48], 1) << 4, 5, scales, offsets=offsets)


def _q6_k(blocks: Tensor) -> PackedWeight | None:
    low = _nibbles(_split(blocks[..., :128], 2, 64)).flatten(-2)
    high = _shifted(_split(blocks[..., 128:192], 2, 32), 2).flatten(-2)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return packed_weight(low | high << 4, 6, WholeScales(scales, _float16(blocks, 208)), zero=32)


def _iq4_nl(blocks: Tensor) -> PackedWeight | None:
    return packed_weight(_nibbles(blocks[..., 2:]), 4, _float16(blocks, 0), values=_IQ4)


def _iq4_xs(blocks: Tensor) -> PackedWeight | None:
    low, high = blocks[..., 4:8], blocks[..., 2:4]
    scales = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2)
    pairs = (high[..., None] >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3
    whole = (scales | pairs.flatten(-2) << 4).to(torch.int8) - 32
    return packed_weight(
        _nibbles(_split(blocks[..., 8:], 8, 16)), 4, WholeScales(whole, _float16(blocks, 0)), values=_IQ4
    )


def _gguf_mxfp4(blocks: Tensor) -> PackedWeight | None:
    return packed_weight(_nibbles(blocks[..., 1:]), 4, scale_numbers(blocks[..., :1]), values=FP4)


def _gguf_nvfp4(blocks: Tensor) -> PackedWeight | None:
    stored = blocks[..., :4] & 127
    scales = stored.view(torch.float8_e4m3fn).float().masked_fill(stored == 127, 0)
    return packed_weight(_nibbles(_split(blocks[..., 4:], 4, 8)), 4, scales, values=FP4)


def _tq1_0(blocks: Tensor) -> PackedWeight | None:
    """Five base-3 digits a byte, as a fraction of 256."""

    def digits(stored: Tensor, count: int) -> Tensor:
        powers = torch.tensor([3**place for place in range(count)], dtype=torch.uint8)[:, None]
        return (((stored[..., None, :] * powers).int() * 3) >> 8).to(torch.uint8).flatten(-2)

    codes = torch.cat((digits(blocks[..., :32], 5), digits(blocks[..., 32:48], 5), digits(blocks[..., 48:52], 4)), -1)
    return packed_weight(codes, 4, _float16(blocks, 52), zero=1)


def _tq2_0(blocks: Tensor) -> PackedWeight | None:
    return packed_weight(_shifted(_split(blocks[..., :64], 2, 32), 2), 4, _float16(blocks, 64), zero=1)


_BLOCKS: Mapping[str, Callable[[Tensor], PackedWeight | None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _gguf_mxfp4,
    "NVFP4": _gguf_nvfp4,
}
