"""Quantised KV: its place in a slice, writes with a scale for each token, attention over it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonpool.base.kv.layout import KVLayout
from moonpool.engine.kernels import kv_quantization, reference
from moonpool.engine.kernels.attention import write_kv
from moonpool.engine.kernels.native import library
from tests.examples import examples
from tests.unit.engine.kernels.cases import LAST_TOKEN, MODES, Case

DTYPES = list(kv_quantization.DTYPES.values())
HEADS, TOKENS, SIZE = 2, 16, 32
LENGTHS = (1, 15, 16, 17, 63, 64, 75, 256, 513, 2049)
SHAPES = ((3, 32), (7, 64), (1, 128), (8, 48), (9, 80))
"""(query heads to a key's, their numbers)"""


def pool(dtype: torch.dtype, blocks: int = 5, head_dim: int = SIZE) -> tuple[Tensor, Tensor, Tensor]:
    """(slices, values, scales) full of bytes that are NaN in every type."""
    size = KVLayout.uniform(1, HEADS, head_dim, TOKENS, "int8").slice_bytes(0)
    slices = torch.full((blocks, size), 255, dtype=torch.uint8)
    return slices, *kv_quantization.views(slices, dtype, kv_heads=HEADS, block_size=TOKENS, head_dim=head_dim)


def test_scales_lie_behind_each_plane() -> None:
    slices, values, scales = pool(torch.int8)
    values.zero_()
    values[1, 0, 1, 2, 3] = 7
    scales.copy_(torch.arange(5.0 * 64).view(5, 2, 2, TOKENS))
    assert slices[1, TOKENS * (SIZE + 4) + 2 * SIZE + 3] == 7
    assert slices[3, -8:].view(torch.float32).tolist() == [254.0, 255.0]
    assert slices.shape[1] == HEADS * 2 * TOKENS * (SIZE + 4)


@pytest.mark.parametrize("wrong", ["slices", "dtype"])
def test_views_name_wrong_arguments(wrong: str) -> None:
    slices = torch.zeros(3, 100, dtype=torch.uint8) if wrong == "slices" else pool(torch.int8)[0]
    dtype = torch.bfloat16 if wrong == "dtype" else torch.int8
    with pytest.raises(ValueError, match=f"^{wrong}: "):
        kv_quantization.views(slices, dtype, kv_heads=HEADS, block_size=TOKENS, head_dim=SIZE)


@settings(max_examples=examples(25))
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(-8, 3),
)
@pytest.mark.skipif(library.get() is None, reason="no native kernels")
def test_native_writes_as_the_reference_does(
    counts: list[int], stored: torch.dtype, dtype: torch.dtype, exponent: int
) -> None:
    """Chunk by chunk, loud and quiet numbers; the second sequence's tokens come between the first's."""
    generator = torch.Generator().manual_seed(sum(counts))
    ours, theirs = pool(stored, 40), pool(stored, 40)
    position = 0
    for step, count in enumerate(counts):
        where = torch.arange(position, position + count).repeat_interleave(2)
        blocks, offsets = where // TOKENS * 2 + torch.tensor([0, 1]).repeat(count), where % TOKENS
        k, v = (
            (torch.randn(2 * count, HEADS, SIZE, generator=generator) * 2.0 ** (exponent * step)).to(dtype)
            for _ in range(2)
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOONPOOL_KERNELS", "native")
            write_kv(k, v, ours[1], blocks, offsets, scales=ours[2])
        reference.write_kv(k, v, theirs[1], theirs[2], blocks, offsets)
        position += count
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_stored_depends_on_the_token_alone(
    stored: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token after others, or all at once: the same bytes. So a cached prefix is as one computed anew."""
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    once, (_, values, scales) = pool(stored), pool(stored)
    k, v = torch.randn(2, 40, HEADS, SIZE, generator=torch.Generator().manual_seed(4)).bfloat16() * 3
    v[7] = 0
    wanted = pool(stored)
    reference.write_kv(k, v, wanted[1], wanted[2], torch.arange(40) // TOKENS, torch.arange(40) % TOKENS)
    where = torch.arange(40)
    write_kv(k, v, once[1], where // TOKENS, where % TOKENS, scales=once[2])
    assert torch.equal(once[0], wanted[0]), "as the reference, the sign of 0 included"
    for begin, end in ((0, 1), (1, 19), (19, 40)):
        some = where[begin:end]
        write_kv(k[begin:end], v[begin:end], values, some // TOKENS, some % TOKENS, scales=scales)
    assert torch.equal(values.view(torch.uint8), once[1].view(torch.uint8))
    assert torch.equal(scales.view(torch.int32), once[2].view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_stale_blocks(dtype: torch.dtype) -> None:
    _, values, scales = pool(dtype)
    row = torch.zeros(1, HEADS, SIZE)
    write_kv(row, row + 3, values, torch.tensor([2]), torch.tensor([0]), scales=scales)
    stands_for = reference.dequantize(values[2:3], scales[2:3], torch.float32)[0]
    assert not stands_for[:, 0, 0].any()
    torch.testing.assert_close(stands_for[:, 1, 0], row[0] + 3)
    assert scales[2, :, :, 1:].isnan().all(), "other tokens are left alone"


def attended(
    stored: torch.dtype, dtype: torch.dtype, counts: list[int], tokens: list[int], shape: tuple[int, int] = SHAPES[0]
) -> tuple[Case, Tensor]:
    """Sequences of one prefix, with so many query rows and tokens each; and the scales of their pool."""
    group, size = shape
    total, generator = max(tokens), torch.Generator().manual_seed(max(tokens))
    blocks = -(-total // TOKENS)
    _, values, scales = pool(stored, blocks + 7, size)
    both = torch.randn(2, total, HEADS, size, generator=generator)
    both[1, -1] *= LAST_TOKEN
    both = both.to(dtype)
    table, position = torch.randperm(blocks + 7, generator=generator)[:blocks], torch.arange(total)
    write_kv(both[0], both[1], values, table[position // TOKENS], position % TOKENS, scales=scales)
    q = torch.randn(sum(counts), HEADS * group, size, generator=generator).to(dtype)
    tables = table.int().expand(len(counts), blocks).contiguous()
    starts, lengths = torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(tokens, dtype=torch.int32)
    stand_for = values[table].float() * scales[table][..., None]  # [blocks, heads, 2, tokens, size]
    dense = stand_for.permute(2, 0, 3, 1, 4).flatten(1, 2)
    return Case(q, values, tables, starts, lengths, [dense[:, :count] for count in tokens], 1.2 * size**-0.5), scales


def rounds(mode: str, dtype: torch.dtype) -> float:
    """Times the tolerance: in plain torch what is stored becomes `dtype` before it is used."""
    return 2.0 if mode == "torch" and dtype is not torch.float32 else 1.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", DTYPES)
def test_attention_over_it(stored: torch.dtype, dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each sequence alone, the last key is out of tolerance when it is dropped, at every length."""
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    case, scales = attended(stored, dtype, [1, 3], [70, 75])
    case.check(case.run(scales=scales), rounds(mode, dtype))
    for length, shape in zip(LENGTHS, itertools.cycle(SHAPES)):
        case, scales = attended(stored, dtype, [1], [length + 1], shape)
        case.check(case.run(scales=scales), rounds(mode, dtype))
        with pytest.raises(AssertionError, match="of a row's size"):
            case.check(case.run(scales=scales, context_lens=case.context_lens - 1), rounds(mode, dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stored", DTYPES)
def test_a_query_of_zeros_sees_all_tokens_alike(
    stored: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last vector of scores is filled up."""
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    _, values, scales = pool(stored, 12)
    where = torch.arange(52)
    row = torch.randn(52, HEADS, SIZE, generator=torch.Generator().manual_seed(3)).bfloat16()
    write_kv(row, row, values, where // TOKENS, where % TOKENS, scales=scales)
    counts = [1, 2, 3, 17, 18, 19, 20, 52]
    stand_for = (values[:4, :, 1].float() * scales[:4, :, 1, :, None]).transpose(0, 1).flatten(1, 2).transpose(0, 1)
    case = Case(
        torch.zeros(len(counts), 4, SIZE).bfloat16(),
        values,
        torch.arange(4).int().expand(len(counts), 4).contiguous(),
        torch.arange(len(counts) + 1).int(),
        torch.tensor(counts).int(),
        [stand_for[:count].expand(2, -1, -1, -1) for count in counts],
    )
    case.check(case.run(scales=scales), times=2.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("at", [0, 5, SIZE - 1])
def test_what_is_no_number_stays_none(stored: torch.dtype, mode: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN makes its token's scale one; the others are as without it."""
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    _, values, scales = pool(stored)
    row = torch.ones(2, HEADS, SIZE)
    row[0, 1, at] = -torch.nan
    write_kv(row, row, values, torch.tensor([1, 1]), torch.tensor([0, 1]), scales=scales)
    assert scales[1, :, :, :2].isnan().tolist() == [[[False, False]] * 2, [[True, False]] * 2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stored", DTYPES)
def test_what_is_no_number_reaches_the_results_that_meet_it(
    stored: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a key, a value and a query; of decode and of prefill."""
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    _, values, scales = pool(stored, 12)
    both = torch.randn(2, 75, HEADS, SIZE, generator=torch.Generator().manual_seed(4)).bfloat16()
    table, position = torch.tensor([7, 2, 11, 0, 5]), torch.arange(75)
    write_kv(both[0], both[1], values, table[position // TOKENS], position % TOKENS, scales=scales)
    scales[5, 1, 0, 72 % TOKENS] = scales[5, 0, 1, 70 % TOKENS] = torch.nan
    q = torch.randn(5, 6, SIZE, generator=torch.Generator().manual_seed(5)).bfloat16()
    q[1, 4, 7] = torch.nan
    dense = (values[table].float() * scales[table][..., None]).permute(2, 0, 3, 1, 4).flatten(1, 2)
    lengths = [71, 64, 75]
    case = Case(
        q,
        values,
        table.int().expand(3, 5).contiguous(),
        torch.tensor([0, 1, 2, 5], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        [dense[:, :length] for length in lengths],
    )
    met = case.exact().isnan()
    assert met.all(-1).tolist() == met.any(-1).tolist()
    assert met.any(-1).sum(-1).tolist() == [3, 1, 6, 6, 6]
    assert case.run(scales=scales).isnan().all(-1).tolist() == met.all(-1).tolist()


@pytest.mark.parametrize(("stored", "given_"), [(torch.int8, False), (torch.float32, True)])
def test_scales_are_asked_for(stored: torch.dtype, given_: bool) -> None:
    kv = torch.zeros(1, HEADS, 2, TOKENS, SIZE, dtype=stored)
    scales = torch.ones(1, HEADS, 2, TOKENS) if given_ else None
    row, index = torch.zeros(1, HEADS, SIZE), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^scales: "):
        write_kv(row, row, kv, index, index, scales=scales)
