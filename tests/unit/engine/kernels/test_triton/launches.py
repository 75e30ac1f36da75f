"""Launches of the operations, of tiny tensors, to be caught and compiled (`tools.compiled_kernels`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moonpool.engine.kernels.experts import ExpertMatrices
from moonpool.engine.kernels.kind import HeadNorms
from moonpool.engine.weights.packed import PackedWeight


def attend(
    ops: Any,
    *,
    rows: int,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
    head_dim: int = 128,
    group: int = 4,
    block_size: int = 64,
    deterministic: bool = False,
    max_context: int | None = None,
) -> None:
    """Launch attention of two sequences; contents do not matter, nothing runs."""
    kv = torch.empty((4, 2, 2, block_size, head_dim), dtype=stored or dtype)
    scales = None if stored is None else torch.empty((4, 2, 2, block_size))
    tables = torch.zeros((2, 4096 // block_size), dtype=torch.int32)
    lengths = torch.zeros(2, dtype=torch.int32)
    q = torch.empty((2 * rows, 2 * group, head_dim), dtype=dtype)
    keywords = {"max_context": max_context, "deterministic": deterministic}
    if rows == 1:
        ops.decode_attention(q, kv, scales, tables, lengths, 0.1, q, **keywords)
    else:
        starts = torch.zeros(3, dtype=torch.int32)
        ops.prefill_attention(q, kv, scales, tables, starts, lengths, 0.1, q, singles=0, **keywords)


def attend_to_latent(
    ops: Any,
    *,
    rows: int,
    heads: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """As `attend`, over latent vectors of DeepSeek's sizes, which are written first."""
    kv = torch.empty((4, 1, 1, 64, 576), dtype=stored or dtype)
    scales = None if stored is None else torch.empty((4, 1, 1, 64))
    ids = torch.zeros(5, dtype=torch.int64)
    ops.write_kv(torch.empty((5, 1, 576), dtype=dtype), None, kv, scales, ids, ids)
    tables, lengths = torch.zeros((2, 64), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    q, out = (torch.empty((2 * rows, heads, width), dtype=dtype) for width in (576, 512))
    starts = torch.zeros(3, dtype=torch.int32)
    singles = 2 if rows == 1 else 0
    ops.prefill_attention(
        q, kv, scales, tables, starts, lengths, 0.1, out, singles=singles, deterministic=deterministic
    )


def attend_to_chosen(ops: Any, *, heads: int = 128, stored: torch.dtype | None = None, **how: Any) -> None:
    """Launch attention of two rows to chosen latent vectors of DeepSeek's sizes."""
    kv = torch.empty((4, 1, 1, 64, 576), dtype=stored or torch.bfloat16)
    scales = None if stored is None else torch.empty((4, 1, 1, 64))
    places, numbers = torch.zeros((2, 2048), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    q, out = (torch.empty((2, heads, width), dtype=torch.bfloat16) for width in (576, 512))
    ops.chosen_attention(q, kv, scales, places, numbers, 0.1, out, **how)


def choose_keys(
    ops: Any, *, heads: int = 64, dtype: torch.dtype = torch.bfloat16, stored: torch.dtype | None = None
) -> None:
    """Launch the choice of keys for two rows, of DeepSeek's sizes."""
    kv = torch.empty((4, 1, 1, 64, 128), dtype=stored or dtype)
    scales = None if stored is None else torch.empty((4, 1, 1, 64))
    tables, lengths = torch.zeros((2, 64), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    q, weights, starts = torch.empty((2, heads, 128), dtype=dtype), torch.empty((2, heads)), torch.zeros(3).int()
    places, numbers = torch.zeros((2, 2048), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    ops.choose_keys(q, weights, kv, scales, tables, starts, lengths, 0.1, 4096, places, numbers)


def _write(ops: Any, stored: torch.dtype | None = None) -> None:
    k = torch.empty((5, 8, 80), dtype=torch.bfloat16)
    kv = torch.empty((4, 8, 2, 64, 80), dtype=stored or torch.bfloat16)
    ids = torch.zeros(5, dtype=torch.int64)
    ops.write_kv(k, k, kv, None if stored is None else torch.empty((4, 8, 2, 64)), ids, ids)


def norm_rope_write(
    ops: Any, stored: torch.dtype | None = None, *, normed: bool = True, width: int = 128, dim: int = 128
) -> None:
    """Launch what lies between a layer's first product and attention, with 16 heads of queries and 8 of keys."""
    qkv = torch.empty((5, 32, dim), dtype=torch.bfloat16)
    kv = torch.empty((4, 8, 2, 64, dim), dtype=stored or torch.bfloat16)
    ids, angles, weight = torch.zeros(5, dtype=torch.int64), qkv[:, 0, :width], torch.empty(dim)
    norms = HeadNorms(weight, weight, None, None, 1e-6, centred=False, wide=False, last=False) if normed else None
    scales = None if stored is None else torch.empty((4, 8, 2, 64))
    out = torch.empty((5, 16, dim), dtype=torch.bfloat16)
    ops.norm_rope_write(qkv[:, :24], qkv[:, 24:], out, norms, (angles, angles) if width else None, kv, scales, ids, ids)


def _pointwise(ops: Any) -> None:
    x = torch.empty((4, 896), dtype=torch.bfloat16)
    ops.rms_norm(x, None, x[0], 1e-6, x)
    ops.rms_norm(x, x, x[0], 1e-6, x)
    heads = x.view(4, 7, 128)
    for centred, wide, weight in ((False, True, x[0, :128]), (False, False, heads[0]), (True, True, None)):
        scale = None if weight is None else weight.float()
        ops.norm(heads, None, scale, None, 1e-6, heads, centred=centred, wide=wide)
    ops.norm(heads, None, x[0, :128].float(), x[0, :128].float(), 1e-6, heads, centred=True, wide=True)
    ops.norm(x[:, None], x[:, None], x[0].float(), None, 1e-6, x[:, None], centred=False, wide=True)
    ops.rope(x.view(4, 7, 128), x[:, :128], x[:, :128], x.view(4, 7, 128))
    ops.silu_mul(x, torch.empty((4, 448), dtype=torch.bfloat16))


def _sampling(ops: Any) -> None:
    from moonpool.engine.kernels.triton import sampling

    logits, weights = torch.empty((2, 9001)), torch.empty((2, 9088))
    sampling.weights_of(logits, logits[:, 0], logits[:, 0], weights)
    for by_weight in (False, True):
        sampling.keep_leading(weights, torch.empty(2, dtype=torch.float64), by_weight=by_weight)
    sampling.pick(weights, torch.zeros(3, dtype=torch.int64), torch.empty(3, dtype=torch.float64))


def packed_products(ops: Any, rows: int = 1, form: str = "int4/32") -> None:
    """Launch a product with a packed weight of 512 inputs and 256 outputs; `form` as `PackedWeight.kind`."""
    kind, _, size = form.partition("/")
    bits, group = int(kind[-1]), int(size)
    scales = torch.empty((256, 512 // group), dtype=torch.float16)
    tables = {"table4": torch.zeros(16), "float4": torch.linspace(-1, 1, 16), "float8": torch.linspace(-1, 1, 256)}
    weight = PackedWeight(
        torch.empty((256, 512 * (4 if bits == 4 else 8) // 8), dtype=torch.uint8), bits, group,
        scales if bits != 6 else scales.to(torch.int8),
        offsets=scales if kind == "int4" else None,
        values=tables.get(kind),
        units=scales[:, ::16].contiguous() if bits == 6 else None,
    )  # fmt: skip
    x = torch.empty((rows, 512), dtype=torch.bfloat16)
    ops.packed_linear(x, weight, x[0, :256], torch.empty((rows, 256), dtype=torch.bfloat16))


def experts(ops: Any, rows: int = 1, dtype: torch.dtype = torch.bfloat16, *, biased: bool = False) -> None:
    """Launch both products and the sum of 8 experts, 2 of them for each row."""
    starts, tokens = torch.zeros(9, dtype=torch.int64), torch.zeros(2 * rows, dtype=torch.int64)
    up, down = (
        ExpertMatrices(
            [torch.empty(shape, dtype=dtype)] * 8, torch.empty((8, shape[0]), dtype=dtype) if biased else None
        )
        for shape in ((512, 256), (256, 256))
    )
    x, results = torch.empty((rows, 256), dtype=dtype), torch.empty((2 * rows, 256), dtype=dtype)
    both = torch.empty((2 * rows, 512), dtype=dtype)
    ops.expert_linear(x, tokens, starts, up, both, deterministic=False)
    ops.expert_linear(results, None, starts, down, results, deterministic=False)
    ops.add_weighted(results, tokens.view(rows, 2), torch.empty((rows, 2)), x)


def recurrent(
    ops: Any, *, rows: int, key_dim: int = 128, value_dim: int = 128, delta: bool = True, fine: bool = False
) -> None:
    """Launch a convolution and a scan of two sequences with 4 heads."""
    del ops
    from moonpool.engine.kernels.triton import recurrent as kernels

    width, tokens = 2 * key_dim + 4 * value_dim, 2 * rows
    tables, lengths = torch.zeros((2, 64), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    elements = 3 * width + 4 * key_dim * value_dim
    places = kernels.StatePlaces(
        torch.empty((4, elements)), torch.empty((2, elements)), torch.zeros(3, dtype=torch.int32), lengths, tables,
        torch.zeros(tokens, dtype=torch.int64), 64,
    )  # fmt: skip
    x = torch.empty((tokens, width), dtype=torch.bfloat16)
    weight, bias = torch.empty((width, 4), dtype=torch.bfloat16), torch.empty(width, dtype=torch.bfloat16)
    kernels.convolve(x, weight, bias, places, x, silu=True, one_row=rows == 1)
    step = torch.empty((tokens, 4))
    decay = torch.empty((tokens, 4, key_dim)) if fine else step
    shape = kernels.ScanShape(4, 1, key_dim, value_dim, delta, delta, False, 0, key_dim, 2 * key_dim, 3 * width)
    out = torch.empty((tokens, 4 * value_dim), dtype=torch.bfloat16)
    skip = None if delta else torch.empty(4)
    kernels.scan(x, decay, step, skip, places, shape, out, singles=2 if rows == 1 else 0)


PACKED_FORMS = ("int4/32", "int4/128", "table4/32", "int5/32", "int6/16", "int8/32", "float4/64", "float8/128")
OTHERS: list[Callable[[Any], None]] = [
    _write,
    lambda ops: _write(ops, torch.int8),
    lambda ops: _write(ops, torch.float8_e4m3fn),
    lambda ops: ops.copy_blocks(torch.empty((2, 4, 64)), *torch.zeros((2, 3), dtype=torch.int64)),
    *(partial(norm_rope_write, stored=stored) for stored in (None, torch.int8, torch.float8_e4m3fn)),
    partial(norm_rope_write, normed=False, width=32),
    partial(norm_rope_write, width=0, dim=80),
    _pointwise,
    _sampling,
    *(partial(experts, rows=rows, dtype=dtype) for rows in (1, 200) for dtype in (torch.bfloat16, torch.float32)),
    partial(experts, biased=True),
    attend_to_chosen,
    partial(attend_to_chosen, stored=torch.int8),
    partial(attend_to_chosen, stored=torch.float8_e4m3fn, heads=16),
    partial(attend_to_chosen, deterministic=True),
    choose_keys,
    partial(choose_keys, stored=torch.int8, heads=32),
    partial(choose_keys, stored=torch.float8_e4m3fn),
    partial(choose_keys, dtype=torch.float32),
    partial(recurrent, rows=1),
    partial(recurrent, rows=1, fine=True),
    partial(recurrent, rows=200, value_dim=80, delta=False),
    *(partial(packed_products, rows=rows, form=form) for form in PACKED_FORMS for rows in (1, 200)),
]
