"""What else the host of an instance computes: when that is foreseen, and how much longer a prompt takes meanwhile."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple


class Span(NamedTuple):
    """When something computes, in seconds from now."""

    begin_s: float
    end_s: float


FOREVER = Span(0.0, inf)


def stretched(work_s: float, company: Sequence[Span], slow: float) -> tuple[float, float]:
    """How long work takes that needs `work_s` alone, and which share of it is done in company.

    Args:
        work_s: seconds.
        company: when others compute; may overlap.
        slow: times as long that it takes meanwhile.
    """
    at, left_s, shared_s = 0.0, work_s, 0.0
    for begin_s, end_s in sorted(company):
        alone_s = max(0.0, begin_s - at)
        if alone_s >= left_s:
            break
        at, left_s = at + alone_s, left_s - alone_s
        with_s = min(left_s * slow, max(0.0, end_s - at))
        at, left_s, shared_s = at + with_s, left_s - with_s / slow, shared_s + with_s / slow
    return at + left_s, shared_s / work_s if work_s else 0.0
