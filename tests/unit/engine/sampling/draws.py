"""Draws by given numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moonpool.base.sampling_params import SamplingParams
from moonpool.engine.sampling.random_sampler import RandomSampler


def draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[Sequence[float]]) -> list[list[int]]:
    """The tokens of each row of `logits` [R, vocab], one for each of its numbers in [0, 1)."""
    drawing = RandomSampler(params, [len(number) for number in numbers], logits.shape[1], logits.device)
    flat = torch.tensor([number for sampled in numbers for number in sampled], dtype=torch.float64)
    tokens = iter(drawing(logits, flat.to(logits.device)).tolist())
    return [[next(tokens) for _ in number] for number in numbers]
