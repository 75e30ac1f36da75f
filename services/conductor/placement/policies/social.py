"""Own time to first token, and what the placement takes from others; docs/adr/0056-social-placement.md.

Both terms are seconds of waiting of some prompt, so that they need no weights. A prompt that keeps an instance busy for
S seconds delays by S everybody who is computed after it there: the prompts that wait there now and that it goes before,
and those that come until the queues are empty. With arrivals at a rate r, a mean backlog W and a load p, these are
r * W / (1 - p), as the queue of an M/G/1 system lasts W / (1 - p) seconds. Their number is the same everywhere, since
later prompts go where the queue is shortest: so the rule prefers the cheapest place the more, the more is queued.

Each instance computes first what came first, where a prompt stands behind its arrival by a delay that grows with its
work: nobody is overtaken by a prompt that came more than ten times its own work later.
"""

from collections.abc import Sequence
from math import inf

from moonpool.frozen import frozen
from services.conductor.placement.base import Candidates, PrefillChoice, QueueWait

MOST_GROWTH = 5.0
"""1 / (1 - load) at most: at a load of one and more, a queue ends when arrivals ebb."""
PATIENCE = 10.0
"""A prompt waits for those that come so many times its own work later, at most."""
LIMIT_S = 30.0
"""Seconds within which the first token is wanted where the client does not say."""
LIMIT_SHARE = 1 / 3
"""Share of the limit that a prompt's delay may take at most, while the limit is predicted to be kept."""
MARGIN = 0.9
"""Share of the limit at which a prompt is taken for late: prompts that come later may overtake it."""
LOOKED_AT = 24
"""Instances that are looked at each; of more, those of the least queue and cost, twice as many as are wanted."""


@frozen
class Social:
    """The least seconds of waiting of all, this prompt and others together."""

    stores: bool = True

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """By own time to first token and the seconds that others lose."""
        arrivals = candidates.arrivals
        growth = min(MOST_GROWTH, 1.0 / (1.0 - arrivals.busy_share) if arrivals.busy_share < 1.0 else inf)
        later = arrivals.prompts_per_s * arrivals.backlog_s * growth
        rated = []
        for at, choice in enumerate(_choices(candidates, limit, 1.0 + later)):
            delay_s, wait = place_in_queue(candidates, choice)
            placed = choice.with_place(delay_s, wait)
            rated.append((placed.known_s + placed.work_s * (wait.behind + later), choice.there.stages, at, placed))
        rated.sort()
        return candidates.keeping([placed for *_, placed in rated[:limit]])


def _choices(candidates: Candidates, limit: int, factor: float) -> Sequence[PrefillChoice]:
    """The instances that are compared. Equal ones are in the order of `Candidates.least`."""
    if len(candidates) <= LOOKED_AT:
        return [candidates.predict(place) for place in sorted(candidates)]
    return candidates.least(
        2 * limit, lambda choice: choice.queue_s + factor * choice.alone_s, lambda cost: factor * cost.alone_s
    )


def place_in_queue(candidates: Candidates, choice: PrefillChoice) -> tuple[float, QueueWait]:
    """The prompt's delay in the queue of an instance, and its wait there.

    The delay is ten times the work, and a third of the limit at most. A prompt that would be late then goes where it
    has its last chance to be in time, if it is in time there. A prompt that cannot be in time makes room for others, by
    ten times its work.
    """
    limit_s = candidates.request.limit_s
    within_s = LIMIT_S if limit_s is None else limit_s
    work_s, alone_s = choice.work_s, choice.alone_s
    delay_s = min(PATIENCE * work_s, LIMIT_SHARE * max(within_s, 0.0))
    wait = candidates.wait(choice, delay_s)
    if wait.seconds + alone_s <= MARGIN * within_s:
        return delay_s, wait
    last_s = max(0.0, MARGIN * within_s - alone_s)
    if last_s < delay_s:
        sooner = candidates.wait(choice, last_s)
        if sooner.seconds + alone_s <= within_s:
            return last_s, sooner
    delay_s = PATIENCE * work_s
    return delay_s, candidates.wait(choice, delay_s)
