"""Stale placements: which queue a prompt may meet, and what a longer one teaches."""

from collections.abc import Sequence
from dataclasses import replace

from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.events import StalePlacement
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.conductor.placement.base import PrefillChoice

MAX_STALE_ANSWERS = 8
"""`StalePlacement` answers in a row for one placement. The next instance must take the prompt."""
STALE_SLACK = 0.2
"""Share of the predicted TTFT by which a queue may be longer than predicted."""
STALE_SLACK_S = 0.01
"""Seconds by which predictions are off on any machine."""


class StalePlacementCheck:
    """The longest queue that a prompt may meet, and the correction of the cluster view if a queue was longer.

    Attributes:
        answers: `StalePlacement` answers so far.
    """

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self.answers = 0

    def max_queue_s(self, decision: RoutingDecision, answered: int, now: float) -> float | None:
        """Return the longest queue in seconds with which the chosen instance must take a prompt; None = any.

        Other prompts that this conductor placed there count, whichever arrives first.

        Args:
            decision: the prompt's placement, which the instance's state includes already.
            answered: `StalePlacement` answers to this placement so far.
            now: seconds.
        """
        best, instance = decision.prefill, self._cluster.prefills.get(decision.prefill.id)
        lead_s = _lead_s(best, decision.candidates)
        if instance is None or instance.load.drain_s is None or lead_s is None or answered >= MAX_STALE_ANSWERS:
            return None
        # Refusing pays only if another instance is then better: so much longer than predicted the queue may be.
        before_s = max(0.0, instance.free_at - best.busy_s - now)
        return (before_s + max(lead_s, STALE_SLACK * best.ttft_s, STALE_SLACK_S)) / instance.slowed

    def answered(self, instance_id: str, stale: StalePlacement, now: float) -> None:
        """Take the queue that an instance answered. The answer tells neither blocks nor speeds."""
        self.answers += 1
        prefills = self._cluster.prefills
        instance = prefills.get(instance_id)
        if instance is not None:
            load = replace(instance.load, drain_s=stale.drain_s, taken=stale.taken, speeds=None)
            instance.report(load, now, slow_factor=0.0)
            prefills.changed(instance)

    def digest(self) -> bytes:
        return digest_of(self.answers)


def _lead_s(best: PrefillChoice, candidates: Sequence[PrefillChoice]) -> float | None:
    """Seconds by which the first token comes sooner than anywhere else; None = there is no other instance."""
    others = [candidate.ttft_s for candidate in candidates if candidate.id != best.id and not candidate.excluded]
    return min(others) - best.ttft_s if others else None
