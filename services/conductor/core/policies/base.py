"""The contract of placement policies: what a policy is, and the candidates it chooses from."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from moonpool.frozen import frozen
from moonpool.scheduling.fair_share import QueueKey
from services.conductor.core.instances import LoadRanking, RankedInstance, SpeedClass, blocks_at
from services.conductor.core.latency_model import PrefillChoice, PrefillCost
from services.conductor.core.prefix_index import slots_in


class TtftLimit(NamedTuple):
    """TTFT limit of a request.

    Attributes:
        within_s: seconds from now within which the first token must come.
        queue_key: position of the request among others.
    """

    within_s: float
    queue_key: QueueKey


@frozen
class Candidates:
    """Prefill instances that are large enough and take requests, and predictions of the prompt on each.

    Attributes:
        now: seconds of the clock of `RankedInstance.load`, which is the time at which an instance will be free.
        draw: `draw(limit, counter)` gives an integer in [0, limit), random by the conductor's seed, the number of this
            decision and the counter.
    """

    now: float
    draw: Callable[[int, int], int]
    _allowed: int
    _ranks: LoadRanking
    _prefixes: Sequence[tuple[int, int]]
    _cost: Callable[[SpeedClass, int], PrefillCost]
    _predict: Callable[[int, int], PrefillChoice]
    _starved: int | None
    _keeps: Callable[[PrefillChoice], bool]

    def __len__(self) -> int:
        return self._allowed.bit_count()

    def __iter__(self) -> Iterator[RankedInstance]:
        """All instances, in a fixed order: when each will be free, when it was chosen last, and its name."""
        return (self._ranks.place(slot) for slot in slots_in(self._allowed))

    def predict(self, instance: RankedInstance) -> PrefillChoice:
        """Predicts the prompt on an instance; this is what a call costs."""
        return self._predict(instance.slot, blocks_at(self._prefixes, instance.slot))

    def least(
        self, limit: int, by: Callable[[PrefillChoice], float], cost: Callable[[PrefillCost], float]
    ) -> list[PrefillChoice]:
        """Predictions with the least seconds, best first, without a look at each instance.

        Of equal ones the narrower pipeline comes first: a wide one is worth more to a long prompt. Then comes the
        instance that was idle longest, then the one that was chosen least recently. A starved instance, which has
        served nothing while others were preferred for long, is looked at as well.

        Args:
            limit: predictions wanted; there may be one more.
            by: the seconds.
            cost: the seconds on an idle instance; `by` must be `cost` and the wait, or the wait alone.
        """
        found = self._ranks.search(
            self._allowed,
            self._prefixes,
            lambda ranked, blocks: cost(self._cost(ranked, blocks)),
            lambda free_at: max(free_at - self.now, 0.0),
            limit,
        )
        instances = [(instance, blocks) for _, instance, blocks in found]
        slot = self._starved
        if slot is not None and all(instance.slot != slot for instance, _ in instances):
            instances.append((self._ranks.place(slot), blocks_at(self._prefixes, slot)))
        rated = []
        for instance, blocks in instances:
            choice = self._predict(instance.slot, blocks)
            rated.append((by(choice), self._ranks.stages(instance.slot), instance, choice))
        rated.sort()
        return [choice for *_, choice in rated]

    def keeping(self, choices: Sequence[PrefillChoice]) -> Sequence[PrefillChoice]:
        """The same choices; the first that keeps the request's TTFT limit goes before those that do not."""
        at = next((at for at, choice in enumerate(choices) if self._keeps(choice)), 0)
        return [choices[at], *choices[:at], *choices[at + 1 :]] if at else choices


class PlacementPolicy(Protocol):
    """How the prefill instance of a request is chosen. It keeps no state: equal arguments give equal answers.

    Attributes:
        stores: kvstores and other instances' pools count. A prefix is loaded from there if that is predicted to be
            quicker than computing it, and new blocks are written to kvstores. Otherwise instances use their own blocks.
    """

    @property
    def stores(self) -> bool: ...

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """The best of the candidates, best first; at least one, and not many more than `limit`.

        The first one is taken. The others are kept for `explain`.
        """
        ...
