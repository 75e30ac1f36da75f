"""Chooses tokens from logits: a pure function of logits, parameters, history, seed and position.

It has no state: an instance that computes the same logits chooses the same token, also after a crash and on another
instance. A row's result never depends on the other rows.

Order: logit bias and banned tokens, penalties, temperature, top-k, top-p, min-p, then one draw by inverse CDF. Names
and meaning as in vLLM: top-p looks at what top-k has left, and repetition looks at prompt and output, presence and
frequency at the output only.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from moonpool.errors import Internal
from moonpool.sampling import SampleSpec, stream_seed

# A full sort of a 152k vocabulary takes 10 ms, the most likely 1024 take 0.7 ms and nearly always suffice.
CANDIDATES = 1024
# Temperatures below this are greedy: dividing by them would overflow.
_GREEDY_BELOW = 1e-5


@torch.inference_mode()
def sample(logits: Tensor, specs: Sequence[SampleSpec], candidates: int = CANDIDATES) -> list[list[int]]:
    """Choose the tokens of each row of `logits` [R, vocab] float32 by the row's parameters: one for each sample.

    Greedy is the highest logit, the lowest index among equals. `logits` may be overwritten.
    `candidates`: most likely tokens that are sorted first; all are when these do not suffice.

    Raises:
        Internal: a row's logits are not finite; no token would be right.
    """
    assert logits.dim() == 2
    assert logits.shape[0] == len(specs)
    assert logits.dtype == torch.float32
    if not specs:
        return []
    tokens = [[token] * spec.samples for token, spec in zip(_greedy(logits), specs, strict=True)]
    for row, spec in enumerate(specs):
        changed = _adjust(logits[row], spec)
        if spec.params.temperature >= _GREEDY_BELOW:
            heated = logits[row] / spec.params.temperature
            numbers = (uniform(stream_seed(spec.seed, index), spec.position) for index in range(spec.samples))
            tokens[row] = [_draw(heated, spec, number, candidates) for number in numbers]
        elif changed:
            tokens[row] = [int(logits[row].argmax())] * spec.samples
    return tokens


@torch.inference_mode()
def most_likely(logits: Tensor, spec: SampleSpec) -> tuple[list[int], list[float]]:
    """Return the `spec.best` most likely tokens of one row [vocab] with their log probabilities, the best first.

    Equal ones in order of the token. Banned tokens are left out, and the others are not made likelier for that: so
    `transformers` does it in beam search.

    Raises:
        Internal: the logits are not finite.
    """
    log_probabilities = torch.log_softmax(logits, dim=-1)
    if not bool(torch.isfinite(log_probabilities.amax())):
        raise Internal("the model computed logits that are not finite")
    log_probabilities[list(spec.banned)] = -torch.inf
    values, tokens = _most_likely(log_probabilities, min(spec.best, logits.shape[0]))
    count = int(torch.isfinite(values).sum())
    return tokens[:count].tolist(), values[:count].tolist()


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to one output position of a seed.

    A hash of the two and 0 (BLAKE2b, 53 bits of it): counter-based, so it needs no state and has no order.
    """
    counter = struct.pack("<QQQ", seed & (2**64 - 1), 0, position)
    number = int.from_bytes(hashlib.blake2b(counter, digest_size=8, person=b"moonpool sample").digest(), "little")
    return (number >> 11) * 2.0**-53


def _greedy(logits: Tensor) -> list[int]:
    """Return the highest logit's index of every row, the lowest among equals.

    Torch's `argmax` is an order of magnitude slower than `amax`: the maximum of each run of 128 is found first.
    """
    rows, vocab = logits.shape
    width = 128 if vocab % 128 == 0 else 1
    runs = logits.view(rows, -1, width)
    highest, run = runs.amax(-1).max(-1)
    if not bool(torch.isfinite(highest).all()):
        raise Internal("the model computed logits that are not finite")
    return (run * width + runs[torch.arange(rows), run].argmax(-1)).tolist()


def _adjust(row: Tensor, spec: SampleSpec) -> bool:
    """Apply bias, bans and penalties to `row` in place; says whether anything was to be applied."""
    params = spec.params
    changed = False
    if params.logit_bias:
        changed = True
        row[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
    if spec.banned:
        changed = True
        row[list(spec.banned)] = -torch.inf
    if not spec.history or not params.penalised:
        return changed
    history = torch.frombuffer(bytearray(spec.history), dtype=torch.int32).long()
    if params.repetition_penalty != 1:
        seen = torch.unique(history)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    output, counts = torch.unique(history[spec.prompt_tokens :], return_counts=True)
    row[output] -= params.presence_penalty + params.frequency_penalty * counts
    return True


def _draw(row: Tensor, spec: SampleSpec, u: float, candidates: int) -> int:
    """Draw the token from `row` (logits over temperature, [vocab]) that belongs to the number `u`."""
    params = spec.params
    vocab = row.shape[0]
    if not 0 < params.top_k < vocab and params.top_p >= 1:
        weights = torch.softmax(row.double(), dim=-1)
        return _pick(_at_least(weights, params.min_p, weights.max()), u)
    # Candidates in order of (logit falling, index rising): the order must not depend on how they were found.
    count = min(vocab, candidates if params.top_k <= candidates else vocab)
    values, indices = _most_likely(row, count)
    if count < vocab and params.top_k == 0:
        inside = torch.logsumexp(values.double(), 0) - torch.logsumexp(row.double(), 0)
        if inside.exp() < params.top_p:
            values, indices = _most_likely(row, vocab)
    elif params.top_k:
        values, indices = values[: params.top_k], indices[: params.top_k]
    everything = values if params.top_k else row
    weights = (values.double() - torch.logsumexp(everything.double(), 0)).exp()
    if params.top_p < 1:
        before = weights.cumsum(0) - weights
        weights = weights[before < params.top_p]
    return int(indices[_pick(_at_least(weights, params.min_p, weights[0]), u)])


def _most_likely(row: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` highest values and their indices, equal values in order of index."""
    if count == row.shape[0]:
        ordered = row.sort(descending=True, stable=True)
        return ordered.values, ordered.indices
    indices = row.topk(count, sorted=False).indices.sort().values
    ordered = row[indices].sort(descending=True, stable=True)
    return ordered.values, indices[ordered.indices]


def _at_least(weights: Tensor, min_p: float, highest: Tensor) -> Tensor:
    """Return `weights` with 0 for those below `min_p` times the highest."""
    return weights if min_p <= 0 else torch.where(weights >= min_p * highest, weights, 0.0)


def _pick(weights: Tensor, u: float) -> int:
    """Return the index at which the running sum of `weights` passes the share `u` of their total."""
    sums = weights.cumsum(0)
    index = int(torch.searchsorted(sums, u * sums[-1], right=True))
    # Rounding may lead past the end or to a weight of 0 at the end; the last possible token is meant then.
    return index if index < len(weights) else int(weights.nonzero()[-1])
