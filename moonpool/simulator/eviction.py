"""Replays a trace through an eviction policy with the calls that a store's DRAM tier makes, and Belady's optimum."""

import collections
import heapq
from collections.abc import Callable, Sequence

from blake3 import blake3

from moonpool.base.kv.blocks import NO_PARENT, BlockFormat, BlockInfo
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import KVLayout
from moonpool.base.scheduling.sessions import SessionHint
from moonpool.kvstore.eviction.base import EvictionPolicy
from moonpool.kvstore.eviction.retention import SessionRetention
from moonpool.simulator.traces.mooncake import TraceRequest

_FORMAT = BlockFormat(bytes(32), KVLayout.uniform(layers=1, kv_heads=1, head_dim=1, block_size=16, dtype="float32"))


def chains_of(requests: Sequence[tuple[str, Sequence[int]]]) -> list[list[BlockKey]]:
    """Block key chains from a trace's tenants and ids (`hash_ids`), head first: uniform bytes, as real keys are.

    Tenants share no block.
    """
    keys: dict[tuple[str, int], BlockKey] = {}
    for tenant, block in sorted({(tenant, block) for tenant, ids in requests for block in ids}):
        keys[tenant, block] = BlockKey(blake3(tenant.encode() + block.to_bytes(8, "little")).digest())
    return [[keys[tenant, block] for block in ids] for tenant, ids in requests]


class Pool:
    """A block pool, evicted in a policy's order.

    Args:
        policy: the order, empty.
        capacity: blocks; 0 for no bound.
        evicted: called with each block that leaves; None = no listener.

    Attributes:
        hits: references to blocks that were there, up to each request's first miss.
        references: all references.
    """

    def __init__(
        self, policy: EvictionPolicy, capacity: int, evicted: Callable[[BlockKey], None] | None = None
    ) -> None:
        self.policy = policy
        self.hits = 0
        self.references = 0
        self._capacity = capacity
        self._evicted = evicted
        self._held: set[BlockKey] = set()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def lacking(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Keys without blocks here."""
        held = self._held
        return [key for key in keys if key not in held]

    def keys(self) -> list[BlockKey]:
        """All blocks' keys, in byte order."""
        return sorted(self._held)

    def request(self, chain: Sequence[BlockKey]) -> int:
        """Read a chain and store missing blocks, head first, making room block by block; return the hits."""
        held = self._held
        if held.issuperset(chain):
            hits, there = len(chain), chain
            if chain:
                self.policy.touched(chain)
        else:
            hits = next(place for place, key in enumerate(chain) if key not in held)
            self._store(chain)
            there = [key for key in chain if key in held]
        self.hits += hits
        self.references += len(chain)
        self.policy.arrived(there)
        return hits

    def _store(self, chain: Sequence[BlockKey]) -> None:
        held, policy, here = self._held, self.policy, list[BlockKey]()
        for parent, key in zip((NO_PARENT, *chain), chain, strict=False):
            if key in held:
                here.append(key)
                continue
            if here:
                policy.touched(here)
                here = []
            self._make_room()
            policy.added(BlockInfo(key, parent, "", _FORMAT))
            held.add(key)
        if here:
            policy.touched(here)

    def _make_room(self) -> None:
        held, policy = self._held, self.policy
        while self._capacity and len(held) >= self._capacity:
            victim = next(policy.candidates())
            policy.removed(victim)
            held.remove(victim)
            if self._evicted is not None:
                self._evicted(victim)

    @property
    def hit_share(self) -> float:
        """Hits per reference."""
        return self.hits / self.references if self.references else 0.0


def replay(chains: Sequence[Sequence[BlockKey]], policy: EvictionPolicy, capacity: int) -> float:
    """The hit share over all requests, one after the other."""
    pool = Pool(policy, capacity)
    for chain in chains:
        pool.request(chain)
    return pool.hit_share


def replay_sessions(
    requests: Sequence[TraceRequest], chains: Sequence[Sequence[BlockKey]], order: EvictionPolicy, capacity: int,
    *, returns: bool,
) -> float:  # fmt: skip
    """The hit share if clients say which requests are a session's, and which is the last.

    Args:
        requests: a trace with sessions; requests take no time.
        chains: the requests' chains.
        order: the policy below, empty.
        capacity: blocks.
        returns: clients also say when the next request comes.
    """
    last = {request.session: place for place, request in enumerate(requests)}
    following = dict[int, float]()  # seconds of the session's next request, by place
    places = dict[str, int]()
    for place, request in enumerate(requests):
        if (before := places.get(request.session)) is not None:
            following[before] = request.timestamp / 1000
        places[request.session] = place
    now_s = 0.0
    policy = SessionRetention(order, lambda: now_s)
    pool = Pool(policy, capacity)
    for place, (request, chain) in enumerate(zip(requests, chains, strict=True)):
        now_s = request.timestamp / 1000
        pool.request(chain)
        if chain and request.session:
            ended = place == last[request.session]
            return_s = following[place] - now_s if returns and not ended else None
            policy.hint(SessionHint(request.session.encode(), chain[-1], return_s, told=returns, ended=ended))
    return pool.hit_share


def optimum(chains: Sequence[Sequence[BlockKey]], capacity: int) -> float:
    """The hit share under Belady's policy, which knows the future: the block with the latest next use leaves.

    Among blocks used again at the same time, or never, the latest in the chain leaves, since hits stop at the first
    miss. A block that comes may leave at once.
    """
    following = _following(chains)
    held: dict[BlockKey, tuple[int, int]] = {}
    order: list[tuple[int, int, BlockKey]] = []
    hits = references = 0
    for chain, next_uses in zip(chains, following, strict=True):
        hits += next((place for place, key in enumerate(chain) if key not in held), len(chain))
        references += len(chain)
        for place, key in enumerate(chain):
            rank = held[key] = (-next_uses[place], -place)
            heapq.heappush(order, (*rank, key))
            while capacity and len(held) > capacity:
                *worst, victim = heapq.heappop(order)
                if held.get(victim) == tuple(worst):
                    del held[victim]
    return hits / references if references else 0.0


def _following(chains: Sequence[Sequence[BlockKey]]) -> list[list[int]]:
    """For every reference: the next request with that block, by number."""
    upcoming: dict[BlockKey, int] = collections.defaultdict(lambda: len(chains))
    following = []
    for number in range(len(chains) - 1, -1, -1):
        following.append([upcoming[key] for key in chains[number]])
        upcoming.update(dict.fromkeys(chains[number], number))
    return following[::-1]
