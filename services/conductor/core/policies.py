"""Placement policies: how the prefill instance of a request is chosen (docs/policies.md).

To add a policy, write a class like `PlacementPolicy` and an entry in `POLICIES`, or an entry point of the group
`moonpool.policies`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nsmallest
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from blake3 import blake3

from moonpool.errors import ConfigError
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


_KNOWN_S = attrgetter("known_s")
_ALONE_S = attrgetter("alone_s")


@frozen
class KVCacheCentric:
    """The least predicted time to first token, with every prefix there is: Algorithm 1 of the Mooncake paper."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """By the predicted time to first token, without what later prompts are expected to take.

        That counts in the request's limit: where the best would miss it, the first that keeps it is taken.
        """
        return candidates.keeping(candidates.least(limit, _KNOWN_S, _ALONE_S))


@frozen
class CacheAware:
    """The least predicted time to first token, each instance with its own blocks only."""

    stores: bool = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """By the predicted time to first token, without what later prompts are expected to take.

        That counts in the request's limit: where the best would miss it, the first that keeps it is taken.
        """
        return candidates.keeping(candidates.least(limit, _KNOWN_S, _ALONE_S))


_QUEUE_S = attrgetter("queue_s")


@frozen
class LoadBalance:
    """The shortest queue in seconds, whatever the prefixes."""

    stores: bool = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """By the seconds of queue."""
        return candidates.least(limit, _QUEUE_S, lambda _: 0.0)


@frozen
class RoundRobin:
    """The instance that was chosen least recently."""

    stores: bool = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """By the turn of each; by name before the first one."""
        return [candidates.predict(place) for place in nsmallest(limit, candidates, key=attrgetter("turn", "name"))]


@frozen
class Random:
    """Any instance."""

    stores: bool = False

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """The first ones of a random order (Fisher and Yates)."""
        places = sorted(candidates, key=attrgetter("name"))
        for at in range(min(limit, len(places))):
            other = at + candidates.draw(len(places) - at, at)
            places[at], places[other] = places[other], places[at]
        return [candidates.predict(place) for place in places[:limit]]


DEFAULT_POLICY = "kvcache_centric"
POLICIES: Mapping[str, PlacementPolicy] = {
    "random": Random(),
    "round_robin": RoundRobin(),
    "load_balance": LoadBalance(),
    "cache_aware": CacheAware(),
    DEFAULT_POLICY: KVCacheCentric(),
}
"""By name, the simplest first."""
ENTRY_POINT_GROUP = "moonpool.policies"
"""Entry points of this group are policies that other packages bring along."""


def seed_of(conductor: str) -> int:
    """Seed of the draws of a conductor of this name. Another name gives another one."""
    return int.from_bytes(blake3(conductor.encode()).digest(8), "little")


def load_policy(name: str) -> PlacementPolicy:
    """The policy of a name, or the object of `MODULE:OBJECT`; of a class, one that is made without arguments.

    Raises:
        ConfigError: naming `policy`: there is none of this name, it cannot be loaded, or it is no policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    found = _policy_object(name) if ":" in name else _installed_policy(name)
    try:
        policy = found() if isinstance(found, type) else found
    except Exception as error:  # of the class: whatever it raises, the setting is wrong
        raise ConfigError("policy", f"{name!r} cannot be made: {error!r}") from error
    if not callable(getattr(policy, "order", None)) or not isinstance(getattr(policy, "stores", None), bool):
        raise ConfigError("policy", f"{name!r} is no policy: it needs a method `order` and a bool `stores`")
    checked: PlacementPolicy = policy
    return checked


def _installed_policy(name: str) -> Any:
    installed = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        raise ConfigError(
            "policy", f"there is no policy {name!r}; there are {', '.join([*POLICIES, *sorted(installed)])}"
        )
    try:
        return installed[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError("policy", f"{name!r} of {ENTRY_POINT_GROUP} cannot be loaded: {error}") from error


def _policy_object(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: the module has no name
        raise ConfigError("policy", f"{name!r} cannot be loaded: {error}") from error
    return found
