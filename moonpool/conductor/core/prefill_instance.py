"""The prompts of an instance as the conductor knows them, and when they will be computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.base.scheduling.latency import PrefillWork, work_of, work_seconds
from moonpool.base.scheduling.recent_and_usual import RecentRate
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.health_monitor import HealthMonitor
from moonpool.conductor.core.instances import InstanceFacts, LoadFacts
from moonpool.conductor.core.kv_links import KVLink
from moonpool.conductor.core.prefill_corrections import PrefillCorrections
from moonpool.conductor.placement.base import InstanceLoad, PrefillChoice, QueueWait, make

TYPICAL_TOKENS = 2048
"""Length of the prompt by which an instance's speed is judged."""
TYPICAL_PROMPT = work_of(TYPICAL_TOKENS, 0)
NO_WAIT = QueueWait(0.0, 0)


@dataclass(slots=True)
class PrefillInstanceState:
    """One prefill instance, or the prompts of a decode instance in the role both.

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
        step_s: seconds of a step of the answers that run beside the prompts; 0 = none run.
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
    step_s: float = 0.0
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
        """Count a prompt from now on."""
        self._advance(now)
        queue_key = None if self.facts.arrival_order else queue_key  # nobody goes before anybody there
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
        self._advance(now)
        prompt = self.prompts.pop(number)
        if self.load.drain_s is None:  # the instance does not tell when free: the remaining work begins now
            self.free_at = now + self._uncovered_s()
        elif not prompt.covered:
            self.free_at -= prompt.busy_s

    def report(self, load: LoadFacts, now: float, slow_factor: float) -> None:
        """Take a load report, which includes the first `taken` prompts that the instance got.

        A report with fewer prompts than known was overtaken by an answer, and is ignored. If the next report has fewer
        prompts, too, the answer was wrong.
        """
        # Calls and reports travel on different streams: an older report may come after a newer answer.
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
        # What the report includes beyond this conductor's own prompts is other conductors'.
        self.others_at = now + max(
            0.0, drain_s - sum([prompt.busy_s for prompt in self.prompts.values() if prompt.covered])
        )
        # An idle instance keeps the time since when idle: the longest idle instance is chosen first.
        self.free_at = now + ahead_s if ahead_s > 0 else min(self.free_at, now)

    def queue_s(self, key: QueueKey, all_s: float) -> float:
        """Return the predicted seconds until a prompt with this queue key begins, if the whole queue takes `all_s`.

        A prompt that goes before other prompts from this conductor waits for the tenant's earlier prompts, each in turn
        among the tenants, and for the step under way.
        """
        own = [(prompt.queue_key, prompt.busy_s) for prompt in self.prompts.values() if prompt.queue_key is not None]
        last = key.order_in_tenant
        before = [busy_s for other, busy_s in own if other.tenant == key.tenant and other.order_in_tenant < last]
        if len(before) == len(own):
            return all_s
        weights = {other.tenant: other.weight for other, _ in own} | {key.tenant: key.weight}
        turns = sum(weights.values()) / key.weight
        return min(all_s, turns * sum(before) + self._step_s(self.prompts.values()))

    def wait(self, key: QueueKey, now: float) -> QueueWait:
        """Return the place for a prompt with this queue key, if prompts are computed in key order.

        Prompts of other conductors go first. Tenants wait for their turns.
        """
        all_s = self.free_at - now
        if all_s <= 0.0:
            return NO_WAIT
        last, tenant, prompts = (key.rank, key.number), key.tenant, self.prompts
        left_s = before_s = 0.0
        behind = covered = strangers = 0
        for prompt, one_s in self._left(now) if prompts else ():
            if prompt.tenant != tenant:
                strangers += 1
                continue
            left_s += one_s
            covered += prompt.covered
            if prompt.order < last:
                before_s += one_s
            elif prompt.order > last:
                behind += 1
        if strangers:  # tenants take turns, so that order within the tenant is not all
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
        for prompt in sorted(prompts, key=_order_of) if len(prompts) > 1 else prompts:
            left_s = prompt.left_s
            if elapsed_s > 0.0:
                spent_s = min(elapsed_s, left_s)
                elapsed_s -= spent_s
                left_s -= spent_s
            left.append((prompt, left_s))
        return left

    def _advance(self, now: float) -> None:
        """Count the time until now as spent on the first prompts."""
        if now > self.advanced_at:
            for prompt, left_s in self._left(now):
                prompt.left_s = left_s
            self.advanced_at = now

    def _step_s(self, prompts: Iterable[PlacedPrompt]) -> float:
        """Return the seconds of the step under way at most."""
        longest_s = max([prompt.busy_s for prompt in prompts])
        return (
            min(longest_s, work_seconds(self.learnt.speeds, *self.full_step))
            if self.facts.max_num_batched_tokens
            else longest_s
        )

    def busy_share(self, now: float) -> float | None:
        """Return the share of its time that the instance has had work lately; None = it has some now."""
        return None if self.free_at > now else self.recent.mean_per_s(now)

    def there(self, now: float) -> InstanceLoad:
        load, facts, prompts, tokens = self.load, self.facts, 0, 0
        for prompt in self.prompts.values():
            if not prompt.covered:
                prompts, tokens = prompts + 1, tokens + prompt.tokens
        prompts = max(load.running + load.waiting + prompts, len(self.prompts))
        tokens += load.queued_tokens
        busy_share = self.recent.per_s(now)
        return make(InstanceLoad, (prompts, tokens, busy_share, load.free_blocks, facts.total_blocks, facts.stages))

    def observe(self, choice: PrefillChoice, there_s: float) -> None:
        """Learn from the measured seconds of a prompt with this prediction."""
        self.learnt.observe(choice.growing_s, choice.rest_s, there_s)

    def computed(self, now: float) -> None:
        """A prompt from this conductor has a first token: the next prompt begins now."""
        # A measured moment is better than the prediction, whose error would stay until the next report.
        self.free_at = max(now, self.others_at) + sum([prompt.busy_s for prompt in self.prompts.values()])

    def _uncovered_s(self) -> float:
        return sum([prompt.busy_s for prompt in self.prompts.values() if not prompt.covered])

    def digest(self) -> bytes:
        times = self.free_at, self.others_at, self.reported_at, self.overtaken, self.advanced_at
        state = self.learnt.state, times, self.load, self.turn, self.prompts, self.health, self.link, self.recent
        return digest_of(self.facts, self.slot, *state)


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


_order_of = attrgetter("order")
