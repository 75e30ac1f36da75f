"""Requests without a conductor: they run on for a while, are parked, and are taken over (ADR 12)."""

from moonpool.base.scheduling.state_machine import Timers, digest_of, earliest
from moonpool.engine.decode.core.actions import FenceConductor, RequestAdopted, RequestFreed, RequestParked
from moonpool.engine.decode.core.batch_planner import BatchPlanner
from moonpool.engine.decode.core.events import AdoptRequest
from moonpool.engine.decode.core.output_retention import OutputRetention
from moonpool.engine.decode.core.preemption import PreemptedRequests
from moonpool.engine.decode.core.request import (
    MOVING,
    NO_STREAM,
    PREEMPTIBLE,
    DecodeRequest,
    RequestStatus,
    RequestTable,
)
from moonpool.engine.decode.core.restoring import block_sharing_of
from moonpool.engine.decode.core.state import DecodeState


class OrphanedRequests:
    """Requests without a conductor, and the output kept for takeovers.

    Args:
        state: shared state of the scheduler.
        table: all requests except parked requests.
        planner: the batch and the waiting requests.
        preempted: the preempted requests.

    Attributes:
        retained: output of ended and parked requests.
    """

    def __init__(
        self, state: DecodeState, table: RequestTable, planner: BatchPlanner, preempted: PreemptedRequests
    ) -> None:
        self._state = state
        self._table = table
        self._requests = table.requests
        self._planner = planner
        self._preempted = preempted
        self._graces: Timers[int] = Timers()
        self._late: list[DecodeRequest] = []  # their grace period is over; a step or a copy still uses their blocks
        self.retained = OutputRetention(state)

    def __len__(self) -> int:
        """Return number of requests that run without a conductor."""
        return len(self._graces) + len(self._late)

    @property
    def waits_for_run(self) -> bool:
        """Whether a request after the grace period waits for the run in flight to end."""
        return any(self._planner.in_flight(request) for request in self._late)

    def due(self) -> float | None:
        """Return when the next grace period ends, or output is dropped."""
        return earliest(self._graces.next(), self.retained.due())

    # --- losing a conductor ----------------------------------------------------------------------------------------

    def orphan(self, request: DecodeRequest) -> None:
        """Note that a started request has lost the conductor."""
        request.stream = NO_STREAM
        self._graces.set(request.id, self._state.now + self._state.settings.grace_s)

    def of(self, conductor: str) -> list[DecodeRequest]:
        """Return a conductor's orphans, by the conductor's identity."""
        if not conductor or not len(self):
            return []
        orphans = (
            other
            for other in self._requests.values()
            if other.stream == NO_STREAM and other.status is not RequestStatus.FINISHING
        )
        return [request for request in orphans if request.conductor == conductor]

    def request_ended(self, request: DecodeRequest) -> None:
        """Keep an ended request's output if a conductor may ask."""
        self._clear_grace(request)
        retained = request.asked.resumable and request.is_started
        self._state.act(RequestFreed(request.id, retained))
        if retained:
            self.retained.keep_ended(request)

    def tick(self) -> None:
        """Note that time has passed."""
        while (number := self._graces.pop_due(self._state.now)) is not None:
            self._late.append(self._requests[number])
        self.retained.expire()

    def park_late(self) -> list[DecodeRequest]:
        """Park requests after the grace period, unless a step or copy uses their blocks.

        Returns:
            Requests to be aborted instead: their KV has not arrived whole.
        """
        if not self._late:
            return []
        still_late, aborted = [], []
        for request in self._late:
            if request.status in MOVING or self._planner.in_flight(request):
                still_late.append(request)
            elif request.status in PREEMPTIBLE or request.status is RequestStatus.PREEMPTED:
                self._park(request)
            elif request.status is not RequestStatus.FINISHING:
                aborted.append(request)
        self._late = still_late
        return aborted

    def _park(self, request: DecodeRequest) -> None:
        """Take all of a request's blocks. Full blocks stay in the pool as cache until they are needed."""
        self._planner.try_remove(request)
        self._planner.slots.kept.pop(request.id, None)
        if request.status is not RequestStatus.PREEMPTED:
            request.preemption.sharing = block_sharing_of(request, self._state.settings)
        self._preempted.drop_swapped(request)
        self._state.budget.expect(request, 0)
        self._state.budget.release(request)
        request.set_status(RequestStatus.PARKED)
        request.tbt_slo_s = 0.0  # no slot is kept for the request any more
        self._table.remove(request, self._state.now)
        self._state.act(RequestParked(request.id))
        self.retained.keep_parked(request)

    # --- takeover --------------------------------------------------------------------------------------------------

    def adopt(self, event: AdoptRequest, conductor: str) -> None:
        """Give a request, or the retained output, to a conductor with a higher fence than the last conductor's."""
        request, output = self._requests.get(event.id), self.retained.get(event.id)
        if output is not None:
            fence = output.fence
        elif request is not None and _may_be_adopted(request):
            fence = request.takeover.fence
        else:
            return
        if event.fence <= fence:
            self._state.act(FenceConductor(event.id, event.stream))
        elif output is not None and output.request is None:
            self.retained.set_fence(event.id, event.fence)
            self._state.act(RequestAdopted(event.id, event.stream, event.positions))
        else:
            self._hand_over(request or self.retained.take(event.id), event, conductor)

    def _hand_over(self, request: DecodeRequest, event: AdoptRequest, conductor: str) -> None:
        assert request.stream is not None
        if request.stream != NO_STREAM:
            self._state.act(FenceConductor(request.id, request.stream))
        self._clear_grace(request)
        request.stream, request.conductor, request.takeover.fence = event.stream, conductor, event.fence
        if request.status is RequestStatus.PARKED:
            self._table.add(request)
            self._preempted.enqueue(request)
        self._state.act(RequestAdopted(request.id, event.stream, event.positions))

    def _clear_grace(self, request: DecodeRequest) -> None:
        self._graces.clear(request.id)
        self._late = [late for late in self._late if late is not request]

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert that each orphan's grace period ends, and that parked requests hold no blocks."""
        self.retained.check_invariants()
        for request in self._requests.values():
            waits = self._graces.at(request.id) is not None or request in self._late
            assert waits <= (request.stream == NO_STREAM)
            assert waits or request.stream != NO_STREAM or request.status is RequestStatus.FINISHING, "it never ends"
            assert request.status is not RequestStatus.PARKED
        for number, output in self.retained:
            assert number not in self._requests
            if (kept := output.request) is not None:
                assert kept.status is RequestStatus.PARKED
                held = kept.blocks, kept.expected_growth, kept.promised, kept.preemption.swapped_blocks
                assert held == ([], 0, 0, 0), "it holds something"

    def digest(self) -> bytes:
        """Return a hash of the grace periods and the retained output."""
        graces = [(number, at) for number in self._requests if (at := self._graces.at(number)) is not None]
        return digest_of(graces, [request.id for request in self._late], self.retained)


def _may_be_adopted(request: DecodeRequest) -> bool:
    return request.asked.resumable and request.is_started and request.status is not RequestStatus.FINISHING
