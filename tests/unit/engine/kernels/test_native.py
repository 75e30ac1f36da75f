"""The native kernels: shapes, types, instruction sets, threads; results written whole, independent of the batch."""

import os
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonpool.base.native import build
from moonpool.engine.kernels import ops, reference
from moonpool.engine.kernels.attention import copy_blocks, paged_attention, write_kv
from moonpool.engine.kernels.choice import DTYPES
from moonpool.engine.kernels.kind import PLAIN, AttentionKind, first_seen
from moonpool.engine.kernels.native import library
from moonpool.engine.kernels.native.library import Library
from moonpool.engine.kernels.plan import make_plan
from tests.examples import examples
from tests.unit.engine.kernels.cases import Case, make

pytestmark = pytest.mark.skipif(library.get() is None, reason=f"no native kernels: {library.failure()}")

#: Everything that this machine can run, built once; wider ones are tested where there are any.
TARGETS = [name for name, (needed, _) in build.TARGETS.items() if needed <= build.processor_flags()]
CHEAP = ("avx2",)
"""Built in ten seconds; the build's cache keeps it."""
OTHERS = [name if name in CHEAP else pytest.param(name, marks=pytest.mark.slow) for name in TARGETS[1:]]


@pytest.fixture(params=[*TARGETS[:1], *OTHERS])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The native kernels in another instruction set."""
    built = Library(build.build(request.param))
    monkeypatch.setattr(library, "loader", library.Loader(lambda: built.path))
    return built


def test_vectors_are_as_wide_as_the_machine() -> None:
    built = library.get()
    assert built is not None
    assert built.width == {"avx512": 16, "avx2": 8}.get(build.detect().split("-")[0], 4)
    assert built.has_bf16 == ("bf16" in build.detect())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set(target: Library, dtype: torch.dtype) -> None:
    for head_dim, heads, kv_heads in ((64, 7, 1), (80, 8, 2), (96, 3, 3), (128, 16, 1)):
        case = make(
            [(1, 700), (1, 3), (70, 90), (3, 300)], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
        )
        assert_right(replace(case, scale=head_dim**-0.5))
    x, weight = torch.randn(3, 100).to(dtype), torch.randn(100).to(dtype)
    same(ops.rms_norm(x, weight, 1e-6), by_reference_norm(x, weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_score_without_an_order_makes_the_result_nan(target: Library, dtype: torch.dtype) -> None:
    """As softmax has it: in the heads and rows that meet a NaN or an infinite score, and in no other."""
    case = make([(1, 700), (1, 65), (70, 190), (1, 64)], heads=6, kv_heads=2, head_dim=64, dtype=dtype)
    full = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN all of whose bits are set
    for sequence, token, value in ((0, 130, full), (2, 150, torch.nan), (3, 63, torch.inf)):
        case.dense[sequence][0, token, 1, 5] = value
        case.kv[int(case.block_tables[sequence, token // 16]), 1, 0, token % 16, 5] = value
    out, exact = case.run(), case.exact()
    expected = exact.isnan()
    assert expected.any(-1).sum() >= 3 + 3 * 40
    assert torch.equal(out.isnan(), expected)
    torch.testing.assert_close(out[~expected].double(), exact[~expected], rtol=0.05, atol=0.01)


def assert_right(case: Case) -> None:
    out = torch.full_like(case.q, torch.nan)
    case.run(out=out)
    case.check(out)


def same(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Equal up to one rounding of the type, relative to the largest."""
    step = {torch.float32: 4e-7, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=step, atol=step)


def by_reference_norm(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(x)
    reference.rms_norm(x, None, weight, 1e-6, out)
    return out


@settings(max_examples=examples(30))
@given(
    st.lists(st.tuples(st.sampled_from([1, 1, 2, 17]), st.integers(0, 40)), min_size=1, max_size=4),
    st.sampled_from([64, 80, 96, 128, 16, 48, 256]),
    st.integers(1, 16),
    st.integers(1, 3),
    st.sampled_from([16, 48, 256]),
    st.sampled_from(DTYPES),
)
def test_any_shape(
    parts: list[tuple[int, int]], head_dim: int, group: int, kv_heads: int, block_size: int, dtype: torch.dtype
) -> None:
    case = make(
        [(count, count + before) for count, before in parts],
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    assert_right(replace(case, scale=head_dim**-0.5))


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_scale(scale: float, dtype: torch.dtype) -> None:
    case = replace(make([(1, 100), (40, 600)], dtype=dtype), scale=scale)
    case.check(case.run(), times=8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_splits_and_tiles(dtype: torch.dtype) -> None:
    lengths = [63, 64, 65, 255, 256, 257, 511, 512, 513, 1025]
    for group in range(1, 17):
        chosen = [lengths[group % 10], lengths[group * 3 % 10]]
        sequences = [(1, length) for length in chosen] + [(2, length) for length in chosen]
        assert_right(make(sequences, heads=group, kv_heads=1, dtype=dtype))


def test_huge_scores_do_not_overflow() -> None:
    case = make([(1, 100), (20, 40)])
    case.q.mul_(1e4)
    assert torch.isfinite(case.run()).all()


@pytest.mark.parametrize("mode", ["native", "torch", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_deterministic_in_any_batch(mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence alone, and in shuffled mixes: the same bits."""
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    parts = [(1, 700), (1, 30), (40, 40), (7, 300), (1, 1), (130, 530), (1, 31)]
    case = make(parts, heads=6, kv_heads=2, head_dim=32, dtype=dtype)
    starts = case.query_start.tolist()

    def run(chosen: list[int]) -> list[Tensor]:
        rows = [case.q[starts[s] : starts[s + 1]] for s in chosen]
        counts = torch.tensor([0, *(len(part) for part in rows)]).cumsum(0).int()
        out = paged_attention(
            torch.cat(rows),
            case.kv,
            case.block_tables[chosen],
            counts,
            case.context_lens[chosen],
            0.2,
            deterministic=True,
        )
        return list(torch.split(out, [len(part) for part in rows]))

    alone = [run([s])[0] for s in range(len(parts))]
    order = random.Random(4)
    for size in (2, 3, 5, 7):
        chosen = order.sample(range(len(parts)), size)
        for s, rows in zip(chosen, run(chosen), strict=True):
            assert torch.equal(rows, alone[s]), (chosen, s)


def kinds_of_window(*windows: int) -> list[AttentionKind]:
    """Windows and chunks of so many tokens, with sinks and without."""
    sinks = torch.tensor([0.5, -1.0, 9.0, 0.0])
    return [
        AttentionKind(window, None, sinks if chunked else None, chunked)
        for window in windows
        for chunked in (False, True)
    ]


def hidden(case: Case) -> None:
    """Turns all keys and values behind the windows into NaN."""
    size, starts = case.kv.shape[3], case.query_start.tolist()
    for s, length in enumerate(case.context_lens.tolist()):
        assert case.kind.window is not None
        first = first_seen(length - (starts[s + 1] - starts[s]), case.kind.window, chunked=case.kind.chunked)
        for token in range(first):
            case.kv[case.block_tables[s, token // size], :, :, token % size] = torch.nan


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_around_splits_tiles_and_strips(dtype: torch.dtype, target: Library) -> None:
    for kind in kinds_of_window(1, 63, 64, 300, 513, 1100):
        case = replace(make([(1, 1240), (1, 5), (70, 700), (7, 513)], dtype=dtype), kind=kind)
        hidden(case)
        assert_right(case)


@pytest.mark.parametrize(
    "kind", [PLAIN, AttentionKind(sinks=torch.tensor([0.5, -1.0, 9.0, 0.0])), *kinds_of_window(40, 290)]
)
def test_native_prefill_does_not_depend_on_chunk_borders(kind: AttentionKind) -> None:
    case = replace(make([(200, 700)], dtype=torch.bfloat16), kind=kind)
    whole = case.run()
    part = case.run(
        q=case.q[:77],
        query_start=torch.tensor([0, 77], dtype=torch.int32),
        context_lens=torch.tensor([577], dtype=torch.int32),
    )
    assert torch.equal(part, whole[:77])


def test_as_many_threads_as_torch_has_within_the_process() -> None:
    built = library.get()
    assert built is not None
    assert built.threads_used(1) == 1
    case = make([(1, 900), (1, 40), (60, 300)])
    single = case.run()
    torch.set_num_threads(2)
    try:
        assert torch.equal(case.run(), single)
    finally:
        torch.set_num_threads(1)
    processors = len(os.sched_getaffinity(0))
    assert built.threads_used(2) == min(2, processors)
    assert built.threads_used(1000) <= processors


@settings(max_examples=examples(25))
@given(st.integers(0, 9), st.integers(1, 70), st.sampled_from(DTYPES), st.booleans())
def test_small_operations(rows: int, size: int, dtype: torch.dtype, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + size)

    def random_(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, weight, residual = random_(rows, 2 * size)[:, :size], random_(size), random_(rows, size)
    for beside in (None, residual):
        mine, theirs = (None if beside is None else beside.clone() for _ in range(2))
        out, expected = torch.full((rows, size), torch.nan, dtype=dtype), torch.empty(rows, size, dtype=dtype)
        ops.rms_norm(x, weight, 1e-5, residual=mine, out=out)
        reference.rms_norm(x, theirs, weight, 1e-5, expected)
        same(out, expected, dtype)
        if mine is not None and theirs is not None:
            assert torch.equal(mine, theirs)
    heads = random_(rows, 3, 2 * size)
    cos, sin = random_(rows, 2 * size), random_(rows, 2 * size)
    expected = torch.empty_like(heads)
    reference.rope(heads, cos, sin, expected)
    same(ops.rope(heads, cos, sin, out=heads if in_place else torch.full_like(heads, torch.nan)), expected, dtype)
    gate_up, out = random_(rows, 2 * size), torch.full((rows, size), torch.nan, dtype=dtype)
    expected = torch.empty_like(out)
    reference.silu_mul(gate_up, expected)
    same(ops.silu_mul(gate_up, out=out), expected, dtype)


def test_write_and_copy_in_every_layer() -> None:
    pool = torch.randn(2, 6, 2, 2, 16, 32)
    expected = pool.clone()
    expected[:, [4, 0]] = pool[:, [1, 3]]
    copy_blocks(pool, torch.tensor([1, 3]), torch.tensor([4, 0]))
    assert torch.equal(pool, expected)
    k, v = torch.randn(5, 9, 32)[:, :2], torch.randn(5, 2, 32)
    blocks, offsets = torch.tensor([5, 0, -1, 1, 2]), torch.tensor([0, 3, 15, 2, 9])
    write_kv(k, v, pool[1], blocks, offsets)
    reference.write_kv(k, v, expected[1], None, blocks, offsets)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("name", ["block_ids", "offsets", "source", "target"])
@pytest.mark.parametrize("mode", ["native", "torch"])
def test_indices_outside_the_pool_are_refused(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    pool, row = torch.zeros(1, 3, 1, 2, 16, 16), torch.ones(1, 1, 16)
    index = {key: torch.tensor([0]) for key in ("block_ids", "offsets", "source", "target")}

    def call() -> None:
        if name in ("source", "target"):
            copy_blocks(pool, index["source"], index["target"])
        else:
            write_kv(row, row, pool[0], index["block_ids"], index["offsets"])

    for wrong in (-2 if name == "block_ids" else -1, 16):
        index[name] = torch.tensor([wrong])
        with pytest.raises(IndexError, match=f"^{name}: "):
            call()
    assert not pool.any()


def test_a_plan_of_no_rows() -> None:
    kv = torch.zeros(1, 1, 2, 16, 16)
    none = torch.zeros(0, dtype=torch.int32)
    plan = make_plan(kv, none.view(0, 1), torch.zeros(1, dtype=torch.int32), none)
    out = paged_attention(
        torch.zeros(0, 1, 16), kv, none.view(0, 1), torch.zeros(1, dtype=torch.int32), none, 1.0, plan=plan
    )
    assert out.shape == (0, 1, 16)
