"""How long preempted requests wait beside other tenants: the first of each tenant is served within a bound."""

from collections.abc import Iterator

from moonpool.engine.decode.core.overdue import MOST_PATIENCE
from moonpool.engine.decode.core.request import TRANSFERRING, DecodeRequest, RequestStatus
from moonpool.engine.decode.core.scheduler import DecodeScheduler


class WaitLimit:
    """Counts steps between which a request could have been served, and asserts the bound after each event.

    Steps do not count while something is under way that no rule of the scheduler can hasten: a copy or a transfer, or
    a promised time between tokens.

    Attributes:
        longest: most steps that a request has waited so far.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._waited: dict[int, int] = {}
        self.longest = 0

    def look(self, core: DecodeScheduler, ios: int) -> None:
        """Checks the scheduler after an event. `ios`: copies, reads and writes under way."""
        steps, self._steps = core.preempted.steps - self._steps, core.preempted.steps
        waiting = {request.id for request in _firsts(core)} if not ios and not _is_held_up(core) else set()
        self._waited = {number: self._waited.get(number, 0) + steps for number in waiting}
        self.longest = max(self.longest, *self._waited.values(), 0)
        assert self.longest <= bound(core), "a preempted request starves"


def bound(core: DecodeScheduler) -> int:
    """Its patience, and for each tenant a turn with the steps in which the holder is restored."""
    settings = core.settings
    tokens = settings.num_blocks * settings.block_size
    # chunks of all that the pool can hold, each perhaps of a sequence of its own
    restoring = 2 * tokens // settings.chunked_prefill_size + settings.max_num_seqs + settings.run_steps
    tenants = len({request.spec.tenant for request in core.requests.values()})
    patience = int(settings.patience_steps * MOST_PATIENCE) + settings.run_steps
    return patience + (tenants + 1) * (settings.grant_steps + restoring)


def _firsts(core: DecodeScheduler) -> Iterator[DecodeRequest]:
    """The first request of each tenant, if it was preempted and did not run since."""
    started = [
        other for other in core.requests.values() if other.is_started and other.status is not RequestStatus.FINISHING
    ]
    for request in started:
        own = [other for other in started if other.spec.tenant == request.spec.tenant]
        if request.preemption.since is not None and request is min(own, key=lambda other: other.order_key):
            yield request


def _is_held_up(core: DecodeScheduler) -> bool:
    requests = core.requests.values()
    return bool(core.settings.preempt_every) or any(
        request.tbt_slo_s or request.status in TRANSFERRING for request in requests
    )
