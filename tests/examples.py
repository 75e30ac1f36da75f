"""What `make test` leaves to `make test-all`: two of three examples that Hypothesis draws, and most combinations."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

ALL = os.environ.get("TEST_EXAMPLES") == "all"


def examples(count: int) -> int:
    """Of `count` examples as many as this run draws; at least ten."""
    return count if ALL else max(10, count // 3)


def each(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of values, as parameters of a test; those that bring no value of an axis anew are slow."""
    return _covering(list(map(list, axes)), 1)


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """As `each`; a combination is not slow if it brings two values together anew."""
    return _covering(list(map(list, axes)), 2)


def _covering(axes: Sequence[Sequence[Any]], together: int) -> list[Any]:
    """Choose greedily the combinations that have most of what is still missing, of these such as have what is rare."""
    combinations = list(itertools.product(*(range(len(axis)) for axis in axes)))
    has = {combination: set(itertools.combinations(enumerate(combination), together)) for combination in combinations}
    missing, chosen, used = set[object]().union(*has.values()), set[tuple[int, ...]](), Counter[object]()
    while missing:
        best = max(
            combinations,
            key=lambda combination: (len(has[combination] & missing), -sum(used[item] for item in has[combination])),
        )
        chosen.add(best)
        missing -= has[best]
        used.update(has[best])
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, combination, strict=True)),
            marks=() if combination in chosen else pytest.mark.slow,
        )
        for combination in combinations
    ]
