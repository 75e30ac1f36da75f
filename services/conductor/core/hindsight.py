"""Hindsight: what placements lost against their best alternatives, by what was measured since."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.scheduling.state_machine import digest_of
from services.conductor.placement.base import PrefillChoice

KEPT_OUTCOMES = 32
"""First tokens of an instance that are remembered."""
NEAR_S = 60.0
"""Seconds between two placements within which one outcome tells about the other."""
MAX_REMEMBERED = 1024
"""Requests with a remembered regret."""


class PlacementOutcome(NamedTuple):
    """A prompt with a first token: the time of placement, and how many seconds later than predicted the token came."""

    placed_at: float
    late_s: float


class PlacementRegret(NamedTuple):
    """What a placement lost, seconds to first token; 0 = no alternative would have been sooner.

    `better`: instance that would have been best; "" = the chosen one was.
    """

    lost_s: float
    better: str = ""


@dataclass(slots=True)
class HindsightTotals:
    """Sums over all measured placements: how many, how many had a better alternative, and the seconds lost."""

    placements: int = 0
    regretted: int = 0
    lost_s: float = 0.0


class Hindsight:
    """Compares each measured time to first token with what the alternatives would have taken.

    An alternative is taken to have been as much later than predicted as the prompt that was placed there nearest in
    time: so queues that turned out longer, and instances that turned out slower, count as they were.
    """

    def __init__(self) -> None:
        self.totals = HindsightTotals()
        self._outcomes: dict[str, deque[PlacementOutcome]] = {}
        self._regrets: OrderedDict[int, PlacementRegret] = OrderedDict()

    def of(self, request: int) -> PlacementRegret | None:
        """The regret of a request's placement; None = not measured, or forgotten."""
        return self._regrets.get(request)

    def measured(self, request: int, candidates: Sequence[PrefillChoice], placed_at: float, now: float) -> None:
        """A request has a first token now, at the first candidate."""
        chosen, *others = candidates
        ttft_s = now - placed_at
        outcome = PlacementOutcome(placed_at, ttft_s - chosen.ttft_s)
        self._outcomes.setdefault(chosen.id, deque(maxlen=KEPT_OUTCOMES)).append(outcome)
        known = [(self._in_hindsight(it, placed_at), it.id) for it in others if not it.excluded]
        best_s, best = min(known, default=(ttft_s, ""))
        regret = PlacementRegret(ttft_s - best_s, best) if best_s < ttft_s else PlacementRegret(0.0)
        totals = self.totals
        totals.placements, totals.lost_s = totals.placements + 1, totals.lost_s + regret.lost_s
        totals.regretted += bool(regret.better)
        self._regrets[request] = regret
        if len(self._regrets) > MAX_REMEMBERED:
            self._regrets.popitem(last=False)

    def lost(self, instance: str) -> None:
        """The instance is gone."""
        self._outcomes.pop(instance, None)

    def _in_hindsight(self, choice: PrefillChoice, placed_at: float) -> float:
        apart_s, late_s = min(
            [(abs(it.placed_at - placed_at), it.late_s) for it in self._outcomes.get(choice.id, ())],
            default=(NEAR_S, 0.0),
        )
        return max(choice.alone_s, choice.ttft_s + (late_s if apart_s < NEAR_S else 0.0))

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self.totals, sorted(self._outcomes.items()), self._regrets)
