"""Rendezvous hashing: which of several places a key belongs to, without a table and without moving others.

Every place draws a number for the key from a hash of both; the highest wins. An added place takes only keys for which
the place's number is the highest. After a loss, only the lost place's keys move, each to the place that came second.

The logarithmic method weights the draws: a place's share of the keys equals the place's share of all weights. A changed
weight moves only the keys that this place gains or loses. After Thaler and Ravishankar, "Using name-based mappings to
increase hit rates" (1998), and Schindelhauer and Schomaker, "Weighted distributed hash tables" (2005).

Pure: no clock, no randomness, no state. The draw depends on key and name alone, not on the process or the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from blake3 import blake3

_CONTEXT = b"moonpool rendezvous v1"
_DRAW_BITS = 52  # a draw and a half then fit a double's 53 bits exactly, hence a draw is never 0 or 1


def draw(key: bytes, place: str) -> float:
    """Return the number in (0, 1) that a place draws for a key."""
    digest = blake3(_salt(place) + key).digest(8)
    return ((int.from_bytes(digest, "little") >> (64 - _DRAW_BITS)) + 0.5) / (1 << _DRAW_BITS)


@lru_cache(maxsize=1024)
def _salt(place: str) -> bytes:
    name = place.encode()
    return _CONTEXT + len(name).to_bytes(4, "little") + name


def score(key: bytes, place: str, weight: float = 1.0) -> float:
    """Return how much a place wants a key; above 0.

    Raises:
        ValueError: the weight is not positive and finite.
    """
    if not 0 < weight < math.inf:
        raise ValueError(f"the weight of {place!r} must be positive and finite, is {weight}")
    return -weight / math.log(draw(key, place))


def ranked(key: bytes, weights: Mapping[str, float]) -> list[str]:
    """Return all places, the place that wants the key most first; the first n are the homes of n copies.

    Raises:
        ValueError: a weight is not positive and finite.
    """
    return sorted(weights, key=lambda place: (-score(key, place, weights[place]), place))
