"""Placements made on a picture that was too old: an instance that is busier than was thought does not take them.

Conductors side by side do not hear of each other's placements before the next report. So a prompt goes out with the
queue that it may find, and an instance with a longer one answers `Stale` with what it has. The picture is corrected,
and the prompt placed again.
"""

from collections.abc import Sequence
from dataclasses import replace

from moonpool.core.digest import digest_of
from services.conductor.core.cost import PrefillChoice
from services.conductor.core.failures import Stale
from services.conductor.core.picture import Picture
from services.conductor.core.plan import Plan

MOST = 8
"""Answers in a row for one placement. The next instance takes the prompt however long its queue is."""
SLACK = 0.2
"""Of the predicted time to first token, by which a queue may be longer than it was thought to be."""
LEAST_S = 0.01
"""What predictions are off by on any machine."""


class Staleness:
    """Says which queue a prompt may find, and takes the answers of those where it was longer.

    Attributes:
        answers: so many have come.
    """

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self.answers = 0

    def max_queue_s(self, plan: Plan, answered: int, now: float) -> float | None:
        """Seconds that everything may take that a prompt finds at its instance; None = it is taken all the same.

        What others of ours take that were placed there is counted in, whichever comes first.

        Args:
            plan: of the prompt, which is counted at its instance already.
            answered: how often it was not taken before.
            now: seconds.
        """
        best, instance = plan.prefill, self._picture.prefills.get(plan.prefill.id)
        bearable_s = _lead_s(best, plan.candidates)
        if instance is None or instance.load.drain_s is None or bearable_s is None or answered >= MOST:
            return None
        before_s = max(0.0, instance.free_at - best.busy_s - now)
        allowed_s = (before_s + max(bearable_s, SLACK * best.ttft_s, LEAST_S)) / instance.slowed
        return allowed_s + self._picture.prefills.lagging_s(instance, now)

    def answered(self, instance_id: str, stale: Stale, now: float) -> None:
        """An instance has told what it has, which corrects the picture. It is no report: it says nothing of blocks."""
        self.answers += 1
        prefills = self._picture.prefills
        instance = prefills.get(instance_id)
        if instance is not None:
            load = replace(instance.load, drain_s=stale.drain_s, taken=stale.taken, speeds=None)
            instance.report(load, now, slow_factor=0.0)  # of speeds, which it does not tell
            prefills.changed(instance)

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self.answers)


def _lead_s(best: PrefillChoice, candidates: Sequence[PrefillChoice]) -> float | None:
    """By how much sooner the first token comes than anywhere else; None = there is nowhere else."""
    others = [it.ttft_s for it in candidates if it.id != best.id and not it.excluded]
    return min(others) - best.ttft_s if others else None
