"""Chooses tokens from logits: a pure function of logits, parameters, history, seed and position.

It has no state: an instance that computes the same logits chooses the same token, also after a crash and on another
instance. A row's result never depends on the other rows.

Order: bias, bans, penalties and masks (`moonpool.model.adjust`); then, where the temperature is 0, the highest logit,
the lowest token among equals; else temperature, top-k, top-p, min-p and one draw (`moonpool.model.draw` states the
rule).

On CPUs one native call does it all (`moonpool.model.native_sampler`); elsewhere, and as its reference, torch does.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.choice import choose
from kernels.native import library
from kernels.native.structures import GoOn
from moonpool.logprobs import Logprobs
from moonpool.model.adjust import Mask, adjust
from moonpool.model.draw import draw, scale_of
from moonpool.model.likely import logprobs
from moonpool.model.native_sampler import Choice, NativeRows
from moonpool.sampling import SampleSpec, stream_seed

# Temperatures below this are greedy: dividing by them would overflow.
_GREEDY_BELOW = 1e-5

NOTHING_LEFT = "no token is left to choose: each is banned, or does not fit the format"
NOT_FINITE = "the model computed logits that are not finite"


class Sampled(NamedTuple):
    """What was chosen of some rows."""

    tokens: list[list[int]]
    """Of each row one for each sample; none of a row that failed."""
    logprobs: dict[int, Logprobs]
    """By row, where they are wanted."""
    failed: dict[int, str]
    """By row, why no token would be right. Other rows do not notice."""


class Sampler:
    """Chooses the tokens of some sequences, step after step: what one step's choice depends on is kept for the next.

    Args:
        specs: of each row, for the first step.
        vocab: tokens of the model.
        device: of the logits.
        steps: that are sampled at most.
    """

    def __init__(self, specs: Sequence[SampleSpec], vocab: int, device: torch.device, steps: int = 1) -> None:
        self._specs = specs
        self._rows: NativeRows | None = None
        native = library.get() if specs and choose("sampling", device, torch.float32) == "native" else None
        if native is not None:
            scales = [scale_of(it.params) if it.params.temperature >= _GREEDY_BELOW else -1.0 for it in specs]
            self._rows = NativeRows(native, vocab, specs, scales, steps)

    @property
    def chosen(self) -> int | None:
        """As `NativeRows.chosen`; None where rows are not sampled natively, too."""
        return None if self._rows is None else self._rows.chosen

    def sample(self, logits: Tensor, masks: Mapping[int, Mask] = MappingProxyType({})) -> Sampled:
        """See `sample`."""
        assert logits.dim() == 2
        assert logits.shape[0] == len(self._specs)
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        if not self._specs:
            return Sampled([], {}, {})
        if self._rows is None:
            with torch.inference_mode():
                return _by_torch(logits, self._specs, masks)
        return _as_sampled(self._rows.choose(logits, masks))

    def alone(self, further: GoOn) -> bool:
        """See `NativeRows.alone`."""
        return self._rows is not None and self._rows.alone(further)

    def permit(self, masks: Mapping[int, Mask]) -> None:
        """See `NativeRows.permit`; where rows are sampled natively."""
        assert self._rows is not None
        self._rows.permit(masks)

    def found(self) -> Sampled:
        """What the last native choice found."""
        assert self._rows is not None
        return _as_sampled(self._rows.found())

    def sample_at(self, logits: int, masks: Mapping[int, Mask]) -> list[int] | Sampled:
        """As `sample`, natively, of logits at an address; one token of each row, where there is nothing else to say."""
        assert self._rows is not None
        tokens = self._rows.choose_at(logits, masks)
        return self.found() if tokens is None else tokens

    def begin_with(self, tokens: Sequence[int]) -> None:
        """See `NativeRows.begin_with`."""
        assert self._rows is not None
        self._rows.begin_with(tokens)

    def go_on(self, tokens: Sequence[int]) -> None:
        """The next step: each row's token was the one of `tokens`, and the same tokens are banned."""
        if self._rows is not None:
            self._rows.go_on(tokens)
        else:
            self._specs = [spec.after(token) for spec, token in zip(self._specs, tokens, strict=True)]


def sample(logits: Tensor, specs: Sequence[SampleSpec], masks: Mapping[int, Mask] = MappingProxyType({})) -> Sampled:
    """Choose the tokens of each row of `logits` [R, vocab] float32 by the row's parameters: one for each sample.

    `logits` must be contiguous and are overwritten. `masks`: of rows that may not have all tokens.
    """
    return Sampler(specs, logits.shape[-1], logits.device).sample(logits, masks)


def _as_sampled(found: Choice) -> Sampled:
    failed = {row: NOTHING_LEFT if nothing else NOT_FINITE for row, nothing in found.failed.items()}
    return Sampled(found.tokens, found.logprobs, failed)


def _by_torch(logits: Tensor, specs: Sequence[SampleSpec], masks: Mapping[int, Mask]) -> Sampled:
    told = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None]
    untouched = logits[told]
    adjust(logits, specs, masks)
    greedy, failed = _greedy(logits)
    tokens = [[] if row in failed else [greedy[row]] * spec.samples for row, spec in enumerate(specs)]
    drawn = [row for row, spec in enumerate(specs) if spec.params.temperature >= _GREEDY_BELOW and row not in failed]
    if drawn:
        hot = logits if len(drawn) == len(specs) else logits[drawn]
        found = draw(hot, [specs[row].params for row in drawn], [_numbers(specs[row]) for row in drawn])
        for row, its in zip(drawn, found, strict=True):
            tokens[row] = its
    if failed:
        untouched = untouched[[at for at, row in enumerate(told) if row not in failed]]
        told = [row for row in told if row not in failed]
    return Sampled(tokens, _logprobs(untouched, told, specs, tokens), failed)


def _numbers(spec: SampleSpec) -> list[float]:
    return [uniform(stream_seed(spec.seed, index), spec.position) for index in range(spec.samples)]


def _logprobs(
    logits: Tensor, rows: Sequence[int], specs: Sequence[SampleSpec], tokens: Sequence[Sequence[int]]
) -> dict[int, Logprobs]:
    """Of the rows that want them; `logits` are theirs."""
    found: dict[int, Logprobs] = {}
    counts = [specs[row].params.logprobs or 0 for row in rows]
    for count in sorted(set(counts)):
        alike = [at for at, its in enumerate(counts) if its == count]
        its_logits = logits if len(alike) == len(rows) else logits[alike]
        theirs = logprobs(its_logits, [tokens[rows[at]] for at in alike], count)
        found |= {rows[at]: its for at, its in zip(alike, theirs, strict=True)}
    return found


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to one output position of a seed.

    A hash of the two and 0 (BLAKE2b, 53 bits of it): counter-based, so it needs no state and has no order. The native
    sampler hashes them itself (`kernels/native/draws.cpp`).
    """
    counter = struct.pack("<QQQ", seed & (2**64 - 1), 0, position)
    number = int.from_bytes(hashlib.blake2b(counter, digest_size=8, person=b"moonpool sample").digest(), "little")
    return (number >> 11) * 2.0**-53


def _greedy(logits: Tensor) -> tuple[list[int], dict[int, str]]:
    """Return the highest logit's index of every row, the lowest among equals, and rows without a right one.

    Torch's `argmax` is an order of magnitude slower than `amax`: the maximum of each run of 128 is found first.
    """
    rows, vocab = logits.shape
    width = 128 if vocab % 128 == 0 else 1
    runs = logits.view(rows, -1, width)
    highest, run = runs.amax(-1).max(-1)
    chosen = run * width + runs[torch.arange(rows, device=logits.device), run].argmax(-1)
    return chosen.tolist(), {} if bool(torch.isfinite(highest).all()) else _failed(highest.tolist())


def _failed(highest: Sequence[float]) -> dict[int, str]:
    """Rows whose highest logit is none to choose by, and why."""
    bad = ((row, value) for row, value in enumerate(highest) if not math.isfinite(value))
    return {row: NOTHING_LEFT if value == -math.inf else NOT_FINITE for row, value in bad}
