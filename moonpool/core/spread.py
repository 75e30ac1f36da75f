"""Thins out a set of times, for wake-ups that need not be exact."""

from collections.abc import Collection


def spread(times: Collection[float], most: int) -> list[float]:
    """At most so many of the times, ascending and evenly spread over their order, the last one among them."""
    ordered = sorted(set(times))
    if len(ordered) <= most:
        return ordered
    return [ordered[(turn + 1) * len(ordered) // most - 1] for turn in range(most)]
