"""What the right tokens are: those of a plain forward pass of the checkpoint, or of the emulated engine's rule."""

from collections.abc import Collection, Sequence

from moonpool.engine.emulated.kv import continuation, token_seed
from tests.integration.reference import GAP_TOLERANCE, Reference

DRAW_TOLERANCE = 1e-4
"""Greatest distance between a draw and the chosen token's share of the distribution that rounding may explain."""


class ReferenceJudge:
    """Teacher-forced: every token is judged by what the reference computes after those before it."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def wrong(self, prompt: Sequence[int], output: Sequence[int], seed: int | None) -> str:
        """See `Judge.wrong`."""
        if seed is None:
            gaps, tolerance = self._reference.gaps(prompt, output), GAP_TOLERANCE
        else:
            gaps, tolerance = self._reference.misses(prompt, output, seed), DRAW_TOLERANCE
        for position, gap in enumerate(gaps):
            if gap > tolerance:
                return f"token {output[position]} at position {position} of {len(output)} is off by {gap:.3g}"
        return ""


class EmulatedJudge:
    """An emulated engine's answer is a function of its prompt: equal or wrong."""

    def __init__(self, vocab_size: int, reserved: Collection[int]) -> None:
        self._vocab_size = vocab_size
        self._reserved = reserved

    def wrong(self, prompt: Sequence[int], output: Sequence[int], seed: int | None) -> str:
        """See `Judge.wrong`."""
        state = 0 if seed is None else token_seed(seed)
        right = continuation(prompt, len(output), self._vocab_size, self._reserved, seed=state)
        for position, (token, wanted) in enumerate(zip(output, right, strict=True)):
            if token != wanted:
                return f"token {token} at position {position} of {len(output)} should be {wanted}"
        return ""
