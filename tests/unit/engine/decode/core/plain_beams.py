"""Beam search on lists, word for word as `transformers` does it, over a model that is a hash of the tokens."""

import math
import random
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

from moonpool.base.scheduling.state_machine import digest_of
from moonpool.engine.decode.core.events import Candidates, SearchRules

TOKENS = 64
ENDS = 2
"""The lowest token ids end a sequence."""
NEVER = -1e9


def following(tokens: Sequence[int]) -> list[tuple[int, float]]:
    """All tokens with their log probabilities after some tokens, the best first."""
    return _following(tuple(tokens))


def candidates(tokens: Sequence[int], width: int, *, last: bool) -> Candidates:
    """What the core is told of them, for beams of a width; with the `last` one each answer ends."""
    found = following(tokens)[: width + ENDS]
    return tuple((log_probability, token < ENDS or last) for token, log_probability in found)


@lru_cache(maxsize=20_000)
def _following(tokens: tuple[int, ...]) -> list[tuple[int, float]]:
    rng = random.Random(digest_of(tokens))
    logits = [rng.gauss(0.0, 1.5) + (1.5 if token < ENDS else 0.0) for token in range(TOKENS)]
    total = math.log(sum(map(math.exp, logits)))
    return sorted(((token, logit - total) for token, logit in enumerate(logits)), key=lambda other: -other[1])


def plain_search(
    prompt: list[int],
    width: int,
    longest: int,
    rules: SearchRules,
    following: Callable[[list[int]], list[tuple[int, float]]] = following,
    ends: Collection[int] = range(ENDS),
) -> list[tuple[list[int], float]]:
    """Answers and scores, the best first."""
    running: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    for length in range(1, longest + 1):
        everything = [
            ([*answer, token], score + log_probability)
            for answer, score in running
            for token, log_probability in following(prompt + answer)
        ]
        top = sorted(everything, key=lambda beam: -beam[1])[: max(2, 1 + len(ends)) * width]
        stops = [answer[-1] in ends or length == longest for answer, _ in top]
        running = [beam for beam, stop in zip(top, stops, strict=True) if not stop][:width]
        ended = [beam for beam, stop in list(zip(top, stops, strict=True))[:width] if stop]
        finished += [(answer, score / length**rules.length_penalty) for answer, score in ended]
        finished = sorted(finished, key=lambda beam: -beam[1])[:width]
        if all(stops):
            break
        at = longest if rules.early_stopping == "never" and rules.length_penalty > 0 else length
        worst = finished[-1][1] if len(finished) == width else NEVER
        improvable = running[0][1] / at**rules.length_penalty > worst
        if not improvable or (len(finished) == width and rules.early_stopping is True):
            break
    return finished
