"""Decode-side prefill: a decode instance that holds most of a prompt computes the rest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import decode_step_seconds, prefill_seconds, steps_of
from moonpool.conductor.core.block_trie import Prefixes
from moonpool.conductor.core.decode_instance import DecodeInstanceState
from moonpool.conductor.core.decode_pool import DecodePool
from moonpool.conductor.core.demand import Demand
from moonpool.conductor.core.instance_sets import slots_in
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.core.latency_model import DecodeLatencyModel
from moonpool.conductor.core.load_ranking import SHORTLIST
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.conductor.placement.base import DecodeChoice, PrefillChoice

DECODE_STEP_TOKENS = 256
"""Most tokens that a decode instance computes beside the batch in a step (`max_num_batched_tokens` there)."""


class DecodeSidePrefill:
    """The search for a decode instance that holds most of a prompt and can compute the remaining tokens.

    Args:
        decodes: all decode instances.
        max_tokens: remaining tokens that decode may compute; 0 = none.
    """

    def __init__(self, decodes: DecodePool, max_tokens: int) -> None:
        self._decodes = decodes
        self._max_tokens = max_tokens

    def __bool__(self) -> bool:
        return self._max_tokens > 0

    def weigh(
        self, decision: RoutingDecision, shape: KVShape, prefixes: Prefixes, suspects: Collection[str]
    ) -> RoutingDecision:
        """The decision with the best decode instance as a further candidate: the first candidate if that pays."""
        choice = self._best(decision.demand, shape, prefixes, suspects, decision.prefill)
        if choice is None:
            return decision
        if not choice.pays:
            quicker = choice.prefill.ttft_s < decision.prefill.ttft_s
            # Named only where decode would have been quicker for the request: else no reader asks why not.
            why = f"those that run there would lose {choice.cost_s:.4f} s together" if quicker else ""
            return replace(decision, candidates=(*decision.candidates, choice.prefill._replace(excluded=why)))
        return replace(
            decision,
            prefill=choice.prefill,
            decodes=(choice.decode,),
            sources=(),
            candidates=(choice.prefill, *decision.candidates),
            at_decode=True,
        )

    def _best(
        self, demand: Demand, shape: KVShape, prefixes: Prefixes, suspects: Collection[str], other: PrefillChoice
    ) -> DecodeSideChoice | None:
        """Return the best decode instance among those with most of the prompt; None if there is none.

        Best is the least TTFT and cost to others together. `other` is the best prefill instance.
        """
        pool, model = self._decodes, DecodeLatencyModel(demand, shape)
        allowed = pool.eligible_mask(demand.total_blocks, demand.needs) & ~pool.mask_of(suspects)
        for blocks, mask in reversed(prefixes):  # the longest prefix leaves least to compute
            tokens = demand.prompt_tokens - shape.reused_tokens(demand.prompt_tokens, blocks)
            if tokens > self._max_tokens:
                continue
            slots = [slot for slot in slots_in(mask & allowed) if _has_memory(pool.by_slot[slot], model)][:SHORTLIST]
            choices = [_decode_side_choice(pool.by_slot[slot], model, tokens, blocks, demand, other) for slot in slots]
            known = [choice for choice in choices if choice.prefill.prefill_s > 0.0]
            if known:
                return min(known, key=lambda choice: (choice.prefill.ttft_s + choice.cost_s, choice.prefill.id))
        return None


@frozen
class DecodeSideChoice:
    """The prediction for a decode instance computing a prompt's end.

    Attributes:
        prefill: in the form of a prefill instance's prediction.
        decode: in the form of a decode instance's.
        cost_s: seconds that the sequences running there lose together.
        pays: the choice is better than the best prefill instance.
    """

    prefill: PrefillChoice
    decode: DecodeChoice
    cost_s: float
    pays: bool


def _has_memory(instance: DecodeInstanceState, model: DecodeLatencyModel) -> bool:
    return instance.available_blocks >= model.blocks(instance.load.answer_tokens)


def _decode_side_choice(
    instance: DecodeInstanceState,
    model: DecodeLatencyModel,
    tokens: int,
    blocks: int,
    demand: Demand,
    other: PrefillChoice,
) -> DecodeSideChoice:
    speeds, running = instance.speeds, instance.sequences
    steps, prefix = steps_of(tokens, DECODE_STEP_TOKENS), demand.prompt_tokens - tokens
    compute_s = prefill_seconds(speeds, tokens, prefix, steps=steps)
    batch_s = decode_step_seconds(speeds, running, instance.context_tokens) if running else 0.0
    name, need = instance.facts.id, model.blocks(instance.load.answer_tokens)
    prefill = PrefillChoice(  # the prompt waits for the running step, and is computed beside the batch
        name, blocks, blocks, batch_s, 0.0, compute_s + steps * batch_s, compute_s, overhead_s=other.overhead_s
    )
    decode = model.choice(name, speeds, instance.there, blocks, need)
    cost_s = running * compute_s  # each sequence of the batch waits for the prompt's part of the steps
    return DecodeSideChoice(prefill, decode, cost_s, prefill.ttft_s + cost_s < other.ttft_s)
