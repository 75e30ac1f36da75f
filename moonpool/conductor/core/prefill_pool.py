"""The prefill instances: when each will be free, which prefixes they are computing, and which is best for a prompt."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import exp, inf
from operator import attrgetter, itemgetter
from typing import NamedTuple

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.base.scheduling.latency import PrefillWork, Speeds, work_of, work_seconds
from moonpool.base.scheduling.state_machine import digest_of, draw_below
from moonpool.conductor.core.instances import (
    SHORTLIST,
    HealthMonitor,
    InstanceFacts,
    InstancePool,
    LoadFacts,
    LoadRanking,
    blocks_at,
)
from moonpool.conductor.core.latency_model import Demand, KVLink, PrefillCorrections, PrefillLatencyModel
from moonpool.conductor.core.prefix_index import slots_in
from moonpool.conductor.placement.base import (
    Arrivals,
    Candidates,
    InstanceLoad,
    PlacementPolicy,
    PlacementRequest,
    PrefillChoice,
    PrefillCost,
    QueueWait,
    RankedInstance,
    StoredPrefix,
    make,
)

COMPARED_LENGTHS = tuple(sorted({round(2 ** (step / 4)) for step in range(4 * 20)}))
"""Lengths in blocks at which chains are compared."""
_TAKE_MARKS = [
    itemgetter(*[mark - 1 for mark in COMPARED_LENGTHS[:marks]]) for marks in range(2, len(COMPARED_LENGTHS) + 1)
]
"""By the number of marks, from two on: takes a chain's keys at the marks."""
REPORTS_AWAITED = 2
"""Load reports after a first token by which the prompt's blocks are reported, or were not kept.

The first report may have been under way when the token came.
"""


@dataclass(slots=True)
class _ComputedChain:
    """A computed chain with blocks not yet reported, and the load reports since."""

    marked: tuple[bytes, ...]
    reports: int = 0


class InFlightPrefixes:
    """Chains of prompts placed at prefill instances, until their blocks are reported."""

    def __init__(self) -> None:
        self._claims: dict[int, tuple[str, tuple[bytes, ...]]] = {}
        self._computed: dict[str, list[_ComputedChain]] = {}  # by instance
        self._at: dict[bytes, dict[str, int]] = {}  # by the key at a mark: prompts of each instance

    def placed(self, claim: int, instance: str, keys: Sequence[bytes]) -> None:
        """A prompt is placed."""
        marked = _keys_at_marks(keys)
        self._claims[claim] = instance, marked
        at = self._at
        for key in marked:
            there = at.get(key)
            if there is None:
                at[key] = {instance: 1}
            else:
                there[instance] = there.get(instance, 0) + 1

    def released(self, claim: int) -> None:
        """Drops a prompt; claims that are unknown or computed are fine."""
        self._drop(*self._claims.pop(claim, ("", ())))

    def computed(self, claim: int) -> str:
        """A prompt has a first token: the blocks will be reported soon.

        Returns the prompt's instance; "" = unknown claim.
        """
        instance, marked = self._claims.pop(claim, ("", ()))
        if marked:
            self._computed.setdefault(instance, []).append(_ComputedChain(marked))
        return instance

    def keys_reported(self, instance: str, holds: Callable[[bytes], bool]) -> None:
        """An instance has reported which blocks are there."""
        if instance in self._computed:
            self._keep(instance, lambda one: not holds(one.marked[-1]))

    def reported(self, instance: str) -> None:
        """An instance has reported load."""
        if instance in self._computed:
            for one in self._computed[instance]:
                one.reports += 1
            self._keep(instance, lambda one: one.reports < REPORTS_AWAITED)

    def lost(self, instance: str) -> None:
        """The instance and all its blocks are gone."""
        self._keep(instance, lambda _: False)

    def _keep(self, instance: str, wanted: Callable[[_ComputedChain], bool]) -> None:
        """Keeps the computed chains of an instance for which `wanted` is true."""
        kept: list[_ComputedChain] = []
        for one in self._computed.pop(instance, ()):
            if wanted(one):
                kept.append(one)
            else:
                self._drop(instance, one.marked)
        if kept:
            self._computed[instance] = kept

    def _drop(self, instance: str, marked: Sequence[bytes]) -> None:
        for key in marked:
            there = self._at[key]
            there[instance] -= 1
            if not there[instance]:
                del there[instance]
                if not there:
                    del self._at[key]

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Instances where a chain's beginning is being computed, and how many blocks."""
        at = self._at
        marked = _keys_at_marks(keys) if at else ()
        if not marked or marked[0] not in at:
            return {}
        # An instance with more blocks is at all shorter marks: the known marks are the first ones.
        known = bisect_left(marked, True, key=lambda key: key not in at)
        most, found = len(at[marked[0]]), dict[str, int]()
        for place in range(known - 1, -1, -1):
            there = at[marked[place]]
            if len(there) > len(found):
                found = dict.fromkeys(there, COMPARED_LENGTHS[place]) | found
                if len(found) == most:
                    break
        return found

    @property
    def claims(self) -> list[int]:
        """Claims of prompts without a first token."""
        return list(self._claims)

    @property
    def awaited(self) -> list[str]:
        """Instances with computed chains that are not reported yet."""
        return list(self._computed)

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(sorted(self._claims.items()), sorted(self._computed.items()))

    def check_invariants(self) -> None:
        """Asserts that the counts are those of the chains."""
        counted: dict[bytes, dict[str, int]] = {}
        computed = [(instance, one.marked) for instance, here in self._computed.items() for one in here]
        for instance, marked in [*self._claims.values(), *computed]:
            for key in marked:
                there = counted.setdefault(key, {})
                there[instance] = there.get(instance, 0) + 1
        assert counted == self._at


def _keys_at_marks(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """The keys at the marks."""
    marks = bisect_right(COMPARED_LENGTHS, len(keys))
    return _TAKE_MARKS[marks - 2](keys) if marks > 1 else tuple(keys[:marks])


def with_in_flight(
    prefixes: Sequence[tuple[int, int]], in_flight: Sequence[tuple[int, int]]
) -> Sequence[tuple[int, int]]:
    """Prefixes as `BlockTrie.match` gives them, where some slots will soon hold more: (blocks, slot)."""
    if not in_flight:
        return prefixes
    levels = dict(prefixes)
    for blocks, slot in in_flight:
        levels[blocks] = levels.get(blocks, 0) | 1 << slot
    mask, found = 0, []
    for blocks in sorted(levels, reverse=True):  # a slot with more blocks has these, too
        mask |= levels[blocks]
        found.append((blocks, mask))
    return found[::-1]


CLASS_WIDTH = 1.1
TYPICAL_TOKENS = 2048
"""Length of the prompt by which an instance's speed is judged."""
TYPICAL_PROMPT = work_of(TYPICAL_TOKENS, 0)
LONG_PROMPT_END = work_of(512, 16384)
"""The end of a long prompt."""
LOAD_BYTES = 1 << 28
"""Bytes of KV by which loads are compared."""
NO_WAIT = QueueWait(0.0, 0)
LATER_SHARE = 0.25
"""Share of a full step that later prompts take in the step in which a waiting prompt ends."""


RECENT_S = 60.0
"""Time constant of what is called recent, seconds."""


@dataclass(slots=True)
class RecentRate:
    """A sum that fades with `RECENT_S`, by event times: `total` as of the time `at`."""

    total: float = 0.0
    at: float = 0.0

    def add(self, amount: float, now: float) -> None:
        """Adds to the sum."""
        self.total, self.at = self._left(now) + amount, max(now, self.at)

    def per_s(self, now: float) -> float:
        """The sum per second."""
        total = self.total
        return total * exp(min(self.at - now, 0.0) / RECENT_S) / RECENT_S if total else 0.0

    def _left(self, now: float) -> float:
        return self.total * exp(min(self.at - now, 0.0) / RECENT_S)


USUAL_S = 600.0
"""Time constant of what is called usual, seconds."""


@dataclass(slots=True)
class UsualValue:
    """A mean over samples within `USUAL_S`, each weighted by the time since the sample before."""

    value: float = 0.0
    at: float = 0.0

    def sample(self, value: float, now: float) -> None:
        """Takes a sample."""
        kept = exp(min(self.at - now, 0.0) / USUAL_S)
        self.value, self.at = kept * self.value + (1.0 - kept) * value, max(now, self.at)


SAMPLED = 64
"""Sample size: above this number, some instances' queues stand for all."""


@dataclass(slots=True)
class PlacedPrompt:
    """A prompt that this conductor has placed at a prefill instance.

    Attributes:
        busy_s: seconds for which the prompt keeps the instance busy.
        tokens: to compute.
        overtaken: a prompt was placed before this prompt later.
        left_s: remaining part of `busy_s` in seconds, as of the instance's `advanced_at`.
        number: the instance's own number of the prompt; 0 = the instance gives no number, None = not known yet.
        covered: the last report includes the prompt, so the prompt is not counted any more.
        queue_key: the prompt's position among other prompts there; None = not known.
        order: orders one tenant's prompts; prompts without a key go first.
        tenant: the prompt's tenant.
    """

    busy_s: float
    number: int | None = None
    covered: bool = False
    queue_key: QueueKey | None = None
    tokens: int = 0
    overtaken: bool = False
    left_s: float = field(init=False)
    order: tuple[float, int] = field(init=False, default=(-inf, 0))
    tenant: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.left_s = self.busy_s
        if self.queue_key is not None:
            self.order, self.tenant = self.queue_key.order_in_tenant, self.queue_key.tenant


@dataclass(slots=True)
class PrefillInstanceState:
    """One prefill instance.

    Attributes:
        learnt: corrected speeds.
        free_at: time at which all known prompts are computed: prompts in the last report, and own prompts that the
            report does not include. Seconds on `now`'s clock.
        others_at: the same for prompts of other conductors.
        reported_at: time of the last report.
        overtaken: the last report was ignored, as a later answer had arrived first.
        prompts: prompts that this conductor has placed here, by claim.
        link: link over which others read blocks.
        recent: seconds of work that this conductor has placed here.
        advanced_at: time until which `PlacedPrompt.left_s` is counted.
        full_step: work of a full step.
    """

    facts: InstanceFacts
    slot: int
    learnt: PrefillCorrections
    free_at: float
    others_at: float = 0.0
    reported_at: float = 0.0
    overtaken: bool = False
    load: LoadFacts = field(default_factory=LoadFacts)
    turn: int = 0
    prompts: dict[int, PlacedPrompt] = field(default_factory=dict)
    health: HealthMonitor = field(default_factory=HealthMonitor)
    link: KVLink = field(default_factory=KVLink)
    recent: RecentRate = field(default_factory=RecentRate)
    advanced_at: float = 0.0
    full_step: PrefillWork = field(init=False)

    def __post_init__(self) -> None:
        self.full_step = work_of(self.facts.max_num_batched_tokens or TYPICAL_TOKENS, 0)

    @property
    def busy(self) -> bool:
        """Whether a prompt of this conductor is here."""
        return bool(self.prompts)

    @property
    def slowed(self) -> float:
        """Factor by which the queue takes longer than reported; a queue is mostly full steps."""
        return self.learnt.slowdown(self.full_step)

    def claim(self, number: int, busy_s: float, now: float, queue_key: QueueKey | None = None, tokens: int = 0) -> None:
        """Counts a prompt from now on."""
        self._advance(now)
        queue_key = None if self.facts.arrival_order else queue_key
        new = self.prompts[number] = PlacedPrompt(busy_s, queue_key=queue_key, tokens=tokens)
        for other in self.prompts.values() if queue_key is not None else ():
            other.overtaken = other.overtaken or (other.tenant == new.tenant and new.order < other.order)
        self.free_at = max(self.free_at, now) + busy_s
        self.recent.add(busy_s, now)

    def acknowledged(self, claim: int, number: int) -> None:
        """The instance has a claim's prompt, as the `number`-th; the last report may include the prompt already."""
        prompt = self.prompts[claim]
        prompt.number = number
        if 0 < number <= self.load.taken and not prompt.covered and self.load.drain_s is not None:
            prompt.covered = True
            self.free_at -= prompt.busy_s

    def release(self, number: int, now: float) -> None:
        """Stops counting a prompt."""
        self._advance(now)
        prompt = self.prompts.pop(number)
        if self.load.drain_s is None:  # the instance does not tell when free: the remaining work begins now
            self.free_at = now + self._uncovered_s()
        elif not prompt.covered:
            self.free_at -= prompt.busy_s

    def report(self, load: LoadFacts, now: float, slow_factor: float) -> None:
        """Takes a load report, which includes the first `taken` prompts that the instance got.

        A report with fewer prompts than known was overtaken by an answer, and is ignored. If the next report has fewer
        prompts, too, the answer was wrong.
        """
        self.overtaken = load.taken < self.load.taken and not self.overtaken
        if self.overtaken:
            return
        self.load, self.reported_at = load, now
        if load.speeds is not None:
            seconds, idle = work_seconds(load.speeds, *TYPICAL_PROMPT), not load.running + load.waiting
            self.learnt.report(self.health.report(load.speeds, seconds, now, slow_factor, idle=idle))
        if load.drain_s is None:
            return
        for prompt in self.prompts.values():
            prompt.covered = prompt.covered or (prompt.number is not None and prompt.number <= load.taken)
        drain_s = load.drain_s * self.slowed
        ahead_s = drain_s + self._uncovered_s()
        self.others_at = now + max(0.0, drain_s - sum([it.busy_s for it in self.prompts.values() if it.covered]))
        # An idle instance keeps the time since when idle: the longest idle instance is chosen first.
        self.free_at = now + ahead_s if ahead_s > 0 else min(self.free_at, now)

    def queue_s(self, key: QueueKey, all_s: float) -> float:
        """Predicted seconds until a prompt with this queue key begins, if the whole queue takes `all_s`.

        A prompt that goes before other prompts from this conductor waits for the tenant's earlier prompts, each in turn
        among the tenants, and for the step under way.
        """
        own = [(it.queue_key, it.busy_s) for it in self.prompts.values() if it.queue_key is not None]
        last = key.order_in_tenant
        before = [busy_s for it, busy_s in own if it.tenant == key.tenant and it.order_in_tenant < last]
        if len(before) == len(own):
            return all_s
        weights = {it.tenant: it.weight for it, _ in own} | {key.tenant: key.weight}
        turns = sum(weights.values()) / key.weight
        return min(all_s, turns * sum(before) + self._step_s(self.prompts.values()))

    def wait(self, key: QueueKey, now: float) -> QueueWait:
        """The place for a prompt with this queue key, if prompts are computed in key order.

        Prompts of other conductors go first. Tenants wait for their turns.
        """
        all_s = self.free_at - now
        if all_s <= 0.0:
            return NO_WAIT
        last, tenant, prompts = (key.rank, key.number), key.tenant, self.prompts
        left_s = before_s = 0.0
        behind = covered = strangers = 0
        for it, one_s in self._left(now) if prompts else ():
            if it.tenant != tenant:
                strangers += 1
                continue
            left_s += one_s
            covered += it.covered
            if it.order < last:
                before_s += one_s
            elif it.order > last:
                behind += 1
        if strangers:
            return QueueWait(self.queue_s(key, all_s), behind)
        others = self.load.running + self.load.waiting > covered
        if (others or left_s <= 0.0) and left_s < all_s:
            before_s += all_s - left_s  # from other conductors, or from prompts that take longer than predicted
        elif left_s > 0.0:
            before_s *= all_s / left_s
        wait_s = before_s + (self._step_s(prompts.values()) / 2 if behind else 0.0)
        return make(QueueWait, (min(all_s, wait_s), behind))

    def _left(self, now: float) -> list[tuple[PlacedPrompt, float]]:
        """This conductor's prompts in key order, and each prompt's remaining seconds.

        The time since `advanced_at` went to the first of them.
        """
        elapsed_s, left = now - self.advanced_at, []
        prompts = self.prompts.values()
        for it in sorted(prompts, key=_order_of) if len(prompts) > 1 else prompts:
            left_s = it.left_s
            if elapsed_s > 0.0:
                spent_s = min(elapsed_s, left_s)
                elapsed_s -= spent_s
                left_s -= spent_s
            left.append((it, left_s))
        return left

    def _advance(self, now: float) -> None:
        """Counts the time until now as spent on the first prompts."""
        if now > self.advanced_at:
            for it, left_s in self._left(now):
                it.left_s = left_s
            self.advanced_at = now

    def _step_s(self, prompts: Iterable[PlacedPrompt]) -> float:
        """Seconds of the step under way at most."""
        longest_s = max([it.busy_s for it in prompts])
        return (
            min(longest_s, work_seconds(self.learnt.speeds, *self.full_step))
            if self.facts.max_num_batched_tokens
            else longest_s
        )

    def there(self, now: float) -> InstanceLoad:
        """What is here."""
        load, facts, prompts, tokens = self.load, self.facts, 0, 0
        for it in self.prompts.values():
            if not it.covered:
                prompts, tokens = prompts + 1, tokens + it.tokens
        prompts = max(load.running + load.waiting + prompts, len(self.prompts))
        tokens += load.queued_tokens
        busy_share = self.recent.per_s(now)
        return make(InstanceLoad, (prompts, tokens, busy_share, load.free_blocks, facts.total_blocks, facts.stages))

    def observe(self, choice: PrefillChoice, there_s: float) -> None:
        """Learns from the measured seconds of a prompt with this prediction."""
        self.learnt.observe(choice.growing_s, choice.rest_s, there_s)

    def computed(self, now: float) -> None:
        """A prompt from this conductor has a first token: the next prompt begins now."""
        self.free_at = max(now, self.others_at) + sum([prompt.busy_s for prompt in self.prompts.values()])

    def _uncovered_s(self) -> float:
        return sum([prompt.busy_s for prompt in self.prompts.values() if not prompt.covered])

    def digest(self) -> bytes:
        """Hash of the state."""
        times = self.free_at, self.others_at, self.reported_at, self.overtaken, self.advanced_at
        state = self.learnt.state, times, self.load, self.turn, self.prompts, self.health, self.link, self.recent
        return digest_of(self.facts, self.slot, *state)


_order_of = attrgetter("order")


class TtftLimit(NamedTuple):
    """TTFT limit of a request.

    Attributes:
        within_s: seconds from now within which the first token must come.
        queue_key: position of the request among others.
    """

    within_s: float
    queue_key: QueueKey


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
        """Counts a decision."""
        self.decisions += 1
        self.agreed += real.id == shadow.id
        real_s, shadow_s = [
            (it if it.delay_s is not None else it.with_place(0.0, candidates.wait(it, 0.0))).ttft_s
            for it in (real, shadow)
        ]
        self.sooner_s += real_s - shadow_s if real.id != shadow.id else 0.0


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
        """See `InstancePool.add`."""
        super().add(instance)
        self._sample = []

    def remove(self, instance: PrefillInstanceState) -> None:
        """See `InstancePool.remove`."""
        super().remove(instance)
        self._sample = []

    def queue_s(self, choice: PrefillChoice, key: QueueKey) -> float:
        """Predicted seconds that a prompt with this queue key waits at the instance of a choice.

        A choice with a place given by the policy waits as predicted there.
        """
        instance = self.get(choice.id)
        if instance is None or choice.queue_s <= 0.0 or choice.delay_s is not None:
            return choice.queue_s
        return instance.queue_s(key, choice.queue_s)

    def wait(self, name: str, key: QueueKey, now: float) -> QueueWait:
        """The place for a prompt with this queue key at an instance with queues in key order."""
        instance = self.get(name)
        return instance.wait(key, now) if instance is not None else NO_WAIT

    def rank(self, instance: PrefillInstanceState) -> None:
        """Ranks an instance anew, after a change in load or speeds."""
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
        """Prefixes of a chain when prompts in flight are computed; `prefixes` are those of now."""
        in_flight = self.in_flight.match(keys)
        return with_in_flight(
            prefixes, [(blocks, it.slot) for name, blocks in in_flight.items() if (it := self.get(name))]
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
        """Predictions for the best instances by the policy, best first, then for some that cannot be used.

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
            if allowed and len(choices) < SHORTLIST:
                candidates = PoolCandidates(self, model, prefixes, now, prompt.request, arrivals, allowed, prompt)
                found = self._policy.order(candidates, SHORTLIST - len(choices))
                if not found:
                    raise ValueError(f"the policy has chosen none of {len(candidates)} instances")
                if self.shadow_policy is not None and not choices:
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
        """An integer in [0, limit), random by the seed, the number of this decision and `counter`."""
        return draw_below(limit, self._seed, self._decisions, counter)

    def placed(self, busy_s: float, now: float) -> None:
        """Counts a placed prompt in `arrivals`."""
        self._prompts.add(1.0, now)
        self._work.add(busy_s, now)

    def _sampled(self, now: float) -> Arrivals:
        """Recent placements, and the mean queue as a sample of the usual queue; of many instances, some are sampled."""
        count = max(1, len(self))
        looked_at = self._sample
        if not looked_at:
            looked_at = self._sample = list(islice(self.by_slot.values(), 0, None, -(-count // SAMPLED)))
        waits = [wait_s for it in looked_at if (wait_s := it.free_at - now) > 0.0]
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
        return most - min(most, max([shared, *(it.blocks for it in model.sources if it.id != name)]))

    def predict(
        self, model: PrefillLatencyModel, slot: int, blocks: int, now: float, excluded: str = ""
    ) -> PrefillChoice:
        """Predicts a prompt on an instance with `blocks` leading blocks; `excluded`: why the instance is ruled out."""
        instance = self.by_slot[slot]
        facts, learnt, free_at = instance.facts, instance.learnt, instance.free_at
        cost = model.cost(learnt.speeds, facts.stages, facts.max_num_batched_tokens, blocks, loads=facts.loads)
        load_s, prefill_s, busy_s, used, source, read_s, fixed_s, cold = cost
        queue_s = free_at - now if free_at > now else 0.0
        growing_s = (prefill_s - fixed_s) / learnt.growing
        waits = facts.max_num_batched_tokens and queue_s
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
        else:
            why = "no decode instance can take its KV now"
        return self.predict(model, slot, blocks_at(prefixes, slot), now, why)

    def digest(self) -> bytes:
        """Hash of the state."""
        lately = self._prompts, self._work, self._backlog, self._blocks, self._sole_blocks, self.shadow
        return digest_of(super().digest(), self._decisions, self.in_flight, *lately)

    def check_invariants(self) -> None:
        """As of all pools; and chains in flight belong to placed prompts."""
        super().check_invariants()
        self.in_flight.check_invariants()
        assert all(self.get(name) is not None for name in self.in_flight.awaited), "no instance will report it"


@frozen
class TypicalPrefillSeconds:
    """Seconds by which prefill instances are compared: a prompt, a long prompt's end, and a load.

    A class rather than a function, so that a journal can hold the value.
    """

    def __call__(self, speeds: Speeds) -> tuple[float, float, float]:
        load_s = LOAD_BYTES / speeds.load_bytes_per_s if speeds.load_bytes_per_s else 0.0
        return work_seconds(speeds, *TYPICAL_PROMPT), work_seconds(speeds, *LONG_PROMPT_END), load_s


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
            StoredPrefix(it.id, it.blocks, it.blocks if it.warm is None else it.warm, it.peer)
            for it in self._model.sources
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
