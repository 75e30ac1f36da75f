"""The sampler's operations in Triton against those in torch. Run by test_interpreter.py and test_gpu.py."""

import pytest
import torch
from torch import Tensor

from moonpool.engine.kernels.triton import sampling
from moonpool.engine.sampling import ops, random_sampler
from tests.unit.engine.kernels.test_triton.pools import DEVICE, generator

VOCABULARIES = [100, 1152, 151_936] if DEVICE == "cuda" else [100, 1152]


def logits_of(vocab: int) -> Tensor:
    """Rows that are flat, peaked, equal in all tokens, banned in most, and with few values."""
    rng = generator()
    rows = torch.randn((5, vocab), generator=rng) * torch.tensor([[0.5], [20.0], [0.0], [2.0], [1.0]])
    rows[3, vocab // 3 :] = -torch.inf
    rows[4] = (rows[4] * 3).round()
    return rows


SCALES = torch.tensor([1.44, 0.7, 2.0, 1.0, 3.0])


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_weights(vocab: int) -> None:
    logits = logits_of(vocab)
    expected = random_sampler.weights_of(logits, SCALES)
    found = torch.full(expected.shape, torch.nan, device=DEVICE)
    sampling.weights_of(logits.to(DEVICE), logits.amax(-1).to(DEVICE), SCALES.to(DEVICE), found)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("by_weight", [False, True])
def test_leading_tokens(vocab: int, by_weight: bool) -> None:
    for goals in ([1, 3, 40, 7, 99], [50, 1, 99, 2, 20])[: 2 if by_weight else 1]:
        given = torch.tensor(goals, dtype=torch.float64) / (100 if by_weight else 1)
        expected = random_sampler.weights_of(logits_of(vocab), SCALES)
        found = expected.clone().to(DEVICE)
        (ops.keep_top_p if by_weight else ops.keep_top_k)(expected, given)
        sampling.keep_leading(found, given.to(DEVICE), by_weight=by_weight)
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_draws(vocab: int) -> None:
    weights = random_sampler.weights_of(logits_of(vocab), SCALES)
    rows = torch.arange(5).repeat_interleave(torch.tensor([2, 1, 3, 1, 2]))
    numbers = torch.rand(len(rows), generator=generator(), dtype=torch.float64)
    numbers[4], numbers[5] = 0.0, 1 - 2.0**-53
    expected = random_sampler.pick(weights, rows, numbers)
    found = sampling.pick(weights.to(DEVICE), rows.to(DEVICE), numbers.to(DEVICE))
    assert found.tolist() == expected.tolist()


def test_a_row_without_weights_breaks_nothing() -> None:
    weights = torch.zeros((1, 256), device=DEVICE)
    sampling.keep_leading(weights, torch.tensor([0.5], dtype=torch.float64, device=DEVICE), by_weight=True)
    tokens = sampling.pick(weights, torch.tensor([0], device=DEVICE), torch.tensor([0.3], device=DEVICE).double())
    assert 0 <= int(tokens) < 256
