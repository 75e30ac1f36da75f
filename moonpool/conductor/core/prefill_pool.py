"""The prefill instances, and which of them is best for a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.base.scheduling.latency import Speeds, work_of, work_seconds
from moonpool.base.scheduling.recent_and_usual import RecentRate, UsualValue
from moonpool.base.scheduling.state_machine import digest_of, draw_below
from moonpool.conductor.core.block_trie import blocks_at
from moonpool.conductor.core.demand import Demand
from moonpool.conductor.core.in_flight_prefixes import InFlightPrefixes, with_in_flight
from moonpool.conductor.core.instance_pool import InstancePool
from moonpool.conductor.core.instance_sets import slots_in
from moonpool.conductor.core.latency_model import PrefillLatencyModel
from moonpool.conductor.core.load_ranking import SHORTLIST, LoadRanking
from moonpool.conductor.core.prefill_instance import NO_WAIT, TYPICAL_PROMPT, PrefillInstanceState
from moonpool.conductor.placement.base import (
    Arrivals,
    Candidates,
    PlacementPolicy,
    PlacementRequest,
    PrefillChoice,
    PrefillCost,
    QueueWait,
    RankedInstance,
    StoredPrefix,
    make,
)

CLASS_WIDTH = 1.1
SAMPLED = 64
"""Sample size: above this number, some instances' queues stand for all."""
LATER_SHARE = 0.25
"""Share of a full step that later prompts take in the step in which a waiting prompt ends."""
LONG_PROMPT_END = work_of(512, 16384)
"""The end of a long prompt."""
BESIDE_ANSWERS_TOKENS = 512
"""Tokens of prompts that an instance in the role both computes in one step with answers; on a CPU less."""
STEPS_PER_CHUNK = 5
"""Steps of answers for each such step, which is one of them (`num_continuous_decode_steps` of decode, and one)."""
LOAD_BYTES = 1 << 28
"""Bytes of KV by which loads are compared."""


class PrefillPool(InstancePool[PrefillInstanceState]):
    """All prefill instances, ranked by when they will be free.

    Args:
        policy: which is chosen.
        seed: for the draws.
        shadow_policy: what another policy would have chosen is counted in `shadow`; None = none is asked.
    """

    def __init__(self, policy: PlacementPolicy, seed: int = 0, shadow_policy: PlacementPolicy | None = None) -> None:
        super().__init__(LoadRanking(CLASS_WIDTH, TypicalPrefillSeconds()))
        self.in_flight = InFlightPrefixes()
        """Prefixes that are being computed."""
        self._policy = policy
        self.shadow_policy = shadow_policy
        self.shadow = ShadowTally()
        """How the shadow policy's choices compare."""
        self._seed = seed
        self._decisions = 0
        self._prompts, self._work, self._backlog = RecentRate(), RecentRate(), UsualValue()
        self._blocks, self._sole_blocks = RecentRate(), RecentRate()
        self._sample: list[PrefillInstanceState] = []  # whose queues stand for all; empty = to be drawn

    def add(self, instance: PrefillInstanceState) -> None:
        super().add(instance)
        self._sample = []

    def remove(self, instance: PrefillInstanceState) -> None:
        super().remove(instance)
        self._sample = []

    def queue_s(self, choice: PrefillChoice, key: QueueKey) -> float:
        """Return the predicted seconds that a prompt with this queue key waits at the instance of a choice.

        A choice with a place given by the policy waits as predicted there.
        """
        instance = self.get(choice.id)
        if instance is None or choice.queue_s <= 0.0 or choice.delay_s is not None:
            return choice.queue_s
        return instance.queue_s(key, choice.queue_s)

    def wait(self, name: str, key: QueueKey, now: float) -> QueueWait:
        """Return the place for a prompt with this queue key at an instance with queues in key order."""
        instance = self.get(name)
        return instance.wait(key, now) if instance is not None else NO_WAIT

    def rank(self, instance: PrefillInstanceState) -> None:
        """Rank an instance anew, after a change in load or speeds."""
        facts, free_at = instance.facts, instance.free_at
        self.ranks.put(
            instance.slot,
            instance.learnt.speeds,
            lambda _: free_at,
            instance.turn,
            facts.id,
            facts.stages,
            facts.max_num_batched_tokens,
        )

    def soon(self, prefixes: Sequence[tuple[int, int]], keys: Sequence[bytes]) -> Sequence[tuple[int, int]]:
        """Return the prefixes of a chain when prompts in flight are computed; `prefixes` are those of now."""
        in_flight = self.in_flight.match(keys)
        return with_in_flight(
            prefixes, [(blocks, instance.slot) for name, blocks in in_flight.items() if (instance := self.get(name))]
        )

    def computed(self, claim: int) -> None:
        """A prompt has a first token; the blocks count until reported, if the instance is still a member."""
        name = self.in_flight.computed(claim)
        if self.get(name) is None:
            self.in_flight.lost(name)

    def choose(
        self,
        demand: Demand,
        model: PrefillLatencyModel,
        prefixes: Sequence[tuple[int, int]],
        now: float,
        suspects: int,
        prompt: PromptToPlace,
        paired: int = ~0,
    ) -> list[PrefillChoice]:
        """Return the predictions for the best instances by the policy, best first, then for some that cannot be used.

        Args:
            demand: the request's.
            model: predicts the request's prompt.
            prefixes: instances by length of the prefix, as `BlockTrie.match` gives them.
            now: seconds.
            suspects: mask of instances that failed this request before; they come after all others.
            prompt: the prompt.
            paired: mask of instances whose KV a decode instance could take.
        """
        self._decisions += 1
        self._blocks.add(demand.prompt_blocks, now)
        self._sole_blocks.add(self._held_once(model, prefixes), now)
        arrivals = self._sampled(now)
        able = self.eligible_mask(demand.prompt_blocks, demand.needs, paired)
        choices: list[PrefillChoice] = []
        for allowed in (able & ~suspects, able & suspects):
            # Suspects come last, and are asked only if the others are few: a suspect may be the only one left.
            if allowed and len(choices) < SHORTLIST:
                candidates = PoolCandidates(self, model, prefixes, now, prompt.request, arrivals, allowed, prompt)
                found = self._policy.order(candidates, SHORTLIST - len(choices))
                if not found:
                    raise ValueError(f"the policy has chosen none of {len(candidates)} instances")
                if self.shadow_policy is not None and not choices:  # with the same candidates, or it compares nothing
                    self.shadow.compare(candidates, found[0], self.shadow_policy.order(candidates, SHORTLIST)[0])
                choices += found
        if len(choices) < SHORTLIST:
            others = islice(slots_in(self.mask & ~able), SHORTLIST - len(choices))
            choices += [self._excluded(model, prefixes, now, slot, demand) for slot in others]
        return choices

    def ttft_s(self, choice: PrefillChoice, key: QueueKey) -> float:
        """Predicted time to first token of a request with this queue key, as tenants share the instance's time."""
        return choice.ttft_s - choice.queue_s + self.queue_s(choice, key)

    def draw(self, limit: int, counter: int) -> int:
        """Return an integer in [0, limit), random by the seed, the number of this decision and `counter`."""
        return draw_below(limit, self._seed, self._decisions, counter)

    def placed(self, busy_s: float, now: float) -> None:
        """Count a placed prompt in `arrivals`."""
        self._prompts.add(1.0, now)
        self._work.add(busy_s, now)

    def _sampled(self, now: float) -> Arrivals:
        """Recent placements, and the mean queue as a sample of the usual queue; of many instances, some are sampled."""
        count = max(1, len(self))
        looked_at = self._sample
        if not looked_at:
            looked_at = self._sample = list(islice(self.by_slot.values(), 0, None, -(-count // SAMPLED)))
        waits = [wait_s for instance in looked_at if (wait_s := instance.free_at - now) > 0.0]
        backlog_s = sum(waits) / max(1, len(looked_at))
        self._backlog.sample(backlog_s, now)
        prompts_per_s, work_per_s = self._prompts.per_s(now) / count, self._work.per_s(now) / count
        blocks_per_s = self._blocks.per_s(now)
        sole_share = self._sole_blocks.per_s(now) / blocks_per_s if blocks_per_s else 0.0
        return Arrivals(prompts_per_s, work_per_s, backlog_s, self._backlog.value, sole_share)

    def _held_once(self, model: PrefillLatencyModel, prefixes: Sequence[tuple[int, int]]) -> int:
        """Blocks of the chain that one instance alone holds: no other instance has them, or could load them."""
        most = shared = holder = 0
        for blocks, mask in prefixes:
            if here := mask & self.mask:
                most, holder = blocks, here
                shared = blocks if here & (here - 1) else shared
        if most == shared:
            return 0
        name = self.by_slot[holder.bit_length() - 1].facts.id
        return most - min(most, max([shared, *(source.blocks for source in model.sources if source.id != name)]))

    def predict(
        self, model: PrefillLatencyModel, slot: int, blocks: int, now: float, excluded: str = ""
    ) -> PrefillChoice:
        """Predict a prompt on an instance with `blocks` leading blocks; `excluded`: why the instance is ruled out."""
        instance = self.by_slot[slot]
        facts, learnt, free_at = instance.facts, instance.learnt, instance.free_at
        stages, busy = facts.stages, 0.0 if facts.stages == 1 else instance.busy_share(now)
        cost = model.cost(
            learnt.speeds, stages, facts.max_num_batched_tokens, blocks, loads=facts.loads, busy_share=busy
        )
        load_s, prefill_s, busy_s, used, source, read_s, fixed_s, cold = cost
        queue_s = free_at - now if free_at > now else 0.0
        growing_s = (prefill_s - fixed_s) / learnt.growing
        if instance.step_s:  # answers run beside the prompt, and take their share of the time
            chunks = -(-model.tokens_behind(used) // BESIDE_ANSWERS_TOKENS)
            answers_s = chunks * STEPS_PER_CHUNK * instance.step_s
            prefill_s, busy_s, fixed_s = prefill_s + answers_s, busy_s + answers_s, fixed_s + answers_s
        waits = facts.max_num_batched_tokens and queue_s
        # Prompts that come later share the step in which a waiting prompt ends; an idle instance starts at once.
        tail_s = LATER_SHARE * work_seconds(learnt.speeds, *instance.full_step) if waits else 0.0
        rest_s = queue_s + tail_s + load_s + fixed_s
        optimism = self.optimism_factor(instance)
        if optimism < 1.0:
            load_s, prefill_s, busy_s = [part * optimism for part in (load_s, prefill_s, busy_s)]
        work_s = max(read_s, busy_s * (growing_s + fixed_s) * optimism / prefill_s) if prefill_s else busy_s
        others, there = len(instance.prompts), instance.there(now)
        held = facts.id, blocks, used
        seconds = queue_s, load_s, prefill_s, busy_s, source, excluded, learnt.overhead.seconds, others, growing_s
        return make(PrefillChoice, (*held, *seconds, rest_s, read_s, tail_s, cold, there, work_s, None))

    def _excluded(
        self, model: PrefillLatencyModel, prefixes: Sequence[tuple[int, int]], now: float, slot: int, demand: Demand
    ) -> PrefillChoice:
        facts = self.by_slot[slot].facts
        if self.draining_mask >> slot & 1:
            why = "draining"
        elif self.slow_mask >> slot & 1:
            why = "slow"
        elif lacks := [option for option in demand.needs if facts.lacks(option)]:
            why = f"cannot serve {lacks[0].partition(':')[0]}"
        elif facts.total_blocks < demand.prompt_blocks:
            why = f"too small: {facts.total_blocks} blocks, the prompt needs {demand.prompt_blocks}"
        elif facts.computes_prompts:
            why = f"too small: {facts.total_blocks} blocks, prompt and answer need {demand.total_blocks}"
        else:
            why = "no decode instance can take its KV now"
        return self.predict(model, slot, blocks_at(prefixes, slot), now, why)

    def digest(self) -> bytes:
        lately = self._prompts, self._work, self._backlog, self._blocks, self._sole_blocks, self.shadow
        return digest_of(super().digest(), self._decisions, self.in_flight, *lately)

    def check_invariants(self) -> None:
        """As of all pools; and chains in flight belong to placed prompts."""
        super().check_invariants()
        self.in_flight.check_invariants()
        assert all(self.get(name) is not None for name in self.in_flight.awaited), "no instance will report it"


@frozen
class PromptToPlace:
    """A prompt for which an instance is chosen.

    Attributes:
        request: the policies' view.
        queue_key: position among others, on arrival at an instance now.
        limit: which placements are refused; None = none for the time to first token.
    """

    request: PlacementRequest
    queue_key: QueueKey
    limit: TtftLimit | None = None


class TtftLimit(NamedTuple):
    """TTFT limit of a request.

    Attributes:
        within_s: seconds from now within which the first token must come.
        queue_key: position of the request among others.
    """

    within_s: float
    queue_key: QueueKey


@frozen
class PoolCandidates(Candidates):
    """Instances of a pool that are large enough and take requests: `allowed`, a mask."""

    _pool: PrefillPool
    _model: PrefillLatencyModel
    _prefixes: Sequence[tuple[int, int]]
    now: float
    request: PlacementRequest
    arrivals: Arrivals
    _allowed: int
    _prompt: PromptToPlace

    def __len__(self) -> int:
        return self._allowed.bit_count()

    def __iter__(self) -> Iterator[RankedInstance]:
        return (self._pool.ranks.place(slot) for slot in slots_in(self._allowed))

    @property
    def holders(self) -> Sequence[StoredPrefix]:
        return [
            StoredPrefix(source.id, source.blocks, source.blocks if source.warm is None else source.warm, source.peer)
            for source in self._model.sources
        ]

    def draw(self, limit: int, counter: int) -> int:
        return self._pool.draw(limit, counter)

    def predict(self, instance: RankedInstance) -> PrefillChoice:
        blocks = blocks_at(self._prefixes, instance.slot)
        return self._pool.predict(self._model, instance.slot, blocks, self.now)

    def least(
        self, limit: int, by: Callable[[PrefillChoice], float], cost: Callable[[PrefillCost], float]
    ) -> list[PrefillChoice]:
        model, ranks, now = self._model, self._pool.ranks, self.now
        found = ranks.search(
            self._allowed,
            self._prefixes,
            lambda ranked, blocks: cost(
                model.cost(ranked.speeds, ranked.key.stages, ranked.key.max_num_batched_tokens, blocks)
            ),
            lambda free_at: free_at - now if free_at > now else 0.0,
            limit,
        )
        instances = [(instance, blocks) for _, instance, blocks in found]
        # A search goes by class speeds: an instance whose own bad measurement starves it would never be found.
        slot = self._pool.starved_slot(self._allowed)
        if slot is not None and all(instance.slot != slot for instance, _ in instances):
            instances.append((ranks.place(slot), blocks_at(self._prefixes, slot)))
        predict, rated = self._pool.predict, []
        for instance, blocks in instances:
            choice = predict(model, instance.slot, blocks, now)
            rated.append((by(choice), ranks.stages(instance.slot), instance, choice))
        rated.sort()
        return [choice for *_, choice in rated]

    def keeping(self, choices: Sequence[PrefillChoice]) -> Sequence[PrefillChoice]:
        at = next((at for at, choice in enumerate(choices) if self._keeps(choice)), 0)
        return [choices[at], *choices[:at], *choices[at + 1 :]] if at else choices

    def wait(self, choice: PrefillChoice, delay_s: float) -> QueueWait:
        return self._pool.wait(choice.id, self._prompt.queue_key.delayed(delay_s), self.now)

    def _keeps(self, choice: PrefillChoice) -> bool:
        limit = self._prompt.limit
        return limit is None or self._pool.ttft_s(choice, limit.queue_key) <= limit.within_s


@dataclass(slots=True)
class ShadowTally:
    """A shadow policy's decisions beside the real policy's.

    Attributes:
        decisions: number of compared decisions.
        agreed: decisions with the same instance.
        sooner_s: predicted seconds to first token that the shadow policy's choices would have saved; negative = cost.
            Both are predicted in the queues as they are, where a prompt without a delay stands at its arrival.
    """

    decisions: int = 0
    agreed: int = 0
    sooner_s: float = 0.0

    def compare(self, candidates: Candidates, real: PrefillChoice, shadow: PrefillChoice) -> None:
        self.decisions += 1
        self.agreed += real.id == shadow.id
        real_s, shadow_s = [
            (choice if choice.delay_s is not None else choice.with_place(0.0, candidates.wait(choice, 0.0))).ttft_s
            for choice in (real, shadow)
        ]
        self.sooner_s += real_s - shadow_s if real.id != shadow.id else 0.0


@frozen
class TypicalPrefillSeconds:
    """Seconds by which prefill instances are compared: a prompt, a long prompt's end, and a load.

    A class rather than a function, so that a journal can hold the value.
    """

    def __call__(self, speeds: Speeds) -> tuple[float, float, float]:
        load_s = LOAD_BYTES / speeds.load_bytes_per_s if speeds.load_bytes_per_s else 0.0
        return work_seconds(speeds, *TYPICAL_PROMPT), work_seconds(speeds, *LONG_PROMPT_END), load_s
