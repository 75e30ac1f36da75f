"""Rows sampled by the native sampler (`kernels/native/sample.cpp`): its arguments, packed, and its results."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from torch import Tensor

from kernels.native.library import Library
from kernels.native.structures import SAMPLING_ROW, GoOn, Sampling
from moonpool.logprobs import Logprobs
from moonpool.sampling.penalties import TokenMask
from moonpool.sampling_params import SampleSpec, stream_seed

_OF_PARAMS = attrgetter(
    "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "top_p", "logprobs", "logit_bias"
)


@dataclass(slots=True)
class RowChoices:
    """What was found."""

    tokens: list[list[int]]
    """Of each row its draws; none of a row that failed."""
    failed: dict[int, bool]
    """By row, whether no token was left; else its logits are not finite."""
    logprobs: dict[int, Logprobs]
    """By row, where they are wanted and it did not fail."""


class NativeRows:
    """Rows that are sampled natively: packed once, then changed in place from step to step.

    Args:
        native: the kernels.
        vocab: tokens of the model.
        specs: of each row, for the first step.
        scales: of each row's logits, so that weights are powers of two of them; negative: the highest is chosen.
        steps: that are sampled at most.
    """

    def __init__(
        self, native: Library, vocab: int, specs: Sequence[SampleSpec], scales: Sequence[float], steps: int = 1
    ) -> None:
        self._native, self._specs = native, specs
        self._data = array("i")
        self._ends: dict[int, int] = {}
        """By row with a history, where its next token goes to in `_data`."""
        draws, packed = 0, []
        for row, (spec, scale) in enumerate(zip(specs, scales, strict=True)):
            packed.append(self._row(row, spec, scale, vocab, draws, steps))
            draws += spec.samples
        self._rows = np.array(packed, SAMPLING_ROW)
        self._most = max(0, int(self._rows["top"].max()))
        seeds = [stream_seed(spec.seed, index) for spec in specs for index in range(spec.samples)]
        self._seeds = np.array(seeds, np.uint64)
        self._positions = np.repeat(
            np.array([spec.position for spec in specs], np.uint64), [spec.samples for spec in specs]
        )
        self._numbers = np.zeros(draws)
        self._numbers_at = self._numbers.ctypes.data
        self._hashed = self._seeds.ctypes.data, self._positions.ctypes.data
        self._drawn, self._later, self._begun = max(scales) >= 0, 0, True
        self._plain = draws == len(specs) and all(spec.params.logprobs is None for spec in specs)
        self._masks: Mapping[int, TokenMask] = {}
        self._tokens, self._failed = array("i", bytes(4 * draws)), array("i", bytes(4 * len(specs)))
        self._told = array("f", bytes(4 * draws)), array("I", bytes(4 * draws))
        likely = bytes(4 * len(specs) * self._most)
        self._likely: tuple[array[int], array[float]] = array("i", likely), array("f", likely)
        outputs = (self._tokens, self._failed, *self._told, *self._likely)
        self._call = Sampling(
            None, len(specs), vocab,
            self._rows.ctypes.data, self._data.buffer_info()[0], self._numbers_at,
            *(output.buffer_info()[0] for output in outputs), self._most,
        )  # fmt: skip

    @property
    def chosen(self) -> int | None:
        """Address of the rows' tokens, one int32 of each, written by each choice; None where a row has several."""
        return self._tokens.buffer_info()[0] if len(self._tokens) == len(self._specs) else None

    def begin_with(self, tokens: Sequence[int]) -> None:
        """What each row's token was before the first step, which has not begun; where `chosen` is an address."""
        self._tokens[:] = array("i", tokens)
        self._begun = False

    def go_on(self, tokens: Sequence[int]) -> None:
        """The next step, after each row's first sample was `tokens`."""
        self._later += 1
        for row, end in self._ends.items():
            self._data[end] = tokens[row]
            self._rows["history_count"][row] += 1
            self._ends[row] = end + 1

    def alone(self, further: GoOn) -> bool:
        """Have native code choose in steps to come by itself; False where something is to be done or told between them.

        Masks are those of `permit`. From then on `go_on` is not called any more.
        """
        if not self._plain or self._ends:
            return False
        self._call.logits = further.logits
        further.sampling, further.later = ctypes.pointer(self._call), self._later + self._begun
        if self._drawn:
            further.seeds, further.counters = self._hashed
            further.numbers = self._numbers_at
        return True

    def permit(self, masks: Mapping[int, TokenMask]) -> None:
        """Choose by these masks from now on, as they are then: their own memory is referred to.

        The same object as before has the same memory.
        """
        if masks is self._masks:
            return
        self._rows["mask"] = 0
        for row, mask in masks.items():
            self._rows["mask"][row] = np.frombuffer(mask, np.uint8).ctypes.data
            self._rows["mask_bytes"][row] = len(mask)
        self._masks = masks

    def choose(
        self, logits: Tensor, masks: Mapping[int, TokenMask], numbers: Sequence[float] | None = None
    ) -> RowChoices:
        """Choose tokens of each row of `logits` [R, vocab], contiguous float32, which are overwritten.

        Args:
            logits: of the model.
            masks: as `moonpool.sampling.sampler.sample` has them; the same object as before has the same memory.
            numbers: in [0, 1), for each row and each of its samples, in place of those of seeds and positions.
        """
        tokens = self.choose_at(logits.data_ptr(), masks, numbers)
        return self.found() if tokens is None else RowChoices([[token] for token in tokens], {}, {})

    def choose_at(
        self, logits: int, masks: Mapping[int, TokenMask], numbers: Sequence[float] | None = None
    ) -> list[int] | None:
        """As `choose`, of logits at an address: one token of each row; None where `found` has more, or less, to say."""
        if numbers is not None:
            self._numbers[:] = numbers
        elif self._drawn:
            self._native.uniform(*self._hashed, self._later, len(self._numbers), self._numbers_at)
        self.permit(masks)
        self._call.logits = logits
        failed = self._native.sample(self._call)
        return self._tokens.tolist() if self._plain and not failed else None

    def found(self) -> RowChoices:
        """What the last choice found."""
        found = RowChoices([], {}, {})
        first = 0
        for row, spec in enumerate(self._specs):
            last = first + spec.samples
            if self._failed[row]:
                found.failed[row] = self._failed[row] == 1
                found.tokens.append([])
            else:
                found.tokens.append(self._tokens[first:last].tolist())
                if spec.params.logprobs is not None:
                    found.logprobs[row] = self._logprobs(row, spec, slice(first, last))
            first = last
        return found

    def _row(
        self, row: int, spec: SampleSpec, scale: float, vocab: int, draws: int, steps: int
    ) -> tuple[float | int, ...]:
        """As `SAMPLING_ROW` has it, with what it refers to in `_data`."""
        top_k, min_p, repetition, frequency, presence, top_p, logprobs, biases = _OF_PARAMS(spec.params)
        history_at = banned_at = bias_at = history = 0
        if spec.history and spec.params.penalised:
            history = len(spec.history) // 4
            history_at = self._put(spec.history)
            self._ends[row] = len(self._data)
            self._data.frombytes(bytes(4 * (steps - 1)))
        if spec.banned:
            banned_at = self._put(array("i", spec.banned).tobytes())
        if biases:
            bias_at = self._put(array("i", biases).tobytes() + array("f", biases.values()).tobytes())
        top = -1 if logprobs is None else min(logprobs, vocab)
        return (
            top_p,
            0, history_at, banned_at, bias_at,
            history, spec.prompt_tokens, len(spec.banned), len(biases), draws, spec.samples,
            min(top_k, vocab), top,
            scale, min_p, repetition, frequency, presence,
            0,
        )  # fmt: skip

    def _put(self, part: bytes) -> int:
        at = 4 * len(self._data)
        self._data.frombytes(part)
        return at

    def _logprobs(self, row: int, spec: SampleSpec, draws: slice) -> Logprobs:
        begin, count = row * self._most, min(spec.params.logprobs or 0, self._most)
        top = slice(begin, begin + count)
        tokens, values = self._likely[0][top] * spec.samples, self._likely[1][top] * spec.samples
        return Logprobs(self._told[0][draws], self._told[1][draws], tokens, values)
