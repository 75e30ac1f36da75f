"""Paged attention: the reference against the formula, the CPU kernel against the reference, the checks by name."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels import reference
from kernels.attention import make_plan, paged_attention, selected, write_kv

MODES = ["reference", "torch", "native"]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass
class Case:
    """Arguments of one call, and the dense keys and values behind the pool."""

    q: Tensor
    kv: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    dense: list[Tensor]  # per sequence [2, context, kv_heads, head_dim]
    scale: float = 0.25

    def run(self, **changed: Any) -> Tensor:
        names = ("q", "kv", "block_tables", "query_start", "context_lens", "scale")
        return paged_attention(**{name: getattr(self, name) for name in names} | changed)


def make(
    sequences: list[tuple[int, int]],  # (query rows, tokens in all) of each sequence
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Scatter random sequences over a pool whose other slots are NaN; table entries past the end are garbage."""
    generator = torch.Generator().manual_seed(5)
    used = [-(-total // block_tokens) for _, total in sequences]
    free = torch.randperm(sum(used) + 3, generator=generator).tolist()
    kv = torch.full((len(free), kv_heads, 2, block_tokens, head_dim), torch.nan, dtype=dtype)
    tables = torch.full((len(sequences), max(used) + 1), 2**30, dtype=torch.int32)
    dense = []
    for s, (_, total) in enumerate(sequences):
        values = torch.randn((2, total, kv_heads, head_dim), generator=generator).to(dtype)
        blocks = torch.tensor([free.pop() for _ in range(used[s])])
        tables[s, : used[s]] = blocks
        position = torch.arange(total)
        write_kv(values[0], values[1], kv, blocks[position // block_tokens], position % block_tokens)
        dense.append(values)
    counts = torch.tensor([0] + [count for count, _ in sequences])
    q = torch.randn((int(counts.sum()), heads, head_dim), generator=generator).to(dtype)
    lengths = torch.tensor([total for _, total in sequences], dtype=torch.int32)
    return Case(q, kv, tables, counts.cumsum(0).int(), lengths, dense)


def by_formula(case: Case) -> Tensor:
    """Dense causal attention in float64."""
    out = []
    for s, values in enumerate(case.dense):
        q = case.q[case.query_start[s] : case.query_start[s + 1]].double().transpose(0, 1)
        k, v = values.double().transpose(1, 2).repeat_interleave(q.shape[0] // values.shape[2], dim=1)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale).transpose(0, 1))
    return torch.cat(out)


def by_reference(case: Case) -> Tensor:
    out = torch.full_like(case.q, torch.nan)
    reference.prefill_attention(
        case.q, case.kv, None, case.block_tables, case.query_start, case.context_lens, case.scale, out
    )
    return out


BATCHES = {
    "prompt": [(40, 40)],
    "chunk": [(16, 48)],
    "decode": [(1, 1), (1, 16), (1, 17), (1, 100), (1, 31)],
    "decode, unsorted": [(1, 40), (1, 20), (1, 33), (1, 17)],
    "decode, equal": [(1, 20), (1, 20), (1, 20)],
    "mixed": [(1, 33), (20, 20), (1, 5), (7, 90), (1, 64), (150, 150)],
    "far apart": [(1, 3), (1, 400), (1, 4), (1, 350)],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("batch", BATCHES)
def test_all_follow_the_formula(
    batch: str, heads: tuple[int, int], dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_KERNELS", mode)
    case = make(BATCHES[batch], heads=heads[0], kv_heads=heads[1], dtype=dtype)
    torch.testing.assert_close(case.run().double(), by_formula(case), rtol=0, atol=TOLERANCE[dtype])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 20]), st.integers(0, 60)), min_size=1, max_size=8),
    st.sampled_from([16, 32]),
)
def test_any_batch(parts: list[tuple[int, int]], block_tokens: int) -> None:
    case = make([(count, count + before) for count, before in parts], block_tokens=block_tokens)
    for mode in MODES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOONPOOL_KERNELS", mode)
            torch.testing.assert_close(case.run(), by_reference(case), rtol=0, atol=2e-6)


def test_groups_and_tiles_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_KERNELS", "torch")
    case = make(BATCHES["mixed"] + BATCHES["decode"])
    expected = case.run()
    monkeypatch.setattr("kernels.division.GATHER_BYTES", 1)
    monkeypatch.setattr("kernels.cpu._TILE_BYTES", 1)
    torch.testing.assert_close(case.run(), expected, rtol=0, atol=1e-6)


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
    torch.testing.assert_close(case.run(), by_formula(case), rtol=0, atol=1e-12)


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
    kv = torch.zeros(3, 2, 2, 16, 4)
    k, v = torch.ones(2, 2, 4), torch.full((2, 2, 4), 2.0)
    write_kv(k, v, kv, torch.tensor([2, 0]), torch.tensor([15, 3]))
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
