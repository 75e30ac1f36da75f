"""Predictions of the prefill scheduler.

Queue time, arrival of loaded layers, and prefixes another request will provide.
"""

from bisect import bisect_left
from collections.abc import Sequence

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.latency import Speeds, encoded_tokens, load_seconds, prefill_seconds, steps_of
from moonpool.engine.prefill.core.in_flight import SendFlight, StepFlight
from moonpool.engine.prefill.core.request import PrefillRequest, PrefixLoad
from moonpool.engine.prefill.core.state import PrefillState

LAYER_STALL_S = 0.02
"""Seconds, besides two layers' time, that a step waits for a late layer while other requests wait."""
TIMER_GRAIN_S = 0.0005
"""A step may begin this many seconds early: the resolution of an event loop's timers."""
LEAST_OVERTAKEN_S = 0.25
"""Least lateness in seconds before a load's blocks are computed: smaller delays are noise on a busy machine."""
OVERDUE_RATIO = 2.0
"""A step this many times longer than predicted lowers the engine's speed before the end."""


def layer_seconds(state: PrefillState, load: PrefixLoad) -> float:
    """Return seconds between two layers of a load: measured after two layers, predicted before.

    The first layer is left out: that time includes connecting and looking up.
    """
    if load.layers > 1:
        return (load.progressed_at - load.first_at) / (load.layers - 1)
    nbytes = state.settings.moved_bytes(load.end - load.first) // state.settings.layers
    return load_seconds(state.tracker.speeds, nbytes)


def stall_grace(state: PrefillState, load: PrefixLoad) -> float:
    """Return seconds for which a step waits for a late layer."""
    return LAYER_STALL_S + 2.0 * layer_seconds(state, load)


def wait_for_layers(state: PrefillState, load: PrefixLoad, step_s: float) -> float | None:
    """Return seconds after which a step would find each layer of the load in time.

    Args:
        state: the scheduler's state.
        load: the load that the step follows layer by layer.
        step_s: seconds of the step, spread evenly over the layers.

    Returns:
        0 = begin now; None = unknown: no layer has arrived yet, or the next layer is long overdue.
    """
    layers = state.settings.layers
    if load.layers == layers:
        return 0.0
    each = layer_seconds(state, load)
    next_at = load.progressed_at + each
    if not load.layers or load.stalled or state.now > next_at + stall_grace(state, load):
        return None
    next_in = max(0.0, next_at - state.now)
    last_in = next_in + (layers - 1 - load.layers) * each
    computing = step_s / layers
    wait = max(next_in - load.layers * computing, last_in - (layers - 1) * computing)
    return wait if wait > TIMER_GRAIN_S else 0.0


def overtake_at(state: PrefillState, request: PrefillRequest, load: PrefixLoad, others: int) -> float | None:
    """Return when computing a load's blocks becomes faster than waiting, if no layer comes before; None = never.

    Computing takes the engine from the `others` requests: the wait must be longer than computing for each other
    request, too. A late load without a layer is expected to take as long again. Each missing layer is expected to take
    as long as the late layer. Layers with a window are not computed beside a load, which has their window blocks.
    """
    settings = state.settings
    sending = request.outgoing is not None and isinstance(state.ios.get(request.outgoing.io or 0), SendFlight)
    if settings.window_blocks or sending or state.manager.num_available < load.end - load.first:
        return None
    compute_s = (1 + others) * _compute_seconds(state, load.first, load.end) / state.core_share
    compute_s = max(compute_s, LEAST_OVERTAKEN_S)
    if not load.layers:
        load_s = settings.layers * layer_seconds(state, load)
        return load.began_at + max(load_s, compute_s)
    left, each_s = settings.layers - load.layers, layer_seconds(state, load)
    if not left:
        return None
    if left * each_s - (state.now - load.progressed_at) > compute_s:
        return load.progressed_at
    return load.progressed_at + max(each_s + stall_grace(state, load), compute_s / left)


def queue_seconds(state: PrefillState, now: float) -> float:
    """Return seconds until all queued requests are computed, with all the engine's cores.

    Each prompt counts alone: tokens attend to the prompt's own context only. Short prompts share steps. Pipeline stages
    compute several steps at once, so the time of all steps is divided among them. The step in front is partly done.
    """
    speeds, settings = state.tracker.speeds, state.settings
    work, tokens = 0.0, 0
    for request in state.requests.values():
        done = _done_tokens(request)
        left = request.spec.tokens - done
        if left > 0:
            begins, cost = request.first_step_at is None, request.spec.token_cost
            chunks = steps_of(left, settings.max_num_batched_tokens)
            work += cost * prefill_seconds(speeds, left, done, steps=0, chunks=chunks, begins=begins)
            if request.spec.pictures:
                work += speeds.encode_per_token_s * encoded_tokens(request.spec.pictures, done)
            tokens += cost * left
    work += speeds.prefill_base_s * -(-tokens // settings.max_num_batched_tokens)
    return max(0.0, work - _done_seconds(state, now)) / settings.stages


def speeds_now(state: PrefillState, now: float) -> Speeds:
    """Return the engine's speeds at `now`: a step that takes too long counts before the end."""
    speeds, front = state.tracker.speeds, state.front
    if front is None or front.gated:
        return speeds
    expected_s = _step_seconds(state, front) / state.core_share
    late = (now - max(front.began_at, front.progressed_at)) / expected_s if expected_s else 1.0
    return speeds.slowed_prefill(late) if late > OVERDUE_RATIO else speeds


def _done_seconds(state: PrefillState, now: float) -> float:
    """Return seconds done of the step being computed, at most the prediction; 0 in a pipeline, where steps overlap."""
    front = state.front
    if front is None or state.settings.stages > 1:
        return 0.0
    return min(state.core_share * (now - front.began_at), _step_seconds(state, front))


def _step_seconds(state: PrefillState, flight: StepFlight) -> float:
    """Return predicted seconds of a step."""
    speeds = state.tracker.speeds
    chunks = [(part.end - part.start, part.start, part.first) for part in flight.slices]
    costs = [
        state.requests[part.request].spec.token_cost if part.request in state.requests else 1 for part in flight.slices
    ]
    seconds = [prefill_seconds(speeds, new, start, steps=0, begins=first) for new, start, first in chunks]
    return speeds.prefill_base_s + sum(cost * each_s for cost, each_s in zip(costs, seconds, strict=True))


def shared_tokens(state: PrefillState, request: PrefillRequest) -> int:
    """Return a request's leading tokens that earlier requests compute, so the request will find the tokens cached."""
    keys, most = request.spec.keys[: state.reusable_blocks(request)], 0
    for other in state.requests.values() if keys else ():
        if other.id < request.id and other.reuse and not other.owner.transient and other.spec.keys[:1] == keys[:1]:
            most = max(most, common_prefix(keys, other.spec.keys))
    return state.settings.reused_tokens(request.spec.tokens, most)


def reassign_shared_prefix(state: PrefillState, gone: PrefillRequest) -> None:
    """Let the first request that was to find the blocks of a request that is gone compute them."""
    for request in state.requests.values():
        if request.id > gone.id and request.shared_tokens and request.spec.keys[:1] == gone.spec.keys[:1]:
            held = len(state.manager.match(request.spec.keys[: state.reusable_blocks(request)]))
            there = state.settings.reused_tokens(request.spec.tokens, held)
            request.shared_tokens = max(there, shared_tokens(state, request))
            return


def common_prefix(keys: Sequence[BlockKey], other: Sequence[BlockKey]) -> int:
    """Return leading keys that two chains share; equal keys follow equal keys only."""
    return bisect_left(range(min(len(keys), len(other))), True, key=lambda at: keys[at] != other[at])


def _done_tokens(request: PrefillRequest) -> int:
    """Return leading tokens that have KV, or are expected to get KV without being computed."""
    if request.table is None and request.token_at is None:
        return max(request.expected_tokens, request.shared_tokens)
    shares = request.first_step_at is None and request.prefix.load is None
    return max(request.computed, request.shared_tokens) if shares else request.computed


def wait_for_other_load_until(state: PrefillState, request: PrefillRequest) -> float | None:
    """Return until when a request without steps waits for another to load the blocks that it would compute first.

    The request waits only if the whole load is expected before these blocks could be computed, and only until a load's
    layer is late.

    Returns:
        Seconds; None if the request does not wait.
    """
    at = request.scheduled // state.settings.block_size
    if not request.may_match or not request.prefix.blocks <= at < state.reusable_blocks(request):
        return None
    for other in state.started.values():
        load = other.prefix.load
        if load is not None and load.first <= at < load.end and other.spec.keys[at] == request.spec.keys[at]:
            late_at = _wait_pays_until(state, request, at, other, load)
            if late_at is not None:
                return late_at
    return _wait_for_replica_until(state, request, at)


def _wait_for_replica_until(state: PrefillState, request: PrefillRequest, at: int) -> float | None:
    """Return until when a request waits for a replication that brings block `at`; None if computing is faster."""
    replica = state.replica
    if replica is None or not replica.table.past <= at < len(replica.keys) or replica.keys[at] != request.spec.keys[at]:
        return None
    speeds = state.tracker.speeds
    load_s = load_seconds(speeds.loading_from_peers() if replica.source.peer else speeds, replica.nbytes)
    left_s = replica.began_at + load_s - state.now
    late_at = state.now + left_s + LAYER_STALL_S
    end = common_prefix(request.spec.keys[: state.reusable_blocks(request)], replica.keys)
    return late_at if state.now < late_at and left_s < _compute_seconds(state, at, end) else None


def _compute_seconds(state: PrefillState, first: int, end: int) -> float:
    """Return predicted seconds for computing a prompt's blocks [first, end)."""
    size = state.settings.block_size
    tokens = (end - first) * size
    steps = steps_of(tokens, state.settings.max_num_batched_tokens)
    return prefill_seconds(state.tracker.speeds, tokens, first * size, steps=steps, begins=False)


def is_computed_by_other(state: PrefillState, request: PrefillRequest) -> bool:
    """Return whether an earlier started request has yet to compute all blocks that this request's sources hold."""
    most = min(max(source.blocks for source in request.sources), state.reusable_blocks(request))
    for other in state.started.values():
        computes = other.prefix.load is None and other.computed < most * state.settings.block_size
        # Requests with the same keys are of the same tenant.
        is_earlier = other.queue_key.order_in_tenant < request.queue_key.order_in_tenant
        found = other.reuse and not other.owner.transient and is_earlier
        if computes and found and common_prefix(request.spec.keys, other.spec.keys) >= most:
            return True
    return False


def _wait_pays_until(
    state: PrefillState, request: PrefillRequest, at: int, other: PrefillRequest, load: PrefixLoad
) -> float | None:
    """Return when a load will be late; None if the load is late, or computing is faster than waiting."""
    each_s = layer_seconds(state, load)
    late_at = load.progressed_at + each_s + stall_grace(state, load)
    if load.stalled or other.owner.transient or state.now >= late_at:
        return None
    end = min(common_prefix(request.spec.keys[: state.reusable_blocks(request)], other.spec.keys), load.end)
    left_s = load.progressed_at + each_s * (state.settings.layers - load.layers) - state.now
    return late_at if left_s < _compute_seconds(state, at, end) else None
