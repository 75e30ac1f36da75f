"""Which services were disturbed when: by this a storm judges whether a request may have failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Span = tuple[float, float]
RETRIES = 3
"""Of a request, as the conductor's `--set retries` has it by default."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A service is not as usual, from a fault on until it has recovered; seconds on any clock."""

    service: str
    begin: float
    end: float


class Disturbances:
    """All disturbances of a storm.

    Args:
        services: ids of all services; an id is its kind, "-" and a number.
        retries: faults that a request survives, one after the other.
    """

    def __init__(self, services: Iterable[str], retries: int = RETRIES) -> None:
        self._of_kind: dict[str, list[str]] = {}
        for name in services:
            self._of_kind.setdefault(name.partition("-")[0], []).append(name)
        self._retries = retries
        self._all: list[Disturbance] = []

    def add(self, services: Iterable[str], begin: float, end: float) -> None:
        """A fault has disturbed these services until then."""
        self._all += [Disturbance(service, begin, end) for service in services]

    def explain(self, begin: float, end: float, kinds: Sequence[str]) -> str:
        """Why a request from `begin` to `end` that needs a service of each kind may have failed; "": it may not.

        At some moment all services of a kind were disturbed; or there were more faults than it is placed again.
        """
        for kind in kinds:
            if any(first <= end and begin <= last for first, last in self.down(kind)):
                return f"each {kind} was disturbed"
        faults = {
            each.begin for each in self._all if each.begin <= end and begin <= each.end and _kind(each.service) in kinds
        }
        return f"{len(faults)} faults" if len(faults) > self._retries else ""

    def any(self, begin: float, end: float) -> bool:
        """Whether a service was disturbed meanwhile."""
        return any(each.begin <= end and begin <= each.end for each in self._all)

    def down(self, kind: str) -> list[Span]:
        """Times in which all services of a kind were disturbed."""
        found: list[Span] | None = None
        for service in self._of_kind.get(kind, ()):
            spans = _united((each.begin, each.end) for each in self._all if each.service == service)
            found = spans if found is None else _common(found, spans)
        return found or []

    def up_share(self, begin: float, end: float, kinds: Sequence[str]) -> float:
        """Share of a time in which of each kind at least one service was undisturbed."""
        down = _united(span for kind in kinds for span in self.down(kind))
        return 1.0 - sum(max(0.0, min(last, end) - max(first, begin)) for first, last in down) / (end - begin)


def _kind(service: str) -> str:
    return service.partition("-")[0]


def _united(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def _common(value: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    pairs = [(max(a[0], b[0]), min(a[1], b[1])) for a in value for b in other]
    return sorted((first, last) for first, last in pairs if first < last)
