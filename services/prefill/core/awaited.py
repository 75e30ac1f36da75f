"""What a job does not compute, or load, as it comes for another one: each prefix is computed or loaded once. Pure."""

from moonpool.cost import prefill_seconds
from services.prefill.core.gates import layer_seconds, stall_grace
from services.prefill.core.predict import common
from services.prefill.core.state import Job, Load, State


def awaited_until(state: State, job: Job) -> float | None:
    """Until when a job that has not begun waits for the load of another one, which brings what it would compute first.

    It waits only where all of the load is expected sooner than its own part of it could be computed, and no longer
    than a layer of it may be late.

    Returns:
        Seconds; None = nothing is waited for.
    """
    at = job.scheduled // state.settings.block_tokens
    begins = job.first_step_at is None and job.load is None and not job.loaded
    if not begins or not job.prefix_blocks <= at < state.reusable_blocks(job):
        return None
    for other in state.started.values():
        load = other.load
        if load is not None and load.first <= at < load.end and other.keys[at] == job.keys[at]:
            late_at = _worth_waiting(state, job, at, other, load)
            if late_at is not None:
                return late_at
    return None


def is_brought(state: State, job: Job) -> bool:
    """Whether a started job that goes before it is to compute all that its sources have, and has not yet."""
    most = min(max(source.blocks for source in job.sources), state.reusable_blocks(job))
    for other in state.started.values():
        computes = other.load is None and other.computed < most * state.settings.block_tokens
        # Who has the same keys is of the same tenant.
        found = other.reuse and not other.owner.transient and other.place.own < job.place.own
        if computes and found and common(job.keys, other.keys) >= most:
            return True
    return False


def _worth_waiting(state: State, job: Job, at: int, other: Job, load: Load) -> float | None:
    """When a load is late; None where it is, or it is better not waited for."""
    each_s, size = layer_seconds(state, load), state.settings.block_tokens
    late_at = load.moved_at + each_s + stall_grace(state, load)
    if load.overtaken or other.owner.transient or state.now >= late_at:
        return None
    end = min(common(job.keys[: state.reusable_blocks(job)], other.keys), load.end)
    compute_s = prefill_seconds(state.tracker.speeds, (end - at) * size, at * size, steps=1, begins=False)
    left_s = load.moved_at + each_s * (state.settings.layers - load.layers) - state.now
    return late_at if left_s < compute_s else None
