"""Predicted latencies of one request on any instance.

`PrefillLatencyModel` is the Mooncake paper's Algorithm 1, with a choice between loading and recomputing a prefix.
"""

from collections.abc import Sequence

from moonpool.base.scheduling.latency import (
    DEFAULT_BYTES_PER_S,
    PrefillWork,
    Speeds,
    decode_step_seconds,
    encoded_tokens,
    overlapped_seconds,
    pipelined_seconds,
    pipelined_step_tokens,
    prompt_work,
    transfer_seconds,
    work_seconds,
)
from moonpool.conductor.core.demand import Demand, MemoryNeed, expected_blocks
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.core.prefix_holder import PrefixHolder
from moonpool.conductor.placement.base import DecodeChoice, DecodeLoad, PrefillCost, make


class PrefillLatencyModel:
    """The prediction of one request's prompt on any instance.

    Args:
        demand: the request's.
        shape: KV shape.
        sources: a few instances that a prefix may be loaded from.
        threshold: a prefix elsewhere must be this many times longer than the instance's own.
    """

    def __init__(self, demand: Demand, shape: KVShape, sources: Sequence[PrefixHolder], threshold: float) -> None:
        self._tokens, self._pictures, self._encoded = demand.prompt_tokens, demand.pictures, demand.encoded
        self._shape = shape
        self.sources = sources
        self._block_bytes = shape.block_size * shape.token_bytes
        self._layers = shape.layers or 1
        self._threshold = threshold
        self._works: dict[tuple[int, int], PrefillWork] = {}
        self._loads: dict[int, list[tuple[PrefixHolder, int, PrefillWork]]] = {}
        """By tokens of a step: prefixes that may be loaded, their blocks, and the work after each."""

    def cost(
        self,
        speeds: Speeds,
        stages: int,
        max_num_batched_tokens: int,
        local_blocks: int,
        *,
        loads: bool = True,
        busy_share: float | None = 0.0,
    ) -> PrefillCost:
        """Return the prediction for an instance with these speeds and `local_blocks` leading blocks.

        `loads`: the instance can load a longer prefix from others. `busy_share`: of a pipeline's time lately; None =
        another prompt is there now.
        """
        if stages > 1 and busy_share is not None:
            most = max_num_batched_tokens
            max_num_batched_tokens = self._step_tokens(speeds, stages, most, local_blocks, busy_share)
        local = self._works.get((local_blocks, max_num_batched_tokens)) or self._work(
            local_blocks, max_num_batched_tokens
        )
        # Asked some twenty times for each request: what is short stands here in full, and constructors are passed by.
        base_s, token_s, pair_s = speeds.prefill_base_s, speeds.prefill_per_token_s, speeds.prefill_per_pair_s
        prompt_s, cached_s = speeds.prefill_per_prompt_s, speeds.prefill_per_cached_token_s
        context_s = speeds.prefill_per_context_token_s
        steps, new, pairs, prefix, context = local
        compute_s = (prompt_s + cached_s * prefix) + (
            steps * base_s + (token_s * new + pair_s * pairs) + context_s * context
        )
        least_s = compute_s = compute_s + self._encode_s(speeds, prefix)
        best, shape, threshold = None, self._shape, self._threshold
        least_blocks = threshold * local_blocks if threshold > 1.0 else local_blocks
        rate_here = speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S
        peer_rate_here = speeds.peer_bytes_per_s or rate_here
        for load in self._loads.get(max_num_batched_tokens) or self._loadable(max_num_batched_tokens) if loads else ():
            source, blocks, (steps, new, pairs, longer, context) = load
            if blocks <= least_blocks:
                continue
            rest_s = (prompt_s + cached_s * longer) + (
                steps * base_s + (token_s * new + pair_s * pairs) + context_s * context
            )
            rest_s += self._encode_s(speeds, longer)
            if rest_s >= least_s:
                continue  # a load takes at least the work after its prefix
            nbytes = shape.moved_bytes(longer, prefix) if shape.window_bytes else (longer - prefix) * shape.token_bytes
            _, _, wait_s, rate_there, peer, warm, _ = source
            rate = peer_rate_here if peer else rate_here  # as `PrefixHolder.rate`
            if rate_there and rate_there < rate:
                rate = rate_there
            if warm is None:
                load_s = nbytes / rate
            else:
                load_s = source.read_s(rate, nbytes, source.cold_blocks(local_blocks) * self._block_bytes)
            busy_s = wait_s + load_s
            if busy_s >= least_s:
                continue  # nor less than the load
            shorter_s, longer_s = (busy_s, rest_s) if busy_s < rest_s else (rest_s, busy_s)
            both_s = longer_s + shorter_s / self._layers  # as `overlapped_seconds`
            if both_s < least_s and load_s:
                best, least_s, best_s, read_s = load, both_s, rest_s, load_s
        if best is None:
            steps = local.steps
            own_s = compute_s if stages == 1 else pipelined_seconds(compute_s, steps=steps, stages=stages)
            fixed_s = steps * base_s * (own_s / compute_s) if compute_s else 0.0
            return make(PrefillCost, (0.0, own_s, compute_s / stages, local_blocks, "", 0.0, fixed_s, 0))
        source, blocks, rest = best
        own_s, busy_s = best_s, max(best_s / stages, read_s)
        if stages > 1:
            own_s = pipelined_seconds(own_s, steps=rest.steps, stages=stages)
            least_s = overlapped_seconds(source.wait_s + read_s, own_s, shape.layers)
        fixed_s = rest.steps * base_s * (own_s / best_s) if best_s else 0.0
        cold = source.cold_blocks(local_blocks) if source.warm is not None else 0
        return make(PrefillCost, (least_s - own_s, own_s, busy_s, blocks, source.id, read_s, fixed_s, cold))

    def alone_s(self, speeds: Speeds, stages: int, max_num_batched_tokens: int, blocks: int) -> float:
        """Return the seconds to the first token on an idle instance with `blocks` leading blocks, loading nothing."""
        if stages > 1:
            max_num_batched_tokens = self._step_tokens(speeds, stages, max_num_batched_tokens, blocks)
        work = self._works.get((blocks, max_num_batched_tokens)) or self._work(blocks, max_num_batched_tokens)
        compute_s = work_seconds(speeds, *work) + self._encode_s(speeds, work.prefix_tokens)
        return compute_s if stages == 1 else pipelined_seconds(compute_s, steps=work.steps, stages=stages)

    def _encode_s(self, speeds: Speeds, prefix: int) -> float:
        """Return the seconds for the pictures behind `prefix` tokens: encoding them, or reading their rows."""
        encode_s = speeds.encode_per_token_s * encoded_tokens(self._pictures, prefix) if self._pictures else 0.0
        return encode_s + (speeds.rows_per_token_s * encoded_tokens(self._encoded, prefix) if self._encoded else 0.0)

    def tokens_behind(self, blocks: int) -> int:
        """Return the number of prompt tokens to compute behind `blocks` leading blocks."""
        return self._tokens - self._shape.reused_tokens(self._tokens, blocks)

    def _step_tokens(self, speeds: Speeds, stages: int, most: int, blocks: int, busy_share: float = 0.0) -> int:
        """Return the tokens of a pipeline's steps for this prompt alone, behind `blocks` leading blocks."""
        work = self._works.get((blocks, most)) or self._work(blocks, most)
        return pipelined_step_tokens(speeds, stages, work, most, self._shape.block_size, busy_share)

    def _loadable(self, max_num_batched_tokens: int) -> list[tuple[PrefixHolder, int, PrefillWork]]:
        """Return the prefixes that may be loaded."""
        found = self._loads[max_num_batched_tokens] = [
            (source, source.blocks, self._work(source.blocks, max_num_batched_tokens)) for source in self.sources
        ]
        return found

    def _work(self, blocks: int, max_num_batched_tokens: int) -> PrefillWork:
        """Return the work left behind `blocks` leading blocks."""
        prefix = self._shape.reused_tokens(self._tokens, blocks)
        work = self._works[blocks, max_num_batched_tokens] = prompt_work(self._tokens, prefix, max_num_batched_tokens)
        return work


class DecodeLatencyModel:
    """The prediction of one request's answer on any decode instance."""

    def __init__(self, demand: Demand, shape: KVShape) -> None:
        self._prompt_tokens = demand.prompt_tokens
        self._tokens = demand.decode_tokens
        self._choices, self._expected = demand.choices, demand.expected_tokens
        self._context_tokens = demand.prompt_tokens * demand.choices
        self._total_blocks = demand.total_blocks
        self._shape = shape
        self._lacking: dict[int, int] = {}
        self._needs: dict[int, int] = {}

    def blocks(self, answer_tokens: int) -> int:
        """Blocks that the request is expected to need if answers are expected to have `answer_tokens` tokens."""
        blocks = self._needs.get(answer_tokens)
        if blocks is None:
            need = MemoryNeed(self._prompt_tokens, self._total_blocks, self._choices, self._expected)
            blocks = expected_blocks(self._shape, need, answer_tokens)
            self._needs[answer_tokens] = blocks
        return blocks

    def fixed_s(self, speeds: Speeds, held_blocks: int) -> float:
        """Seconds for the request on an idle instance: receiving missing KV, and the request's own share of steps."""
        receive_s = transfer_seconds(speeds, self._lacking_bytes(held_blocks))
        return receive_s + self._tokens * decode_step_seconds(speeds, self._choices, self._context_tokens)

    def load_s(self, step_load_s: float) -> float:
        """Return the seconds added by what runs there already, which makes each step longer by `step_load_s`."""
        return self._tokens * step_load_s

    def choice(
        self, name: str, speeds: Speeds, there: DecodeLoad, held_blocks: int, blocks: int, optimism: float = 1.0
    ) -> DecodeChoice:
        """Return the prediction for an instance with this load.

        Args:
            name: the instance's name.
            speeds: the instance's speeds.
            there: what else is at the instance.
            held_blocks: leading blocks of the prompt that are there.
            blocks: expected memory of the request.
            optimism: factor of the time by which instances are compared.
        """
        # Asked for each candidate: `decode_step_seconds` stands here in full.
        sequences, context_tokens, tokens = there.sequences, there.context_tokens, self._tokens
        base_s, sequence_s = speeds.decode_base_s, speeds.decode_per_sequence_s
        context_s = speeds.decode_per_context_token_s
        more, longer = sequences + self._choices, context_tokens + self._context_tokens
        tbt_s = base_s + sequence_s * more + context_s * longer
        finish_s = transfer_seconds(speeds, self._lacking_bytes(held_blocks)) + tokens * tbt_s
        longer_s = tbt_s - (base_s + sequence_s * sequences + context_s * context_tokens) if sequences else 0.0
        others_s = sequences * tokens * longer_s
        return make(DecodeChoice, (name, tbt_s, finish_s, blocks, held_blocks, finish_s * optimism, others_s, there))

    def _lacking_bytes(self, held_blocks: int) -> int:
        nbytes = self._lacking.get(held_blocks)
        if nbytes is None:
            held = min(held_blocks * self._shape.block_size, self._prompt_tokens)
            nbytes = self._lacking[held_blocks] = self._shape.moved_bytes(self._prompt_tokens, held)
        return nbytes


def step_load_s(speeds: Speeds, sequences: int, context_tokens: int) -> float:
    """Return the seconds that what runs on a decode instance adds to each step."""
    return speeds.decode_per_sequence_s * sequences + speeds.decode_per_context_token_s * context_tokens
