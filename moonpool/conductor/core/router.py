"""Routing.

A request's prefill and decode instance, source of the prefix, kvstores that keep the blocks, and copies of hot
prefixes.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.frozen import frozen
from moonpool.base.kv import rendezvous
from moonpool.base.sampling_params import LORA
from moonpool.base.scheduling.fair_share import QueueKey, priority_rank
from moonpool.base.scheduling.latency import decode_step_seconds, prefill_seconds, steps_of, transfer_seconds
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.base.settings import setting
from moonpool.conductor.core.decode_pool import DecodeInstanceState, DecodePool
from moonpool.conductor.core.instances import SHORTLIST, InstanceFacts, LoadFacts, blocks_at
from moonpool.conductor.core.latency_model import (
    DecodeLatencyModel,
    Demand,
    KVLink,
    KVShape,
    PrefillLatencyModel,
    PrefixHolder,
    make,
)
from moonpool.conductor.core.prefill_pool import PrefillInstanceState, PrefillPool, PromptToPlace, TtftLimit
from moonpool.conductor.core.prefix_index import NO_SLOT, PrefixIndex, slots_in
from moonpool.conductor.placement.base import (
    DecodeChoice,
    DecodePolicy,
    PlacementPolicy,
    PlacementRequest,
    PrefillChoice,
    SessionFacts,
)
from moonpool.conductor.placement.decode_policies import DECODE_POLICIES, DEFAULT_DECODE_POLICY
from moonpool.conductor.placement.policies import DEFAULT_POLICY, POLICIES

EXPECTED_ANSWER_TOKENS = 256
"""Most answers are shorter than their limit: decode instances are compared for this many tokens at most."""
SHARED_BY = 4
"""A prefix that so many different chains continue is shared; fewer may be one turn asked again."""
MAX_FORKS = 1 << 14
MAX_REPLICAS = 8


class StoreView(NamedTuple):
    """A kvstore's state for a request.

    `blocks`: leading blocks of the request's chain in the store. `warm`: those of them in memory, the others are on SSD
    only; None = unknown. `busy`: sessions that the store serves. `score`: of rendezvous hashing.
    """

    id: str
    blocks: int
    busy: int = 0
    score: float = 0.0
    warm: int | None = None


def in_reading_order(stores: Sequence[StoreView]) -> list[StoreView]:
    """Return the stores in the order to read the chain from: longest prefix, least busy, most in memory, score."""
    return sorted(stores, key=_reading_order)


def _reading_order(store: StoreView) -> tuple[int, int, int, float, str]:
    warm = store.blocks if store.warm is None else store.warm
    return -store.blocks, store.busy, -warm, -store.score, store.id


def choose_write_back(stores: Sequence[StoreView], copies: int, *, shared: bool = False) -> list[StoreView]:
    """Return the stores that shall hold the chain, at most `copies` of them, best first.

    A store that holds at least half as much as the best keeps the chain: completing the chain is quicker than filling
    another store. With `shared`, stores hold only a prefix that many chains share, and the score alone decides.
    """
    half = max((store.blocks for store in stores), default=0) / 2

    def order(store: StoreView) -> tuple[int, float, str]:
        kept = 0 if shared or store.blocks < half else store.blocks
        return -kept, -store.score, store.id

    return nsmallest(copies, stores, key=order)


def rendezvous_weights(capacities: Mapping[str, int]) -> dict[str, float]:
    """Return rendezvous weights: capacities in bytes; an unknown capacity (0) counts as the mean of the others."""
    known = [capacity for capacity in capacities.values() if capacity > 0]
    usual = sum(known) / len(known) if known else 1.0
    return {name: float(capacity) if capacity > 0 else usual for name, capacity in capacities.items()}


class ChainForks:
    """Where chains fork: for each last held block the different blocks that followed, in bounded memory.

    A conversation's next turn follows the conversation's last block once. A block that many different chains follow
    ends a shared prefix, such as a system prompt, and those chains may go to different stores.
    """

    def __init__(self, max_blocks: int = MAX_FORKS) -> None:
        """Start empty; beyond `max_blocks` blocks, the least recently met are dropped."""
        if max_blocks < 1:
            raise ValueError("max_blocks must be positive")
        self._limit = max_blocks
        self._followers: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._followers)

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._followers)

    def shared(self, block: bytes, follower: bytes) -> bool:
        """Note that a chain continues `block` with `follower`; return whether `block` ends a shared prefix."""
        known = self._followers.pop(block, ())
        if len(known) < SHARED_BY and follower not in known:
            known = (*known, follower)
        self._followers[block] = known
        if len(self._followers) > self._limit:
            self._followers.popitem(last=False)
        return len(known) >= SHARED_BY

    def check_invariants(self) -> None:
        """Raise AssertionError when the memory is inconsistent."""
        assert len(self._followers) <= self._limit
        for known in self._followers.values():
            assert 0 < len(set(known)) == len(known) <= SHARED_BY


@dataclass(slots=True)
class StoreInstanceState:
    """One kvstore.

    Prefixes are loaded over the store's `link`; `memory` is the slot of those in memory (`PrefixIndex`).
    """

    facts: InstanceFacts
    slot: int
    memory: int = NO_SLOT
    load: LoadFacts = field(default_factory=LoadFacts)
    link: KVLink = field(default_factory=KVLink)


class StorePool:
    """All kvstores.

    Args:
        replicas: stores that shall hold each chain, if there are so many.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._by_id: dict[str, StoreInstanceState] = {}
        self._weights: dict[str, float] = {}  # of those that take requests
        self._forks = ChainForks()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[StoreInstanceState]:
        """All, in order of joining."""
        return iter(self._by_id.values())

    def get(self, instance_id: str) -> StoreInstanceState | None:
        """The store of that id."""
        return self._by_id.get(instance_id)

    def add(self, store: StoreInstanceState) -> None:
        """Takes a store in."""
        self._by_id[store.facts.id] = store
        self._weigh()

    def remove(self, store: StoreInstanceState) -> None:
        """Takes a store out."""
        del self._by_id[store.facts.id]
        self._weigh()

    def report(self, store: StoreInstanceState, load: LoadFacts) -> None:
        """Takes a report."""
        weigh, store.load = load.draining != store.load.draining, load
        if weigh:
            self._weigh()

    def views(self, keys: Sequence[bytes], prompt_key: bytes, prefixes: Sequence[tuple[int, int]]) -> list[StoreView]:
        """The stores as a request sees them; `prefixes` are the result of `BlockTrie.match` for `keys`."""
        stores = [self._by_id[name] for name in self._weights]
        held: dict[int, int] = {}
        everyone = 0
        for store in stores:
            everyone |= 1 << store.slot
            if store.memory != NO_SLOT:
                everyone |= 1 << store.memory
        for blocks, mask in prefixes:
            if here := mask & everyone:
                held.update(dict.fromkeys(slots_in(here), blocks))
        views = []
        for store in stores:
            running, reads = store.load.running, len(store.link.reads)
            warm = None if store.memory == NO_SLOT else held.get(store.memory, 0)
            busy = running if running > reads else reads
            views.append(make(StoreView, (store.facts.id, held.get(store.slot, 0), busy, 0.0, warm)))
        # Scores decide among equals. If one store alone holds blocks, that store is read from and keeps the chain.
        alone = sum([view.blocks > 0 for view in views]) == 1 == self._replicas
        return views if alone else self._scored(keys, prompt_key, views)

    def _scored(self, keys: Sequence[bytes], prompt_key: bytes, views: Sequence[StoreView]) -> list[StoreView]:
        """The views with scores for the first block that no store holds: the first that may be the chain's own."""
        longest = max([view.blocks for view in views], default=0)
        key = keys[min(longest, len(keys) - 1)] if keys else prompt_key
        return [view._replace(score=rendezvous.score(key, view.id, self._weights[view.id])) for view in views]

    def write_back(self, keys: Sequence[bytes], prompt_key: bytes, views: Sequence[StoreView]) -> tuple[StoreView, ...]:
        """The stores that shall hold the chain, also for a prompt without a full block: the answer may fill blocks."""
        holders = [view for view in views if view.blocks]
        longest = max([view.blocks for view in holders], default=0)
        parts = len(views) > self._replicas and 0 < longest < len(keys)  # else no decision is needed
        shared = parts and self._forks.shared(keys[longest - 1], keys[longest])
        if len(holders) == self._replicas == 1 and not shared:
            return tuple(holders)  # as below
        rated = self._scored(keys, prompt_key, views) if shared else views
        return tuple(choose_write_back(rated, self._replicas, shared=shared))

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._by_id, self._forks)

    def check_invariants(self) -> None:
        """Asserts that ids and weights agree."""
        self._forks.check_invariants()
        assert all(store.facts.id == name for name, store in self._by_id.items())
        assert list(self._weights) == [name for name, store in self._by_id.items() if not store.load.draining]

    def _weigh(self) -> None:
        self._weights = rendezvous_weights(
            {name: store.facts.capacity_bytes for name, store in self._by_id.items() if not store.load.draining}
        )


MAX_PEERS = 2
"""Engine instances considered for one prompt: among those with most blocks, and among those with fewer."""
MAX_LOOKED_AT = 16
"""Of instances that hold equally much, so many are compared by how busy their links are."""
MAX_FALLBACK_HOLDERS = 2
"""Further instances to load a prefix from if the chosen one fails."""
Prefixes = Sequence[tuple[int, int]]


class PrefixHolders:
    """Finds instances that a prefix can be loaded from.

    Args:
        pools: the engine instances' pools; none = only kvstores are read from.
        stores: the kvstores; None = they are not read from.
    """

    def __init__(self, pools: Sequence[PrefillPool | DecodePool], stores: StorePool | None) -> None:
        self._pools = pools
        self._stores = stores

    def of(
        self,
        views: Sequence[StoreView],
        prefixes: Prefixes,
        suspects: Callable[[PrefillPool | DecodePool], int],
        now: float,
    ) -> list[PrefixHolder]:
        """Instances a request may load from: kvstores first, in reading order, then engine instances."""
        return [*self._kvstores(views, now), *self._peers(prefixes, suspects, now)]

    def _kvstores(self, views: Sequence[StoreView], now: float) -> list[PrefixHolder]:
        """The best ones that hold something."""
        best = in_reading_order([view for view in views if view.blocks])[: 1 + MAX_FALLBACK_HOLDERS]
        links = [(view, store.link) for view in best if self._stores and (store := self._stores.get(view.id))]
        return [
            PrefixHolder(
                view.id, view.blocks, link.wait_s(now), link.memory.known(now),
                warm=view.warm, cold_bytes_per_s=link.ssd.known(now),
            )
            for view, link in links
        ]  # fmt: skip

    def _peers(
        self, prefixes: Prefixes, suspects: Callable[[PrefillPool | DecodePool], int], now: float
    ) -> list[PrefixHolder]:
        """Engine instances that hold most, and the best of those that hold less.

        Args:
            prefixes: instances by length of the prefix, as `BlockTrie.match` gives them.
            suspects: mask of a pool's instances that are not asked.
            now: seconds.
        """
        there = [
            (pool, pool.domain_mask("") & ~pool.draining_mask & ~pool.slow_mask & ~suspects(pool))
            for pool in self._pools
        ]
        allowed = sum([mask for _, mask in there])
        found: list[PrefixHolder] = []
        for blocks, mask in reversed(prefixes):
            if len(found) == MAX_PEERS:
                break
            if here := mask & allowed:
                found.append(self._freest(blocks, here, now))
                allowed &= ~mask
        return found

    def _freest(self, blocks: int, mask: int, now: float) -> PrefixHolder:
        if mask & (mask - 1):
            holders = [self._at(slot) for slot in islice(slots_in(mask), MAX_LOOKED_AT)]
            best = min(holders, key=lambda it: (it.link.wait_s(now), it.turn, it.facts.id))
        else:
            best = self._at(mask.bit_length() - 1)
        link = best.link
        return make(PrefixHolder, (best.facts.id, blocks, link.wait_s(now), link.memory.known(now), True, None, 0.0))

    def _at(self, slot: int) -> PrefillInstanceState | DecodeInstanceState:
        prefills, decodes = self._pools
        return prefills.by_slot[slot] if slot in prefills.by_slot else decodes.by_slot[slot]


def holders_to_load_from(
    sources: Sequence[PrefixHolder], chosen: str, local_blocks: int, held_blocks: int
) -> tuple[PrefixHolder, ...]:
    """Instances to load from: the chosen instance first, then by prefix length; none if no load is needed.

    If prompts in flight are expected to bring what the instance lacks, no source is chosen. Fallbacks are given all the
    same, as those prompts may fail.

    Args:
        sources: instances that were considered.
        chosen: id of the instance that the prediction assumes; "" = none.
        local_blocks: leading blocks that the loading instance holds, or will hold when prompts in flight are computed.
        held_blocks: leading blocks there now.
    """
    least = local_blocks if chosen else held_blocks
    holders = [source for source in sources if source.blocks > least] if chosen or held_blocks < local_blocks else []
    holders.sort(key=lambda source: (source.id != chosen, -source.blocks))
    return tuple(holders[: 1 + MAX_FALLBACK_HOLDERS])


class ReplicationHint(NamedTuple):
    """What a request would have gained if an instance had held a prefix of the prompt.

    Attributes:
        blocks: length of the prefix.
        target: the instance.
        source: instance that holds the prefix.
        gain_s: seconds by which the first token would have come sooner.
        read_s: seconds for which a copy takes the source's link.
    """

    blocks: int
    target: str
    source: str
    gain_s: float
    read_s: float


@frozen
class RoutingDecision:
    """Where a request goes, best first.

    Attributes:
        prefill: the best of `candidates`.
        decodes: a few, best first; empty if decode is not needed.
        sources: the prefix is loaded from the first of them that answers.
        write_back: kvstores that shall hold the chain.
        candidates: the best prefill instances, then some that cannot be used.
        demand: what the request needs.
        index_version: version of the prefix index behind the decision, for `ClusterView.forget`.
        emulated: compute is emulated.
        at_decode: the single decode instance computes the prompt's end; `prefill` predicts that.
        hint: the copy of a prefix from which the request would have gained; None = none, or copies are off.
        send_s: predicted seconds of sending the KV that decode lacks.
    """

    prefill: PrefillChoice
    decodes: tuple[DecodeChoice, ...]
    sources: tuple[PrefixHolder, ...]
    write_back: tuple[StoreView, ...]
    candidates: tuple[PrefillChoice, ...]
    demand: Demand
    index_version: int
    emulated: bool = False
    at_decode: bool = False
    hint: ReplicationHint | None = None
    send_s: float = 0.0


MAX_HOT_PREFIXES = 1024
"""Prefixes that are watched: those of most regret. Up to twice as many are kept before the others are dropped."""
REGRET_HALF_LIFE_S = 30.0
MIN_PROMPTS = 2.0
"""Least demand for a copy: the prompts that asked for a prefix. Each counts 1 at first, and half after each
`REGRET_HALF_LIFE_S`: three within about 40 s, or two at once. The next turn of a conversation is no demand."""
MIN_GAIN = 2.0
"""Least ratio of the seconds lost without a copy to the seconds that the copy takes."""


@frozen
class ReplicatePrefix:
    """Order an instance to copy a chain's blocks from another one, because many requests want them."""

    instance: str
    keys: tuple[bytes, ...]
    source: str
    tenant: str


@frozen
class StopReplication:
    """Call off what was ordered of a chain with this last key: the blocks are not wanted there any more."""

    instance: str
    tail: bytes


class LinkBudget:
    """Bounds the share of each instance's link, in both directions, that copies take.

    Args:
        share: of a link; 0 = no copy is allowed.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._free_at: dict[str, float] = {}  # when an instance's link allows another copy

    def __bool__(self) -> bool:
        return self._share > 0

    def take(self, target: str, source: str, read_s: float, now: float) -> bool:
        """Takes a copy of `read_s` seconds, unless one end's link has had as much as allowed. Returns whether taken."""
        self._free_at = {end: at for end, at in self._free_at.items() if at > now}
        if target in self._free_at or source in self._free_at:
            return False
        self._free_at[target] = self._free_at[source] = now + read_s / self._share
        return True

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._free_at)


@dataclass(slots=True)
class PrefixRegret:
    """Seconds lost because a prefix is not where prompts go, and the prompts that lost them, as of the time `at`.

    Both are halved after each `REGRET_HALF_LIFE_S`.
    """

    lost_s: float
    prompts: float
    at: float

    def age(self, now: float) -> None:
        """Lets time pass."""
        left = 0.5 ** ((now - self.at) / REGRET_HALF_LIFE_S)
        self.lost_s, self.prompts, self.at = self.lost_s * left, self.prompts * left, now


class PrefixReplication:
    """Orders copies of hot prefixes.

    Args:
        share: share of an instance's link that copies may take, in both directions; 0 = no copies.

    Attributes:
        ordered: copies ordered so far.
    """

    def __init__(self, share: float) -> None:
        self._budget = LinkBudget(share)
        self._regrets: dict[bytes, PrefixRegret] = {}
        self.ordered = 0

    def __bool__(self) -> bool:
        return bool(self._budget)

    def placed(
        self, keys: Sequence[bytes], hint: ReplicationHint | None, tenant: str, now: float
    ) -> ReplicatePrefix | None:
        """Counts the hint of a request that was placed; returns the order for a copy if there is enough demand."""
        if hint is None:
            return None
        key = keys[hint.blocks - 1]
        regret = self._regrets.get(key)
        if regret is None:
            self._bound(now)
            regret = self._regrets[key] = PrefixRegret(0.0, 0.0, now)
        regret.age(now)
        regret.lost_s += hint.gain_s
        regret.prompts += 1.0
        if regret.prompts < MIN_PROMPTS or regret.lost_s < MIN_GAIN * hint.read_s:
            return None
        if not self._budget.take(hint.target, hint.source, hint.read_s, now):
            return None
        del self._regrets[key]
        self.ordered += 1
        return ReplicatePrefix(hint.target, tuple(keys[: hint.blocks]), hint.source, tenant)

    def _bound(self, now: float) -> None:
        """Drops the prefixes of least regret when there are too many."""
        if len(self._regrets) < 2 * MAX_HOT_PREFIXES:
            return
        for regret in self._regrets.values():
            regret.age(now)
        kept = sorted(self._regrets.items(), key=lambda item: -item[1].lost_s)[:MAX_HOT_PREFIXES]
        self._regrets = dict(kept)

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._regrets, self._budget, self.ordered)

    def check_invariants(self) -> None:
        """Asserts that what is remembered is bounded."""
        assert len(self._regrets) <= 2 * MAX_HOT_PREFIXES
        assert all(regret.lost_s >= 0 for regret in self._regrets.values())


DECODE_STEP_TOKENS = 256
"""Most tokens that a decode instance computes beside the batch in a step (`max_num_batched_tokens` there)."""


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


class DecodeSidePrefill:
    """Finds a decode instance that holds most of a prompt and can compute the remaining tokens.

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
        """The best decode instance among those with most of the prompt; None if there is none.

        Best is the least TTFT and cost to others together. `other` is the best prefill instance.
        """
        pool, model = self._decodes, DecodeLatencyModel(demand, shape)
        allowed = pool.eligible_mask(demand.total_blocks, demand.needs) & ~pool.mask_of(suspects)
        for blocks, mask in reversed(prefixes):
            tokens = demand.prompt_tokens - shape.reused_tokens(demand.prompt_tokens, blocks)
            if tokens > self._max_tokens:
                continue
            slots = [slot for slot in slots_in(mask & allowed) if _has_memory(pool.by_slot[slot], model)][:SHORTLIST]
            choices = [_decode_side_choice(pool.by_slot[slot], model, tokens, blocks, demand, other) for slot in slots]
            known = [it for it in choices if it.prefill.prefill_s > 0.0]
            if known:
                return min(known, key=lambda it: (it.prefill.ttft_s + it.cost_s, it.prefill.id))
        return None


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
    cost_s = running * compute_s
    return DecodeSideChoice(prefill, decode, cost_s, prefill.ttft_s + cost_s < other.ttft_s)


@frozen
class RoutingConfig:
    """How requests are routed.

    Attributes:
        balancing_threshold: a prefix elsewhere counts if this many times longer than the instance's own (the paper's
            kvcache_balancing_threshold). With 1 each longer prefix counts: the predicted costs decide (ADR 16).
        policy: chooses prefill instances.
        decode_policy: orders decode instances.
        shadow_policy: decides beside `policy` without acting; None = none does.
        seed: for the policy's random draws.
    """

    balancing_threshold: float = 1.0
    kvstore_replicas: int = setting(
        1,
        "kvstores that hold a copy of each prefix, where there are that many; with 2, losing one loses no KV, and a "
        "hot prefix is read from both",
        ge=1,
        le=MAX_REPLICAS,
    )
    policy: PlacementPolicy = POLICIES[DEFAULT_POLICY]
    decode_policy: DecodePolicy = DECODE_POLICIES[DEFAULT_DECODE_POLICY]
    shadow_policy: PlacementPolicy | None = None
    seed: int = 0
    decode_prompt_tokens: int = setting(
        0,
        "a decode instance that holds all of a prompt except at most this many tokens computes the remainder if that "
        "is predicted to be quicker, counting the cost for other requests; 0 = never; docs/placement.md",
        ge=0,
    )
    slow_factor: float = setting(
        6.0,
        "an engine that measures itself this many times slower than usual gets no new requests and hands running ones "
        "over, while another engine is well; 0 = slow engines are used like others",
        ge=0,
    )
    peers: bool = setting(
        True,
        "prefixes are loaded from the pools of other prefill and decode instances too, not only from kvstores; "
        "docs/placement.md",
    )
    copy_share: float = setting(
        0.1,
        "share of an instance's link, in each direction, that copies of hot prefixes may take; 0 = no copies are "
        "ordered, and a prefix spreads only by being loaded",
        ge=0,
        le=1,
    )
    prefetch_share: float = setting(
        0.5,
        "share of an instance's link, in each direction, that may bring blocks into prefill instances before expected "
        "prompts come; 0 = blocks are brought into kvstores' memory only; docs/placement.md",
        ge=0,
        le=1,
    )


DEFAULT_ROUTING = RoutingConfig()


NO_KEY = QueueKey("", 0.0, 0)


@frozen
class RoutingRequest:
    """A request for which instances are chosen.

    Attributes:
        tokens: to compute: the prompt and, of a continued answer, the tokens generated before.
        answer_tokens: still to be generated; with 1, prefill alone can serve the request.
        keys: keys for all full blocks of `tokens`.
        prompt_key: hash of the prompt; chooses the kvstore if there is no full block.
        now: time, seconds.
        suspects: ids of instances that failed the request before; used only if no other is left.
        choices: answers to generate.
        at_decode: decode may compute the rest of the prompt.
        ttft_limit: beyond which the request is refused; None = not running.
        limit_s: seconds from now within which the client wants the first token; None = not told.
        priority: among the tenant's requests.
        queue_key: position among waiting requests, by arrival at the conductor.
        needs: sampling options that the instances must have.
        session: what is known of the request's session.
    """

    tokens: int
    answer_tokens: int
    keys: Sequence[bytes]
    prompt_key: bytes
    now: float
    suspects: Collection[str] = ()
    choices: int = 1
    at_decode: bool = False
    ttft_limit: TtftLimit | None = None
    limit_s: float | None = None
    priority: int = 0
    queue_key: QueueKey = NO_KEY
    needs: tuple[str, ...] = ()
    session: SessionFacts | None = None

    def to_place(self, demand: Demand) -> PromptToPlace:
        """The prompt on arrival at an instance now."""
        key = self.queue_key
        there = QueueKey(key.tenant, priority_rank(self.now, self.priority), key.number, key.weight)
        return PromptToPlace(self.placed(demand), there, self.ttft_limit)

    def placed(self, demand: Demand) -> PlacementRequest:
        """What policies see of the request."""
        tenant, priority, limit_s = self.queue_key.tenant, self.priority, self.limit_s
        blocks, tokens = demand.prompt_blocks, demand.decode_tokens
        return PlacementRequest(demand.prompt_tokens, blocks, tokens, tenant, priority, limit_s, self.session)

    def demand(self, shape: KVShape) -> Demand:
        """Blocks and tokens that the request needs."""
        return Demand(
            prompt_tokens=self.tokens,
            prompt_blocks=shape.blocks_for(self.tokens),
            total_blocks=shape.blocks_for_choices(self.tokens, self.answer_tokens, self.choices),
            decode_tokens=min(self.answer_tokens - 1, EXPECTED_ANSWER_TOKENS),
            choices=self.choices,
            needs=self.needs,
        )


class Router:
    """Chooses instances by the pools and the prefix index.

    Args:
        index: which instance holds which blocks.
        prefills: the prefill instances.
        decodes: the decode instances.
        stores: the kvstores.
        config: how requests are routed.
    """

    def __init__(
        self, index: PrefixIndex, prefills: PrefillPool, decodes: DecodePool, stores: StorePool, config: RoutingConfig
    ) -> None:
        shared = config.policy.stores
        self._index = index
        self._prefills = prefills
        self._decodes = decodes
        self._stores = stores if shared else None
        self._threshold = config.balancing_threshold
        self._at_decode = DecodeSidePrefill(decodes, config.decode_prompt_tokens)
        self._replicates = shared and config.copy_share > 0
        self._holders = PrefixHolders((prefills, decodes) if shared and config.peers else (), self._stores)

    def plan(self, request: RoutingRequest, shape: KVShape) -> RoutingDecision:
        """Routes a request; `shape` is that of the cluster's KV.

        Raises:
            Unavailable: no instance that is large enough takes requests now.
            InvalidRequest: no instance that was ever here is large enough, or none has an option that the request sets.
        """
        demand, keys, stores = request.demand(shape), request.keys, self._stores
        for pool in (self._prefills, self._decodes) if demand.needs else ():
            if option := pool.nobody_has(demand.needs):
                field = "model" if option.startswith(LORA) else f"sampling.{option}"
                raise InvalidRequest(field, "no engine of this cluster can serve it")
        prefixes = self._index.match(keys)
        views = stores.views(keys, request.prompt_key, prefixes) if stores is not None else []
        usable, readable = prefixes, views
        if shape.window_blocks:
            usable = self._index.continuable(keys, prefixes, shape.window_blocks)
            readable = stores.views(keys, request.prompt_key, usable) if stores is not None else []
        sources = self._holders.of(readable, usable, lambda pool: pool.mask_of(request.suspects), request.now)
        model = PrefillLatencyModel(demand, shape, sources, self._threshold)
        candidates = self._prefill(request, demand, self._prefills.soon(usable, keys), model)
        best = candidates[0]
        domain = self._domain(best.id)
        decodes = self._decode(request, demand, shape, prefixes, domain) if demand.decode_tokens else []
        if not self._prefills.by_slot[self._index.slot(best.id)].facts.loads:  # nor does it write to kvstores
            sources, stores = [], None
        decision = RoutingDecision(
            prefill=best,
            decodes=tuple(decodes),
            sources=holders_to_load_from(
                sources, best.source, best.local_blocks, blocks_at(usable, self._index.slot(best.id))
            ),
            write_back=stores.write_back(keys, request.prompt_key, views) if stores is not None else (),
            candidates=tuple(candidates),
            demand=demand,
            index_version=self._index.version,
            emulated=shape.emulated,
            send_s=self._send_s(best, decodes, prefixes, demand, shape) if decodes else 0.0,
            hint=self._hint(model, candidates, sources, shape) if self._replicates and sources else None,
        )
        if not (decodes and request.at_decode and self._at_decode):
            return decision
        return self._at_decode.weigh(decision, shape, usable, request.suspects)

    def _prefill(
        self, request: RoutingRequest, demand: Demand, prefixes: Prefixes, model: PrefillLatencyModel
    ) -> list[PrefillChoice]:
        pool, suspects = self._prefills, self._suspected(request.suspects)
        choices = pool.choose(
            demand, model, prefixes, request.now, suspects, request.to_place(demand), self._paired(demand)
        )
        if choices[0].excluded:
            if demand.prompt_blocks <= pool.largest_blocks:
                raise Unavailable(f"no prefill instance takes the prompt now ({choices[0].excluded})")
            raise InvalidRequest("prompt", f"no prefill instance can take the request ({choices[0].excluded})")
        return choices

    def _suspected(self, suspects: Collection[str]) -> int:
        """Mask of the prefill instances that are suspects, or from which KV goes to suspects only."""
        mask, decodes = self._prefills.mask_of(suspects), self._decodes.mask_of(suspects)
        for domain in self._prefills.domains if decodes else ():
            if domain and not self._decodes.domain_mask(domain) & ~decodes:
                mask |= self._prefills.domain_mask(domain)
        return mask

    def _paired(self, demand: Demand) -> int:
        """Mask of the prefill instances whose KV a decode instance could take, if the request needs decode."""
        domains = list(self._prefills.domains)
        if domains == [""] or not demand.decode_tokens:
            return ~0
        decodes, mask = self._decodes, 0
        for domain in domains:
            if decodes.eligible_mask(demand.total_blocks, demand.needs, decodes.domain_mask(domain)):
                mask |= self._prefills.domain_mask(domain)
        return mask

    def _domain(self, prefill: str) -> str:
        return self._prefills.by_slot[self._index.slot(prefill)].facts.kv_domain

    def _send_s(
        self,
        best: PrefillChoice,
        decodes: Sequence[DecodeChoice],
        prefixes: Prefixes,
        demand: Demand,
        shape: KVShape,
    ) -> float:
        """Seconds that the chosen instance's link has to do for the KV that the best decode instance lacks."""
        speeds = self._prefills.by_slot[self._index.slot(best.id)].learnt.speeds
        held = blocks_at(prefixes, self._index.slot(decodes[0].id)) * shape.block_size
        return transfer_seconds(speeds, shape.moved_bytes(demand.prompt_tokens, held))

    def _hint(
        self,
        model: PrefillLatencyModel,
        choices: Sequence[PrefillChoice],
        sources: Sequence[PrefixHolder],
        shape: KVShape,
    ) -> ReplicationHint | None:
        """The instance with the soonest first token if the longest prefix were there; None = none."""
        source, best_s = max(sources, key=lambda it: it.blocks), choices[0].ttft_s
        found: tuple[float, str, PrefillChoice, PrefillInstanceState] | None = None
        least_s = best_s
        for choice in choices:
            soonest_s = choice.queue_s + choice.tail_s + choice.overhead_s
            if choice.excluded or choice.local_blocks >= source.blocks or soonest_s > least_s:
                continue
            instance = self._prefills.by_slot[self._index.slot(choice.id)]
            facts = instance.facts
            if not facts.kv_domain:
                optimism = self._prefills.optimism_factor(instance)
                alone_s = model.alone_s(
                    instance.learnt.speeds, facts.stages, facts.max_num_batched_tokens, source.blocks
                )
                one = soonest_s + alone_s * optimism, choice.id, choice, instance
                if one[0] < best_s and (found is None or one < found):
                    found, least_s = one, one[0]
        if found is None:
            return None
        ttft_s, target, choice, instance = found
        gain_s = best_s - ttft_s
        nbytes = shape.moved_bytes(source.blocks * shape.block_size, choice.local_blocks * shape.block_size)
        cold_bytes = source.cold_blocks(choice.local_blocks) * shape.block_size * shape.token_bytes
        read_s = source.read_s(source.rate(instance.learnt.speeds), nbytes, cold_bytes)
        return ReplicationHint(source.blocks, target, source.id, gain_s, read_s)

    def _decode(
        self, request: RoutingRequest, demand: Demand, shape: KVShape, prefixes: Prefixes, domain: str
    ) -> list[DecodeChoice]:
        pool, suspects = self._decodes, self._decodes.mask_of(request.suspects)
        model = DecodeLatencyModel(demand, shape)
        choices = pool.choose(demand, model, prefixes, suspects, request.placed(demand), domain)
        if not choices:
            need = f"prompt and answer need {demand.total_blocks} KV blocks, no decode instance"
            if demand.total_blocks <= pool.largest_blocks:
                raise Unavailable(f"{need} with so many takes requests now")
            raise InvalidRequest("sampling.max_tokens", f"{need} has more than {pool.largest_blocks}")
        return choices
