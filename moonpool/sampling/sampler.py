"""Chooses tokens from logits: a pure function of logits, parameters, history, seed and position.

The sampler has no state: an instance that computes the same logits chooses the same token, also after a crash and on
another instance. A row's result never depends on the other rows.

Order: bias, bans, penalties and masks (`moonpool.sampling.penalties`); then, if the temperature is 0, the highest
logit, the lowest token among equals; else temperature, top-k, top-p, min-p and one draw (`moonpool.sampling.draw`).

On CPUs one native call does it all (`moonpool.sampling.native_sampler`); elsewhere torch does
(`moonpool.sampling.torch_sampler`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.choice import choose
from kernels.native import library
from kernels.native.structures import GoOn
from moonpool.logprobs import Logprobs
from moonpool.sampling.draw import scale_of
from moonpool.sampling.native_sampler import NativeRows, RowChoices
from moonpool.sampling.penalties import TokenMask
from moonpool.sampling.torch_sampler import TorchRows
from moonpool.sampling_params import SampleSpec

# Temperatures below this are greedy: dividing by them would overflow.
_GREEDY_BELOW = 1e-5


NOTHING_LEFT = "no token is left to choose: each is banned, or does not fit the format"


NOT_FINITE = "the model computed logits that are not finite"


class SamplerOutput(NamedTuple):
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
        self._count = len(specs)
        self._rows: NativeRows | None = None
        self._torch: TorchRows | None = None
        native = library.get() if specs and choose("sampling", device, torch.float32) == "native" else None
        if native is not None:
            scales = [scale_of(it.params) if it.params.temperature >= _GREEDY_BELOW else -1.0 for it in specs]
            self._rows = NativeRows(native, vocab, specs, scales, steps)
        elif specs:
            drawn = [row for row, spec in enumerate(specs) if spec.params.temperature >= _GREEDY_BELOW]
            self._torch = TorchRows(specs, drawn, vocab, device)

    @property
    def chosen(self) -> int | None:
        """As `NativeRows.chosen`; None where rows are not sampled natively, too."""
        return None if self._rows is None else self._rows.chosen

    def sample(self, logits: Tensor, masks: Mapping[int, TokenMask] = MappingProxyType({})) -> SamplerOutput:
        """See `sample`."""
        assert logits.dim() == 2
        assert logits.shape[0] == self._count
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        if self._torch is not None:
            with torch.inference_mode():
                return _as_sampled(self._torch.read(self._torch.begin(logits, masks)))
        return _as_sampled(self._rows.choose(logits, masks)) if self._rows is not None else SamplerOutput([], {}, {})

    def alone(self, further: GoOn) -> bool:
        """See `NativeRows.alone`."""
        return self._rows is not None and self._rows.alone(further)

    def permit(self, masks: Mapping[int, TokenMask]) -> None:
        """See `NativeRows.permit`; where rows are sampled natively."""
        assert self._rows is not None
        self._rows.permit(masks)

    def found(self) -> SamplerOutput:
        """What the last native choice found."""
        assert self._rows is not None
        return _as_sampled(self._rows.found())

    def sample_at(self, logits: int, masks: Mapping[int, TokenMask]) -> list[int] | SamplerOutput:
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
        for rows in (self._rows, self._torch):
            if rows is not None:
                rows.go_on(tokens)


def sample(
    logits: Tensor, specs: Sequence[SampleSpec], masks: Mapping[int, TokenMask] = MappingProxyType({})
) -> SamplerOutput:
    """Choose the tokens of each row of `logits` [R, vocab] float32 by the row's parameters: one for each sample.

    `logits` must be contiguous and are overwritten. `masks`: of rows that may not have all tokens.
    """
    return Sampler(specs, logits.shape[-1], logits.device).sample(logits, masks)


def _as_sampled(found: RowChoices) -> SamplerOutput:
    failed = {row: NOTHING_LEFT if nothing else NOT_FINITE for row, nothing in found.failed.items()}
    return SamplerOutput(found.tokens, found.logprobs, failed)
