"""The most likely tokens of logits, and log probabilities; without a sort of the vocabulary.

A run of 128 consecutive values whose greatest is not among the `count` greatest of all runs holds none of the `count`
greatest values: only the other runs are looked at.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moonpool.logprobs import Logprobs
from moonpool.sampling import SampleSpec

RUN = 128


def runs_of(count: int) -> int:
    """Runs that so many values begin."""
    return -(-count // RUN)


def in_runs(values: Tensor, count: int) -> Tensor:
    """Return of each row of `values` [R, whole runs] some that contain the `count` greatest: [R, n], in any order."""
    runs = values.view(values.shape[0], -1, RUN)
    if 2 * count >= runs.shape[1]:
        return values
    chosen = runs.amax(-1).topk(count, sorted=False).indices
    return runs.gather(1, chosen[:, :, None].expand(-1, -1, RUN)).flatten(1)


def top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` greatest of each row of `values` [R, n], and their indices; equals in order of these."""
    size = values.shape[1]
    if 2 * count >= runs_of(size):
        ordered = values.sort(descending=True, stable=True)
        return ordered.values[:, :count], ordered.indices[:, :count]
    padded = functional.pad(values, (0, -size % RUN), value=-torch.inf)
    runs = padded.view(values.shape[0], -1, RUN)
    chosen = runs.amax(-1).sort(descending=True, stable=True).indices[:, :count].sort().values
    found = runs.gather(1, chosen[:, :, None].expand(-1, -1, RUN)).flatten(1)
    ordered = found.sort(descending=True, stable=True)
    at = ordered.indices[:, :count]
    return ordered.values[:, :count], chosen.gather(1, at // RUN) * RUN + at % RUN


@torch.inference_mode()
def most_likely(logits: Tensor, spec: SampleSpec) -> tuple[list[int], list[float]]:
    """Return the `spec.best` most likely tokens of one row [vocab] with their log probabilities, the best first.

    Equal ones in order of the token. Banned tokens are left out, and the others are not made likelier for that: so
    `transformers` does it in beam search. None where the logits are not finite, or all is banned.
    """
    log_probabilities = torch.log_softmax(logits, dim=-1)
    if not bool(torch.isfinite(log_probabilities.amax())):
        return [], []
    log_probabilities[list(spec.banned)] = -torch.inf
    values, tokens = (it[0] for it in top(log_probabilities[None], min(spec.best, logits.shape[0])))
    count = int(torch.isfinite(values).sum())
    return tokens[:count].tolist(), values[:count].tolist()


@torch.inference_mode()
def logprobs(logits: Tensor, tokens: Sequence[Sequence[int]], count: int) -> list[Logprobs]:
    """Return the log probabilities of each row's `tokens` by `logits` [R, vocab], and of its `count` most likely."""
    sizes = [len(its) for its in tokens]
    several = max(sizes, default=1) > 1
    rows = torch.arange(len(tokens)).repeat_interleave(torch.tensor(sizes)).to(logits.device)
    chosen = torch.tensor([token for its in tokens for token in its], device=logits.device)
    normalisers, values = logits.logsumexp(-1), logits[rows, chosen]
    ranks = ((logits[rows] if several else logits) > values[:, None]).sum(-1) + 1
    found = torch.split_with_sizes(values - normalisers[rows], sizes), torch.split_with_sizes(ranks, sizes)
    likely, ids = top(logits, min(count, logits.shape[1]))
    likely = likely - normalisers[:, None]
    return [
        Logprobs(
            array("f", its.tolist()),
            array("I", their.tolist()),
            array("i", ids[row].tolist() * size),
            array("f", likely[row].tolist() * size),
        )
        for row, (its, their, size) in enumerate(zip(*found, sizes, strict=True))
    ]
