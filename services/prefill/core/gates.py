"""When the layers of a load are expected, and how long a step may wait for one that is late. Pure."""

from moonpool.cost import load_seconds
from services.prefill.core.state import Load, State

STALL_S = 0.02
"""A step waits so long, and two layers' time, for a layer that is late while others wait."""
EARLY_S = 0.0005
"""A step may begin so much before its time: event loops have timers of this grain."""


def layer_seconds(state: State, load: Load) -> float:
    """Seconds from one layer of a load to the next: measured once two have come, predicted before.

    The first layer's time says little: it includes that of connecting and looking up.
    """
    if load.layers > 1:
        return (load.moved_at - load.first_at) / (load.layers - 1)
    nbytes = (load.end - load.first) * state.settings.slice_bytes
    return load_seconds(state.tracker.speeds, nbytes)


def stall_grace(state: State, load: Load) -> float:
    """Seconds for which a step waits for a late layer."""
    return STALL_S + 2.0 * layer_seconds(state, load)


def wait_for_layers(state: State, load: Load, step_s: float) -> float | None:
    """Seconds after which a step would find each layer of the load in time.

    Args:
        state: the core's.
        load: is followed layer by layer.
        step_s: seconds of the step, spread evenly over the layers.

    Returns:
        0 = begin now; None = not to be foreseen: no layer has come yet, or the next one is long overdue.
    """
    layers = state.settings.layers
    if load.layers == layers:
        return 0.0
    each = layer_seconds(state, load)
    next_at = load.moved_at + each
    if not load.layers or load.overtaken or state.now > next_at + stall_grace(state, load):
        return None
    next_in = max(0.0, next_at - state.now)
    last_in = next_in + (layers - 1 - load.layers) * each
    computing = step_s / layers
    wait = max(next_in - load.layers * computing, last_in - (layers - 1) * computing)
    return wait if wait > EARLY_S else 0.0
