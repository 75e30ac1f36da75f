"""How prefill instances are chosen: by the conductor's own plan, or as the baselines of the Mooncake paper do."""

from collections.abc import Collection
from typing import Any

from moonpool.core.draws import draw_below
from services.conductor.core.picture import Picture
from services.conductor.core.plan import Plan
from simulator.cluster.config import ClusterConfig

POLICIES = {
    "random": "any prefill instance, by seed",
    "load-balance": "the shortest queue, whoever holds what",
    "cache-aware": "the least predicted time to first token, each instance with its own blocks only",
    "kvcache-centric": "the least predicted time to first token, blocks of kvstores included",
}
"""How prefill instances are chosen, the worst first."""
BASELINES = ("random", "load-balance")


def picture_of(config: ClusterConfig) -> Picture:
    """The conductor's picture; for a baseline one that plans with the instance that the baseline picks."""
    if config.policy in BASELINES:
        return Baseline(config)
    return Picture(balancing_threshold=config.threshold)


class Baseline(Picture):
    """A picture whose plans are for one prefill instance, picked without a look at what it holds."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(balancing_threshold=config.threshold)
        self._config = config
        self._queued_s = {f"p{number}": 0.0 for number in range(config.prefill)}
        self._placed: dict[int, tuple[str, float]] = {}
        self._decisions = 0

    def plan(self, *, suspects: Collection[str] = (), **sequence: Any) -> Plan:
        """See `Picture.plan`: all prefill instances but the picked one are suspects."""
        self._decisions += 1
        chosen = self._choose([name for name in self._queued_s if name not in suspects and self.incarnation(name)])
        others = [name for name in self._queued_s if chosen and name != chosen]
        return super().plan(suspects=(*suspects, *others), **sequence)

    def _choose(self, there: list[str]) -> str:
        """Of the instances that are there; empty when there is none."""
        if not there:
            return ""
        if self._config.policy == "random":
            return there[draw_below(len(there), self._config.seed, self._decisions)]
        first = self._decisions % len(there)  # equals take turns
        return min(there[first:] + there[:first], key=self._queued_s.__getitem__)

    def claim_prefill(self, instance_id: str, busy_s: float, now: float, source: str = "") -> int:
        """See `Picture.claim_prefill`."""
        number = super().claim_prefill(instance_id, busy_s, now, source)
        self._placed[number] = instance_id, busy_s
        self._queued_s[instance_id] += busy_s
        return number

    def release(self, claim: int, now: float) -> None:
        """See `Picture.release`."""
        super().release(claim, now)
        instance, busy_s = self._placed.pop(claim, ("", 0.0))
        if instance:
            self._queued_s[instance] -= busy_s
