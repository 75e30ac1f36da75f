"""Logits processors: bias, banned tokens, penalties and masks, for all rows at once.

Names and meaning as in vLLM: repetition looks at prompt and output, presence and frequency at the output only. The
frequency penalty times the count of a token is rounded to float32, as the native sampler does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moonpool.sampling.ops import send_to_device
from moonpool.sampling_params import SampleSpec

TokenMask = bytes | memoryview
"""Bit i, from the lowest of the first byte on, says whether token i may be chosen."""


_IN_PROMPT, _IN_OUTPUT = 1, 2
"""What an occurrence adds to a token's count; of those in the prompt only one counts."""


class LogitsAdjuster:
    """Bias, bans, penalties and masks of some rows, step after step.

    Args:
        specs: of each row, for the first step.
        vocab: tokens of the model; others are passed over.
        device: of the logits.
    """

    def __init__(self, specs: Sequence[SampleSpec], vocab: int, device: torch.device) -> None:
        self._vocab, self._device = vocab, device
        biases = [(row, *it) for row, spec in enumerate(specs) for it in spec.params.logit_bias.items()]
        biases = [it for it in biases if it[1] < vocab]
        self._biased = self._places([it[:2] for it in biases])
        self._biases = send_to_device(torch.tensor([it[2] for it in biases], dtype=torch.float32), device)
        banned = [(row, token) for row, spec in enumerate(specs) for token in spec.banned if token < vocab]
        self._banned = self._places(banned)
        self._never = torch.full((), -torch.inf, device=device)
        self._bits = torch.arange(8, dtype=torch.uint8, device=device)
        counted = [row for row, spec in enumerate(specs) if spec.history and spec.params.penalised]
        self._penalties = _Penalties(counted, [specs[row] for row in counted], vocab, device) if counted else None

    def go_on(self, tokens: Sequence[int]) -> None:
        """The next step: each row's token was the one of `tokens`."""
        if self._penalties is not None:
            self._penalties.go_on(tokens)

    def __call__(self, logits: Tensor, masks: Mapping[int, TokenMask]) -> None:
        """Change `logits` [R, vocab] in place: bias, bans, penalties and masks, in this order. `masks`: by row."""
        if self._biased is not None:
            logits.index_put_(self._biased, logits[self._biased] + self._biases)
        if self._banned is not None:
            logits.index_put_(self._banned, self._never)
        if self._penalties is not None:
            self._penalties(logits)
        if masks:
            self._mask(logits, masks)

    def _places(self, found: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor] | None:
        """Rows and tokens on the device; None when there are none."""
        if not found:
            return None
        rows, tokens = send_to_device(torch.tensor(found, dtype=torch.int64).t(), self._device)
        return rows, tokens

    def _mask(self, logits: Tensor, masks: Mapping[int, TokenMask]) -> None:
        """Masks go to the device as they are; tokens behind the end of one may not be chosen."""
        packed = np.zeros((len(masks), -(-self._vocab // 8)), np.uint8)
        for at, mask in enumerate(masks.values()):
            part = np.frombuffer(mask, np.uint8)[: packed.shape[1]]
            packed[at, : len(part)] = part
        rows = send_to_device(torch.tensor(list(masks)), self._device)
        bits = send_to_device(torch.from_numpy(packed), self._device)[:, :, None] >> self._bits & 1
        masked = logits[rows].masked_fill_(bits.flatten(1)[:, : self._vocab] == 0, -torch.inf)
        logits.index_copy_(0, rows, masked)


class _Penalties:
    """Of the rows that have some; with how often each had which token.

    Args:
        rows: of the logits.
        specs: of each of them.
        vocab: tokens of the model.
        device: of the logits.
    """

    def __init__(self, rows: Sequence[int], specs: Sequence[SampleSpec], vocab: int, device: torch.device) -> None:
        self._rows, self._vocab, self._device = rows, vocab, device
        self._at = send_to_device(torch.tensor(rows), device)
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        values = torch.tensor([[[getattr(spec.params, name)] for spec in specs] for name in names])
        self._repetition, self._frequency, self._presence = send_to_device(values, device)  # each [P, 1]
        # One more column, for what is no token of the model.
        self._counts = torch.zeros((len(rows), vocab + 1), dtype=torch.int32, device=device)
        prompts, outputs = (send_to_device(torch.from_numpy(places), device) for places in _occurrences(specs, vocab))
        self._counts.view(-1).index_fill_(0, prompts, _IN_PROMPT)
        self._counts.view(-1).scatter_add_(0, outputs, torch.full_like(outputs, _IN_OUTPUT, dtype=torch.int32))
        self._last: list[int] | None = None

    def go_on(self, tokens: Sequence[int]) -> None:
        """See `Adjusting.go_on`."""
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


def _occurrences(specs: Sequence[SampleSpec], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Places in flat counts [P, vocab + 1] of all tokens of the rows' prompts, and of their outputs."""
    tokens = np.frombuffer(b"".join(spec.history or b"" for spec in specs), np.int32)
    lengths = np.array([len(spec.history or b"") // 4 for spec in specs])
    rows = np.repeat(np.arange(len(specs)), lengths)
    behind = np.arange(len(tokens)) - (np.cumsum(lengths) - lengths)[rows]
    places = rows * (vocab + 1) + np.minimum(tokens, vocab)
    prompt = behind < np.array([spec.prompt_tokens for spec in specs])[rows]
    return places[prompt], places[~prompt]
