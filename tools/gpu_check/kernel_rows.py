"""Rows of `kernel_speed`: kernels and sampling, each beside a limit measured in the same run.

Calls are timed by the device's events, after warming up. Limits are what a large copy reads and writes per second, a
large matrix product, and what torch has of its own.
"""

import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from benchmarks.ceilings import On
from benchmarks.frame import Row, optional, paired
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.engine.kernels import ops, reference
from moonpool.engine.kernels.attention import HeadNorms, copy_blocks, norm_rope_write, paged_attention, write_kv
from moonpool.engine.kernels.choice import VARIABLE
from moonpool.engine.kernels.plan import make_plan
from moonpool.engine.kernels.sparse import ChosenKeys, choose_keys, chosen_attention
from moonpool.engine.sampling.sampler import Sampler

WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "top-p 0.95, penalties": SamplingParams(temperature=0.8, top_p=0.95, frequency_penalty=0.2, repetition_penalty=1.1),
}
SAMPLED = ((64, 32_000), (64, 151_936))
"""(rows, vocabulary)"""
DECODE_TARGET, PREFILL_TARGET, FLASH_TARGET = 0.85, 0.4, 0.9
_COPY, _PRODUCT = "copy", "matrix product"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What kernels are measured with."""

    decode: tuple[tuple[int, int], ...] = ((32, 4096), (32, 32768), (128, 8192), (256, 4096))
    """(batch, context)"""
    prefill: tuple[tuple[int, int], ...] = ((8192, 8192), (16384, 16384), (4096, 32768))
    """(rows, context)"""
    written: int = 8192
    """Tokens with KV to be written."""
    copied: int = 256
    """Blocks that are copied."""
    normed: tuple[int, int] = (8192, 4096)
    """Rows and width of a norm."""


SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer's attention and pool."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    layers: int = 8
    """The pool with the copied blocks."""
    dtype: torch.dtype = torch.bfloat16
    rest: int = 0
    """Of latent vectors, elements behind a value; 0: keys and values are two planes."""

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"{kind}, {heads}, latent" if self.rest else f"{kind}, {heads}"

    @property
    def value_dim(self) -> int | None:
        """Elements of a latent vector that are its value; None: there are two planes."""
        return self.head_dim - self.rest if self.rest else None

    def pool(self, blocks: int, device: torch.device) -> Tensor:
        """A layer's blocks of random KV."""
        shape = (blocks, self.kv_heads, 1 if self.rest else 2, self.block_size, self.head_dim)
        return torch.randn(shape, device=device, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class _Case:
    """Attention over a paged pool: the call, the reference's, and the call's parts."""

    call: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    kv: Tensor
    tables: Tensor
    q: Tensor


def _case(on: On, shape: Shape, batch: int, rows: int, context: int) -> _Case:
    blocks = context // shape.block_size
    kv = shape.pool(batch * blocks, on.device)
    tables = torch.randperm(batch * blocks, device=on.device).int().view(batch, blocks)
    starts = torch.arange(batch + 1, device=on.device, dtype=torch.int32) * rows
    lengths = torch.full((batch,), context, device=on.device, dtype=torch.int32)
    q = torch.randn(batch * rows, shape.heads, shape.head_dim, device=on.device, dtype=shape.dtype)
    width, scale = shape.value_dim or shape.head_dim, shape.head_dim**-0.5
    plan = make_plan(kv, tables, starts, lengths)
    out = torch.full((batch * rows, shape.heads, width), torch.nan, device=on.device, dtype=shape.dtype)
    expected = torch.full_like(out, torch.nan)

    def call() -> Tensor:
        return paged_attention(q, kv, tables, starts, lengths, scale, out, plan=plan, value_dim=shape.value_dim)

    def by_reference() -> Tensor:
        reference.prefill_attention(q, kv, None, tables, starts, lengths, scale, expected)
        return expected

    return _Case(call, by_reference, kv, tables, q)


def _beside_a_copy(on: On, name: str, nbytes: int, call: Callable[[], object], target: float | None = None) -> Row:
    """Bytes that a call reads and writes per second beside those of a copy."""
    pairs = [(own / 1e9, limit / 1e9) for own, limit in on.pairs(nbytes, call, on.copied)]
    return paired(name, "GB/s", pairs, _COPY, target=target)


def decode_row(on: On, shape: Shape, batch: int, context: int) -> Row:
    """Bytes of KV per second."""
    case = _case(on, shape, batch, 1, context)
    name = f"GPU decode, {shape}, batch {batch}, context {context}"
    return _beside_a_copy(on, name, case.kv.nbytes, case.call, DECODE_TARGET)


def prefill_rows(on: On, shape: Shape, rows: int, context: int) -> list[Row]:
    """One sequence's chunk beside a matrix product; a whole prompt also beside flash attention over contiguous keys."""
    case, before = _case(on, shape, 1, rows, context), context - rows
    both = shape.head_dim + (shape.value_dim or shape.head_dim)
    work = 2 * both * shape.heads * (rows * before + rows * (rows + 1) / 2) / 1e12
    name = f"GPU prefill, {shape}, {rows} of {context}"
    products = on.pairs(work, case.call, lambda: on.multiplied(shape.dtype) / 1e12)
    found = [paired(name, "TFLOP/s", products, _PRODUCT, target=PREFILL_TARGET)]
    if not before and not shape.rest:
        flash = _flash(shape, case)
        pairs = on.pairs(work, case.call, lambda: work * on.per_second(flash))
        found.append(paired(name, "TFLOP/s", pairs, "torch's flash attention", target=FLASH_TARGET))
    return found


def _flash(shape: Shape, case: _Case) -> Callable[[], object]:
    dense = case.kv[case.tables[0].long()].permute(2, 1, 0, 3, 4).reshape(2, 1, shape.kv_heads, -1, shape.head_dim)
    keys, values = dense.repeat_interleave(shape.heads // shape.kv_heads, 2).contiguous()
    queries = case.q.transpose(0, 1)[None].contiguous()

    def call() -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(queries, keys, values, is_causal=True)

    return call


def flashinfer_rows(on: On, shape: Shape, sizes: Sizes) -> Iterator[Row]:
    """Decode and prefill beside FlashInfer's kernels over the same KV. Never run so far.

    Raises:
        Skipped: FlashInfer is not installed.
    """
    flashinfer = optional("flashinfer")
    for batch, context in sizes.decode:
        name = f"GPU decode, {shape}, batch {batch}, context {context}"
        yield _beside_flashinfer(on, shape, flashinfer, _case(on, shape, batch, 1, context), name)
    for rows, context in sizes.prefill:
        name = f"GPU prefill, {shape}, {rows} of {context}"
        yield _beside_flashinfer(on, shape, flashinfer, _case(on, shape, 1, rows, context), name)


def _beside_flashinfer(on: On, shape: Shape, flashinfer: Any, case: _Case, name: str) -> Row:
    batch, blocks = case.tables.shape
    rows = len(case.q) // batch
    room = torch.empty(128 << 20, dtype=torch.uint8, device=on.device)
    pages = torch.arange(batch + 1, device=on.device, dtype=torch.int32) * blocks
    last = torch.full((batch,), shape.block_size, device=on.device, dtype=torch.int32)
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.block_size)
    kv = case.kv.transpose(1, 2).contiguous()  # pages of [K or V, heads, tokens, head_dim]
    if rows == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "HND", use_tensor_cores=True)
        wrapper.plan(pages, case.tables.flatten(), last, *sizes, data_type=shape.dtype, q_data_type=shape.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(room, "HND")
        starts = torch.arange(batch + 1, device=on.device, dtype=torch.int32) * rows
        types = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}
        wrapper.plan(starts, pages, case.tables.flatten(), last, *sizes, causal=True, **types)

    def theirs() -> object:
        return wrapper.run(case.q, kv)

    torch.testing.assert_close(case.call(), theirs(), atol=0.02, rtol=0.02)
    pairs = [(1e3 / own, 1e3 / peer) for own, peer in on.pairs(1.0, case.call, lambda: on.per_second(theirs))]
    return paired(name, "ms", pairs, "FlashInfer", less_is_better=True)


def write_row(on: On, shape: Shape, tokens: int) -> Row:
    """Tokens' KV, each in a separate block or a neighbour's, into the pool."""
    kv = shape.pool(-(-tokens // shape.block_size), on.device)
    k, v = torch.randn(2, tokens, shape.kv_heads, shape.head_dim, device=on.device, dtype=shape.dtype)
    slots = torch.arange(tokens, device=on.device)
    where = slots // shape.block_size, slots % shape.block_size
    call = lambda: write_kv(k, v, kv, *where)  # noqa: E731
    return _beside_a_copy(on, f"GPU KV write, {shape}, {tokens} tokens", 2 * (k.nbytes + v.nbytes), call)


def heads_rows(on: On, shape: Shape, tokens: int) -> list[Row]:
    """Norms of heads, rotation and KV write in one launch, beside the same in separate ones: of a decode step, too."""
    return [_heads_row(on, shape, count, normed=normed) for count in (64, tokens) for normed in (False, True)]


def _heads_row(on: On, shape: Shape, tokens: int, *, normed: bool) -> Row:
    kv = shape.pool(-(-tokens // shape.block_size), on.device)
    heads, width = shape.heads, shape.heads + 2 * shape.kv_heads
    qkv = torch.randn(tokens, width, shape.head_dim, device=on.device, dtype=shape.dtype)
    qk, v = qkv[:, : heads + shape.kv_heads], qkv[:, heads + shape.kv_heads :]
    angles, weight = torch.rand_like(qkv[:, 0]), torch.ones(shape.head_dim, device=on.device)
    slots = torch.arange(tokens, device=on.device)
    where = slots // shape.block_size, slots % shape.block_size
    norms = HeadNorms(weight, weight, None, None, 1e-6, centred=False, wide=False, last=False) if normed else None

    def together() -> Tensor:
        return norm_rope_write(qk, v, heads, kv, *where, norms=norms, angles=(angles, angles))

    def apart() -> Tensor:
        turned = qk
        if normed:
            turned = torch.empty_like(qk, memory_format=torch.contiguous_format)
            for part in (slice(heads), slice(heads, None)):
                ops.norm(qk[:, part], weight, None, 1e-6, centred=False, wide=False, out=turned[:, part])
        turned = ops.rope(turned, angles, angles)
        write_kv(turned[:, heads:], v, kv, *where)
        return turned[:, :heads]

    torch.testing.assert_close(together(), apart(), atol=0.02, rtol=0.02)
    pairs = [(1e3 / own, 1e3 / other) for own, other in on.pairs(1.0, together, lambda: on.per_second(apart))]
    name = f"GPU {'norms, ' if normed else ''}rotation and KV write, {shape}, {tokens} tokens"
    return paired(name, "ms", pairs, "separate launches", less_is_better=True, target=1.0)


def copy_row(on: On, shape: Shape, blocks: int) -> Row:
    """Copy blocks in every layer of a pool."""
    pool = torch.stack([shape.pool(2 * blocks, on.device) for _ in range(shape.layers)])
    source, target = torch.randperm(2 * blocks, device=on.device).view(2, blocks)
    name = f"GPU block copy, {shape}, {blocks} blocks of {shape.layers} layers"
    return _beside_a_copy(on, name, pool.nbytes, lambda: copy_blocks(pool, source, target))


def norm_rows(on: On, dtype: torch.dtype, rows: int, size: int) -> list[Row]:
    """A norm with what is added before it, also beside the same by two launches, and one without beside torch's."""
    x, residual = (torch.randn(rows, size, device=on.device, dtype=dtype) for _ in range(2))
    weight, out = torch.ones(size, device=on.device, dtype=dtype), torch.empty_like(x)
    name = f"GPU norm, {str(dtype).removeprefix('torch.')}, {rows} rows of {size}"

    def theirs() -> float:
        return on.per_second(lambda: rms_norm(x, (size,), weight, 1e-6)) * 2 * x.nbytes / 1e9

    def apart() -> Tensor:
        return ops.rms_norm(residual.add_(x), weight, 1e-6, out=out)

    adding = lambda: ops.rms_norm(x, weight, 1e-6, residual=residual, out=out)  # noqa: E731
    by_two = on.pairs(4 * x.nbytes / 1e9, adding, lambda: on.per_second(apart) * 4 * x.nbytes / 1e9)
    alone = on.pairs(2 * x.nbytes / 1e9, lambda: ops.rms_norm(x, weight, 1e-6, out=out), theirs)
    return [
        _beside_a_copy(on, f"{name}, added to", 4 * x.nbytes, adding),
        paired(name, "GB/s", alone, "torch's norm"),
        paired(f"{name}, added to", "GB/s", by_two, "two launches", target=1.0),
    ]


def beside_reference(on: On, name: str, call: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> Row:
    """A kernel's time beside the reference's in plain torch; results are compared first."""
    torch.testing.assert_close(call().float(), theirs().float(), atol=0.02, rtol=0.02)
    pairs = [(1e3 / own, 1e3 / other) for own, other in on.pairs(1.0, call, lambda: on.per_second(theirs))]
    return paired(name, "ms", pairs, "the reference", less_is_better=True)


def latent_rows(on: On, shape: Shape, sizes: Sizes) -> Iterator[Row]:
    """Attention to latent vectors: beside the hardware, then a decode step and a prompt beside the reference."""
    yield from attention_rows(on, shape, sizes)
    for name, batch, rows in (("decode", 8, 1), ("prefill", 1, sizes.prefill[0][0] // 4)):
        context = min(1024, sizes.prefill[0][1])
        case = _case(on, shape, batch, rows, context)
        yield beside_reference(on, f"GPU {name}, {shape}, {rows} of {context}", case.call, case.reference)


def in_torch(call: Callable[[], Tensor]) -> Tensor:
    """Return what plain torch gives for a call of kernels."""
    had = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "reference"
    try:
        return call()
    finally:
        del os.environ[VARIABLE]
        if had is not None:
            os.environ[VARIABLE] = had


def chosen_rows(on: On, shape: Shape, rows: int, context: int, chosen: int) -> Iterator[Row]:
    """Attention to keys that an indexer has chosen: the bytes of their vectors beside a copy, and beside torch."""
    kv, device = shape.pool(rows * context // shape.block_size, on.device), on.device
    tokens = torch.rand(rows, context, device=device).topk(chosen).indices.sort().values
    places = (tokens + torch.arange(rows, device=device)[:, None] * context).int()
    numbers = torch.full((rows,), chosen, dtype=torch.int32, device=device)
    keys = ChosenKeys(None, places, numbers, None)
    q = torch.randn(rows, shape.heads, shape.head_dim, device=device, dtype=shape.dtype)
    assert shape.value_dim is not None
    call = partial(chosen_attention, q, kv, None, keys, shape.head_dim**-0.5, shape.value_dim, deterministic=False)
    name = f"GPU attention to {chosen} chosen keys of {context}, {shape}, {rows} rows"
    yield _beside_a_copy(on, name, places.numel() * shape.head_dim * kv.element_size(), call)
    yield beside_reference(on, name, call, partial(in_torch, call))


def choice_rows(
    on: On, dtype: torch.dtype, heads: int, width: int, rows: int, context: int, chosen: int
) -> Iterator[Row]:
    """An indexer's choice, each row of its own sequence: the bytes of all keys beside a copy, and beside torch.

    Numbers are small and whole: both choose the same keys.
    """
    device, size = on.device, 16
    kv = torch.randint(-3, 4, (rows * context // size, 1, 1, size, width), device=device).to(dtype)
    q = torch.randint(-3, 4, (rows, heads, width), device=device).to(dtype)
    weights, starts = torch.ones((rows, heads), device=device), torch.arange(rows + 1, device=device).int()
    tables = torch.arange(len(kv), device=device).int().view(rows, -1)
    lists = tables, starts, torch.full((rows,), context, device=device).int()
    plan = make_plan(kv, *lists)

    def call() -> Tensor:
        found = choose_keys(q, weights, kv, None, *lists, 0.25, chosen, plan=plan)
        assert found is not None
        return found.places

    kind = str(dtype).removeprefix("torch.")
    name = f"GPU choice of {chosen} keys of {context}, {kind}, {heads} heads of {width}, {rows} rows"
    yield _beside_a_copy(on, name, kv.nbytes, call)
    yield beside_reference(on, name, call, partial(in_torch, call))


def attention_rows(on: On, shape: Shape, sizes: Sizes) -> Iterator[Row]:
    """Attention beside the hardware."""
    for batch, context in sizes.decode:
        yield decode_row(on, shape, batch, context)
    for rows, context in sizes.prefill:
        yield from prefill_rows(on, shape, rows, context)


def kernel_rows(on: On, shape: Shape, sizes: Sizes) -> Iterator[Row]:
    """All rows of kernels, as they are measured."""
    yield from attention_rows(on, shape, sizes)
    yield write_row(on, shape, sizes.written)
    yield from heads_rows(on, shape, sizes.written)
    yield copy_row(on, shape, sizes.copied)
    yield from norm_rows(on, shape.dtype, *sizes.normed)


def sampling_rows(on: On, rows: int, vocab: int) -> list[Row]:
    """From logits to tokens on the host, beside reading the logits once; top-p also beside torch's sort and draw."""
    logits = torch.randn(rows, vocab, device=on.device) * 2
    found = []
    for way, params in WAYS.items():
        call = _sampling(logits, params)
        pairs = on.pairs(1.0, call, lambda: on.copied() / logits.nbytes)
        name = f"GPU sampling, {way}, {rows} rows of {vocab}"
        found.append(_in_ms(name, pairs, "the logits once at a copy's rate"))
        if way == "top-p 0.95":
            theirs = partial(on.per_second, partial(_by_sort, logits, params))
            found.append(_in_ms(name, on.pairs(1.0, call, theirs), "torch's sort and multinomial"))
    return found


def _in_ms(name: str, rates: list[tuple[float, float]], limit_name: str) -> Row:
    return paired(name, "ms", [(1e3 / own, 1e3 / limit) for own, limit in rates], limit_name, less_is_better=True)


def _sampling(logits: Tensor, params: SamplingParams) -> Callable[[], object]:
    """A further step of a run; the logits are written anew each time, as a step's are."""
    history = array("i", range(0, 1000, 2)).tobytes() if params.penalised else None
    specs = [SampleSpec(params, seed, history=history, prompt_tokens=100) for seed in range(len(logits))]
    sampler, room = Sampler(specs, logits.shape[1], logits.device, 1 << 16), torch.empty_like(logits)

    def call() -> object:
        tokens = sampler.sample(room.copy_(logits)).tokens
        sampler.advance([drawn[0] for drawn in tokens])
        return tokens

    return call


def _by_sort(logits: Tensor, params: SamplingParams) -> Tensor:
    ordered = torch.softmax(logits / params.temperature, -1).sort(-1, descending=True)
    kept = torch.where(ordered.values.cumsum(-1) - ordered.values < params.top_p, ordered.values, 0.0)
    return ordered.indices.gather(1, kept.multinomial(1)).cpu()
