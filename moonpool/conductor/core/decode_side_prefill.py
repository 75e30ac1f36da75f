"""Decode-side prefill: a decode instance computes what it lacks of a prompt, if that is better for all together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import decode_step_seconds, prefill_seconds, steps_of
from moonpool.conductor.core.block_trie import Prefixes, blocks_at
from moonpool.conductor.core.decode_instance import DecodeInstanceState
from moonpool.conductor.core.decode_pool import DecodePool
from moonpool.conductor.core.instance_sets import slots_in
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.core.latency_model import DecodeLatencyModel
from moonpool.conductor.core.load_ranking import SHORTLIST
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.conductor.placement.base import DecodeChoice, PrefillChoice

DECODE_STEP_TOKENS = 256
"""Most tokens that a decode instance computes beside the batch in a step (`chunked_prefill_size` there)."""
SHORT_TOKENS = 2048
"""Up to so many tokens are computed where that is predicted to be better at all; more, where it is beyond errors."""
LONG_SHARE = 0.75
"""Share of the TTFT through prefill within which a longer rest must be computed, the cost to others included."""


class DecodeSidePrefill:
    """The search for a decode instance that can compute what it lacks of a prompt.

    Instances in the role both are no candidates here: they are chosen as prefill instances are.

    Args:
        decodes: all decode instances.
        max_tokens: tokens that decode may compute for one prompt; 0 = none.
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
        choice = self._best(decision, shape, prefixes, suspects)
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
        self, decision: RoutingDecision, shape: KVShape, prefixes: Prefixes, suspects: Collection[str]
    ) -> DecodeSideChoice | None:
        """Return the best decode instance among those that hold most of the prompt, and those that suit the answer.

        Best is the least TTFT and cost to others together. None if there is no instance. `decision` is the best without
        decode-side prefill.
        """
        demand, pool = decision.demand, self._decodes
        model = DecodeLatencyModel(demand, shape)
        # Engines of other makes do what they joined for: one that answers is not asked for whole prompts.
        own = pool.domain_mask("")
        allowed = pool.eligible_mask(demand.total_blocks, demand.needs, own) & ~pool.mask_of(suspects) & ~pool.both_mask
        choices: list[DecodeSideChoice] = []
        for slot, blocks in self._candidates(decision, prefixes, allowed).items():
            tokens = demand.prompt_tokens - shape.reused_tokens(demand.prompt_tokens, blocks)
            instance = pool.by_slot[slot]
            if tokens <= self._max_tokens and _has_memory(instance, model):
                choices.append(_decode_side_choice(instance, model, tokens, blocks, decision))
        known = [choice for choice in choices if choice.prefill.prefill_s > 0.0]
        return min(known, key=lambda choice: (choice.prefill.ttft_s + choice.cost_s, choice.prefill.id), default=None)

    def _candidates(self, decision: RoutingDecision, prefixes: Prefixes, allowed: int) -> dict[int, int]:
        """Return a few instances by slot, and the leading blocks that each holds."""
        slots = [slot for _, mask in reversed(prefixes) for slot in slots_in(mask & allowed)][:SHORTLIST]
        suited = self._decodes.mask_of([choice.id for choice in decision.decodes]) & allowed
        return {slot: blocks_at(prefixes, slot) for slot in (*slots, *slots_in(suited))}


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
    decision: RoutingDecision,
) -> DecodeSideChoice:
    demand, other = decision.demand, decision.prefill
    speeds, running = instance.speeds, instance.sequences
    steps, prefix = steps_of(tokens, DECODE_STEP_TOKENS), demand.prompt_tokens - tokens
    compute_s = prefill_seconds(speeds, tokens, prefix, steps=steps)
    batch_s = decode_step_seconds(speeds, running, instance.context_tokens) if running else 0.0
    name, need = instance.facts.id, model.blocks(instance.load.answer_tokens)
    queue_s = batch_s + instance.prompts_s
    prefill = (
        PrefillChoice(  # the prompt waits for the running step and other prompts, and is computed beside the batch
            name, blocks, blocks, queue_s, 0.0, compute_s + steps * batch_s, compute_s, overhead_s=other.overhead_s
        )
    )
    decode = model.choice(name, speeds, instance.there, blocks, need)
    cost_s = running * compute_s  # each sequence of the batch waits for the prompt's part of the steps
    least_s = other.ttft_s * (1.0 if tokens <= SHORT_TOKENS and blocks else LONG_SHARE)
    return DecodeSideChoice(prefill, decode, cost_s, prefill.ttft_s + cost_s < least_s)
