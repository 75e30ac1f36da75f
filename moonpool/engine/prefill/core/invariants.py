"""What must hold in the prefill scheduler between any two events."""

from collections import Counter

from moonpool.engine.prefill.core.in_flight import LoadFlight, SendFlight, StepFlight, WriteBackFlight
from moonpool.engine.prefill.core.request import PrefillRequest, PrefillStatus
from moonpool.engine.prefill.core.state import PrefillState
from moonpool.engine.prefill.core.step_planner import StepPlanner
from moonpool.engine.scheduler.block_table import check_pins


def check_prefill_state(state: PrefillState, steps: StepPlanner) -> None:
    """Assert that blocks are pinned exactly by their users, and that every request's place agrees with the status."""
    state.manager.check_invariants()
    _check_block_pins(state)
    _check_steps_in_flight(state, steps)
    state.waiting.check_invariants()
    waiting = set(state.waiting)
    assert len(waiting) == len(state.waiting)
    assert waiting | state.started.keys() == state.requests.keys()
    assert not waiting & state.started.keys()
    for request in state.requests.values():
        _check_request(state, request)


def _check_block_pins(state: PrefillState) -> None:
    owned = [request.table for request in state.requests.values() if request.table is not None]
    owned += [
        overtaken.table for request in state.requests.values() if (overtaken := request.prefix.overtaken) is not None
    ]
    owned += [state.replica.table] if state.replica is not None else []
    check_pins(state.manager, owned, state.ios, list(state.lending))
    writes = [flight.table for _, flight in state.ios if isinstance(flight, WriteBackFlight)]
    state.writes.check_invariants(writes)


def _check_steps_in_flight(state: PrefillState, steps: StepPlanner) -> None:
    steps_in_flight = {io: flight for io, flight in state.ios if isinstance(flight, StepFlight)}
    assert steps_in_flight == state.steps
    assert steps.plan_at is None or not steps.are_full()
    assert list(steps_in_flight) == steps.in_flight == sorted(steps.in_flight)
    assert len(steps_in_flight) <= state.settings.max_steps
    live: Counter[int] = Counter()
    for flight in steps_in_flight.values():
        for part in flight.slices:
            request = state.requests.get(part.request)
            assert not part.live or request is not None, "a slice of a request that has ended counts"
            live[part.request] += part.live
            border = part.start % state.settings.block_size == 0
            assert border or not state.settings.recurrent, "a step given up would be behind its recurrent states"
            if part.live and request is not None and part.loading:
                assert request.gated
                arrived = request.prefix.load.layers if request.prefix.load else state.settings.layers
                assert flight.opened < arrived, "open too early"
    for request in state.requests.values():
        assert request.slices_in_flight == live[request.id]


def _check_request(state: PrefillState, request: PrefillRequest) -> None:
    assert all(io in state.ios for io in request.blocked_by)
    assert (request.id in state.waiting) == (request.status is PrefillStatus.WAITING)
    assert (request.first_step_at is None) == (request.status in (PrefillStatus.WAITING, PrefillStatus.STARTED))
    assert request.finished == (request.status is PrefillStatus.COMPUTED)
    assert request.token_at is not None or not request.finished
    if request.status is PrefillStatus.WAITING:
        assert request.table is None
        assert not request.slices_in_flight
        return
    assert 0 <= request.prefix.cached <= request.computed <= request.scheduled <= request.spec.tokens
    assert not request.gated or request.slices_in_flight == 1
    if request.table is None:
        assert request.finished
        return
    assert len(request.table.blocks) == state.settings.blocks_for(request.spec.tokens)
    if request.prefix.load is not None:
        assert isinstance(state.ios.get(request.prefix.load.io), LoadFlight)
        assert request.computed == request.prefix.cached
        assert (
            request.prefix.blocks
            == request.prefix.load.first
            < request.prefix.load.end
            <= state.reusable_blocks(request)
        )
    if request.outgoing is not None and request.outgoing.io is not None:
        assert request.outgoing.io in state.ios
        assert request.outgoing.open or not isinstance(state.ios.get(request.outgoing.io), SendFlight)
