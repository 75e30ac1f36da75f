"""Conditional disaggregation: a decode instance that holds nearly all of a prompt computes the short rest itself.

So no prefill instance is asked and no KV is sent. It costs those that run there: their step takes longer while the rest
is computed beside them. It pays where the first token comes sooner by more than all of them together lose.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from moonpool.cost import decode_step_seconds, prefill_seconds
from moonpool.frozen import frozen
from services.conductor.core.cost import DecodeChoice, DecodeModel, PrefillChoice, steps_of
from services.conductor.core.decodes import Decode, Decodes
from services.conductor.core.facts import Demand, Shape
from services.conductor.core.plan import Plan
from services.conductor.core.ranks import SHORTLIST
from services.conductor.core.sets import members

STEP_TOKENS = 256
"""Tokens that a decode instance computes beside its batch in a step at most (`CoreConfig.step_tokens` there)."""


@frozen
class Rest:
    """The rest of a prompt at a decode instance: the prediction in the form of a prefill instance's, and of decode's.

    `cost_s`: what those that run there lose together. `pays`: it is better than the best prefill instance.
    """

    prefill: PrefillChoice
    decode: DecodeChoice
    cost_s: float
    pays: bool


class Rests:
    """Finds the decode instance for a rest.

    Args:
        decodes: all.
        most_tokens: the longest rest that is thought of; 0 = none.
    """

    def __init__(self, decodes: Decodes, most_tokens: int) -> None:
        self._decodes = decodes
        self._most_tokens = most_tokens

    def __bool__(self) -> bool:
        return self._most_tokens > 0

    def weigh(self, plan: Plan, shape: Shape, prefixes: Sequence[tuple[int, int]], suspects: Collection[str]) -> Plan:
        """The plan with the rest at decode as one more candidate: the first one where it pays."""
        rest = self._best(plan.demand, shape, prefixes, suspects, plan.prefill)
        if rest is None:
            return plan
        if not rest.pays:
            quicker = rest.prefill.ttft_s < plan.prefill.ttft_s
            why = f"those that run there would lose {rest.cost_s:.4f} s together" if quicker else ""
            return replace(plan, candidates=(*plan.candidates, rest.prefill._replace(excluded=why)))
        return replace(
            plan,
            prefill=rest.prefill,
            decodes=(rest.decode,),
            sources=(),
            candidates=(rest.prefill, *plan.candidates),
            at_decode=True,
        )

    def _best(
        self,
        demand: Demand,
        shape: Shape,
        prefixes: Sequence[tuple[int, int]],
        suspects: Collection[str],
        other: PrefillChoice,
    ) -> Rest | None:
        """The decode instance at which the rest is done soonest, what it costs others counted; None when none can.

        Of those that hold most of the prompt, as others would compute more.

        Args:
            demand: of the request.
            shape: of the KV.
            prefixes: who holds how much, as `Forest.match` says it.
            suspects: instances that failed this request before.
            other: the best prefill instance.
        """
        pool, model = self._decodes, DecodeModel(demand, shape)
        allowed = pool.able(demand.total_blocks) & ~pool.mask_of(suspects)
        for blocks, mask in reversed(prefixes):
            tokens = demand.prompt_tokens - shape.reused_tokens(demand.prompt_tokens, blocks)
            if tokens > self._most_tokens:
                continue
            slots = [slot for slot in members(mask & allowed) if _roomy(pool.by_slot[slot], model)][:SHORTLIST]
            rests = [_rest(pool.by_slot[slot], model, tokens, blocks, demand, other) for slot in slots]
            known = [rest for rest in rests if rest.prefill.prefill_s > 0.0]
            if known:
                return min(known, key=lambda rest: (rest.prefill.ttft_s + rest.cost_s, rest.prefill.id))
        return None


def _roomy(instance: Decode, model: DecodeModel) -> bool:
    return instance.room_blocks >= model.blocks(instance.load.answer_tokens)


def _rest(instance: Decode, model: DecodeModel, tokens: int, blocks: int, demand: Demand, other: PrefillChoice) -> Rest:
    speeds, running = instance.speeds, instance.sequences
    steps, prefix = steps_of(tokens, STEP_TOKENS), demand.prompt_tokens - tokens
    compute_s = prefill_seconds(speeds, tokens, prefix, steps=steps)
    batch_s = decode_step_seconds(speeds, running, instance.context_tokens) if running else 0.0
    name, need = instance.facts.id, model.blocks(instance.load.answer_tokens)
    prefill = PrefillChoice(  # it waits for the step that is running, and is computed beside the batch
        name, blocks, blocks, batch_s, 0.0, compute_s + steps * batch_s, compute_s, overhead_s=other.overhead_s
    )
    decode = model.choice(name, speeds, running, instance.context_tokens, blocks, need)
    cost_s = running * compute_s
    return Rest(prefill, decode, cost_s, prefill.ttft_s + cost_s < other.ttft_s)
