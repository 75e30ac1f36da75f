"""Mixtures of experts in Triton against the reference. Run by test_interpreter.py and test_gpu.py."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moonpool.base.families.spec import ExpertsSpec, FeedForwardSpec
from moonpool.engine.kernels import ops, reference
from moonpool.engine.kernels.choice import VARIABLE
from moonpool.engine.kernels.experts import ExpertMatrices, rows_by_expert
from moonpool.engine.kernels.triton import ops as triton_ops
from moonpool.engine.models.experts import MixtureOfExperts, expert_matrices
from moonpool.engine.models.layers import FeedForward, fused_gate
from moonpool.engine.weights.linear import Linear
from tests.unit.engine.kernels.test_triton.pools import DEVICE, DTYPES, generator

#: Sums differ by the order of additions, and the interpreter truncates to bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
HIDDEN, INNER, COUNT, CHOSEN = 80, 48, 6, 3


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")


def close(found: Tensor, expected: Tensor) -> None:
    dtype = expected.dtype
    limit = TOLERANCE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(found.cpu().float(), expected.float(), rtol=TOLERANCE[dtype], atol=limit)


def matrices(dtype: torch.dtype, rng: torch.Generator, *, biased: bool) -> tuple[ExpertMatrices, ExpertMatrices]:
    """Random matrices of experts, on the host and on the device."""
    on_host = [torch.randn((INNER, HIDDEN), generator=rng).to(dtype) for _ in range(COUNT)]
    bias = torch.randn((COUNT, INNER), generator=rng).to(dtype) if biased else None
    there = ExpertMatrices([matrix.to(DEVICE) for matrix in on_host], None if bias is None else bias.to(DEVICE))
    return ExpertMatrices(on_host, bias), there


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 9, 90])
def test_products_and_sums(dtype: torch.dtype, tokens: int) -> None:
    """One expert has no row; rows of `x` are apart."""
    rng = generator()
    x = torch.randn((tokens, HIDDEN + 16), generator=rng).to(dtype)[:, :HIDDEN]
    chosen = torch.stack([torch.randperm(COUNT - 1, generator=rng)[:CHOSEN] for _ in range(tokens)])
    weights = torch.rand((tokens, CHOSEN), generator=rng)
    here, there = matrices(dtype, rng, biased=tokens == 9)
    rows = rows_by_expert(chosen, weights, COUNT)
    assert rows.starts[-2:].tolist() == [tokens * CHOSEN] * 2
    expected = torch.empty((tokens * CHOSEN, INNER), dtype=dtype)
    reference.expert_linear(x, rows.tokens, rows.starts, here, expected, deterministic=False)
    found = torch.full_like(expected, torch.nan, device=DEVICE)
    tokens_there, starts = rows.tokens.to(DEVICE), rows.starts.to(DEVICE)
    triton_ops.expert_linear(x.to(DEVICE), tokens_there, starts, there, found, deterministic=False)
    close(found, expected)
    for factors in (rows.weights, None):
        total = torch.empty((tokens, INNER), dtype=dtype)
        reference.add_weighted(expected, rows.places, factors, total)
        summed = torch.full_like(total, torch.nan, device=DEVICE)
        given = None if factors is None else factors.to(DEVICE)
        triton_ops.add_weighted(expected.to(DEVICE), rows.places.to(DEVICE), given, summed)
        close(summed, total)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    rng = generator()
    x = torch.randn((220, HIDDEN), generator=rng).half().to(DEVICE)
    chosen = torch.stack([torch.randperm(COUNT, generator=rng)[:CHOSEN] for _ in range(len(x))]).to(DEVICE)
    weights = torch.rand(chosen.shape, generator=rng).to(DEVICE)
    _, there = matrices(torch.float16, rng, biased=False)

    def computed(some: slice) -> Tensor:
        rows = rows_by_expert(chosen[some], weights[some], COUNT)
        results = ops.expert_linear(x[some], rows.tokens, rows.starts, there, deterministic=True)
        return ops.add_weighted(results, rows.places, rows.weights)

    many = computed(slice(None))
    for row in (0, 31, 219):
        assert torch.equal(computed(slice(row, row + 1))[0], many[row])


SPEC = ExpertsSpec(COUNT, CHOSEN, INNER, "softmax", normalised=True)


@pytest.mark.parametrize(
    ("spec", "network"),
    [
        (SPEC, FeedForwardSpec(INNER)),
        (replace(SPEC, scores="softmax_chosen"), FeedForwardSpec(INNER, "clamped_swiglu", bias=True)),
        (replace(SPEC, scores="sigmoid", weighted_inputs=True), FeedForwardSpec(INNER)),
        (replace(SPEC, scores="sigmoid", groups=3, groups_chosen=2, factor=2.0), FeedForwardSpec(INNER, "gelu")),
    ],
)
def test_layers(spec: ExpertsSpec, network: FeedForwardSpec) -> None:
    """All experts together beside one expert after the other."""
    rng = generator()

    def drawn(outputs: int, inputs: int) -> Linear:
        bias = torch.randn(outputs, generator=rng).to(DEVICE) if network.bias else None
        gated = fused_gate(network) and outputs == 2 * INNER
        return Linear((torch.randn((outputs, inputs), generator=rng) / inputs**0.5).to(DEVICE), bias, gated=gated)

    experts = [FeedForward(network, drawn(2 * INNER, HIDDEN), drawn(HIDDEN, INNER)) for _ in range(COUNT)]
    router = Linear(torch.randn((COUNT, HIDDEN), generator=rng).to(DEVICE))
    together = MixtureOfExperts(spec, router, None, experts, None, None, matrices=expert_matrices(experts))
    assert together.matrices is not None
    x = torch.randn((40, HIDDEN), generator=rng).to(DEVICE)
    expected = replace(together, matrices=None)(x, deterministic=False)
    torch.testing.assert_close(together(x, deterministic=False), expected, rtol=1e-4, atol=1e-5)


def test_wrong_arguments_are_named() -> None:
    _, there = matrices(torch.float32, generator(), biased=False)
    starts = torch.zeros(COUNT + 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"^x: must be \[T, 80\]"):
        ops.expert_linear(torch.zeros((2, 64), device=DEVICE), None, starts, there)
    with pytest.raises(ValueError, match=r"^starts"):
        ops.expert_linear(torch.zeros((2, HIDDEN), device=DEVICE), None, starts[1:], there)
    with pytest.raises(ValueError, match=r"^matrices"):
        ExpertMatrices([torch.zeros((2, 4)), torch.zeros((3, 4))])
