"""Kernels that are right pass the check at an engine's start. Run by test_interpreter.py and test_gpu.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.engine.kernels import attention, ops, sparse
from moonpool.engine.kernels.attention import HeadNorms, make_plan
from moonpool.engine.kernels.choice import REPLACED, VARIABLE
from moonpool.engine.kernels.experts import ExpertMatrices
from moonpool.engine.kernels.kind import PLAIN, AttentionKind
from moonpool.engine.kernels.self_check import SelfCheck, checking
from moonpool.engine.kernels.triton import recurrent
from moonpool.engine.models.recurrent import StateUndo
from moonpool.engine.sampling.random_sampler import compare as compare_sampling
from moonpool.engine.weights.packed import PackedMethod
from tests.unit.engine.kernels.test_packed_products import Kind, packed
from tests.unit.engine.kernels.test_triton.cases_products import weight_of
from tests.unit.engine.kernels.test_triton.cases_recurrent import BLOCK, HIDDEN, SPECS, batch_of
from tests.unit.engine.kernels.test_triton.pools import DEVICE, DTYPES, SLOWLY, generator, make, slowly
from tools.gpu_check.recurrent_rows import random_layer

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
E4M3 = torch.float8_e4m3fn
LONG = ("gated_delta", "kimi_delta", "lightning")
SINKS = torch.tensor([-2.0, 0.5, 3.0, 9.0, 0.0, -9.0, 1.0, 2.0])
LATENT = {"kv_heads": 1, "head_dim": 72, "rest": 8, "group": 20}


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "triton")
    REPLACED.clear()
    yield
    REPLACED.clear()


def looked_at(check: SelfCheck, *operations: str) -> None:
    """Nothing was found in these operations, all of which were compared; how near each is to its limit is printed."""
    for name, error in check.compared:
        print(f"{name}: {error:.2f} of what is allowed")
    assert {name for name, _ in check.compared} == set(operations)
    assert not check.found
    assert not REPLACED


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"dtype": torch.bfloat16}, AttentionKind(40, 1.5, SINKS)),
        ({"stored": torch.int8, "dtype": torch.bfloat16}, PLAIN),
        ({"stored": torch.float8_e4m3fn}, AttentionKind(24, chunked=True)),
        ({"dtype": torch.bfloat16, **LATENT}, PLAIN),
        *slowly(({"dtype": torch.float32}, PLAIN), ({}, PLAIN), ({"stored": torch.int8, **LATENT}, PLAIN)),
    ],
)
@pytest.mark.parametrize("deterministic", [False, *slowly((True,))])
def test_attention(sizes: dict[str, object], kind: AttentionKind, *, deterministic: bool) -> None:
    with checking(torch.device(DEVICE)) as check:
        for sequences in ([(1, 60)] * 3, [(20, 61), (1, 33), (30, 30)]):
            check.next_step()
            case = make(sequences, **sizes)  # type: ignore[arg-type]
            sinks = None if kind.sinks is None else kind.sinks.to(case.q)
            case.tables = case.tables[:, :-1].clamp_max(len(case.kv) - 1)  # steps' tables name blocks of the pool
            tables = (case.tables, case.starts, case.lengths)
            plan = make_plan(
                case.kv, *(each.cpu() for each in tables),
                deterministic=deterministic, window=kind.window, chunked=kind.chunked,
            )  # fmt: skip
            value_dim = case.q.shape[2] - case.rest if case.rest else None
            attention.paged_attention(
                case.q, case.kv, *tables, case.scale,
                kind=replace(kind, sinks=sinks), scales=case.scales, plan=plan, value_dim=value_dim,
            )  # fmt: skip
    looked_at(check, "prefill_attention")
    assert len(check.compared) == 2


@pytest.mark.parametrize("stored", [None, torch.int8])
def test_chosen_keys(stored: torch.dtype | None) -> None:
    case = make([(1, 40), (1, 7), (1, 33)], stored=stored, **LATENT)  # type: ignore[arg-type]
    places = torch.zeros((3, 32), dtype=torch.int32, device=DEVICE)
    numbers = torch.tensor([32, 5, 9], dtype=torch.int32, device=DEVICE)
    chosen = sparse.ChosenKeys(torch.arange(3, device=DEVICE), places, numbers, None)
    with checking(torch.device(DEVICE)) as check:
        sparse.chosen_attention(case.q, case.kv, case.scales, chosen, case.scale, 64, deterministic=False)
    looked_at(check, "chosen_attention")


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.bfloat16, E4M3), *slowly((torch.float32, None), (torch.float16, None), (torch.bfloat16, torch.int8))],
)
def test_a_choice_of_keys(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """Of rows of a prompt and single rows; the step's own numbers are none."""
    blocks, heads, width, spans = 6, 5, 24, ((7, 90), (1, 60), (1, 20))
    kv = torch.zeros((blocks, 1, 1, BLOCK, width), dtype=stored or dtype, device=DEVICE)
    scales = None if stored is None else torch.ones(kv.shape[:4], device=DEVICE)
    tables = torch.arange(blocks, device=DEVICE).expand(len(spans), -1).int()
    starts = torch.tensor([0, *(count for count, _ in spans)], device=DEVICE).cumsum(0).int()
    lengths = torch.tensor([length for _, length in spans], device=DEVICE).int()
    q = torch.full((int(starts[-1]), heads, width), torch.nan, dtype=dtype, device=DEVICE)
    with checking(torch.device(DEVICE)) as check:
        sparse.choose_keys(q, q[..., 0].float(), kv, scales, tables, starts, lengths, 0.1, 25)
    looked_at(check, "choose_keys")


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.bfloat16, torch.int8), (torch.float16, None), *slowly((torch.float32, None), (torch.bfloat16, E4M3))],
)
def test_between_the_products(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """Norms, rotation, KV writes, the activation, copies of blocks: of some tokens, several of which have one slot."""
    tokens, heads, kv_heads, dim = 20, 4, 2, 64
    case = make([(1, 20)], dtype=dtype, stored=stored, head_dim=dim, kv_heads=kv_heads)
    zeros = torch.zeros(tokens, heads + 2 * kv_heads, dim, dtype=dtype, device=DEVICE)
    weight = torch.rand(dim, generator=generator()).to(DEVICE)
    norms = HeadNorms(weight, weight, None, None, 1e-5, centred=False, wide=True, last=False)
    ids, angles = torch.ones(tokens, dtype=torch.int64, device=DEVICE), zeros[:, 0, :32].contiguous()
    keys, values = zeros[:, : heads + kv_heads], zeros[:, heads + kv_heads :]
    with checking(torch.device(DEVICE)) as check:
        for head_norms in (None, norms):
            attention.norm_rope_write(
                keys, values, heads, case.kv, ids, ids, norms=head_norms, angles=(angles, angles), scales=case.scales
            )
        attention.write_kv(keys[:, :kv_heads], values, case.kv, ids, ids, scales=case.scales)
        attention.copy_blocks(case.kv[None], ids[:1], ids[:1] - 1)
        rows, residual = zeros.flatten(1), zeros.flatten(1).clone()
        for added in (None, residual):
            ops.rms_norm(rows, rows[0].clone(), 1e-6, residual=added)
            ops.norm(rows, rows[0].float(), rows[0].float(), 1e-6, centred=True, wide=True, residual=added)
        ops.silu_mul(rows)
        ops.rope(zeros, zeros[:, 0].contiguous(), zeros[:, 0].contiguous())
    looked_at(check, "norm_rope_write", "write_kv", "copy_blocks", "rms_norm", "norm", "silu_mul", "rope")
    assert not residual.any(), "the step has its own numbers"


@pytest.mark.parametrize("stored", [torch.int8, *(pytest.param(each, marks=SLOWLY) for each in (None, E4M3))])
def test_what_a_norm_was_rounded_by_is_no_error(stored: torch.dtype | None) -> None:
    """Of many rows, also where one weight is far larger."""
    tokens, heads, dim = 48, 4, 128
    case = make([(1, 20)], dtype=torch.bfloat16, stored=stored, head_dim=dim, kv_heads=1)
    x = torch.zeros(tokens, heads + 2, dim, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.ones(dim, device=DEVICE).index_fill(0, torch.tensor([5], device=DEVICE), 30.0)
    norms = HeadNorms(weight, weight, None, None, 1e-5, centred=False, wide=False, last=False)
    ids, angles = torch.ones(tokens, dtype=torch.int64, device=DEVICE), x[:, 0].contiguous()
    with checking(torch.device(DEVICE)) as check:
        attention.norm_rope_write(
            x[:, :-1], x[:, -1:], heads, case.kv, ids, ids, norms=norms, angles=(angles, angles), scales=case.scales
        )
    looked_at(check, "norm_rope_write")


@EACH_DTYPE
def test_experts_and_packed_products(dtype: torch.dtype) -> None:
    rng = generator()
    matrices = [torch.randn((48, 80), generator=rng).to(DEVICE, dtype) for _ in range(3)]
    rows = torch.zeros(9, 80, dtype=dtype, device=DEVICE)
    starts, places = torch.tensor([0, 18, 18, 18], device=DEVICE), torch.arange(18, device=DEVICE).view(9, 2)
    kinds = (Kind(4, 32, offsets=True), Kind(4, 16, scales="wide", floats="table"))
    with checking(torch.device(DEVICE)) as check:
        found = ops.expert_linear(rows, places.flatten() // 2, starts, ExpertMatrices(matrices))
        for weights in (None, torch.rand((9, 2), generator=rng).to(DEVICE)):
            ops.add_weighted(found, places, weights)
        for kind in kinds:
            product = PackedMethod(weight_of(packed(70, 256, kind)), None, dtype)
            assert not product.product(torch.zeros(5, 256, dtype=dtype, device=DEVICE)).any()
    looked_at(check, "expert_linear", "add_weighted", "packed_linear")


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=SLOWLY)])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SLOWLY if kind in LONG else ()) for kind in SPECS])
def test_recurrent_layers(kind: str, dtype: torch.dtype) -> None:
    rng, spec, batch = generator(), SPECS[kind], batch_of([(1, 0)])
    weights = random_layer(spec, HIDDEN, dtype, DEVICE, rng)
    kv = torch.zeros(9, 1, 1, 1, spec.state_elements + BLOCK, device=DEVICE)
    rows, turns = torch.zeros(1, HIDDEN, dtype=dtype, device=DEVICE), torch.zeros(1, 8, dtype=dtype, device=DEVICE)
    with checking(torch.device(DEVICE)) as check:
        weights(rows, batch, kv, StateUndo(), (turns, turns), deterministic=False)
    looked_at(check, "recurrent", *(("rope",) if kind == "lightning" else ()))
    assert not kv[7:].any(), "slots that are not needed stay as they are"


def test_a_scan_that_is_wrong_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 summed logarithms of decays wrongly along a column: behind some row, states fade otherwise."""
    right = recurrent.scan

    def wrong(mixed: Tensor, decay: Tensor, *rest: Any, **how: Any) -> None:
        right(mixed, decay.index_fill(0, torch.tensor([7], device=DEVICE), 0.0), *rest, **how)

    monkeypatch.setattr(recurrent, "scan", wrong)
    spec, batch = SPECS["mamba2"], batch_of([(1, 0)])
    weights = random_layer(spec, HIDDEN, torch.bfloat16, DEVICE, generator(2))
    kv, rows = torch.zeros(9, 1, 1, 1, spec.state_elements, device=DEVICE), torch.zeros(1, HIDDEN).bfloat16().to(DEVICE)
    with checking(torch.device(DEVICE)) as check:
        weights(rows, batch, kv, StateUndo(), None, deterministic=False)
    assert "recurrent" in check.found[0]
    assert {"recurrent"} == REPLACED


@pytest.mark.parametrize("vocab", slowly((300,)))
def test_sampling(vocab: int) -> None:
    with checking(torch.device(DEVICE)) as check:
        compare_sampling(check, vocab)
    looked_at(check, "sampling")
