"""Predicted seconds of what is queued, and speeds that a step tells while it runs. Pure."""

from bisect import bisect_left
from collections.abc import Sequence

from moonpool.cost import Speeds, prefill_seconds
from moonpool.kv.keys import BlockKey
from services.prefill.core.state import Job, State, StepFlight

OVERDUE = 2.0
"""A step that takes so many times longer than expected tells of itself before it is over."""


def queue_seconds(state: State, now: float) -> float:
    """Seconds until everything that is queued now is computed, with all of the engine's cores.

    Each prompt counts by itself, so that its tokens attend to its own context only. Short prompts share steps. Stages
    work on several steps at once: the time of all steps is divided among them. The step in front is partly done.
    """
    speeds, settings = state.tracker.speeds, state.settings
    work, tokens = 0.0, 0
    for job in state.jobs.values():
        done = _done_tokens(job)
        left = job.num_tokens - done
        if left > 0:
            work += prefill_seconds(speeds, left, done, steps=0, begins=job.first_step_at is None)
            tokens += left
    work += speeds.prefill_base_s * -(-tokens // settings.step_tokens)
    return max(0.0, work - _done_seconds(state, now)) / settings.stages


def speeds_now(state: State, now: float) -> Speeds:
    """The engine's speeds, as far as is known now: a step of which nothing is heard tells before it is over."""
    speeds, front = state.tracker.speeds, state.front
    if front is None or front.gated:
        return speeds
    expected_s = _step_seconds(state, front) / state.share
    late = (now - max(front.began_at, front.moved_at)) / expected_s if expected_s else 1.0
    return speeds.slowed_prefill(late) if late > OVERDUE else speeds


def _done_seconds(state: State, now: float) -> float:
    """Of the step that is being computed, as far as its prediction holds; 0 in a pipeline, where steps overlap."""
    front = state.front
    if front is None or state.settings.stages > 1:
        return 0.0
    return min(state.share * (now - front.began_at), _step_seconds(state, front))


def _step_seconds(state: State, flight: StepFlight) -> float:
    """Predicted seconds of a step."""
    speeds = state.tracker.speeds
    chunks = [(share.end - share.start, share.start, share.first) for share in flight.shares]
    whole_s = sum([prefill_seconds(speeds, new, start, steps=0, begins=first) for new, start, first in chunks])
    return speeds.prefill_base_s + whole_s


def shared_tokens(state: State, job: Job) -> int:
    """Leading tokens of a job which the jobs before it compute: it will find them."""
    keys, most = job.keys[: state.reusable_blocks(job)], 0
    for other in state.jobs.values() if keys else ():
        if other.number < job.number and other.reuse and not other.owner.transient and other.keys[:1] == keys[:1]:
            most = max(most, common(keys, other.keys))
    return state.settings.reused_tokens(job.num_tokens, most)


def not_computed(state: State, gone: Job) -> None:
    """A job has left early: the first of those that were to find its blocks computes them, where the others find them.

    What it has computed is there.
    """
    for job in state.jobs.values():
        if job.number > gone.number and job.shared_tokens and job.keys[:1] == gone.keys[:1]:
            held = len(state.manager.match(job.keys[: state.reusable_blocks(job)]))
            there = state.settings.reused_tokens(job.num_tokens, held)
            job.shared_tokens = max(there, shared_tokens(state, job))
            return


def common(one: Sequence[BlockKey], other: Sequence[BlockKey]) -> int:
    """Leading keys that two chains share; equal keys follow equal ones only."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda at: one[at] != other[at])


def _done_tokens(job: Job) -> int:
    """Leading tokens that are there, or are expected to come without being computed."""
    if job.table is None and job.token_at is None:
        return max(job.expected_tokens, job.shared_tokens)
    return max(job.computed, job.shared_tokens) if job.first_step_at is None and job.load is None else job.computed
