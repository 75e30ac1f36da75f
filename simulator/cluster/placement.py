"""Where requests go: the conductor's own picture and plans, and the baselines of the Mooncake paper."""

from collections.abc import Sequence

from moonpool.core.draws import draw_below
from services.conductor.core.decodes import Answer
from services.conductor.core.facts import InstanceFacts, Kind, Shape
from services.conductor.core.lengths import Stratum, stratum_of
from services.conductor.core.picture import Picture
from services.conductor.core.plan import Plan
from simulator.cluster.config import ClusterConfig
from simulator.cluster.requests import Attempt, Request

POLICIES = {
    "random": "any prefill instance, by seed",
    "load-balance": "the shortest queue, whoever holds what",
    "cache-aware": "the least predicted time to first token, each instance with its own blocks only",
    "kvcache-centric": "the least predicted time to first token, blocks of kvstores included",
}
"""How prefill instances are chosen, the worst first."""
_KINDS = {"p": Kind.PREFILL, "d": Kind.DECODE, "s": Kind.KVSTORE}


def _stratum(request: Request) -> Stratum:
    return stratum_of("", request.tokens)


class Placement:
    """Plans requests with the conductor's `Picture`. Instances are called "p3", "d0", "s1"."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self.picture = Picture(balancing_threshold=config.threshold)
        self._shape = Shape(config.block_tokens, config.profile.token_bytes, config.profile.layers, emulated=True)
        self._incarnations: dict[str, int] = {}
        self._sequences: dict[str, int] = {}
        self._queued_s = {f"p{number}": 0.0 for number in range(config.prefill)}
        self._decisions = 0
        stores = config.kvstore if config.policy == "kvcache-centric" else 0
        for kind, count in (("p", config.prefill), ("d", config.decode), ("s", stores)):
            for number in range(count):
                self.joined(f"{kind}{number}", 0.0)

    def joined(self, name: str, now: float) -> None:
        """An instance joins, empty; what it was before is forgotten."""
        config, kind = self._config, _KINDS[name[0]]
        incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        facts = InstanceFacts(
            id=name,
            incarnation=incarnation,
            kind=kind,
            total_blocks=0 if kind is Kind.KVSTORE else config.blocks,
            shape=None if kind is Kind.KVSTORE else self._shape,
            speeds=config.profile.speeds,
            step_tokens=config.step_tokens,
            capacity_bytes=config.store_bytes if kind is Kind.KVSTORE else 0,
        )
        self.picture.join(facts, now)
        self.picture.events(name, 1, (), (), snapshot_begin=True, snapshot_end=True)
        self._sequences[name] = 1

    def knows(self, name: str) -> bool:
        """Whether an instance has joined."""
        return name in self._sequences

    def lost(self, name: str) -> None:
        """An instance is gone."""
        self.picture.leave(name)
        self._sequences.pop(name, None)

    def keys_changed(self, name: str, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """An instance tells what came and what left; nobody listens to one that has not joined."""
        if name in self._sequences:
            self._sequences[name] += 1
            self.picture.events(name, self._sequences[name], stored, removed)

    def plan(self, request: Request, now: float) -> Plan:
        """Where a request could go.

        Raises:
            Unavailable: no instance takes it now.
            InvalidRequest: no instance is large enough, ever.
        """
        self._decisions += 1
        chosen = self._baseline()
        keys = request.keys
        return self.picture.plan(
            tokens=request.tokens + request.made,
            answer_tokens=request.answer - request.made,
            keys=keys,
            prompt_key=keys[0] if keys else request.number.to_bytes(32, "little"),
            now=now,
            suspects=[name for name in self._queued_s if name != chosen] if chosen else (),
        )

    def _baseline(self) -> str:
        """The prefill instance that a baseline picks; empty when the plan is the picture's own."""
        there = [name for name in self._queued_s if name in self._sequences]
        if not there or self._config.policy in ("cache-aware", "kvcache-centric"):
            return ""
        if self._config.policy == "random":
            return there[draw_below(len(there), self._config.seed, self._decisions)]
        first = self._decisions % len(there)  # equals take turns
        return min(there[first:] + there[:first], key=self._queued_s.__getitem__)

    def claim(self, attempt: Attempt, plan: Plan, now: float) -> None:
        """Counts an attempt on its instances until it is released."""
        attempt.busy_s = plan.prefill.busy_s
        self._queued_s[plan.prefill.id] += attempt.busy_s
        attempt.prefill_claim = self.picture.claim_prefill(
            plan.prefill.id, plan.prefill.busy_s, now, plan.prefill.kvstore
        )
        if plan.decodes:
            choice, stratum = plan.decodes[0], _stratum(attempt.request)
            attempt.decode_claim = self.picture.claim_decode(
                choice.id,
                Answer(attempt.tokens, choice.blocks, stratum=stratum, told_at=now + plan.prefill.ttft_s),
            )

    def started(self, attempt: Attempt, now: float) -> None:
        """An answer has its first token."""
        self.picture.grew(attempt.decode_claim, 1, now)
        self.picture.forecasts.lengths.begin(attempt.request.number, _stratum(attempt.request))

    def over(self, request: Request, *, done: bool) -> None:
        """A request has ended, by itself (`done`) or not."""
        lengths = self.picture.forecasts.lengths
        if done:
            lengths.ended(request.number, request.answer)
        lengths.gone(request.number)

    def queued_s(self, prefill: str) -> float:
        """Seconds of prompts that were placed on a prefill instance and are not computed."""
        return max(self._queued_s[prefill], 0.0)

    def prompt_done(self, attempt: Attempt, now: float) -> None:
        """The prompt keeps its instance busy no longer; a second time is fine."""
        self._queued_s[f"p{attempt.prefill}"] -= attempt.busy_s
        attempt.busy_s = 0.0
        self.picture.release(attempt.prefill_claim, now)

    def answer_done(self, attempt: Attempt, now: float) -> None:
        """The answer has ended, or will not be; a second time is fine."""
        self.picture.release(attempt.decode_claim, now)

    def check_at_rest(self) -> None:
        """Asserts that nothing is counted."""
        picture = self.picture
        assert picture.prompts_in_flight == picture.answers_in_flight == picture.reads_in_flight == 0
        assert all(abs(seconds) < 1e-6 for seconds in self._queued_s.values())
        picture.check_invariants()
