"""Samples rows with the native sampler (`kernels/engine/sample.cpp`): packs arguments, reads results."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np
from torch import Tensor

from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import SampleSpec, stream_seed
from moonpool.engine.kernels.native.library import Library
from moonpool.engine.kernels.native.structures import GoOn, Sampling
from moonpool.engine.sampling.base import RowChoices, TokenMask


class NativeRows:
    """Native `RowSampler`. The arguments are packed once and changed in place from step to step.

    Args:
        native: the kernels.
        vocab: number of tokens in the vocabulary.
        specs: each row's, for the first step.
        scales: each row's logits scale (`random_sampler.scale_of`); negative: the highest logit is chosen.
        steps: largest number of steps.
    """

    def __init__(
        self, native: Library, vocab: int, specs: Sequence[SampleSpec], scales: Sequence[float], steps: int = 1
    ) -> None:
        self._native, self._specs = native, specs
        self._data = array("i")
        self._ends: dict[int, int] = {}
        """Place of the next token in `_data`, by row with a history."""
        self._options = attrgetter(*native.sampling_options)
        draws, packed = 0, []
        for row, (spec, scale) in enumerate(zip(specs, scales, strict=True)):
            packed.append(self._row(row, spec, scale, vocab, draws, steps))
            draws += spec.samples
        self._rows = np.array(packed, native.sampling_row)
        self._most = max(0, int(self._rows["top"].max()))
        seeds = [stream_seed(spec.seed, index) for spec in specs for index in range(spec.samples)]
        self._seeds = np.array(seeds, np.uint64)
        self._positions = np.repeat(
            np.array([spec.position for spec in specs], np.uint64), [spec.samples for spec in specs]
        )
        self._numbers = np.zeros(draws)
        self._numbers_at = self._numbers.ctypes.data
        self._hashed = self._seeds.ctypes.data, self._positions.ctypes.data
        self._drawn, self._steps, self._begun = max(scales) >= 0, 0, True
        self._plain = draws == len(specs) and all(spec.params.logprobs is None for spec in specs)
        self._masks: Mapping[int, TokenMask] = {}
        self._tokens, self._failed = array("i", bytes(4 * draws)), array("i", bytes(4 * len(specs)))
        self._scores = array("f", bytes(4 * draws)), array("I", bytes(4 * draws))
        top = bytes(4 * len(specs) * self._most)
        self._top: tuple[array[int], array[float]] = array("i", top), array("f", top)
        outputs = (self._tokens, self._failed, *self._scores, *self._top)
        self._call = Sampling(
            None, len(specs), vocab,
            self._rows.ctypes.data, self._data.buffer_info()[0], self._numbers_at,
            *(output.buffer_info()[0] for output in outputs), self._most,
        )  # fmt: skip

    @property
    def tokens_address(self) -> int | None:
        """The address of the last step's tokens, one int32 per row. None if a row has several samples."""
        return self._tokens.buffer_info()[0] if len(self._tokens) == len(self._specs) else None

    def set_previous(self, tokens: Sequence[int]) -> None:
        """Set each row's token before the first step, which has not begun. Needs a `tokens_address`."""
        self._tokens[:] = array("i", tokens)
        self._begun = False

    def advance(self, tokens: Sequence[int]) -> None:
        self._steps += 1
        for row, end in self._ends.items():
            self._data[end] = tokens[row]
            self._rows["history_count"][row] += 1
            self._ends[row] = end + 1

    def attach(self, further: GoOn) -> bool:
        """Let the native loop `further` sample the coming steps, with the masks from `set_masks`.

        `advance` must not be called afterwards. Returns False if Python has work between two of these steps.
        """
        if not self._plain or self._ends:
            return False
        self._call.logits = further.logits
        further.sampling, further.later = ctypes.pointer(self._call), self._steps + self._begun
        if self._drawn:
            further.seeds, further.counters = self._hashed
            further.numbers = self._numbers_at
        return True

    def set_masks(self, masks: Mapping[int, TokenMask]) -> None:
        """Use these masks from now on. Their memory is read in each step, not copied.

        The same mapping object as before has the same memory.
        """
        if masks is self._masks:
            return
        self._rows["mask"] = 0
        for row, mask in masks.items():
            self._rows["mask"][row] = np.frombuffer(mask, np.uint8).ctypes.data
            self._rows["mask_bytes"][row] = len(mask)
        self._masks = masks

    def sample(
        self, logits: Tensor, masks: Mapping[int, TokenMask], numbers: Sequence[float] | None = None
    ) -> RowChoices:
        """See `RowSampler.sample`.

        `numbers`: in [0, 1), for each row and each of the row's samples; None: from seeds and positions.
        """
        tokens = self.sample_at(logits.data_ptr(), masks, numbers)
        return self.choices() if tokens is None else RowChoices([[token] for token in tokens], {}, {})

    def sample_at(
        self, logits: int, masks: Mapping[int, TokenMask], numbers: Sequence[float] | None = None
    ) -> list[int] | None:
        """Sample from logits at an address; return one token per row. None if that is not all: see `choices`."""
        if numbers is not None:
            self._numbers[:] = numbers
        elif self._drawn:
            self._native.uniform(*self._hashed, self._steps, len(self._numbers), self._numbers_at)
        self.set_masks(masks)
        self._call.logits = logits
        failed = self._native.sample(self._call)
        return self._tokens.tolist() if self._plain and not failed else None

    def choices(self) -> RowChoices:
        """Return the result of the last step."""
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
        """Return the fields of `Library.sampling_row`; lists of tokens go to `_data`."""
        params, biases, logprobs = spec.params, spec.params.logit_bias, spec.params.logprobs
        history_at = banned_at = bias_at = history = 0
        if spec.history and params.penalised:
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
            params.top_p,
            0, history_at, banned_at, bias_at,
            history, spec.prompt_tokens, len(spec.banned), len(biases), draws, spec.samples,
            min(params.top_k, vocab), top,
            scale, *self._options(params),
            0,
        )  # fmt: skip

    def _put(self, part: bytes) -> int:
        at = 4 * len(self._data)
        self._data.frombytes(part)
        return at

    def _logprobs(self, row: int, spec: SampleSpec, draws: slice) -> Logprobs:
        begin, count = row * self._most, min(spec.params.logprobs or 0, self._most)
        top = slice(begin, begin + count)
        tokens, values = self._top[0][top] * spec.samples, self._top[1][top] * spec.samples
        return Logprobs(self._scores[0][draws], self._scores[1][draws], tokens, values)
