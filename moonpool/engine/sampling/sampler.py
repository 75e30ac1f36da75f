"""Chooses tokens from logits: a pure function of logits, parameters, history, seed and position.

The sampler has no state: an instance that computes the same logits chooses the same token, also after a crash and on
another instance. A row's result never depends on the other rows.

Order: logits processors and masks (`moonpool.engine.sampling.processors`). Then, if the temperature is 0, the highest
logit, the lowest token among equals; else temperature, filters (`moonpool.engine.sampling.filters`) and one draw
(`moonpool.engine.sampling.random_sampler`).

On CPUs a single native call samples (`moonpool.engine.sampling.native_sampler`); elsewhere torch does
(`moonpool.engine.sampling.torch_sampler`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import SampleSpec
from moonpool.engine.kernels.choice import choose
from moonpool.engine.kernels.native import library
from moonpool.engine.sampling.base import RowChoices, RowSampler, TokenMask
from moonpool.engine.sampling.native_sampler import NativeRows
from moonpool.engine.sampling.random_sampler import LEAST_TEMPERATURE, scale_of
from moonpool.engine.sampling.torch_sampler import TorchRows

NOTHING_LEFT = "no token is left to choose: each is banned, or does not fit the format"
NOT_FINITE = "the model computed logits that are not finite"


class SamplerOutput(NamedTuple):
    """Chosen tokens for some rows."""

    tokens: list[list[int]]
    """One list per row, with a token for each sample; empty for a row that failed."""
    logprobs: dict[int, Logprobs]
    """By row, for rows that asked for log probabilities."""
    failed: dict[int, str]
    """Why a row has no token. Other rows are not affected."""


class Sampler:
    """Chooses tokens for some sequences, step after step.

    Args:
        specs: each row's, for the first step.
        vocab: number of tokens in the vocabulary.
        device: the logits' device.
        steps: largest number of steps.
    """

    def __init__(self, specs: Sequence[SampleSpec], vocab: int, device: torch.device, steps: int = 1) -> None:
        self._count = len(specs)
        self._rows: RowSampler | None = None
        native = library.get() if specs and choose("sampling", device, torch.float32) == "native" else None
        if native is not None:
            scales = [scale_of(spec.params) if spec.params.temperature >= LEAST_TEMPERATURE else -1.0 for spec in specs]
            self._rows = NativeRows(native, vocab, specs, scales, steps)
        elif specs:
            drawn = [row for row, spec in enumerate(specs) if spec.params.temperature >= LEAST_TEMPERATURE]
            self._rows = TorchRows(specs, drawn, vocab, device)

    @property
    def native(self) -> NativeRows | None:
        """The native rows, for loops that sample without Python; None if torch samples."""
        return self._rows if isinstance(self._rows, NativeRows) else None

    def sample(self, logits: Tensor, masks: Mapping[int, TokenMask] = MappingProxyType({})) -> SamplerOutput:
        assert logits.dim() == 2
        assert logits.shape[0] == self._count
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        return SamplerOutput([], {}, {}) if self._rows is None else sampler_output(self._rows.sample(logits, masks))

    def advance(self, tokens: Sequence[int]) -> None:
        """Go to the next step, after row i got `tokens[i]`; the same tokens are banned."""
        if self._rows is not None:
            self._rows.advance(tokens)


def sample(
    logits: Tensor, specs: Sequence[SampleSpec], masks: Mapping[int, TokenMask] = MappingProxyType({})
) -> SamplerOutput:
    """Return tokens for each row in `logits` [R, vocab] float32, one for each sample in the row's spec.

    `logits` must be contiguous and are overwritten. `masks`: by row, tokens that may be chosen; absent: all.
    """
    return Sampler(specs, logits.shape[-1], logits.device).sample(logits, masks)


def sampler_output(choices: RowChoices) -> SamplerOutput:
    """Return the choices, with messages for rows that failed."""
    failed = {row: NOTHING_LEFT if nothing else NOT_FINITE for row, nothing in choices.failed.items()}
    return SamplerOutput(choices.tokens, choices.logprobs, failed)
