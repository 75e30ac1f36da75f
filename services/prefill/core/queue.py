"""Which jobs get blocks, and when: in fair order, and not long before they can be computed."""

from moonpool.core.fair import Place
from services.prefill.core.awaited import awaited_until
from services.prefill.core.gates import wait_for_layers
from services.prefill.core.state import Job, State, Table


def start_next(state: State) -> Job | None:
    """Binds the blocks of the first waiting job, if there is room and what goes before it is running short.

    Returns:
        The job; whether more of its prefix is loaded must be decided at once. None = none can start now.
    """
    started = len(state.started)
    if started == len(state.jobs) or started >= state.settings.max_started:
        return None
    first = state.waiting.first()
    if not _short_of_work(state, first):
        return None
    job = state.jobs[first.number]
    held = state.manager.match(job.keys[: state.reusable_blocks(job)])
    state.manager.acquire(held)
    missing = state.settings.blocks_for(job.num_tokens) - len(held)
    if not state.manager.can_allocate(missing):
        state.manager.release(held)
        return None
    state.waiting.remove(job.number)
    job.table = Table(held + state.manager.allocate(missing))
    state.hold_prefix(job, len(held))
    state.started[job.number] = job
    return job


def _short_of_work(state: State, first: Place) -> bool:
    """Whether the started jobs that go before have less to compute than the steps that can be in flight, and one more.

    A job that waits for layers, of its own load or of another one's, does not count: a slow store must not keep the
    engine from work that needs no load.
    """
    key = state.shares.key
    last = key(first)
    ahead = sum(_ahead(state, job) for job in state.started.values() if key(job.place) < last)
    return ahead < (state.settings.stages + 1) * state.settings.step_tokens


def _ahead(state: State, job: Job) -> int:
    if job.load is None or job.gated:
        return 0 if awaited_until(state, job) is not None else job.num_tokens - job.scheduled
    if wait_for_layers(state, job.load, step_s=0.0) != 0.0:
        return 0
    return job.num_tokens - job.load.end * state.settings.block_tokens
