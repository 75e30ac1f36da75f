"""What must hold in a prefill core between any two events."""

from collections import Counter

from services.prefill.core.state import CopyFlight, Job, LoadFlight, PutFlight, SendFlight, State, StepFlight, Table
from services.prefill.core.steps import Steps


def check(state: State, steps: Steps) -> None:
    """Asserts all of it: blocks are held exactly by what uses them, and every job is somewhere on its way."""
    state.manager.check_invariants()
    _check_holds(state)
    _check_steps(state, steps)
    state.waiting.check_invariants()
    waiting = set(state.waiting)
    assert len(waiting) == len(state.waiting)
    assert waiting | state.started.keys() == state.jobs.keys()
    assert not waiting & state.started.keys()
    for job in state.jobs.values():
        _check_job(state, job)


def _check_holds(state: State) -> None:
    holds: Counter[int] = Counter()
    tables: dict[int, Table] = {}
    refs: Counter[int] = Counter(state.lending)
    owned = [job.table for job in state.jobs.values() if job.table is not None]
    for _, flight in state.ios:
        owned += flight.tables
        if isinstance(flight, PutFlight | CopyFlight):
            refs.update(flight.blocks)
    for table in owned:
        holds[id(table)] += 1
        tables[id(table)] = table
    for name, table in tables.items():
        assert table.holds == holds[name] > 0
        assert len(set(table.blocks)) == len(table.blocks)
        refs.update(table.blocks)
    for block in range(state.manager.num_blocks):
        assert state.manager.ref_count(block) == refs[block], f"block {block} is held by something else"


def _check_steps(state: State, steps: Steps) -> None:
    flying = {io: flight for io, flight in state.ios if isinstance(flight, StepFlight)}
    assert flying == state.steps
    assert steps.plan_at is None or not steps.are_full()
    assert list(flying) == steps.in_flight == sorted(steps.in_flight)
    assert len(flying) <= state.settings.stages
    live: Counter[int] = Counter()
    for flight in flying.values():
        for share in flight.shares:
            job = state.jobs.get(share.job)
            assert not share.live or job is not None, "a share of a job that has ended counts"
            live[share.job] += share.live
            if share.live and job is not None and share.loading:
                assert job.gated
                assert flight.opened < (job.load.layers if job.load else state.settings.layers), "open too early"
    for job in state.jobs.values():
        assert job.flying == live[job.number]


def _check_job(state: State, job: Job) -> None:
    assert all(io in state.ios for io in job.settling)
    if job.number in state.waiting:
        assert job.table is None
        assert not job.flying
        return
    assert 0 <= job.cached <= job.computed <= job.scheduled <= job.num_tokens
    assert not job.gated or job.flying == 1
    if job.table is None:
        assert job.finished
        return
    assert len(job.table.blocks) == state.settings.blocks_for(job.num_tokens)
    if job.load is not None:
        assert isinstance(state.ios.get(job.load.io), LoadFlight)
        assert job.computed == job.cached
        assert job.prefix_blocks == job.load.first < job.load.end <= state.reusable_blocks(job)
    if job.outgoing is not None and job.outgoing.io is not None:
        assert job.outgoing.io in state.ios
        assert job.outgoing.open or not isinstance(state.ios.get(job.outgoing.io), SendFlight)
