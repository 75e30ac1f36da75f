"""Predicted seconds of prefill, loads, transfers and decode steps, from an instance's speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import NamedTuple

from moonpool.base.frozen import frozen

DEFAULT_BYTES_PER_S = 1e9
"""Rate assumed for loading or sending KV before any measurement, bytes per second."""

IDLE_SHARE = 0.25
"""A pipeline that has had work for less of its time divides prompts for their own sake alone."""


@frozen
class Speeds:
    """One instance's speeds, measured or given by a profile; field for field the contract's `SpeedReport`.

    `moonpool.base.cluster.proto_conversion` translates. All times are seconds, all rates bytes per second. A rate of 0
    means "not measured"; then `DEFAULT_BYTES_PER_S` is assumed, and for `peer_bytes_per_s` the rate for loading from
    stores. `prefill_base_s` is counted per engine step, `prefill_per_prompt_s` per prompt, `prefill_per_cached_token_s`
    per prompt and cached prefix token, `prefill_per_context_token_s` per chunk and token before the chunk, whose KV a
    step reads whatever the chunk's length, `encode_per_token_s` per token of a picture that is encoded,
    `rows_per_token_s` per token of a picture whose rows are read from a kvstore.
    """

    prefill_base_s: float = 0.0
    prefill_per_token_s: float = 0.0
    prefill_per_pair_s: float = 0.0
    decode_base_s: float = 0.0
    decode_per_sequence_s: float = 0.0
    decode_per_context_token_s: float = 0.0
    load_bytes_per_s: float = 0.0
    transfer_bytes_per_s: float = 0.0
    prefill_per_prompt_s: float = 0.0
    prefill_per_cached_token_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    encode_per_token_s: float = 0.0
    rows_per_token_s: float = 0.0
    prefill_per_context_token_s: float = 0.0

    def loading_from_peers(self) -> Speeds:
        """Return these speeds with the peers' read rate as the rate for loading, if that rate is known."""
        return replace(self, load_bytes_per_s=self.peer_bytes_per_s) if self.peer_bytes_per_s else self

    def slowed_prefill(self, factor: float, *, fixed_factor: float | None = None) -> Speeds:
        """Return these speeds with all prefill seconds multiplied by `factor`.

        `fixed_factor` multiplies a step's fixed seconds instead; None = as for the others.
        """
        return Speeds(  # several times as quick as `replace`, and done for each report
            self.prefill_base_s * (factor if fixed_factor is None else fixed_factor),
            self.prefill_per_token_s * factor,
            self.prefill_per_pair_s * factor,
            self.decode_base_s,
            self.decode_per_sequence_s,
            self.decode_per_context_token_s,
            self.load_bytes_per_s,
            self.transfer_bytes_per_s,
            self.prefill_per_prompt_s * factor,
            self.prefill_per_cached_token_s * factor,
            self.peer_bytes_per_s,
            self.encode_per_token_s * factor,
            self.rows_per_token_s,
            self.prefill_per_context_token_s * factor,
        )

    def slowed_decode(self, factor: float) -> Speeds:
        """Return these speeds with all decode seconds multiplied by `factor`."""
        return replace(
            self,
            decode_base_s=self.decode_base_s * factor,
            decode_per_sequence_s=self.decode_per_sequence_s * factor,
            decode_per_context_token_s=self.decode_per_context_token_s * factor,
        )


def encoded_tokens(pictures: Sequence[tuple[int, int]], prefix_tokens: int) -> int:
    """Tokens of the pictures that are encoded for computing what is behind a prefix; encoders take whole pictures.

    Args:
        pictures: where pictures stand in the prompt, [begin, end).
        prefix_tokens: leading tokens that are not computed.
    """
    return sum(end - begin for begin, end in pictures if end > prefix_tokens)


class PrefillWork(NamedTuple):
    """Work that a prompt still needs: steps, tokens, pairs (as in `attention_pairs`), prefix tokens, context tokens."""

    steps: int
    new_tokens: int
    pairs: int
    prefix_tokens: int
    context_tokens: int
    """Of all steps together, as in `chunk_context`."""


def attention_pairs(new_tokens: int, prefix_tokens: int) -> int:
    """Number of (computed token, attended token) pairs for `new_tokens` after `prefix_tokens`, causal."""
    return new_tokens * prefix_tokens + new_tokens * (new_tokens + 1) // 2


def chunk_context(new_tokens: int, prefix_tokens: int, chunks: int) -> int:
    """Sum over equal chunks of the tokens before each, for `new_tokens` after `prefix_tokens`."""
    return chunks * prefix_tokens + (chunks - 1) * new_tokens // 2


def work_of(new_tokens: int, prefix_tokens: int, steps: int = 1) -> PrefillWork:
    """What computing `new_tokens` after `prefix_tokens` is."""
    pairs, context = attention_pairs(new_tokens, prefix_tokens), chunk_context(new_tokens, prefix_tokens, steps)
    return PrefillWork(steps, new_tokens, pairs, prefix_tokens, context)


def steps_of(tokens: int, max_num_batched_tokens: int) -> int:
    """Steps that `tokens` tokens take; `max_num_batched_tokens` 0 = all in one step."""
    return -(-tokens // max_num_batched_tokens) if max_num_batched_tokens else 1


def prompt_work(tokens: int, prefix_tokens: int, max_num_batched_tokens: int) -> PrefillWork:
    """Work that a prompt needs behind a prefix, in steps of `max_num_batched_tokens` at most; 0 = one step."""
    new = tokens - prefix_tokens
    return work_of(new, prefix_tokens, steps_of(new, max_num_batched_tokens))


def pipelined_step_tokens(
    speeds: Speeds, stages: int, work: PrefillWork, most: int, block_size: int, busy_share: float = 0.0
) -> int:
    """Return the tokens of each step of a prompt that finds a pipeline empty.

    All stages but one are idle for the length of the last step: more steps make that step shorter. Each further step
    costs its fixed seconds and reads the KV before it once more: b seconds for a step in the prompt's middle. If the
    last token takes l seconds by itself, n = sqrt((stages - 1) * tokens * l / b) equal steps are best.
    What steps cost makes the prompts wait that come meanwhile. So a pipeline that is busy at times takes large steps.

    Args:
        speeds: the pipeline's; if steps cost nothing by these, steps are as large as possible.
        stages: of the pipeline; on a single stage, fewer steps are always better.
        work: the prompt's.
        most: tokens in a step at most; 0 = any number.
        block_size: steps end at blocks' borders.
        busy_share: share of its time that the pipeline has had work lately.
    """
    tokens, prefix, context_s = work.new_tokens, work.prefix_tokens, speeds.prefill_per_context_token_s
    step_s = speeds.prefill_base_s + context_s * (prefix + tokens / 2)
    most = most or tokens
    if stages == 1 or busy_share > IDLE_SHARE or not step_s or tokens <= block_size:
        return most
    token_s = speeds.prefill_per_token_s + speeds.prefill_per_pair_s * (prefix + tokens) - context_s
    filling_s = (stages - 1) * tokens * max(token_s, 0.0)
    ideal = max(1.0, sqrt(filling_s / step_s))
    shorter = block_size * max(1, int(tokens / (ideal * block_size)))  # than the ideal step, by part of a block

    def seconds(size: int) -> float:
        return steps_of(tokens, size) * step_s + filling_s * size / tokens

    counts = (int(ideal), int(ideal) + 1, steps_of(tokens, shorter))
    return min(most, min([-(-tokens // (block_size * steps)) * block_size for steps in counts], key=seconds))


def prefill_seconds(
    speeds: Speeds, new_tokens: int, prefix_tokens: int, *, steps: int = 1, chunks: int = 0, begins: bool = True
) -> float:
    """Predict the seconds for computing `new_tokens` after `prefix_tokens` tokens.

    Args:
        speeds: the computing instance's speeds.
        new_tokens: tokens to compute; none take no time.
        prefix_tokens: tokens before `new_tokens`, with KV already in the pool.
        steps: engine steps whose fixed seconds count.
        chunks: in which the tokens are computed; 0 = one in each step, and at least one.
        begins: the prompt begins here and the prefix was cached; False for a later chunk of the same prompt.
    """
    if new_tokens <= 0:
        return 0.0
    pairs = attention_pairs(new_tokens, prefix_tokens)
    context = chunk_context(new_tokens, prefix_tokens, chunks or steps or 1)
    return work_seconds(speeds, steps, new_tokens, pairs, prefix_tokens, context, begins=begins)


def work_seconds(
    speeds: Speeds,
    steps: int,
    new_tokens: int,
    pairs: int,
    prefix_tokens: int,
    context_tokens: int,
    *,
    begins: bool = True,
) -> float:
    """Predict the seconds for a `PrefillWork`; for callers that ask for the same work at several speeds."""
    once = speeds.prefill_per_prompt_s + speeds.prefill_per_cached_token_s * prefix_tokens if begins else 0.0
    growing = speeds.prefill_per_token_s * new_tokens + speeds.prefill_per_pair_s * pairs
    return once + (steps * speeds.prefill_base_s + growing + speeds.prefill_per_context_token_s * context_tokens)


def load_seconds(speeds: Speeds, nbytes: int) -> float:
    """Predict the seconds for reading `nbytes` of KV from the store."""
    return nbytes / (speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S)


def transfer_seconds(speeds: Speeds, nbytes: int) -> float:
    """Predict the seconds for sending `nbytes` of KV to decode."""
    return nbytes / (speeds.transfer_bytes_per_s or DEFAULT_BYTES_PER_S)


def decode_step_seconds(speeds: Speeds, sequences: float, context_tokens: float) -> float:
    """Predict the seconds for one decode step over `sequences` with `context_tokens` tokens in total."""
    return (
        speeds.decode_base_s
        + speeds.decode_per_sequence_s * sequences
        + speeds.decode_per_context_token_s * context_tokens
    )


def overlapped_seconds(load_s: float, compute_s: float, layers: int) -> float:
    """Seconds for loading and computing if layer l+1 loads while layer l computes.

    The longer hides the shorter, except the shorter's share for one layer.
    """
    shorter, longer = (load_s, compute_s) if load_s < compute_s else (compute_s, load_s)
    return longer + shorter / (layers or 1)


def pipelined_seconds(compute_s: float, *, steps: int, stages: int) -> float:
    """Seconds for `steps` equal steps that take `compute_s` one after the other, if `stages` steps overlap.

    The last step ends after all stages; each other step delays the last step by a single stage. All steps together keep
    the pipeline busy for `compute_s / stages`.
    """
    steps = max(steps, 1)
    return compute_s * (steps + stages - 1) / (steps * stages)


def load_is_cheaper(speeds: Speeds, local: PrefillWork, rest: PrefillWork, *, nbytes: int, layers: int = 1) -> bool:
    """Tell whether loading a longer prefix is predicted to be quicker than computing the prefix.

    Args:
        speeds: speeds at the instance that would load or compute.
        local: the prompt's work behind the prefix in the instance's own pool.
        rest: the prompt's work behind the longer prefix.
        nbytes: bytes of KV to load.
        layers: the model's layers, for overlapping loads with computation; 1 = no overlap.
    """
    load_s = load_seconds(speeds, nbytes)
    return overlapped_seconds(load_s, work_seconds(speeds, *rest), layers) < work_seconds(speeds, *local)
