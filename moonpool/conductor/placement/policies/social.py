"""Own time to first token, and what the placement takes from others; docs/adr/0076-what-a-placement-puts-out.md.

Both terms are seconds that some prompt waits, so that they need no weights. A prompt that keeps an instance busy for S
seconds delays by S every prompt that is computed later there: waiting prompts that the new prompt goes before, and
prompts that come until the queues are empty. With arrival rate r, mean backlog W and load p, the second number is r * W
/ (1 - p), as an M/G/1 queue lasts W / (1 - p) seconds. The number is the same everywhere, since later
prompts go to the shortest queue: so the longer the queues, the more the rule prefers the cheapest place.

New blocks put others out of a full cache. A prompt that asks for those next computes them again, if they are nowhere
else: about as much work as the new blocks took, which delays that prompt and those behind.

Each instance computes prompts in arrival order, but a prompt can stand behind its arrival by a delay. Short prompts
have short delays.

A prompt gives up half the mean queue at most, by its place as by its delay: half of what first come, first served would
cost the prompt. So where hardly anything waits, the rule is the least own time to first token, and no length is served
later than by that rule. Only in a lasting overload, prompts that miss their limit go last.
"""

from collections.abc import Sequence
from math import inf

from moonpool.base.frozen import frozen
from moonpool.conductor.placement.base import Arrivals, Candidates, PrefillChoice, QueueWait

MOST_GROWTH = 5.0
"""Most 1 / (1 - load): at a load of one and more, a queue ends when arrivals ebb."""
PATIENCE = 10.0
"""A prompt waits for later prompts at most for this multiple of its own work."""
QUEUE_SHARE = 0.5
"""Share of the mean queue that a prompt gives up at most by its place, and by its delay."""
LATE_PATIENCE = 20.0
"""As `PATIENCE`, for a prompt that misses the limit in an overload."""
OVERLOADED_SHARE = 0.5
"""Share of the limit at which the usual queue means a lasting overload."""
LIMIT_S = 30.0
"""Seconds within which the first token is wanted where the client does not say."""
LIMIT_SHARE = 1 / 3
"""Share of the limit that a prompt's delay may take at most, while the limit is predicted to be kept."""
MARGIN = 0.9
"""Share of the limit at which a prompt is taken for late."""
LOOKED_AT = 24
"""Instances that are looked at each; of more instances, those with the least queue and cost, as many as are wanted."""


@frozen
class Social:
    """The least waiting seconds over all prompts, this prompt and others together."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Order by own time to first token and the seconds that others lose."""
        arrivals = candidates.arrivals
        growth = min(MOST_GROWTH, 1.0 / (1.0 - arrivals.busy_share) if arrivals.busy_share < 1.0 else inf)
        later = arrivals.prompts_per_s * arrivals.backlog_s * growth
        rated = []
        for at, choice in enumerate(_choices(candidates, limit, 1.0 + later)):
            alone_s = choice.alone_s
            delay_s, wait = _place_in_queue(candidates, choice, alone_s, arrivals)
            placed = choice.with_place(delay_s, wait)
            own_s = wait.seconds + alone_s
            again = arrivals.sole_share * _evicting_share(choice, candidates.request.prompt_blocks)
            lost_s = placed.work_s * (wait.behind + later + again * (1.0 + later))
            rated.append((own_s + lost_s, choice.there.stages, at, own_s, placed))
        rated.sort()
        most_s = min([own_s for *_, own_s, _ in rated]) + QUEUE_SHARE * arrivals.backlog_s
        given = [placed for *_, own_s, placed in rated if own_s <= most_s]
        rest = [placed for *_, own_s, placed in rated if own_s > most_s]
        return candidates.keeping([*given, *rest][:limit])


def _choices(candidates: Candidates, limit: int, factor: float) -> Sequence[PrefillChoice]:
    """Return the instances that are compared. Equal instances are in `Candidates.least`'s order."""
    if len(candidates) <= LOOKED_AT:
        return [candidates.predict(place) for place in sorted(candidates)]
    return candidates.least(
        limit,
        lambda choice: choice.queue_s + factor * choice.alone_s,
        lambda cost: factor * (cost.load_s + cost.prefill_s),
    )


def _evicting_share(choice: PrefillChoice, prompt_blocks: int) -> float:
    """Share of the prompt's new blocks for which the instance has no free blocks, so that others leave its cache."""
    new_blocks = prompt_blocks - choice.local_blocks
    return max(0.0, 1.0 - choice.there.free_blocks / new_blocks) if new_blocks > 0 else 0.0


def _place_in_queue(
    candidates: Candidates, choice: PrefillChoice, alone_s: float, arrivals: Arrivals
) -> tuple[float, QueueWait]:
    """Return the prompt's delay in an instance's queue, and the prompt's wait there.

    The delay is at most ten times the work, half the mean queue, and a third of the limit. A prompt that would be late
    makes room for others, the more, the nearer the usual queue is to half the limit.
    """
    limit_s = candidates.request.limit_s
    within_s = max(0.0, LIMIT_S if limit_s is None else limit_s)
    work_s, given_s = choice.work_s, QUEUE_SHARE * arrivals.backlog_s
    delay_s = min(PATIENCE * work_s, given_s, LIMIT_SHARE * within_s)
    wait = candidates.wait(choice, delay_s)
    if wait.seconds + alone_s <= MARGIN * within_s:
        return delay_s, wait
    calm = 1.0 - arrivals.usual_backlog_s / (OVERLOADED_SHARE * within_s) if within_s else 0.0
    delay_s = min(LATE_PATIENCE * work_s, given_s / calm if calm > 0.0 else inf)
    return delay_s, candidates.wait(choice, delay_s)
