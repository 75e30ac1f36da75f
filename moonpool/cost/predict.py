"""Predicts the seconds of prefill, loading, sending and one decode step, and whether loading a prefix pays.

Pure functions of speeds and sizes. The prefill formula is the polynomial of the Mooncake paper (FAST'25 section 5.2:
seconds grow with the tokens computed and with the pairs of tokens that attend to each other), plus what a prompt costs
once: a fixed part and a part per token of its cached prefix.
"""

from __future__ import annotations

from typing import NamedTuple

from moonpool.cost.speeds import DEFAULT_BYTES_PER_S, Speeds


class PrefillWork(NamedTuple):
    """What a prompt leaves to compute: steps, tokens, pairs as `attention_pairs` counts them, tokens of its prefix."""

    steps: int
    new_tokens: int
    pairs: int
    prefix_tokens: int


def attention_pairs(new_tokens: int, prefix_tokens: int) -> int:
    """Number of (token computed, token attended to) pairs of `new_tokens` after `prefix_tokens`, causal."""
    return new_tokens * prefix_tokens + new_tokens * (new_tokens + 1) // 2


def work_of(new_tokens: int, prefix_tokens: int, steps: int = 1) -> PrefillWork:
    """What computing `new_tokens` after `prefix_tokens` is."""
    return PrefillWork(steps, new_tokens, attention_pairs(new_tokens, prefix_tokens), prefix_tokens)


def prefill_seconds(
    speeds: Speeds, new_tokens: int, prefix_tokens: int, *, steps: int = 1, begins: bool = True
) -> float:
    """Predict the seconds of computing `new_tokens` whose context is `prefix_tokens` long.

    Args:
        speeds: of the instance that computes.
        new_tokens: tokens to compute; none take no time.
        prefix_tokens: tokens before them, whose KV is there.
        steps: engine steps it takes.
        begins: the prompt begins here and its prefix was cached; False for a later chunk of the same prompt.
    """
    if new_tokens <= 0:
        return 0.0
    pairs = attention_pairs(new_tokens, prefix_tokens)
    return work_seconds(speeds, steps, new_tokens, pairs, prefix_tokens, begins=begins)


def work_seconds(
    speeds: Speeds, steps: int, new_tokens: int, pairs: int, prefix_tokens: int, *, begins: bool = True
) -> float:
    """Predict the seconds of a `PrefillWork`; for callers that ask for the same work at several speeds."""
    once = speeds.prefill_per_prompt_s + speeds.prefill_per_cached_token_s * prefix_tokens if begins else 0.0
    return once + (
        steps * speeds.prefill_base_s + speeds.prefill_per_token_s * new_tokens + speeds.prefill_per_pair_s * pairs
    )


def load_seconds(speeds: Speeds, nbytes: int) -> float:
    """Predict the seconds of reading `nbytes` of KV from the store."""
    return nbytes / (speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S)


def transfer_seconds(speeds: Speeds, nbytes: int) -> float:
    """Predict the seconds of sending `nbytes` of KV to decode."""
    return nbytes / (speeds.transfer_bytes_per_s or DEFAULT_BYTES_PER_S)


def decode_step_seconds(speeds: Speeds, sequences: float, context_tokens: float) -> float:
    """Predict the seconds of one decode step over `sequences` with `context_tokens` of context in total."""
    return (
        speeds.decode_base_s
        + speeds.decode_per_sequence_s * sequences
        + speeds.decode_per_context_token_s * context_tokens
    )


def overlapped_seconds(load_s: float, compute_s: float, layers: int) -> float:
    """Seconds of loading and computing when layer l+1 loads while layer l computes.

    The longer of the two hides all of the shorter one but its share of one layer.
    """
    shorter, longer = (load_s, compute_s) if load_s < compute_s else (compute_s, load_s)
    return longer + shorter / (layers or 1)


def pipelined_seconds(compute_s: float, *, steps: int, stages: int) -> float:
    """Seconds of `steps` equal steps that take `compute_s` one after the other, when `stages` of them overlap.

    The last step ends when it has been through all stages; the others only hold it up for a stage each. They keep the
    pipeline busy for `compute_s / stages`.
    """
    steps = max(steps, 1)
    return compute_s * (steps + stages - 1) / (steps * stages)


def load_is_cheaper(
    speeds: Speeds, *, total_tokens: int, local_tokens: int, stored_tokens: int, token_bytes: int, layers: int = 1
) -> bool:
    """Tell whether loading a stored prefix is predicted to be quicker than computing it.

    Args:
        speeds: of the instance that would load or compute.
        total_tokens: tokens of the prompt.
        local_tokens: leading tokens whose KV is in the instance's own pool.
        stored_tokens: leading tokens whose KV the store holds; only those beyond `local_tokens` would be loaded.
        token_bytes: bytes of KV per token over all layers.
        layers: layers of the model, for the overlap of loading and computing; 1 = no overlap.
    """
    if stored_tokens <= local_tokens:
        return False
    recompute = prefill_seconds(speeds, total_tokens - local_tokens, local_tokens)
    rest = prefill_seconds(speeds, total_tokens - stored_tokens, stored_tokens)
    load = load_seconds(speeds, (stored_tokens - local_tokens) * token_bytes)
    return overlapped_seconds(load, rest, layers) < recompute
