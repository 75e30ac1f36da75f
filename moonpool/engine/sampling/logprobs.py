"""Tokens' log probabilities, and the most likely tokens in a logits row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import SampleSpec
from moonpool.engine.kernels.to_device import send_to_device
from moonpool.engine.sampling.ops import top


@torch.inference_mode()
def top_candidates(logits: Tensor, spec: SampleSpec) -> tuple[list[int], list[float]]:
    """Return the `spec.best` most likely tokens in one row [vocab] with log probabilities, best first.

    Equals are ordered by token. Banned tokens are left out, and the others do not become likelier: as `transformers`
    does in beam search. None where the logits are not finite, or all is banned.
    """
    log_probabilities = torch.log_softmax(logits, dim=-1)
    if not bool(torch.isfinite(log_probabilities.amax())):
        return [], []
    log_probabilities[list(spec.banned)] = -torch.inf
    values, tokens = (found[0] for found in top(log_probabilities[None], min(spec.best, logits.shape[0])))
    count = int(torch.isfinite(values).sum())
    return tokens[:count].tolist(), values[:count].tolist()


class DeviceLogprobs(NamedTuple):
    """Log probabilities on their device."""

    of_tokens: Tensor
    """[D] float32."""
    ranks: Tensor
    """[D], 1 for the most likely token."""
    top: Tensor
    """[R, count] float32, for the most likely tokens."""
    top_tokens: Tensor
    """[R, count]."""

    def read(self, sizes: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
        """Wait for the log probabilities. `sizes`: each row's tokens; `counts`: each row's wanted likeliest tokens."""
        own, ranks, top, top_tokens = (part.tolist() for part in self)
        found, begin = [], 0
        for size, count, scores, ids in zip(sizes, counts, top, top_tokens, strict=True):
            part = slice(begin, begin + size)
            likely, chosen = array("f", scores[:count] * size), array("i", ids[:count] * size)
            found.append(Logprobs(array("f", own[part]), array("I", ranks[part]), chosen, likely))
            begin += size
        return found


def gather_logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, count: int) -> DeviceLogprobs:
    """Find the log probabilities for `tokens` [D], each in one of the `rows` [D] in `logits` [R, vocab].

    `count`: how many most likely tokens are wanted for each row.
    """
    normalisers, values = logits.logsumexp(-1), logits[rows, tokens]
    likely, ids = top(logits, min(count, logits.shape[1]))
    ranks = _greater(logits, rows, values, likely) + 1
    return DeviceLogprobs(values - normalisers[rows], ranks, likely - normalisers[:, None], ids)


def _greater(logits: Tensor, rows: Tensor, values: Tensor, likely: Tensor) -> Tensor:
    """Count the logits that are greater than each of `values` [D]. On a CPU most are found among the likely ones."""
    if logits.device.type != "cpu" or not likely.shape[1]:
        several = len(rows) > len(logits)
        return ((logits[rows] if several else logits) > values[:, None]).sum(-1)
    near = likely[rows]
    counts = (near > values[:, None]).sum(-1)
    further = (~(values >= near[:, -1])).nonzero()[:, 0]
    if len(further):
        counts[further] = (logits[rows[further]] > values[further, None]).sum(-1)
    return counts


@torch.inference_mode()
def compute_logprobs(logits: Tensor, tokens: Sequence[Sequence[int]], count: int) -> list[Logprobs]:
    """Return log probabilities by `logits` [R, vocab], for each row's `tokens` and `count` most likely tokens."""
    sizes = [len(row) for row in tokens]
    rows = send_to_device(torch.arange(len(tokens)).repeat_interleave(torch.tensor(sizes)), logits.device)
    chosen = send_to_device(torch.tensor([token for row in tokens for token in row]), logits.device)
    return gather_logprobs(logits, rows, chosen, count).read(sizes, [count] * len(sizes))
