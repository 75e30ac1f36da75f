"""Hindsight: what placements lost against their best alternatives, by what was measured since."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.placement.base import DecodeChoice, PrefillChoice

KEPT_OUTCOMES = 32
"""Measurements of an instance that are remembered."""
NEAR_S = 60.0
"""Seconds between two placements within which one outcome tells about the other."""
MAX_REMEMBERED = 1024
"""Requests with a remembered regret."""


class Hindsight:
    """What was measured, compared with what the alternatives would have taken.

    Attributes:
        prefill: regrets of prompts, seconds to the first token. An alternative is taken to have been as much later than
            predicted as the prompt that was placed there nearest in time: so queues that turned out longer, and
            instances that turned out slower, count as they were.
        decode: regrets of answers, seconds from the first token to the last. An alternative is taken to have been as
            many times as slow as predicted as the answer that was placed there nearest in time; if there is none, as
            the chosen instance was, since load comes and goes everywhere.
    """

    def __init__(self) -> None:
        self.prefill = Regrets()
        self.decode = Regrets()

    def first_token(self, request: int, candidates: Sequence[PrefillChoice], placed_at: float, now: float) -> None:
        """A request has a first token now, at the first candidate."""
        chosen, *others = candidates
        regrets, ttft_s = self.prefill, now - placed_at
        regrets.noted(chosen.id, PlacementOutcome(placed_at, ttft_s - chosen.ttft_s))
        known = [
            (max(other.alone_s, other.ttft_s + (regrets.error_near(other.id, placed_at) or 0.0)), other.id)
            for other in others
            if not other.excluded
        ]
        regrets.measured(request, ttft_s, known)

    def answered(
        self,
        request: int,
        candidates: Sequence[DecodeChoice],
        chosen_id: str,
        placed_at: float,
        answered_s: float,
        length: float = 1.0,
    ) -> None:
        """A request has the whole answer, `answered_s` after the first token.

        Alternatives that had no memory for the request count for nothing.

        Args:
            request: by number.
            candidates: the instances that were compared.
            chosen_id: the instance that gave the answer.
            placed_at: the time of placement.
            answered_s: see above.
            length: tokens of the answer over the number for which `DecodeChoice.finish_s` was predicted.
        """
        chosen = next((candidate for candidate in candidates if candidate.id == chosen_id), None)
        if chosen is None or not chosen.finish_s:
            return
        regrets, factor = self.decode, answered_s / (length * chosen.finish_s)
        regrets.noted(chosen.id, PlacementOutcome(placed_at, factor))
        known: list[tuple[float, str]] = []
        for other in candidates:
            if other is not chosen and other.there.available_blocks >= other.blocks:
                error = regrets.error_near(other.id, placed_at)
                known.append((length * other.finish_s * (factor if error is None else error), other.id))
        regrets.measured(request, answered_s, known)

    def lost(self, instance: str) -> None:
        self.prefill.lost(instance)
        self.decode.lost(instance)

    def digest(self) -> bytes:
        return digest_of(self.prefill, self.decode)


class Regrets:
    """Regrets of placements on instances with the same role."""

    def __init__(self) -> None:
        self.totals = HindsightTotals()
        self._outcomes: dict[str, deque[PlacementOutcome]] = {}
        self._by_request: OrderedDict[int, PlacementRegret] = OrderedDict()

    def of(self, request: int) -> PlacementRegret | None:
        """Return the regret of a request's placement; None = not measured, or forgotten."""
        return self._by_request.get(request)

    def error_near(self, instance: str, placed_at: float) -> float | None:
        """Return the error of the prediction that was made for an instance nearest in time; None = none is near."""
        outcomes = self._outcomes.get(instance, ())
        apart_s, error = min(
            [(abs(outcome.placed_at - placed_at), outcome.error) for outcome in outcomes], default=(NEAR_S, 0.0)
        )
        return error if apart_s < NEAR_S else None

    def noted(self, instance: str, outcome: PlacementOutcome) -> None:
        """A placement on an instance was measured."""
        self._outcomes.setdefault(instance, deque(maxlen=KEPT_OUTCOMES)).append(outcome)

    def measured(self, request: int, seconds: float, others: Iterable[tuple[float, str]]) -> None:
        """A request took so many seconds; `others`: seconds that each alternative would have taken, and the name."""
        best_s, best = min(others, default=(seconds, ""))
        regret = PlacementRegret(seconds - best_s, best) if best_s < seconds else PlacementRegret(0.0)
        totals = self.totals
        totals.placements, totals.lost_s = totals.placements + 1, totals.lost_s + regret.lost_s
        totals.regretted += bool(regret.better)
        self._by_request[request] = regret
        if len(self._by_request) > MAX_REMEMBERED:
            self._by_request.popitem(last=False)

    def lost(self, instance: str) -> None:
        self._outcomes.pop(instance, None)

    def digest(self) -> bytes:
        return digest_of(self.totals, sorted(self._outcomes.items()), self._by_request)


@dataclass(slots=True)
class HindsightTotals:
    """Sums over all measured placements: how many, how many had a better alternative, and the seconds lost."""

    placements: int = 0
    regretted: int = 0
    lost_s: float = 0.0


class PlacementRegret(NamedTuple):
    """What a placement lost in seconds; 0 = no alternative would have been sooner.

    `better`: instance that would have been best; "" = the chosen one was.
    """

    lost_s: float
    better: str = ""


class PlacementOutcome(NamedTuple):
    """How far a measurement was from the prediction, and the time of placement.

    `error`: of prompts, seconds that the first token came later; of answers, the factor by which tokens took longer.
    """

    placed_at: float
    error: float
