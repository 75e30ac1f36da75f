"""Changes logits before a token is chosen: bias, bans, penalties, masks; for all rows at once, where they apply.

Names and meaning as in vLLM: repetition looks at prompt and output, presence and frequency at the output only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moonpool.sampling import SampleSpec

Mask = bytes | memoryview
"""Bit i, from the lowest of the first byte on, says whether token i may be chosen."""


def adjust(logits: Tensor, specs: Sequence[SampleSpec], masks: Mapping[int, Mask]) -> None:
    """Apply bias, bans, penalties and masks, in this order, to `logits` [R, vocab], contiguous, in place.

    `masks`: by row.
    """
    flat, vocab = logits.view(-1), logits.shape[1]
    _bias(flat, vocab, specs)
    banned = _places([(row, _tokens(spec.banned)) for row, spec in enumerate(specs) if spec.banned], vocab)
    if banned is not None:
        flat[banned.to(flat.device)] = -torch.inf
    _penalise(flat, vocab, [(row, spec) for row, spec in enumerate(specs) if spec.history and spec.params.penalised])
    for row, mask in masks.items():
        _mask(logits[row], mask)


def _mask(row: Tensor, mask: Mask) -> None:
    allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(row), bitorder="little")
    row.masked_fill_(torch.from_numpy(allowed == 0).to(row.device), -torch.inf)


def _tokens(tokens: Sequence[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def _places(found: Sequence[tuple[int, Tensor]], vocab: int) -> Tensor | None:
    """Indices in the flat logits of some rows' tokens; None when there are none."""
    return torch.cat([tokens + row * vocab for row, tokens in found]) if found else None


def _bias(flat: Tensor, vocab: int, specs: Sequence[SampleSpec]) -> None:
    biased = [(row, spec.params.logit_bias) for row, spec in enumerate(specs) if spec.params.logit_bias]
    places = _places([(row, _tokens(list(bias))) for row, bias in biased], vocab)
    if places is not None:
        values = torch.tensor([value for _, bias in biased for value in bias.values()], dtype=torch.float32)
        flat[places.to(flat.device)] += values.to(flat.device)


def _penalise(flat: Tensor, vocab: int, rows: Sequence[tuple[int, SampleSpec]]) -> None:
    """Each token's logit is read once and written as often as the token occurs, with the same value.

    The frequency penalty is subtracted as often as the token occurs: always the same number, so the order is without
    effect.
    """
    histories = [(row, spec, _history(spec)) for row, spec in rows]
    outputs = [(row, spec, tokens[spec.prompt_tokens :]) for row, spec, tokens in histories]
    repeated = _values(flat, histories, vocab, lambda spec: spec.params.repetition_penalty, without=1.0)
    if repeated is not None:
        places, factors = repeated
        values = flat[places]
        flat[places] = torch.where(values > 0, values / factors, values * factors)
    frequent = _values(flat, outputs, vocab, lambda spec: spec.params.frequency_penalty)
    if frequent is not None:
        places, penalties = frequent
        flat.index_put_((places,), -penalties, accumulate=True)
    present = _values(flat, outputs, vocab, lambda spec: spec.params.presence_penalty)
    if present is not None:
        places, penalties = present
        flat[places] = flat[places] - penalties


def _history(spec: SampleSpec) -> Tensor:
    return torch.frombuffer(bytearray(spec.history or b""), dtype=torch.int32).long()


def _values(
    flat: Tensor,
    found: Sequence[tuple[int, SampleSpec, Tensor]],
    vocab: int,
    of: Callable[[SampleSpec], float],
    without: float = 0.0,
) -> tuple[Tensor, Tensor] | None:
    """Places in `flat` of all occurrences of tokens, each with its row's penalty; None when no row has one."""
    used = [(row, of(spec), tokens) for row, spec, tokens in found if of(spec) != without]
    places = _places([(row, tokens) for row, _, tokens in used], vocab)
    if places is None:
        return None
    lengths = torch.tensor([len(tokens) for _, _, tokens in used])
    values = torch.tensor([value for _, value, _ in used]).repeat_interleave(lengths)
    return places.to(flat.device), values.to(flat.device)
