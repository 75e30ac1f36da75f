"""The last stage's end of a step: which tokens its sequences get, and log probabilities."""

from collections.abc import Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moonpool.engine.footprint import LOGIT_ROWS
from moonpool.engine.masks import CannotFollow, Mask
from moonpool.logprobs import Logprobs
from moonpool.model.batch import PackedBatch
from moonpool.model.likely import logprobs, most_likely
from moonpool.model.sampler import NOT_FINITE, NOTHING_LEFT, sample
from moonpool.model.stage import StageModel
from moonpool.sampling import SampleSpec
from moonpool.sched.steps import Scored, Several, Step


@dataclass(slots=True)
class Found:
    """As the fields of `StepResult`."""

    sampled: list[int | None] = field(default_factory=list)
    several: dict[int, Several] = field(default_factory=dict)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    scores: dict[int, Logprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


@torch.inference_mode()
def choose(
    model: StageModel,
    step: Step,
    hidden: Tensor,
    batch: PackedBatch,
    dropped: Container[int],
    masks: Future[dict[int, Mask]] | None,
) -> Found:
    """Everything that is wanted of the `hidden` states [T, hidden] after the last layer, but of dropped sequences.

    `masks`: which tokens may follow, by index of the sequence, where not all may.
    """
    found = Found([None] * len(step.sequences))
    live = [(index, sequence) for index, sequence in enumerate(step.sequences) if index not in dropped]
    wanted = [(index, sequence.sample) for index, sequence in live if sequence.sample is not None]
    for begin in range(0, len(wanted), LOGIT_ROWS):
        some = wanted[begin : begin + LOGIT_ROWS]
        logits = model.logits(hidden[batch.last_rows[[index for index, _ in some]]])
        _sample(logits, some, masks, found)
    for index, sequence in live:
        if sequence.scored is not None:
            last = int(batch.last_rows[index])
            first = last + 1 - len(sequence.token_ids) // 4
            found.scores[index] = _scores(model, hidden[first : last + 1], sequence.scored)
    return found


def _sample(
    logits: Tensor, wanted: Sequence[tuple[int, SampleSpec]], masks: Future[dict[int, Mask]] | None, found: Found
) -> None:
    """Each row's tokens; for beams the most likely ones, which are not drawn."""
    drawn = [(row, index, spec) for row, (index, spec) in enumerate(wanted) if not spec.best]
    for row, (index, spec) in enumerate(wanted):
        if spec.best:
            _most_likely(logits[row], index, spec, found)
    rows = logits if len(drawn) == len(wanted) else logits[[row for row, _, _ in drawn]]
    allowed, made = {}, masks.result() if masks is not None else {}
    for at, (_, index, _) in enumerate(drawn):
        mask = made.get(index)
        if isinstance(mask, CannotFollow):
            found.failed[index] = str(mask)
        elif mask is not None:
            allowed[at] = mask
    chosen = sample(rows, [spec for _, _, spec in drawn], allowed)
    for at, (_, index, spec) in enumerate(drawn):
        if index not in found.failed and at in chosen.failed:
            found.failed[index] = chosen.failed[at]
        if index in found.failed:
            continue
        found.sampled[index] = chosen.tokens[at][0]
        if spec.samples > 1:
            found.several[index] = Several(tuple(chosen.tokens[at]))
        if at in chosen.logprobs:
            found.logprobs[index] = chosen.logprobs[at]


def _most_likely(logits: Tensor, index: int, spec: SampleSpec, found: Found) -> None:
    """A beam's most likely tokens; a beam without any ends its search."""
    tokens, scores = most_likely(logits, spec)
    if tokens:
        found.sampled[index], found.several[index] = tokens[0], Several(tuple(tokens), tuple(scores))
    else:
        found.failed[index] = NOTHING_LEFT if bool(torch.isfinite(logits).all()) else NOT_FINITE


def _scores(model: StageModel, hidden: Tensor, scored: Scored) -> Logprobs:
    """Log probabilities of the tokens after the leading rows of `hidden`."""
    tokens, found = torch.frombuffer(bytearray(scored.token_ids), dtype=torch.int32).tolist(), Logprobs()
    for begin in range(0, len(tokens), LOGIT_ROWS):
        part = tokens[begin : begin + LOGIT_ROWS]
        logits = model.logits(hidden[begin : begin + len(part)])
        for its in logprobs(logits, [[token] for token in part], scored.top):
            found.extend(its)
    return found
