"""Draws by given numbers."""

from collections.abc import Sequence

from torch import Tensor

from moonpool.base.sampling_params import SamplingParams
from moonpool.engine.sampling.random_sampler import RandomSampler


def draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[Sequence[float]]) -> list[list[int]]:
    """The tokens of each row of `logits` [R, vocab], one for each of its numbers in [0, 1)."""
    drawing = RandomSampler(params, [len(number) for number in numbers], logits.shape[1], logits.device)
    tokens = iter(drawing(logits, [number for sampled in numbers for number in sampled]).tolist())
    return [[next(tokens) for _ in number] for number in numbers]
