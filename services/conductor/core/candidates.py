"""The prefill instances that may compute one prompt, as a policy sees them."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from moonpool.core.fair import Place as Turn
from moonpool.frozen import frozen
from services.conductor.core.cost import PrefillChoice, PrefillCost
from services.conductor.core.pool import blocks_at
from services.conductor.core.ranks import Place, RankClass, Ranks
from services.conductor.core.sets import members


class Limit(NamedTuple):
    """The first token is wanted within so many seconds from now, of a request with this place among others."""

    within_s: float
    place: Turn


@frozen
class Candidates:
    """Those that are large enough and take requests, and what the prompt is predicted to take on each.

    Attributes:
        now: seconds of the clock of `Place.load`, which is when an instance will be free.
        draw: `draw(limit, counter)` gives a whole number in [0, limit), random by the conductor's seed, the number of
            this decision and the counter.
    """

    now: float
    draw: Callable[[int, int], int]
    _allowed: int
    _ranks: Ranks
    _prefixes: Sequence[tuple[int, int]]
    _cost: Callable[[RankClass, int], PrefillCost]
    _predict: Callable[[int, int], PrefillChoice]
    _overlooked: int | None
    _keeps: Callable[[PrefillChoice], bool]

    def __len__(self) -> int:
        return self._allowed.bit_count()

    def __iter__(self) -> Iterator[Place]:
        """All of them, in a fixed order: when each will be free, when it was chosen last, and its name."""
        return (self._ranks.place(slot) for slot in members(self._allowed))

    def predict(self, place: Place) -> PrefillChoice:
        """What the prompt is predicted to take on one of them; the costs of this call are those of one prediction."""
        return self._predict(place.slot, blocks_at(self._prefixes, place.slot))

    def least(
        self, limit: int, by: Callable[[PrefillChoice], float], cost: Callable[[PrefillCost], float]
    ) -> list[PrefillChoice]:
        """Those for which some seconds are least, best first, without a look at each.

        Among equals the narrower pipeline comes first: a wide one is worth more to a long prompt. Then the one that was
        idle longest, then the one that was chosen least recently. One that others were preferred to for long, although
        it has served nothing yet, is looked at as well.

        Args:
            limit: so many, and perhaps one more.
            by: the seconds.
            cost: what they are on an idle instance; `by` must be that and the wait, or the wait alone.
        """
        found = self._ranks.search(
            self._allowed,
            self._prefixes,
            lambda ranked, blocks: cost(self._cost(ranked, blocks)),
            lambda free_at: max(free_at - self.now, 0.0),
            limit,
        )
        places = [(place, blocks) for _, place, blocks in found]
        slot = self._overlooked
        if slot is not None and all(place.slot != slot for place, _ in places):
            places.append((self._ranks.place(slot), blocks_at(self._prefixes, slot)))
        rated = []
        for place, blocks in places:
            choice = self._predict(place.slot, blocks)
            rated.append((by(choice), self._ranks.stages(place.slot), place, choice))
        rated.sort()
        return [choice for *_, choice in rated]

    def keeping(self, choices: Sequence[PrefillChoice]) -> Sequence[PrefillChoice]:
        """The same choices, where the first that keeps the request's limit goes before those that do not."""
        at = next((at for at, choice in enumerate(choices) if self._keeps(choice)), 0)
        return [choices[at], *choices[:at], *choices[at + 1 :]] if at else choices


class Policy(Protocol):
    """How the prefill instance of a request is chosen. It keeps no state: equal arguments give equal answers.

    Attributes:
        stores: kvstores and other instances' pools count. A prefix is loaded from there where that is predicted to be
            quicker than computing it, and new blocks are written to kvstores. Otherwise instances have their own only.
    """

    @property
    def stores(self) -> bool: ...

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """The best of the candidates, best first; at least one, and not many more than `limit`.

        The first one is taken. The others are kept for `explain`.
        """
        ...
