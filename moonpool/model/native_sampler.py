"""What rows are chosen by, as the native sampler (`kernels/native/sample.cpp`) is told, and what it found."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from torch import Tensor

from kernels.native.library import Library
from kernels.native.structures import SAMPLING_ROW, Sampling
from moonpool.logprobs import Logprobs
from moonpool.sampling import SampleSpec

_OF_PARAMS = attrgetter(
    "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "top_p", "logprobs", "logit_bias"
)


@dataclass(slots=True)
class Choice:
    """What was found."""

    tokens: list[list[int]]
    """Of each row its draws; none of a row that failed."""
    failed: dict[int, bool]
    """By row, whether no token was left; else its logits are not finite."""
    logprobs: dict[int, Logprobs]
    """By row, where they are wanted and it did not fail."""


@dataclass(slots=True)
class _Order:
    """The rows of one call, and what they refer to."""

    vocab: int
    rows: bytearray = field(default_factory=bytearray)
    data: bytearray = field(default_factory=bytearray)
    draws: int = 0
    most: int = 0

    def add(self, spec: SampleSpec, scale: float, mask: bytes | None) -> None:
        """One more row."""
        top_k, min_p, repetition, frequency, presence, top_p, logprobs, biases = _OF_PARAMS(spec.params)
        mask_at = history_at = banned_at = bias_at = -1
        history, banned = b"", spec.banned
        if mask is not None:
            mask_at = self._put(mask[: -(-self.vocab // 8)])
        if spec.history and spec.params.penalised:
            history = spec.history
            history_at = self._put(history)
        if banned:
            banned_at = self._put(array("i", banned).tobytes())
        if biases:
            bias_at = self._put(array("i", biases).tobytes() + array("f", biases.values()).tobytes())
        top = -1 if logprobs is None else min(logprobs, self.vocab)
        self.most = max(self.most, top)
        self.rows += SAMPLING_ROW.pack(
            top_p,
            history_at, mask_at, banned_at, bias_at,
            len(history) // 4, spec.prompt_tokens, len(banned), len(biases), self.draws, spec.samples,
            min(top_k, self.vocab), top,
            scale, min_p, repetition, frequency, presence,
        )  # fmt: skip
        self.draws += spec.samples

    def _put(self, part: bytes) -> int:
        at = len(self.data)
        self.data += part
        self.data += bytes(-len(part) % 8)
        return at


def choose(
    native: Library,
    logits: Tensor,
    specs: Sequence[SampleSpec],
    scales: Sequence[float],
    numbers: Sequence[float],
    masks: Mapping[int, bytes],
) -> Choice:
    """Choose tokens of each row of `logits` [R, vocab], contiguous float32, which are overwritten.

    Args:
        native: the kernels.
        logits: of the model.
        specs: of each row.
        scales: of each row's logits, so that weights are powers of two of them; negative: the highest is chosen.
        numbers: in [0, 1), for each row and each of its samples.
        masks: as `moonpool.model.sampler.sample` has them.
    """
    order = _Order(logits.shape[1])
    for row, (spec, scale) in enumerate(zip(specs, scales, strict=True)):
        order.add(spec, scale, masks.get(row))
    drawn = array("d", numbers)
    tokens, failed = array("i", bytes(4 * order.draws)), array("i", bytes(4 * len(specs)))
    told = array("f", bytes(4 * order.draws)), array("I", bytes(4 * order.draws))
    likely = array("i", bytes(4 * len(specs) * order.most)), array("f", bytes(4 * len(specs) * order.most))
    rows, data = array("b", bytes(order.rows)), array("b", bytes(order.data) or b"\0")
    native.sample(
        Sampling(
            logits.data_ptr(), *logits.shape,
            *(it.buffer_info()[0] for it in (rows, data, drawn, tokens, failed, *told, *likely)),
            order.most,
        )
    )  # fmt: skip
    return _found(specs, tokens, failed, told, likely, order.most)


def _found(
    specs: Sequence[SampleSpec],
    tokens: array[int],
    failed: array[int],
    told: tuple[array[float], array[int]],
    likely: tuple[array[int], array[float]],
    most: int,
) -> Choice:
    found = Choice([], {}, {})
    first = 0
    for row, spec in enumerate(specs):
        last = first + spec.samples
        if failed[row]:
            found.failed[row] = failed[row] == 1
            found.tokens.append([])
        else:
            found.tokens.append(tokens[first:last].tolist())
            if spec.params.logprobs is not None:
                top = slice(row * most, row * most + min(spec.params.logprobs, most))
                found.logprobs[row] = Logprobs(
                    told[0][first:last], told[1][first:last],
                    likely[0][top] * spec.samples, likely[1][top] * spec.samples,
                )  # fmt: skip
        first = last
    return found
