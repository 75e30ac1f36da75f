"""Logits processors: bias, banned tokens, penalties and masks, for all rows at once.

Names and meaning as in vLLM: repetition looks at prompt and output, presence and frequency at the output only. The
frequency penalty times a token's count is rounded to float32, as in the native sampler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from moonpool.base.sampling_params import SampleSpec
from moonpool.engine.kernels.to_device import send_to_device
from moonpool.engine.sampling.base import LogitsProcessor, TokenMask

_IN_PROMPT, _IN_OUTPUT = 1, 2
"""Added to a token's count for occurrences in the prompt (once for all) and for each occurrence in the output."""


class LogitsPipeline:
    """All processors for some rows, then the masks.

    Args:
        specs: each row's, for the first step.
        vocab: tokens of the model.
        device: the logits' device.
    """

    def __init__(self, specs: Sequence[SampleSpec], vocab: int, device: torch.device) -> None:
        self._vocab, self._device = vocab, device
        processors = (kind.of(specs, vocab, device) for kind in PROCESSORS)
        self._processors = [processor for processor in processors if processor is not None]
        self._bits = torch.arange(8, dtype=torch.uint8, device=device)

    def advance(self, tokens: Sequence[int]) -> None:
        for processor in self._processors:
            processor.advance(tokens)

    def __call__(self, logits: Tensor, masks: Mapping[int, TokenMask]) -> None:
        """Change `logits` [R, vocab] in place. `masks`: by row, tokens that may be chosen."""
        for processor in self._processors:
            processor(logits)
        if masks:
            self._mask(logits, masks)

    def _mask(self, logits: Tensor, masks: Mapping[int, TokenMask]) -> None:
        """Apply masks, which go to the device packed. Tokens behind the end of a mask must not be chosen."""
        packed = np.zeros((len(masks), -(-self._vocab // 8)), np.uint8)
        for at, mask in enumerate(masks.values()):
            part = np.frombuffer(mask, np.uint8)[: packed.shape[1]]
            packed[at, : len(part)] = part
        rows = send_to_device(torch.tensor(list(masks)), self._device)
        bits = send_to_device(torch.from_numpy(packed), self._device)[:, :, None] >> self._bits & 1
        masked = logits[rows].masked_fill_(bits.flatten(1)[:, : self._vocab] == 0, -torch.inf)
        logits.index_copy_(0, rows, masked)


class LogitBias:
    """Adds `logit_bias` to single tokens' logits."""

    def __init__(self, places: tuple[Tensor, Tensor], biases: Tensor) -> None:
        self._places, self._biases = places, biases

    @classmethod
    def of(cls, specs: Sequence[SampleSpec], vocab: int, device: torch.device) -> Self | None:
        biases = [(row, *bias) for row, spec in enumerate(specs) for bias in spec.params.logit_bias.items()]
        biases = [bias for bias in biases if bias[1] < vocab]
        if not biases:
            return None
        values = torch.tensor([bias[2] for bias in biases], dtype=torch.float32)
        return cls(_places([bias[:2] for bias in biases], device), send_to_device(values, device))

    def advance(self, tokens: Sequence[int]) -> None:
        """Biases are the same in each step."""

    def __call__(self, logits: Tensor) -> None:
        logits.index_put_(self._places, logits[self._places] + self._biases)


class BannedTokens:
    """Excludes the tokens `SampleSpec.banned`: end tokens before `min_tokens`, and the ends of bad words."""

    def __init__(self, places: tuple[Tensor, Tensor], device: torch.device) -> None:
        self._places, self._never = places, torch.full((), -torch.inf, device=device)

    @classmethod
    def of(cls, specs: Sequence[SampleSpec], vocab: int, device: torch.device) -> Self | None:
        banned = [(row, token) for row, spec in enumerate(specs) for token in spec.banned if token < vocab]
        return cls(_places(banned, device), device) if banned else None

    def advance(self, tokens: Sequence[int]) -> None:
        """The same tokens are banned in each step of a run."""

    def __call__(self, logits: Tensor) -> None:
        logits.index_put_(self._places, self._never)


class Penalties:
    """Repetition, frequency and presence penalties, for the rows that have some.

    Args:
        rows: rows in the logits.
        specs: these rows' specs.
        vocab: tokens of the model.
        device: the logits' device.
    """

    def __init__(self, rows: Sequence[int], specs: Sequence[SampleSpec], vocab: int, device: torch.device) -> None:
        self._rows, self._vocab, self._device = rows, vocab, device
        self._at = send_to_device(torch.tensor(rows), device)
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        values = torch.tensor([[[getattr(spec.params, name)] for spec in specs] for name in names])
        self._repetition, self._frequency, self._presence = send_to_device(values, device)  # each [P, 1]
        # The last column counts ids that are no tokens of the model.
        self._counts = torch.zeros((len(rows), vocab + 1), dtype=torch.int32, device=device)
        prompts, outputs = (send_to_device(torch.from_numpy(places), device) for places in _occurrences(specs, vocab))
        self._counts.view(-1).index_fill_(0, prompts, _IN_PROMPT)
        self._counts.view(-1).scatter_add_(0, outputs, torch.full_like(outputs, _IN_OUTPUT, dtype=torch.int32))
        self._last: list[int] | None = None

    @classmethod
    def of(cls, specs: Sequence[SampleSpec], vocab: int, device: torch.device) -> Self | None:
        rows = [row for row, spec in enumerate(specs) if spec.history and spec.params.penalised]
        return cls(rows, [specs[row] for row in rows], vocab, device) if rows else None

    def advance(self, tokens: Sequence[int]) -> None:
        self._last = [min(tokens[row], self._vocab) for row in self._rows]

    def __call__(self, logits: Tensor) -> None:
        if self._last is not None:
            last = send_to_device(torch.tensor(self._last)[:, None], self._device)
            self._counts.scatter_add_(1, last, torch.full_like(last, _IN_OUTPUT, dtype=torch.int32))
            self._last = None
        counts, values = self._counts[:, : self._vocab], logits[self._at]
        repeated = torch.where(values > 0, values / self._repetition, values * self._repetition)
        values = torch.where(counts > 0, repeated, values)
        values -= (counts // _IN_OUTPUT) * self._frequency
        values -= torch.where(counts >= _IN_OUTPUT, self._presence, 0.0)
        logits.index_copy_(0, self._at, values)


PROCESSORS: tuple[type[LogitsProcessor], ...] = (LogitBias, BannedTokens, Penalties)
"""In the order in which they are applied."""


def _places(found: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows and tokens on the device."""
    rows, tokens = send_to_device(torch.tensor(found, dtype=torch.int64).t(), device)
    return rows, tokens


def _occurrences(specs: Sequence[SampleSpec], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return places in flat counts [P, vocab + 1] for all tokens in the rows' prompts, and in their outputs."""
    tokens = np.frombuffer(b"".join(spec.history or b"" for spec in specs), np.int32)
    lengths = np.array([len(spec.history or b"") // 4 for spec in specs])
    rows = np.repeat(np.arange(len(specs)), lengths)
    behind = np.arange(len(tokens)) - (np.cumsum(lengths) - lengths)[rows]
    places = rows * (vocab + 1) + np.minimum(tokens, vocab)
    prompt = behind < np.array([spec.prompt_tokens for spec in specs])[rows]
    return places[prompt], places[~prompt]
