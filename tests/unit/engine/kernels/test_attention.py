"""Paged attention: every implementation against the formula, the checks by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.engine.kernels import torch_ops
from moonpool.engine.kernels.attention import selected, write_kv
from moonpool.engine.kernels.kind import AttentionKind
from moonpool.engine.kernels.plan import make_plan
from tests.examples import examples, pairs
from tests.unit.engine.kernels.cases import BATCHES, MODES, make

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1025, 2049)
"""Contexts around the borders of blocks, tiles and splits."""


@pytest.mark.parametrize(("batch", "heads", "dtype", "mode"), pairs(BATCHES, [(4, 4), (4, 2), (6, 1)], DTYPES, MODES))
def test_all_follow_the_formula(
    batch: str, heads: tuple[int, int], dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    case = make(BATCHES[batch], heads=heads[0], kv_heads=heads[1], dtype=dtype)
    case.check(case.run())


KINDS = {
    "window": AttentionKind(window=20),
    "narrow": AttentionKind(window=1),
    "chunks": AttentionKind(window=20, chunked=True),
    "chunks of a block": AttentionKind(window=16, chunked=True, soft_cap=1.5),
    "soft cap": AttentionKind(soft_cap=1.5),
    "sinks": AttentionKind(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all": AttentionKind(window=33, soft_cap=1.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize(("batch", "kind", "mode"), pairs(BATCHES, KINDS, MODES))
def test_windows_chunks_caps_and_sinks(batch: str, kind: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    case = replace(make(BATCHES[batch]), kind=KINDS[kind])
    case.check(case.run())


@pytest.mark.parametrize("kind", KINDS)
def test_small_groups_and_tiles_see_the_same_window(kind: str) -> None:
    case = replace(make(BATCHES["mixed"] + BATCHES["decode"]), kind=KINDS[kind])
    window, chunked = KINDS[kind].window, KINDS[kind].chunked
    plan = make_plan(case.kv, case.block_tables, case.query_start, case.context_lens, window=window, chunked=chunked)
    out = torch.full_like(case.q, torch.nan)
    torch_ops.paged_attention(
        case.q, case.kv, None, plan, case.scale, out, kind=case.kind, gather_bytes=1, tile_bytes=1
    )
    case.check(out)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stored", [None, torch.int8])
def test_one_plane_holds_keys_that_are_values_too(
    mode: str, stored: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of latent vectors gives what one with each vector twice gives, prompts and single rows alike."""
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    case = make([(7, 40), (1, 33), (1, 16), (3, 3)], heads=6, kv_heads=1, head_dim=24)
    vectors = torch.randn((92, 1, 24), generator=torch.Generator().manual_seed(2))
    lengths, size = case.context_lens.tolist(), case.kv.shape[3]
    places = [(case.block_tables[s, t // size], t % size) for s, length in enumerate(lengths) for t in range(length)]
    blocks, offsets = (torch.tensor(part, dtype=torch.int64) for part in zip(*places, strict=True))
    found = []
    for planes in (1, 2):
        kv = torch.full((len(case.kv), 1, planes, size, 24), -1 if stored else torch.nan, dtype=stored or torch.float32)
        scales = None if stored is None else torch.full(kv.shape[:4], torch.nan)
        write_kv(vectors, vectors if planes == 2 else None, kv, blocks, offsets, scales=scales)
        found.append(case.run(kv=kv, scales=scales))
        if planes == 1:
            first = case.run(kv=kv, scales=scales, value_dim=17)
            torch.testing.assert_close(first, found[0][..., :17], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert not found[0].isnan().any()


def test_elements_of_a_value_belong_to_latent_vectors() -> None:
    case = make([(1, 3)], heads=2, kv_heads=1, head_dim=16)
    for kv, value_dim in ((case.kv, 8), (case.kv[:, :, :1].contiguous(), 17)):
        with pytest.raises(ValueError, match=f"^value_dim: {value_dim} elements of a value"):
            case.run(kv=kv, value_dim=value_dim)


def test_values_are_given_where_there_are_two_planes() -> None:
    k, index = torch.zeros(1, 1, 16), torch.zeros(1, dtype=torch.int64)
    for planes, v in ((1, k), (2, None)):
        with pytest.raises(ValueError, match=f"^v: kv has {planes} planes"):
            write_kv(k, v, torch.zeros(1, 1, planes, 16, 16), index, index)


@pytest.mark.parametrize(("kind", "firsts"), [("window", (80, 68)), ("chunks", (80, 80))])
def test_blocks_behind_the_window_are_not_read(kind: str, firsts: tuple[int, int]) -> None:
    """They may hold anything, as if their tokens' KV were gone."""
    case = replace(make([(1, 100), (3, 90)]), kind=KINDS[kind])
    expected = case.run()
    for table, first in zip(case.block_tables, firsts, strict=True):
        case.kv[table[: first // 16].long()] = torch.nan
    assert torch.equal(case.run(), expected)


def test_a_kind_must_belong_to_its_plan() -> None:
    case = make(BATCHES["mixed"])
    plan = make_plan(case.kv, case.block_tables, case.query_start, case.context_lens)
    for kind in (KINDS["window"], AttentionKind(sinks=torch.zeros(3))):
        with pytest.raises(ValueError, match="kind"):
            case.run(kind=kind, plan=plan)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropping_the_last_key_is_out_of_tolerance_at_every_length(
    dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself is told a context without the last token: what it gives must not pass for right."""
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    for length in LENGTHS:
        for rows in (1, 2):
            case = make([(rows, length + 1)], dtype=dtype)
            case.check(case.run())
            with pytest.raises(AssertionError, match="of a row's size"):
                case.check(case.run(context_lens=case.context_lens - 1))


@settings(max_examples=examples(25))
@given(
    st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 20]), st.integers(0, 60)), min_size=1, max_size=8),
    st.sampled_from([16, 32]),
)
def test_any_batch(parts: list[tuple[int, int]], block_size: int) -> None:
    case = make([(count, count + before) for count, before in parts], block_size=block_size)
    for mode in MODES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOONPOOL_KERNELS", mode)
            case.check(case.run())


def test_groups_and_tiles_do_not_change_the_result() -> None:
    case = make(BATCHES["mixed"] + BATCHES["decode"])
    outs = []
    for gather, tile in ((torch_ops.GATHER_BYTES, torch_ops.TILE_BYTES), (1, 1)):
        plan = make_plan(case.kv, case.block_tables, case.query_start, case.context_lens)
        outs.append(torch.full_like(case.q, torch.nan))
        torch_ops.paged_attention(
            case.q, case.kv, None, plan, case.scale, outs[-1], gather_bytes=gather, tile_bytes=tile
        )
        case.check(outs[-1])
    torch.testing.assert_close(*outs, rtol=0, atol=1e-6)


def test_out_is_written_whole_and_returned() -> None:
    case = make(BATCHES["mixed"])
    out = torch.full_like(case.q, torch.nan)
    assert case.run(out=out) is out
    assert torch.equal(out, case.run())


@pytest.mark.parametrize("mode", MODES)
def test_q_may_be_part_of_wider_rows_and_blocks_may_lie_apart(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    case = make(BATCHES["mixed"])
    wide = torch.full((case.q.shape[0], 9, 16), torch.nan)
    wide[:, :4] = case.q
    apart = torch.full((case.kv.shape[0], 2, *case.kv.shape[1:]), torch.nan)
    apart[:, 0] = case.kv
    assert torch.equal(case.run(q=wide[:, :4], kv=apart[:, 0]), case.run())


def test_one_plan_serves_every_layer() -> None:
    case, other = make(BATCHES["mixed"]), make(BATCHES["mixed"])
    other.kv.mul_(0.5)
    plan = make_plan(case.kv, case.block_tables, case.query_start, case.context_lens)
    for layer in (case, other):
        assert torch.equal(layer.run(plan=plan), layer.run())


def test_a_sequence_without_rows_is_skipped() -> None:
    case = make([(3, 20), (2, 9)])
    tables = case.block_tables[[0, 0, 1]]
    starts = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    lengths = torch.tensor([20, 20, 9], dtype=torch.int32)
    assert torch.equal(case.run(block_tables=tables, query_start=starts, context_lens=lengths), case.run())


def test_other_types_run_the_reference() -> None:
    case = make(BATCHES["mixed"], dtype=torch.float64)
    assert selected("cpu", torch.float64) == "reference"
    case.check(case.run())


GOOD = make([(1, 20), (4, 30)])


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("q", {"q": GOOD.q[:-1]}),
        ("q", {"q": GOOD.q[:, :3]}),
        ("q", {"q": GOOD.q[..., :8]}),
        ("q", {"q": GOOD.q.bfloat16()}),
        ("kv", {"kv": GOOD.kv[:, :, 0]}),
        ("kv", {"kv": GOOD.kv.transpose(3, 4).contiguous().transpose(3, 4)}),
        ("block_tables", {"block_tables": GOOD.block_tables[:1]}),
        ("block_tables", {"block_tables": GOOD.block_tables.long()}),
        ("block_tables", {"block_tables": GOOD.block_tables[:, :1].contiguous()}),
        ("block_tables", {"block_tables": GOOD.block_tables + 1000}),
        ("block_tables", {"block_tables": GOOD.block_tables - 1000}),
        ("query_start", {"query_start": GOOD.query_start + 1}),
        ("query_start", {"query_start": GOOD.query_start.long()}),
        ("query_start", {"query_start": torch.tensor([0, 6, 5], dtype=torch.int32)}),
        ("context_lens", {"context_lens": GOOD.context_lens[:1]}),
        ("context_lens", {"context_lens": torch.tensor([20, 3], dtype=torch.int32)}),
        ("out", {"out": torch.empty(5, 4, 8)}),
        ("out", {"out": torch.empty(5, 4, 16, dtype=torch.bfloat16)}),
        ("plan", {"plan": make_plan(GOOD.kv[1:], GOOD.block_tables.clamp(0, 1), GOOD.query_start, GOOD.context_lens)}),
    ],
)
def test_wrong_arguments_are_named(name: str, changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        GOOD.run(**changed)


def test_write_kv_writes_its_slots_and_nothing_else() -> None:
    """A token whose block is -1 has none."""
    kv = torch.zeros(3, 2, 2, 16, 4)
    k, v = torch.ones(3, 2, 4), torch.full((3, 2, 4), 2.0)
    write_kv(k, v, kv, torch.tensor([2, -1, 0]), torch.tensor([15, 7, 3]))
    expected = torch.zeros_like(kv)
    expected[2, :, 0, 15], expected[0, :, 0, 3] = 1.0, 1.0
    expected[2, :, 1, 15], expected[0, :, 1, 3] = 2.0, 2.0
    assert torch.equal(kv, expected)


@pytest.mark.parametrize("name", ["k", "v", "kv", "block_ids", "offsets"])
def test_write_kv_names_wrong_arguments(name: str) -> None:
    good = {
        "k": torch.ones(2, 2, 4),
        "v": torch.ones(2, 2, 4),
        "kv": torch.zeros(3, 2, 2, 16, 4),
        "block_ids": torch.tensor([0, 1]),
        "offsets": torch.tensor([0, 1]),
    }
    good[name] = good[name][:, 0] if name in ("k", "v", "kv") else good[name].int()
    with pytest.raises(ValueError, match=f"^{name}: "):
        write_kv(**good)


def test_case_is_not_shared() -> None:
    """The module's GOOD arguments are good."""
    assert torch.isfinite(replace(GOOD).run()).all()
