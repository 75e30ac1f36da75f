"""The conductor's view of the cluster: instances, their blocks, their load, and requests routed there.

An instance's state is the last report plus the conductor's own requests there that the report does not include. A
request counts as soon as a place is chosen (a claim), so that a burst does not go to one instance.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from moonpool.base.errors import Unavailable
from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.base.scheduling.latency import decode_step_seconds
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.decode_instance import DecodeInstanceState, PlacedAnswer
from moonpool.conductor.core.decode_pool import DecodePool
from moonpool.conductor.core.events import KeysChanged
from moonpool.conductor.core.hindsight import Hindsight
from moonpool.conductor.core.instances import InstanceFacts, InstanceKind, LoadFacts
from moonpool.conductor.core.kv_links import NO_READ, LinkRead, ReadsInFlight
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.core.load_forecast import LoadForecaster
from moonpool.conductor.core.prefill_corrections import PrefillCorrections
from moonpool.conductor.core.prefill_instance import PrefillInstanceState
from moonpool.conductor.core.prefill_pool import PrefillPool
from moonpool.conductor.core.prefix_index import KeyEventResult, PrefixIndex
from moonpool.conductor.core.replication import PrefixReplication
from moonpool.conductor.core.router import Router
from moonpool.conductor.core.routing import (
    DEFAULT_ROUTING,
    EXPECTED_ANSWER_TOKENS,
    RoutingConfig,
    RoutingDecision,
    RoutingRequest,
)
from moonpool.conductor.core.store_pool import StoreInstanceState, StorePool

MAX_INDEX_KEYS = 4_000_000
"""KV blocks of all instances together that are remembered: a gigabyte of memory, at 250 bytes each."""


class ClusterView:
    """The cluster according to one conductor. Times are arguments, in seconds on one clock."""

    def __init__(self, config: RoutingConfig = DEFAULT_ROUTING, max_index_keys: int = MAX_INDEX_KEYS) -> None:
        """Start without instances; `max_index_keys` KV blocks are remembered at most."""
        self.index = PrefixIndex(max_index_keys)
        self.shape: KVShape | None = None
        """Shape of the KV; None while there is no engine."""
        self._slow_factor = config.slow_factor
        self._instances: dict[str, AnyInstance] = {}
        self.decodes = DecodePool(config.decode_policy)
        self.prefills = PrefillPool(config.policy, config.seed, config.shadow_policy)
        self.hindsight = Hindsight()
        self.forecasts = LoadForecaster(self.decodes, EXPECTED_ANSWER_TOKENS)
        self.stores = StorePool(config.kvstore_replicas)
        self.prefetch_share = config.prefetch_share if config.policy.stores else 0.0
        self.replication = PrefixReplication(config.copy_share if config.policy.stores else 0.0)
        self._router = Router(self.index, self.prefills, self.decodes, self.stores, config)
        self._reads = ReadsInFlight()
        self._claims: dict[int, list[PrefillInstanceState | DecodeInstanceState]] = {}
        self._next_claim = 1

    # --- instances -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._instances)

    @property
    def ready(self) -> bool:
        """Whether prompts and answers can be computed: an instance in the role both is enough."""
        return all(pool.mask & ~pool.draining_mask for pool in (self.prefills, self.decodes))

    def epoch(self, instance_id: str) -> int:
        """Return the epoch of an instance; 0 = not a member."""
        instance = self._instances.get(instance_id)
        return instance.facts.epoch if instance is not None else 0

    def all_suspected(self, suspects: Collection[str]) -> bool:
        """Return whether all prefill instances, or all decode instances, are among the suspects."""
        pools = [prefill.facts.id for prefill in self.prefills], [decode.facts.id for decode in self.decodes]
        return any(all(name in suspects for name in pool) for pool in pools)

    def paired(self, prefill: str, decode: str) -> bool:
        """Return whether KV can go from a prefill to a decode instance; both must be here."""
        sender, receiver = self.prefills.get(prefill), self.decodes.get(decode)
        return sender is not None and receiver is not None and sender.facts.kv_domain == receiver.facts.kv_domain

    def should_drain(self, instance_id: str) -> bool:
        """Whether requests must move away from an engine: the engine is slow or drains (decode), and another exists."""
        leaving = self.decodes.slow_mask | self.decodes.draining_mask
        if not (leaving or self.prefills.slow_mask):
            return False  # most of the time
        return self.prefills.should_drain(instance_id) or self.decodes.should_drain(instance_id, leaving)

    def join(self, facts: InstanceFacts, now: float) -> None:
        """Add an instance, with all blocks free until the first report.

        If the same epoch is a member already, the claims and learnt speeds are kept. An earlier epoch of
        the id is replaced.
        """
        earlier = self._instances.get(facts.id)
        if earlier is not None:
            self._take_out(earlier)
        self.index.add_instance(facts.id, reports_ssd=facts.reports_ssd)
        # The same process has only lost its stream: its queue and what was learnt of it are as before.
        same = earlier if earlier is not None and _is_same(earlier.facts, facts) else None
        instance = same or new_instance(facts, now)
        instance.slot = self.index.slot(facts.id)
        if isinstance(instance, StoreInstanceState):
            instance.memory = self.index.memory(facts.id)
        self._put_in(instance)

    def leave(self, instance_id: str) -> None:
        """Forget an instance; unknown ids are fine. The instance's claims no longer count."""
        instance = self._instances.get(instance_id)
        if instance is not None:
            self._take_out(instance)
            self.index.remove_instance(instance_id)
            self.hindsight.lost(instance_id)

    def report(self, instance_id: str, load: LoadFacts, now: float) -> None:
        """Take a load report; the report includes the claims that the instance knew (`acknowledged`).

        Unknown ids are fine.
        """
        self.index.sweep()
        instance = self._instances.get(instance_id)
        match instance:
            case PrefillInstanceState():
                instance.report(load, now, self._slow_factor)
                self.prefills.in_flight.reported(instance_id)
                self.prefills.changed(instance)
            case DecodeInstanceState():
                instance.report(load, now, self._slow_factor)
                self.decodes.changed(instance)
                self._report_prompts(instance, now)
            case StoreInstanceState():
                self.stores.report(instance, load)

    def keys_changed(self, event: KeysChanged) -> bool:
        """Take a message of KV events. Return whether a snapshot must be ordered.

        Raises:
            KeyError: the instance has not joined.
        """
        instance_id = event.instance
        applied = self.index.apply(
            instance_id,
            event.sequence,
            event.stored,
            event.removed,
            event.cooled,
            snapshot_begin=event.snapshot_begin,
            snapshot_end=event.snapshot_end,
        )
        instance = self._instances[instance_id]
        self.prefills.in_flight.keys_reported(instance_id, lambda key: self.index.holds(instance_id, key))
        slot = self.index.slot(instance_id)
        if slot != instance.slot:
            match instance:
                case PrefillInstanceState():
                    self.prefills.move(instance, slot)
                case DecodeInstanceState():
                    self.decodes.move(instance, slot)
                    if instance.prompts is not None:
                        self.prefills.move(instance.prompts, slot)
                case StoreInstanceState():
                    instance.slot, instance.memory = slot, self.index.memory(instance_id)
        return applied is KeyEventResult.RESYNC

    def _report_prompts(self, instance: DecodeInstanceState, now: float) -> None:
        """A decode instance in the role both has reported: its prompts, and the answers that run beside them."""
        prompts, load = instance.prompts, instance.load
        if prompts is None:
            return
        running = load.running
        prompts.step_s = decode_step_seconds(instance.speeds, running, load.context_tokens) if running else 0.0
        prompts.report(load.of_prompts, now, self._slow_factor)
        self.prefills.in_flight.reported(instance.facts.id)
        self.prefills.changed(prompts)

    def forget(self, instance_id: str, keys: Iterable[bytes], version: int) -> None:
        """Drop blocks that an instance was found not to hold, unless they were reported after `version`."""
        self.index.forget(instance_id, keys, version)

    def first_token(
        self,
        decision: RoutingDecision,
        computed: int,
        there_s: float,
        overhead_s: float,
        now: float,
        *,
        overtaken: bool = False,
    ) -> None:
        """Learn from a first token, which took `there_s` at the prefill instance and `overhead_s` around the instance.

        A prompt that others have overtaken there had no valid prediction: such a prompt teaches only the overhead.
        """
        instance = self.prefills.get(decision.prefill.id)
        if instance is None or self.shape is None:
            return
        size, foreseen = self.shape.block_size, self.tokens_to_compute(decision)
        instance.learnt.overhead.observe(overhead_s)
        if abs(computed - foreseen) < size and not overtaken:  # else another prompt was predicted
            instance.observe(decision.prefill, there_s)
        instance.computed(now)
        self.prefills.rank(instance)

    def overtaken(self, claim: int) -> bool:
        """Return whether a prompt was placed before the prompt of a claim later, at the same instance."""
        there = [instance for instance in self._claims.get(claim, ()) if isinstance(instance, PrefillInstanceState)]
        return any(instance.prompts[claim].overtaken for instance in there)

    def tokens_to_compute(self, decision: RoutingDecision) -> int:
        """Return the number of prompt tokens that the chosen instance is predicted to compute."""
        tokens, shape = decision.demand.prompt_tokens, self.shape
        return tokens - shape.reused_tokens(tokens, decision.prefill.used_blocks) if shape is not None else tokens

    # --- claims ----------------------------------------------------------------------------------------------------

    def claim_prefill(
        self,
        prefill: str,
        busy_s: float,
        now: float,
        source: str = "",
        queue_key: QueueKey | None = None,
        read: LinkRead = NO_READ,
        send_s: float = 0.0,
        tokens: int = 0,
    ) -> int:
        """Count a prompt on an instance until `release`, and time on links: the source's, and the instance's own.

        Returns:
            The claim's number. No claim number is used twice.
        """
        number, instances = self._new_claim()
        instance, lender = self.prefills.get(prefill), self._instances.get(source)
        if instance is not None:
            instance.claim(number, busy_s, now, queue_key, tokens)
            self.prefills.placed(busy_s, now)
            self.prefills.chose(instance)
            instances.append(instance)
            if send_s:
                self._reads.send(number, instance.link, send_s, now)
        if lender is not None:
            self._reads.claim(number, lender.link, read, now)
        return number

    def read_measured(self, claim: int, source: str, blocks: int, seconds: float, now: float) -> None:
        """Learn what the read of a claim took."""
        instance, shape = self._instances.get(source), self.shape
        if instance is not None and shape is not None:
            nbytes = shape.moved_bytes(blocks * shape.block_size, 0)
            self._reads.measured(claim, instance.link, nbytes, seconds, now)

    def claim_decode(self, instance_id: str, answer: PlacedAnswer) -> int:
        """Count an answer, or several together, on an instance until `release`; return the claim's number."""
        number, instances = self._new_claim()
        instance = self.decodes.get(instance_id)
        if instance is not None:
            instance.claim(number, answer)
            self.decodes.chose(instance)
            instances.append(instance)
        return number

    def acknowledged(self, claim: int, number: int = 0) -> None:
        """Note that the instance has confirmed the request.

        Args:
            claim: the request's claim there.
            number: requests the instance has taken so far, this one included; reports say how many they include. 0 =
                not known: the next report includes the request.
        """
        for instance in self._claims.get(claim, ()):
            instance.acknowledged(claim, number)
            self._changed(instance)

    def answer_grew(self, claim: int, tokens: int, now: float) -> None:
        """Note that the answer of a claim has `tokens` tokens now; unknown claims are fine."""
        for instance in self._claims.get(claim, ()):
            if isinstance(instance, DecodeInstanceState):
                instance.grew(claim, tokens, now)

    def release(self, claim: int, now: float) -> None:
        """Stop counting a claim: the prompt has a first token, the answer has ended, or neither will happen.

        A claim that was released before is fine.
        """
        self._reads.release(claim)
        self.prefills.in_flight.released(claim)
        for instance in self._claims.pop(claim, ()):
            match instance:
                case PrefillInstanceState():
                    instance.release(claim, now)
                case DecodeInstanceState():
                    instance.release(claim)
            self._changed(instance)

    @property
    def claims(self) -> list[int]:
        """Claims that were not released, ascending."""
        return sorted(self._claims)

    @property
    def prompts_in_flight(self) -> int:
        """Claims on prefill instances."""
        return sum([len(instance.prompts) for instance in self.prefills])

    @property
    def answers_in_flight(self) -> int:
        """Claims on decode instances."""
        return sum([len(instance.answers) for instance in self.decodes])

    @property
    def reads_in_flight(self) -> int:
        """Claims on links: prefixes that are being loaded."""
        return len(self._reads)

    @property
    def blocks_unreported(self) -> int:
        """Blocks of this conductor's answers that no report includes."""
        return sum([instance.unreported_blocks for instance in self.decodes])

    # --- plans -----------------------------------------------------------------------------------------------------

    def plan(self, request: RoutingRequest) -> RoutingDecision:
        """Route a request.

        Raises:
            Unavailable: no instance that is large enough takes requests now.
            InvalidRequest: no instance that was ever here is large enough.
        """
        if self.shape is None or not self.ready:
            raise Unavailable("no prefill or no decode instance has joined" + self._missing())
        return self._router.plan(request, self.shape)

    def _missing(self) -> str:
        pools = (("prefill", self.prefills), ("decode", self.decodes))
        return f" (missing: {', '.join(name for name, pool in pools if not pool.mask & ~pool.draining_mask)})"

    # --- upkeep ----------------------------------------------------------------------------------------------------

    def _put_in(self, instance: AnyInstance) -> None:
        self._instances[instance.facts.id] = instance
        match instance:
            case PrefillInstanceState():
                self.prefills.add(instance)
            case DecodeInstanceState():
                self.decodes.add(instance)
                if instance.prompts is not None:
                    instance.prompts.slot = instance.slot
                    self.prefills.add(instance.prompts)
            case StoreInstanceState():
                self.stores.add(instance)
        self.shape = self.shape or instance.facts.shape

    def _take_out(self, instance: AnyInstance) -> None:
        del self._instances[instance.facts.id]
        match instance:
            case PrefillInstanceState():
                self._take_out_prompts(instance)
            case DecodeInstanceState():
                self.decodes.remove(instance)
                if instance.prompts is not None:
                    self._take_out_prompts(instance.prompts)
            case StoreInstanceState():
                self.stores.remove(instance)
        if not len(self.prefills) and not len(self.decodes):  # engines of another model may come now
            self.shape = None
            self.prefills.largest_blocks = self.decodes.largest_blocks = 0

    def _take_out_prompts(self, instance: PrefillInstanceState) -> None:
        self.prefills.remove(instance)
        self.prefills.in_flight.lost(instance.facts.id)

    def _changed(self, instance: PrefillInstanceState | DecodeInstanceState) -> None:
        """Rank an instance anew if it is still a member."""
        if isinstance(instance, PrefillInstanceState):
            if self.prefills.get(instance.facts.id) is instance:
                self.prefills.changed(instance)
        elif self.decodes.get(instance.facts.id) is instance:
            self.decodes.changed(instance)

    def _new_claim(self) -> tuple[int, list[PrefillInstanceState | DecodeInstanceState]]:
        number, self._next_claim = self._next_claim, self._next_claim + 1
        instances = self._claims[number] = []
        return number, instances

    def digest(self) -> bytes:
        pools, learnt = (self.prefills, self.decodes, self.stores), (self.forecasts, self.replication, self.hindsight)
        return digest_of(self.index, *pools, *learnt, self.shape, sorted(self._claims), self._next_claim)

    def check_invariants(self) -> None:
        """Assert that instances, pools, index and claims agree."""
        for part in (
            self.index,
            self.prefills,
            self.decodes,
            self.stores,
            self.forecasts,
            self._reads,
            self.replication,
        ):
            part.check_invariants()
        prompts = {decode.facts.id: decode.prompts for decode in self.decodes if decode.prompts is not None}
        assert {name for name in prompts if self.prefills.get(name) is prompts[name]} == prompts.keys()
        plain = [prefill for prefill in self.prefills if prefill.facts.id not in prompts]
        pools: Iterator[AnyInstance] = iter([*plain, *self.decodes, *self.stores])
        assert {instance.facts.id: instance for instance in pools} == self._instances
        assert self.prefills.both_mask == self.decodes.both_mask
        for name, instance in self._instances.items():
            assert instance.slot == self.index.slot(name)
        for decode in self.decodes:
            decode.check_invariants()
        held = [number for prefill in self.prefills for number in prefill.prompts]
        held += [number for decode in self.decodes for number in decode.answers]
        assert len(set(held)) == len(held)
        assert set(held) <= set(self._claims)
        assert set(self.prefills.in_flight.claims) <= set(self._claims), "a released claim is still in flight"


AnyInstance = PrefillInstanceState | DecodeInstanceState | StoreInstanceState


def new_instance(facts: InstanceFacts, now: float) -> AnyInstance:
    """Return the instance, idle since `now`, not in any pool yet."""
    if facts.kind is InstanceKind.KVSTORE:
        return StoreInstanceState(facts, -1)
    load, prompts = LoadFacts(free_blocks=facts.total_blocks), None
    if facts.kind is InstanceKind.PREFILL or facts.computes_prompts:
        emulated = facts.shape is not None and facts.shape.emulated
        prompts = PrefillInstanceState(facts, -1, PrefillCorrections(facts.speeds, alone=emulated), now, load=load)
    if prompts is not None and facts.kind is InstanceKind.PREFILL:
        return prompts
    decode = DecodeInstanceState(facts, -1, facts.speeds, load, prompts=prompts)
    if prompts is not None:
        prompts.link = decode.link  # one instance: one link
    return decode


def _is_same(earlier: InstanceFacts, facts: InstanceFacts) -> bool:
    """Whether both are the same process in the same role."""
    roles = [(told.epoch, told.kind, told.computes_prompts) for told in (earlier, facts)]
    return roles[0] == roles[1]
