"""How large steps become, from what is known of the sequences that take part in them."""

import math
from collections.abc import Iterator
from typing import NamedTuple


class Life(NamedTuple):
    """What is expected of a request. Steps are counted from now on."""

    begins: float
    """Its first step."""
    ends: float
    """Its last step."""
    sequences: int
    context: int
    """Tokens of all its sequences in its first step; each has one more with each further one."""


def worst_moments(lives: list[Life], watched: Life) -> Iterator[tuple[int, int]]:
    """Sequences and tokens of the steps in which somebody's last one is, while `watched` is there.

    No other step is longer than all of these: between two ends all that is there grows, and others only come.
    """
    coming, sequences, at_zero = sorted(lives, reverse=True), 0, 0.0
    for life in sorted(lives, key=lambda life: life.ends):
        while coming and coming[-1].begins <= life.ends:
            come = coming.pop()
            sequences, at_zero = sequences + come.sequences, at_zero + come.context - come.begins * come.sequences
        if watched.begins <= life.ends <= watched.ends:
            yield sequences, math.ceil(at_zero + life.ends * sequences)
        sequences, at_zero = sequences - life.sequences, at_zero - life.context + life.begins * life.sequences
