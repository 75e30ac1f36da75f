"""Sampling's contracts: processors for logits, filters for weights, and samplers for rows.

A sampling option has four parts, in this order (docs/extend/sampling_option.md):

1. parameter and check: a field of `moonpool.base.sampling_params.SamplingParams`;
2. wire: the field of the same name in the proto message `Sampling`;
3. torch, the reference: a `LogitsProcessor` in `moonpool.engine.sampling.processors` or a `WeightFilter` in
   `moonpool.engine.sampling.filters`;
4. native: the same rule in `kernels/engine/processors.h`, with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import SampleSpec, SamplingParams

TokenMask = bytes | memoryview
"""Tokens that may be chosen: bit i, counted from the lowest bit of the first byte, belongs to token i."""


class LogitsProcessor(Protocol):
    """Changes logits before the temperature. One object serves the same rows step after step."""

    @classmethod
    def of(cls, specs: Sequence[SampleSpec], vocab: int, device: torch.device) -> Self | None:
        """Return the processor for rows with these specs; None if no row needs the processor.

        Args:
            specs: each row's, for the first step.
            vocab: tokens of the model. Other token ids are ignored.
            device: the logits' device.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Go to the next step, after row i got `tokens[i]`."""
        ...

    def __call__(self, logits: Tensor) -> None:
        """Change `logits` [R, vocab] float32 in place."""
        ...


class WeightFilter(Protocol):
    """Drops tokens from the draw. The weight of a token is exp((logit - highest logit) / temperature)."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int, device: torch.device) -> Self | None:
        """Return the filter for rows with these parameters; None if no row needs the filter.

        Args:
            params: each row's.
            vocab: tokens of the model.
            device: the weights' device.
        """
        ...

    def __call__(self, logits: Tensor, weights: Tensor) -> None:
        """Set dropped tokens in `weights` to 0, in place; at least the most likely token of a row stays.

        Args:
            logits: [R, vocab] float32, after all processors.
            weights: [R, n] float32 in [0, 1], with n >= vocab; 0 behind the vocabulary and for tokens dropped before.
        """
        ...


@dataclass(slots=True)
class RowChoices:
    """Chosen tokens for some rows."""

    tokens: list[list[int]]
    """One list per row, with a token for each sample; empty for a row that failed."""
    failed: dict[int, bool]
    """Rows without a token. True: no token was left; False: the logits are not finite."""
    logprobs: dict[int, Logprobs]
    """By row, for rows that asked for log probabilities and did not fail."""


class RowSampler(Protocol):
    """Chooses tokens for the same rows, step after step."""

    def sample(self, logits: Tensor, masks: Mapping[int, TokenMask]) -> RowChoices:
        """Return tokens for each row in `logits` [R, vocab], contiguous float32, which are overwritten.

        `masks`: by row. The same mapping object as in the step before has the same masks.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Go to the next step, after row i got `tokens[i]` as the first sample."""
        ...
