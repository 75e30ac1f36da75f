"""The check at an engine's start notices kernels that are wrong. None is compiled: those that are right are torch's."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.base.remedies import remedy
from moonpool.engine.kernels import attention, ops, self_check, sparse
from moonpool.engine.kernels.choice import REPLACED
from moonpool.engine.kernels.experts import ExpertMatrices
from moonpool.engine.kernels.kind import AttentionKind
from moonpool.engine.kernels.self_check import allowed, checking, largest_error
from tests.unit.engine.kernels.kernels_of_torch import Break, Kernels, heads_swapped
from tests.unit.engine.kernels.test_triton.pools import make

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

CPU, SIZE = torch.device("cpu"), 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STORED = (None, torch.int8, torch.float8_e4m3fn)
LATENT: dict[str, Any] = {"kv_heads": 1, "head_dim": 72, "rest": 8, "group": 20}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Kernels in place of Triton's; nothing is replaced before and behind."""
    REPLACED.clear()
    yield Kernels(monkeypatch)
    REPLACED.clear()


def attend(dtype: torch.dtype = torch.bfloat16, stored: torch.dtype | None = None, **sizes: Any) -> Tensor:
    """Attention of a step with several sequences, of a prompt and of single rows."""
    kind = sizes.pop("kind", AttentionKind())
    case = make([(20, 509), (1, 509), (1, 300)], dtype=dtype, stored=stored, seed=3, **sizes)
    tables = (case.tables[:, :-1].clamp_max(len(case.kv) - 1), case.starts, case.lengths)
    value_dim = case.q.shape[2] - case.rest if case.rest else None
    return attention.paged_attention(
        case.q, case.kv, *tables, case.scale, scales=case.scales, kind=kind, value_dim=value_dim
    )


def choose(dtype: torch.dtype = torch.bfloat16, stored: torch.dtype | None = None) -> list[list[int]]:
    """An indexer's choice for rows of a prompt and single rows: the places of each row."""
    drawn, heads, topk = torch.Generator().manual_seed(5), 6, 40
    blocks, width, spans = 40, 32, [(9, 120), (1, 300), (1, 77), (1, 20)]

    def whole(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=drawn)

    kv, rows = whole(blocks, 1, 1, SIZE, width).to(stored or dtype), sum(count for count, _ in spans)
    scales = None if stored is None else torch.ones(kv.shape[:4])
    tables = torch.stack([torch.randperm(blocks, generator=drawn)[:20] for _ in spans]).int()
    starts = torch.tensor([0, *(count for count, _ in spans)]).cumsum(0).int()
    lengths, weights = torch.tensor([length for _, length in spans]).int(), whole(rows, heads).float()
    q = whole(rows, heads, width).to(dtype)
    chosen = sparse.choose_keys(q, weights, kv, scales, tables, starts, lengths, 0.25, topk)
    assert chosen is not None
    found = [list[int]() for _ in range(rows)]
    at = range(rows) if chosen.rows is None else chosen.rows.tolist()
    for row, places, number in zip(at, chosen.places.tolist(), chosen.numbers.tolist(), strict=True):
        found[row] = places[:number]
    return found


def of_rows(dtype: torch.dtype = torch.bfloat16, stored: torch.dtype | None = None) -> None:
    """What a layer has beside attention and products."""
    case = make([(1, 20)], dtype=dtype, stored=stored, head_dim=64, kv_heads=2)
    x, ids = torch.zeros(20, 8, 64, dtype=dtype), torch.ones(20, dtype=torch.int64)
    angles = x[:, 0, :32].contiguous(), x[:, 0, :32].contiguous()
    attention.norm_rope_write(x[:, :6], x[:, 6:], 4, case.kv, ids, ids, norms=None, angles=angles, scales=case.scales)
    attention.write_kv(x[:, :2], x[:, 6:], case.kv, ids, ids, scales=case.scales)
    attention.copy_blocks(case.kv[None], ids[:1], ids[:1] - 1)
    ops.rms_norm(x.flatten(1), torch.ones(512, dtype=dtype), 1e-6, residual=x.flatten(1).clone())
    ops.norm(x, torch.ones(64), None, 1e-6, centred=False, wide=True)
    ops.silu_mul(x.flatten(1))
    ops.rope(x, x[:, 0].contiguous(), x[:, 0].contiguous())
    matrices = [torch.randn(48, 64, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3)]
    found = ops.expert_linear(x[:, 0].contiguous(), ids - 1, torch.tensor([0, 20, 20, 20]), ExpertMatrices(matrices))
    ops.add_weighted(found, torch.arange(20).view(10, 2), torch.ones(10, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED)
def test_what_is_right_passes(kernels: Kernels, dtype: torch.dtype, stored: torch.dtype | None) -> None:
    with checking(CPU) as check:
        attend(dtype, stored)
        check.next_step()
        attend(dtype, stored, **LATENT)
        choose(dtype, stored)
        of_rows(dtype, stored)
    assert not check.found
    assert not REPLACED
    assert {name for name, _ in check.compared} >= {
        "prefill_attention", "choose_keys", "norm_rope_write", "expert_linear",
    }  # fmt: skip
    assert max(error for _, error in check.compared) == 0.0


def without_last_key(given: dict[str, Any]) -> None:
    given["context_lens"] = (given["context_lens"] - 1).clamp_min(0)


def one_wider(given: dict[str, Any]) -> None:
    given["kind"] = AttentionKind(given["kind"].window + 1)


def without_one_key(given: dict[str, Any]) -> None:
    """A key in the middle has the value 0, as if a sum left it out."""
    given["kv"] = given["kv"].clone()
    given["kv"][given["block_tables"][0, 7].item(), :, -1, 3] = 0


def without_a_block(given: dict[str, Any]) -> None:
    given["block_tables"] = given["block_tables"].clone()
    given["block_tables"][0, 5] = given["block_tables"][0, 6]


def last_row_is_the_first(given: dict[str, Any]) -> None:
    given["out"][-1] = given["out"][0]


def one_number_lost(given: dict[str, Any]) -> None:
    given["out"].view(-1)[5] = 4.0


def nothing_written(given: dict[str, Any]) -> None:
    given["out"].fill_(torch.nan)


def stored_elsewhere(given: dict[str, Any]) -> None:
    given["offsets"] = (given["offsets"] + 1) % SIZE


@pytest.mark.parametrize(
    ("dtype", "stored"), [*((dtype, None) for dtype in DTYPES), *((torch.bfloat16, stored) for stored in STORED[1:])]
)
@pytest.mark.parametrize(
    ("before", "behind"),
    [(without_last_key, None), (without_one_key, None), (without_a_block, None), (None, heads_swapped),
     (None, last_row_is_the_first)],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [{}, LATENT], ids=["", "latent"])
def test_attention_that_is_wrong_is_replaced(
    kernels: Kernels,
    caplog: pytest.LogCaptureFixture,
    before: Break | None,
    behind: Break | None,
    dtype: torch.dtype,
    stored: torch.dtype | None,
    sizes: dict[str, Any],
) -> None:
    with checking(CPU):  # which leaves its numbers in the pool
        right = attend(dtype, stored, **sizes)
    kernels.break_("prefill_attention", before=before, behind=behind)
    with checking(CPU) as check, caplog.at_level(logging.ERROR):
        found = attend(dtype, stored, **sizes)
    assert torch.equal(found, right), "the step itself has the reference's results"
    assert {"attention"} == REPLACED
    [said] = check.found
    assert "prefill_attention" in said
    assert "Triton" in said
    assert remedy(said).endswith("#wrong-kernel")
    assert said in caplog.text
    launched = kernels.launched
    assert torch.equal(attend(dtype, stored, **sizes), attend(dtype, stored, **sizes))
    assert kernels.launched == launched, "Triton is not asked again"


def test_a_wrong_window_is_noticed_though_no_context_is_as_long(kernels: Kernels) -> None:
    kernels.break_("prefill_attention", before=one_wider)
    with checking(CPU) as check:
        attend(kind=AttentionKind(4096))
    assert check.found


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("broken", [None, heads_swapped, last_row_is_the_first])
def test_chosen_keys(kernels: Kernels, stored: torch.dtype | None, broken: Break | None) -> None:
    kernels.break_("chosen_attention", behind=broken)
    case = make([(1, 40), (1, 7), (1, 33)], stored=stored, dtype=torch.bfloat16, **LATENT)
    numbers = torch.tensor([32, 5, 9], dtype=torch.int32)
    chosen = sparse.ChosenKeys(torch.arange(3), torch.zeros((3, 32), dtype=torch.int32), numbers, None)
    with checking(CPU) as check:
        sparse.chosen_attention(case.q, case.kv, case.scales, chosen, case.scale, 64, deterministic=False)
    assert bool(check.found) == (broken is not None)
    assert ({"attention"} if broken else set()) == REPLACED


def one_key_more(given: dict[str, Any]) -> None:
    given["context_lens"] = given["context_lens"] + 1


def later_of_equal_keys(given: dict[str, Any]) -> None:
    """The first row sees the last of several equal keys in place of the first that it should."""
    places, tokens = given["places"][0], torch.arange(int(given["context_lens"][0] - given["query_start"][1] + 1))
    seen = (given["block_tables"][0, tokens // SIZE] * SIZE + tokens % SIZE).tolist()
    own = {place: token for token, place in enumerate(seen)}
    chosen = [own[place] for place in places.tolist()]
    one, other = next(
        (one, other)
        for one in chosen
        for other in reversed(tokens.tolist())
        if other > one and other not in chosen and same_key(given, seen[one], seen[other])
    )
    places.copy_(torch.tensor([seen[token] for token in sorted({*chosen, other} - {one})]))


def same_key(given: dict[str, Any], one: int, other: int) -> bool:
    parts = [part[:, 0, 0].float() for part in (given["kv"], given["scales"]) if part is not None]
    return all(torch.equal(part[one // SIZE, one % SIZE], part[other // SIZE, other % SIZE]) for part in parts)


def places_of_another_row(given: dict[str, Any]) -> None:
    given["places"][-1] = given["places"][0]


def one_key_fewer(given: dict[str, Any]) -> None:
    given["numbers"][0] -= 1


@pytest.mark.parametrize(
    ("dtype", "stored"), [*((dtype, None) for dtype in DTYPES), *((torch.bfloat16, stored) for stored in STORED[1:])]
)
@pytest.mark.parametrize(
    ("before", "behind"),
    [(without_last_key, None), (without_one_key, None), (without_a_block, None), (one_key_more, None),
     (None, later_of_equal_keys), (None, places_of_another_row), (None, one_key_fewer)],
)  # fmt: skip
def test_a_choice_of_keys_that_is_wrong_is_replaced(
    kernels: Kernels, before: Break | None, behind: Break | None, dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    right = choose(dtype, stored)
    assert [len(places) for places in right] == [40] * 11 + [20]
    with checking(CPU):  # which leaves its numbers in the pool
        beside = choose(dtype, stored)
    kernels.break_("choose_keys", before=before, behind=behind)
    with checking(CPU) as check:
        assert choose(dtype, stored) == beside, "the step itself has the reference's results"
    assert {"choose_keys"} == REPLACED
    [said] = check.found
    assert "choose_keys" in said
    assert remedy(said).endswith("#wrong-kernel")
    launched = kernels.launched
    assert [len(places) for places in choose(dtype, stored)] == [40] * 11 + [0], "the last sequence sees all keys"
    assert choose(dtype, stored)[:11] == right[:11]
    assert kernels.launched == launched, "Triton is not asked again"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "before", "behind", "operation"),
    [
        ("norm_rope_write", None, heads_swapped, "norm_rope_write"),
        ("norm_rope_write", stored_elsewhere, None, "norm_rope_write"),
        ("write_kv", stored_elsewhere, None, "write_kv"),
        ("rms_norm", None, one_number_lost, "rms_norm"),
        ("norm", None, last_row_is_the_first, "norm"),
        ("silu_mul", None, one_number_lost, "silu_mul"),
        ("rope", None, heads_swapped, "rope"),
        ("expert_linear", None, last_row_is_the_first, "expert_linear"),
        ("add_weighted", None, nothing_written, "expert_linear"),
    ],
)
def test_other_operations_that_are_wrong_are_replaced(
    kernels: Kernels, name: str, before: Break | None, behind: Break | None, operation: str, dtype: torch.dtype
) -> None:
    kernels.break_(name, before=before, behind=behind)
    with checking(CPU) as check:
        of_rows(dtype)
    assert {operation} == REPLACED
    assert name in check.found[0]
    of_rows(dtype)  # in torch


@pytest.mark.parametrize("stored", STORED[1:])
def test_quantised_kv_in_another_slot_is_noticed(kernels: Kernels, stored: torch.dtype) -> None:
    kernels.break_("norm_rope_write", before=stored_elsewhere)
    with checking(CPU):
        of_rows(torch.bfloat16, stored)
    assert {"norm_rope_write"} == REPLACED


def test_of_latent_vectors_the_former_tile_comes_first(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows are wrong, the former 32 are right: Triton goes on."""

    def former(device: torch.device) -> bool:
        kernels.broken.clear()
        return True

    monkeypatch.setattr(self_check, "narrow_latent", former)
    kernels.break_("prefill_attention", behind=heads_swapped)
    with checking(CPU) as check:
        attend(**LATENT)
    assert not REPLACED
    assert "a smaller tile takes its place" in check.found[0]


def test_a_shape_is_compared_once_and_attention_in_each_step(kernels: Kernels) -> None:
    with checking(CPU) as check:
        for _ in range(2):
            check.next_step()
            for _ in range(3):
                attend()
                ops.silu_mul(torch.zeros(4, 32))
    assert [name for name, _ in check.compared] == ["prefill_attention", "silu_mul", "prefill_attention"]


def test_what_has_no_memory_is_left(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    def full() -> list[Tensor]:
        raise torch.OutOfMemoryError

    with checking(CPU) as check, check.room("silu_mul"):
        check.compare("silu_mul", "", lambda: [torch.ones(2)], full, [allowed(torch.float32)])
    assert not check.found
    assert "was not compared" in caplog.text


def test_errors_are_relative_to_number_and_row() -> None:
    right = torch.tensor([[100.0, 0.0], [1.0, 1.0]])
    limits = allowed(torch.bfloat16)
    assert largest_error(right, right, *limits) == 0.0
    assert largest_error(right + torch.tensor([[1.0, 1.0], [0.0, 0.0]]), right, *limits) < 1
    assert largest_error(right + torch.tensor([[0.0, 0.0], [0.0, 1.0]]), right, *limits) > 1
    assert largest_error(right * torch.nan, right, *limits) == float("inf")
    assert largest_error(right[:1], right, *limits) == float("inf")
    assert largest_error(right[:0], right[:0], *limits) == 0.0
