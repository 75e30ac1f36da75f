"""What else the host of an instance computes: when that is foreseen, and how much longer a prompt takes meanwhile."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

MOST_LOST = 0.8
"""Of its speed that an engine loses in company at most."""


class Span(NamedTuple):
    """When something computes, in seconds from now."""

    begin_s: float
    end_s: float


FOREVER = Span(0.0, inf)


def stretched(work_s: float, company: Sequence[Span], lost: float) -> tuple[float, float]:
    """How long work takes that needs `work_s` alone, and how much of that time it has company.

    Args:
        work_s: seconds.
        company: when others compute; may overlap.
        lost: share of its speed that it loses meanwhile.
    """
    rate = 1.0 - min(lost, MOST_LOST)
    at = shared_s = 0.0
    for begin_s, end_s in sorted(company):
        alone_s = max(0.0, begin_s - at)
        if alone_s >= work_s:
            break
        at, work_s = at + alone_s, work_s - alone_s
        with_s = min(work_s / rate, max(0.0, end_s - at))
        at, work_s, shared_s = at + with_s, work_s - rate * with_s, shared_s + with_s
    return at + work_s, shared_s
