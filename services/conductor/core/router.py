"""Routing.

Prefill and decode instance of a request, where its prefix is loaded from, which kvstores keep its blocks, and copies
of hot prefixes.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from moonpool.errors import InvalidRequest, Unavailable
from moonpool.frozen import frozen
from moonpool.kv import rendezvous
from moonpool.scheduling.latency import decode_step_seconds, prefill_seconds, transfer_seconds
from moonpool.scheduling.state_machine import digest_of
from services.conductor.core.decode_pool import DecodeInstanceState, DecodePool
from services.conductor.core.instances import SHORTLIST, InstanceFacts, LoadFacts, blocks_at
from services.conductor.core.latency_model import (
    DecodeChoice,
    DecodeLatencyModel,
    Demand,
    KVLink,
    KVShape,
    PrefillChoice,
    PrefillLatencyModel,
    PrefixHolder,
    steps_of,
)
from services.conductor.core.policies import TtftLimit
from services.conductor.core.prefill_pool import PrefillInstanceState, PrefillPool
from services.conductor.core.prefix_index import NO_SLOT, PrefixIndex, slots_in

SHARED_BY = 4
"""A prefix that so many different chains continue is shared; fewer may be one turn asked again."""


MAX_FORKS = 1 << 14


MAX_REPLICAS = 8


class StoreView(NamedTuple):
    """A kvstore as a request sees it.

    `blocks` are the leading blocks of the request's chain it holds, `busy` the sessions it serves, `score` that of
    rendezvous hashing. `warm` of the blocks are in its memory, the others on its SSD only; None = it does not tell.
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

    A store that holds at least half of what the best one does keeps the chain: completing it is quicker than filling
    another. With `shared`, stores hold only a prefix that many chains share, and the score alone decides.
    """
    half = max((store.blocks for store in stores), default=0) / 2

    def order(store: StoreView) -> tuple[int, float, str]:
        kept = 0 if shared or store.blocks < half else store.blocks
        return -kept, -store.score, store.id

    return nsmallest(copies, stores, key=order)


def rendezvous_weights(capacities: Mapping[str, int]) -> dict[str, float]:
    """Return rendezvous weights: capacities in bytes; one that is not known (0) counts as the mean of the others."""
    known = [capacity for capacity in capacities.values() if capacity > 0]
    usual = sum(known) / len(known) if known else 1.0
    return {name: float(capacity) if capacity > 0 else usual for name, capacity in capacities.items()}


class ChainForks:
    """Where chains fork: for each last held block the different blocks that followed it, in bounded memory.

    A conversation's next turn follows its last block once. A block that many different chains follow ends a prefix that
    they share, such as a system prompt, and those chains may go to different stores.
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
    """One kvstore. Prefixes are loaded over its `link`; `memory` is the slot of those in memory (`PrefixIndex`)."""

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
        """The stores as a request sees them; `prefixes` are what `Forest.match` gives for its keys."""
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
        views = [
            StoreView(
                store.facts.id,
                held.get(store.slot, 0),
                max(store.load.running, len(store.link.reads)),
                0.0,
                None if store.memory == NO_SLOT else held.get(store.memory, 0),
            )
            for store in stores
        ]
        # Scores decide among equals. Where one store alone holds something, it is read from and keeps the chain.
        alone = sum([view.blocks > 0 for view in views]) == 1 == self._replicas
        return views if alone else self._scored(keys, prompt_key, views)

    def _scored(self, keys: Sequence[bytes], prompt_key: bytes, views: Sequence[StoreView]) -> list[StoreView]:
        """The views with scores for the first block that no store holds: the first that may be the chain's own."""
        longest = max([view.blocks for view in views], default=0)
        key = keys[min(longest, len(keys) - 1)] if keys else prompt_key
        return [view._replace(score=rendezvous.score(key, view.id, self._weights[view.id])) for view in views]

    def write_back(self, keys: Sequence[bytes], prompt_key: bytes, views: Sequence[StoreView]) -> tuple[StoreView, ...]:
        """The stores that shall hold the chain, also for a prompt without a full block: its answer may fill some."""
        longest = max([view.blocks for view in views], default=0)
        parts = len(views) > self._replicas and 0 < longest < len(keys)  # else there is nothing to decide
        shared = parts and self._forks.shared(keys[longest - 1], keys[longest])
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
"""Engine instances that are considered for one prompt: of those that hold most, and of those that hold less."""


MAX_LOOKED_AT = 16
"""Of instances that hold equally much, so many are compared by how busy their links are."""


MAX_FALLBACK_HOLDERS = 2
"""Further instances to load a prefix from if the chosen one fails."""


Prefixes = Sequence[tuple[int, int]]


class PrefixHolders:
    """Finds them.

    Args:
        pools: of the engine instances; none = only kvstores are read from.
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
        """Whom a request may load from: kvstores first, as they are to be read, then engine instances."""
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
            prefixes: who holds how much, as `Forest.match` says it.
            suspects: mask of the instances of a pool that are not asked.
            now: seconds.
        """
        there = [(pool, pool.mask & ~pool.draining & ~pool.resting & ~suspects(pool)) for pool in self._pools]
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
        holders = [self._at(slot) for slot in islice(slots_in(mask), MAX_LOOKED_AT)]
        best = min(holders, key=lambda it: (it.link.wait_s(now), it.turn, it.facts.id))
        return PrefixHolder(best.facts.id, blocks, best.link.wait_s(now), best.link.memory.known(now), peer=True)

    def _at(self, slot: int) -> PrefillInstanceState | DecodeInstanceState:
        return next(pool.by_slot[slot] for pool in self._pools if slot in pool.by_slot)


def holders_to_load_from(
    sources: Sequence[PrefixHolder], chosen: str, local_blocks: int, held_blocks: int
) -> tuple[PrefixHolder, ...]:
    """Whom to load from, the chosen one first, then who holds most; none when nothing is to be loaded.

    Where nobody is chosen as other prompts bring what the instance lacks, these may not: then it loads after all.

    Args:
        sources: those that were considered.
        chosen: by the prediction; "" = nobody.
        local_blocks: that the instance which loads holds itself, or will hold when other prompts are computed.
        held_blocks: that it holds now.
    """
    least = local_blocks if chosen else held_blocks
    holders = [source for source in sources if source.blocks > least] if chosen or held_blocks < local_blocks else []
    holders.sort(key=lambda source: (source.id != chosen, -source.blocks))
    return tuple(holders[: 1 + MAX_FALLBACK_HOLDERS])


class ReplicationHint(NamedTuple):
    """What a prompt would have gained if an instance had held a prefix of it.

    `gain_s` are the seconds to the first token, `read_s` those that the source's link takes.
    """

    blocks: int
    target: str
    source: str
    gain_s: float
    read_s: float


@frozen
class RoutingDecision:
    """Where a request could go, best first.

    Attributes:
        prefill: the best of `candidates`.
        decodes: a few, best first; empty when decode is not wanted.
        sources: the prefix is loaded from the first of them that answers.
        write_back: kvstores that shall hold the chain.
        candidates: the best prefill instances, then some that cannot be used.
        demand: what was asked for.
        index_version: state of the index behind the plan, for `Picture.forget`.
        emulated: compute is emulated.
        send_s: seconds of sending to decode what that lacks.
        wish: the copy of a prefix from which it would have gained; None = none, or there are no copies.
        at_decode: the one decode instance computes the rest of the prompt itself; `prefill` says what that takes.
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
    wish: ReplicationHint | None = None
    send_s: float = 0.0


MAX_HOT_PREFIXES = 1024
"""Prefixes that are watched, those of most regret; up to twice as many before the others are dropped."""


REGRET_HALF_LIFE_S = 30.0


MIN_PROMPTS = 2.0
"""So much the prompts that asked for a prefix must count together, each 1 at first and half of it after `HALF_LIFE_S`:
three within about 40 s, or two at the same time. A conversation's next turn is no demand."""


MIN_GAIN = 2.0
"""What was lost must be so many times what the copy takes."""


@frozen
class ReplicatePrefix:
    """An instance is to copy a chain's blocks from another one, because they are hot."""

    instance: str
    keys: tuple[bytes, ...]
    source: str
    tenant: str


@dataclass(slots=True)
class PrefixRegret:
    """Of one prefix: seconds lost and prompts that lost them, both halved every `HALF_LIFE_S`, at a time."""

    lost_s: float
    asked: float
    at: float

    def age(self, now: float) -> None:
        """Lets time pass."""
        left = 0.5 ** ((now - self.at) / REGRET_HALF_LIFE_S)
        self.lost_s, self.asked, self.at = self.lost_s * left, self.asked * left, now


class PrefixReplication:
    """Decides on copies.

    Args:
        share: of an instance's link that copies may take, out of it and into it; 0 = there are none.

    Attributes:
        ordered: copies so far.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._regrets: dict[bytes, PrefixRegret] = {}
        self._free_at: dict[str, float] = {}  # when the budget of an instance's link allows another copy
        self.ordered = 0

    def __bool__(self) -> bool:
        return self._share > 0

    def placed(
        self, keys: Sequence[bytes], wish: ReplicationHint | None, tenant: str, now: float
    ) -> ReplicatePrefix | None:
        """A prompt is placed that has this wish; the order for a copy, if it is time for one."""
        if wish is None:
            return None
        key = keys[wish.blocks - 1]
        regret = self._regrets.get(key)
        if regret is None:
            self._bound(now)
            regret = self._regrets[key] = PrefixRegret(0.0, 0.0, now)
        regret.age(now)
        regret.lost_s += wish.gain_s
        regret.asked += 1.0
        if regret.asked < MIN_PROMPTS or regret.lost_s < MIN_GAIN * wish.read_s or not self._affords(wish, now):
            return None
        del self._regrets[key]
        self.ordered += 1
        for end in (wish.target, wish.source):
            self._free_at[end] = now + wish.read_s / self._share
        return ReplicatePrefix(wish.target, tuple(keys[: wish.blocks]), wish.source, tenant)

    def _affords(self, wish: ReplicationHint, now: float) -> bool:
        self._free_at = {end: at for end, at in self._free_at.items() if at > now}
        return wish.target not in self._free_at and wish.source not in self._free_at

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
        return digest_of(self._regrets, self._free_at, self.ordered)

    def check_invariants(self) -> None:
        """Asserts that what is remembered is bounded."""
        assert len(self._regrets) <= 2 * MAX_HOT_PREFIXES
        assert all(regret.lost_s >= 0 for regret in self._regrets.values())


DECODE_STEP_TOKENS = 256
"""Tokens that a decode instance computes beside its batch in a step at most (`CoreConfig.step_tokens` there)."""


@frozen
class DecodeSideChoice:
    """The rest of a prompt at a decode instance: the prediction in the form of a prefill instance's, and of decode's.

    `cost_s`: what those that run there lose together. `pays`: it is better than the best prefill instance.
    """

    prefill: PrefillChoice
    decode: DecodeChoice
    cost_s: float
    pays: bool


class DecodeSidePrefill:
    """Finds the decode instance for a rest.

    Args:
        decodes: all.
        most_tokens: the longest rest that is thought of; 0 = none.
    """

    def __init__(self, decodes: DecodePool, most_tokens: int) -> None:
        self._decodes = decodes
        self._most_tokens = most_tokens

    def __bool__(self) -> bool:
        return self._most_tokens > 0

    def weigh(
        self, plan: RoutingDecision, shape: KVShape, prefixes: Sequence[tuple[int, int]], suspects: Collection[str]
    ) -> RoutingDecision:
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
        shape: KVShape,
        prefixes: Sequence[tuple[int, int]],
        suspects: Collection[str],
        other: PrefillChoice,
    ) -> DecodeSideChoice | None:
        """The decode instance at which the rest is done soonest, what it costs others counted; None when none can.

        Of those that hold most of the prompt, as others would compute more.

        Args:
            demand: of the request.
            shape: of the KV.
            prefixes: who holds how much, as `Forest.match` says it.
            suspects: instances that failed this request before.
            other: the best prefill instance.
        """
        pool, model = self._decodes, DecodeLatencyModel(demand, shape)
        allowed = pool.able(demand.total_blocks) & ~pool.mask_of(suspects)
        for blocks, mask in reversed(prefixes):
            tokens = demand.prompt_tokens - shape.reused_tokens(demand.prompt_tokens, blocks)
            if tokens > self._most_tokens:
                continue
            slots = [slot for slot in slots_in(mask & allowed) if _has_memory(pool.by_slot[slot], model)][:SHORTLIST]
            rests = [_decode_side_choice(pool.by_slot[slot], model, tokens, blocks, demand, other) for slot in slots]
            known = [rest for rest in rests if rest.prefill.prefill_s > 0.0]
            if known:
                return min(known, key=lambda rest: (rest.prefill.ttft_s + rest.cost_s, rest.prefill.id))
        return None


def _has_memory(instance: DecodeInstanceState, model: DecodeLatencyModel) -> bool:
    return instance.room_blocks >= model.blocks(instance.load.answer_tokens)


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
    prefill = PrefillChoice(  # it waits for the step that is running, and is computed beside the batch
        name, blocks, blocks, batch_s, 0.0, compute_s + steps * batch_s, compute_s, overhead_s=other.overhead_s
    )
    decode = model.choice(name, speeds, running, instance.context_tokens, blocks, need)
    cost_s = running * compute_s
    return DecodeSideChoice(prefill, decode, cost_s, prefill.ttft_s + cost_s < other.ttft_s)


@frozen
class RoutingRequest:
    """What a plan is wanted for; `Picture.plan` describes the parts."""

    demand: Demand
    shape: KVShape
    keys: Sequence[bytes]
    prompt_key: bytes
    now: float
    suspects: Collection[str]
    at_decode: bool
    limit: TtftLimit | None


class Router:
    """Plans from the pools and the index.

    Args:
        index: who holds what.
        prefills: the prefill instances.
        decodes: the decode instances.
        stores: the kvstores; None = they do not count.
        threshold: see `PrefillModel`.
        peers: prefixes are loaded from other engine instances too.
        wishes: it is told which copy of a prefix a request would have gained from.
        rest_tokens: see `Rests`.
    """

    def __init__(
        self,
        index: PrefixIndex,
        prefills: PrefillPool,
        decodes: DecodePool,
        stores: StorePool | None,
        threshold: float,
        rest_tokens: int,
        peers: bool,
        wishes: bool,
    ) -> None:
        self._index = index
        self._prefills = prefills
        self._decodes = decodes
        self._stores = stores
        self._threshold = threshold
        self._rests = DecodeSidePrefill(decodes, rest_tokens)
        self._wishes = wishes
        self._sources = PrefixHolders((prefills, decodes) if peers else (), stores)

    def plan(self, wanted: RoutingRequest) -> RoutingDecision:
        """Plans a request.

        Raises:
            Unavailable: no instance that is large enough takes requests now.
            InvalidRequest: no instance that was ever here is large enough.
        """
        demand, keys, stores = wanted.demand, wanted.keys, self._stores
        prefixes = self._index.match(keys)
        views = stores.views(keys, wanted.prompt_key, prefixes) if stores is not None else []
        sources = self._sources.of(views, prefixes, lambda pool: pool.mask_of(wanted.suspects), wanted.now)
        model = PrefillLatencyModel(demand, wanted.shape, sources, self._threshold)
        candidates = self._prefill(wanted, self._prefills.soon(prefixes, keys), model)
        decodes = self._decode(wanted, prefixes) if demand.decode_tokens else []
        best = candidates[0]
        plan = RoutingDecision(
            prefill=best,
            decodes=tuple(decodes),
            sources=holders_to_load_from(
                sources, best.source, best.local_blocks, blocks_at(prefixes, self._index.slot(best.id))
            ),
            write_back=stores.write_back(keys, wanted.prompt_key, views) if stores is not None else (),
            candidates=tuple(candidates),
            demand=demand,
            index_version=self._index.version,
            emulated=wanted.shape.emulated,
            send_s=self._send_s(best, decodes, prefixes, wanted) if decodes else 0.0,
            wish=self._wish(model, candidates, sources, wanted) if self._wishes and sources else None,
        )
        if not (decodes and wanted.at_decode and self._rests):
            return plan
        return self._rests.weigh(plan, wanted.shape, prefixes, wanted.suspects)

    def _prefill(self, wanted: RoutingRequest, prefixes: Prefixes, model: PrefillLatencyModel) -> list[PrefillChoice]:
        demand, pool = wanted.demand, self._prefills
        choices = pool.choose(demand, model, prefixes, wanted.now, pool.mask_of(wanted.suspects), wanted.limit)
        if choices[0].excluded:
            if demand.prompt_blocks <= pool.largest_blocks:
                raise Unavailable(f"no prefill instance takes the prompt now ({choices[0].excluded})")
            raise InvalidRequest("prompt", f"no prefill instance can take it ({choices[0].excluded})")
        return choices

    def _send_s(
        self, best: PrefillChoice, decodes: Sequence[DecodeChoice], prefixes: Prefixes, wanted: RoutingRequest
    ) -> float:
        """Seconds that the chosen instance's link has to do for the KV that the best decode instance lacks."""
        speeds = self._prefills.by_slot[self._index.slot(best.id)].learnt.speeds
        held = blocks_at(prefixes, self._index.slot(decodes[0].id)) * wanted.shape.block_tokens
        return transfer_seconds(speeds, max(0, wanted.demand.prompt_tokens - held) * wanted.shape.token_bytes)

    def _wish(
        self,
        model: PrefillLatencyModel,
        choices: Sequence[PrefillChoice],
        sources: Sequence[PrefixHolder],
        wanted: RoutingRequest,
    ) -> ReplicationHint | None:
        """The instance whose first token would have come before that of the chosen one if it had the longest prefix."""
        source = max(sources, key=lambda it: it.blocks)
        found: list[tuple[float, str, PrefillChoice, PrefillInstanceState]] = []
        for choice in choices:
            if not choice.excluded and choice.local_blocks < source.blocks:
                instance = self._prefills.by_slot[self._index.slot(choice.id)]
                facts, learnt = instance.facts, instance.learnt
                slowed = choice.factors.growing / learnt.factors.growing
                alone_s = model.alone_s(learnt.speeds, facts.stages, facts.step_tokens, source.blocks) * slowed
                ttft_s = choice.queue_s + choice.later_s + choice.overhead_s + alone_s
                found.append((ttft_s, choice.id, choice, instance))
        if not found:
            return None
        ttft_s, target, choice, instance = min(found)
        gain_s = choices[0].ttft_s - ttft_s
        if gain_s <= 0:
            return None
        block_bytes = wanted.shape.block_tokens * wanted.shape.token_bytes
        missing, cold = source.blocks - choice.local_blocks, source.cold_blocks(choice.local_blocks)
        read_s = source.read_s(source.rate(instance.learnt.speeds), missing * block_bytes, cold * block_bytes)
        return ReplicationHint(source.blocks, target, source.id, gain_s, read_s)

    def _decode(self, wanted: RoutingRequest, prefixes: Prefixes) -> list[DecodeChoice]:
        demand, pool = wanted.demand, self._decodes
        choices = pool.choose(demand, DecodeLatencyModel(demand, wanted.shape), prefixes, pool.mask_of(wanted.suspects))
        if not choices:
            need = f"prompt and answer need {demand.total_blocks} KV blocks, no decode instance"
            if demand.total_blocks <= pool.largest_blocks:
                raise Unavailable(f"{need} with so many takes requests now")
            raise InvalidRequest("sampling.max_tokens", f"{need} has more than {pool.largest_blocks}")
        return choices
