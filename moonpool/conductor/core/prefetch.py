"""Prefetch: KV of prompts that are expected or that wait comes nearer before it is needed.

Blocks go from a kvstore's SSD into the kvstore's memory, and from there into the instance that the policy would choose.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.cluster_view import ClusterView
from moonpool.conductor.core.events import PromptsAnnounced
from moonpool.conductor.core.link_budget import LinkBudget
from moonpool.conductor.core.replication import ReplicatePrefix, StopReplication
from moonpool.conductor.core.retention import (
    MAX_EXPECTED,
    ExpectedUse,
    RetainedChain,
    RetainedChains,
    RetentionOwner,
    TellSession,
)
from moonpool.conductor.core.routing import RoutingDecision, RoutingRequest
from moonpool.conductor.core.sessions import SessionTable, session_hint

LEAST_WAIT_S = 0.05
"""A prompt that waits less is not worth an order."""
ANNOUNCED = "\n"
"""Begins the names of announced prompts; no session's id has it."""


@dataclass(slots=True)
class OrderedCopy:
    """Blocks that an instance was told to fetch; `tail` is the last key."""

    instance: str
    tail: bytes


class Prefetch:
    """Orders that bring blocks into memory and into instances.

    Args:
        cluster: instances and blocks.
        retained: the chains of prompts that will come.
        sessions: what is known of sessions.
        share: share of an instance's link, in each direction, that prefetches may take; 0 = none go into instances.

    Attributes:
        to_memory: orders to bring blocks from SSD into memory.
        to_instances: orders to bring blocks into an instance.
        cancelled: of these, those that were called off.
    """

    def __init__(self, cluster: ClusterView, retained: RetainedChains, sessions: SessionTable, share: float) -> None:
        self._cluster = cluster
        self._retained = retained
        self._sessions = sessions
        self._budget = LinkBudget(share)
        self._copies: OrderedDict[RetentionOwner, OrderedCopy] = OrderedDict()
        self.to_memory = self.to_instances = self.cancelled = 0

    def due(self, now: float) -> Iterator[TellSession | ReplicatePrefix]:
        """Return the orders for the prompts that are expected soon."""
        for chain, use in self._retained.coming(now):
            if use.in_memory:
                copy = self._into_instance(chain, use.turn, now)
                if copy is not None:
                    yield copy
            else:
                yield from self._into_memory(chain, use, now)

    def announced(self, event: PromptsAnnounced, now: float) -> Iterator[TellSession | StopReplication]:
        """Clients will send these prompts, or will not after all."""
        for keys in event.chains:
            blocks, stores = self._held(keys)
            if not blocks:
                continue
            owner, turn = (event.tenant, ANNOUNCED + keys[blocks - 1].hex()), SessionTurn(return_s=event.within_s)
            hint = session_hint(event.tenant, turn, keys[blocks - 1], event.within_s)
            if event.within_s is None:
                self._retained.forget(owner)
                yield from self.changed(owner)
            else:
                self._retained.keep(RetainedChain.of(owner, keys[:blocks], stores))
                self._retained.expect(owner, ExpectedUse(turn, hint, now, now + event.within_s), now)
            for store in stores:
                yield TellSession(store, hint)

    def waits(
        self, tenant: str, turn: SessionTurn | None, keys: Sequence[bytes], decision: RoutingDecision, wait_s: float
    ) -> TellSession | None:
        """A prompt waits: what it would read from SSD is read meanwhile. None = nothing is worth an order."""
        chosen = decision.prefill
        if wait_s < LEAST_WAIT_S or not chosen.cold_blocks:
            return None
        self.to_memory += 1
        chain = tuple(keys[: chosen.used_blocks])
        return TellSession(chosen.source, session_hint(tenant, turn or SessionTurn(), chain[-1], wait_s), chain)

    def changed(self, owner: RetentionOwner, prefill: str = "") -> Iterator[StopReplication]:
        """A prompt goes to `prefill`, or is not expected any more: a copy under way elsewhere is called off."""
        copy = self._copies.pop(owner, None)
        if copy is None or copy.instance == prefill or self._cluster.index.holds(copy.instance, copy.tail):
            return
        self.cancelled += 1
        yield StopReplication(copy.instance, copy.tail)

    def _held(self, keys: Sequence[bytes]) -> tuple[int, tuple[str, ...]]:
        """Return the leading blocks of a chain that somebody holds, and the kvstores that hold as many."""
        prefixes = self._cluster.index.match(keys)
        if not prefixes:
            return 0, ()
        blocks, mask = prefixes[-1]
        return blocks, tuple([store.facts.id for store in self._cluster.stores if mask >> store.slot & 1])

    def _into_memory(self, chain: RetainedChain, use: ExpectedUse, now: float) -> Iterator[TellSession]:
        """Have the first store that has the last block on SSD read the chain. Chains leave memory tail first."""
        store = next((store for store in chain.stores if self._cluster.index.is_cold(store, chain.tail)), "")
        if store:
            self.to_memory += 1
            yield TellSession(store, use.hint.after(now - use.told_at), chain.block_keys)

    def _into_instance(self, chain: RetainedChain, turn: SessionTurn, now: float) -> ReplicatePrefix | None:
        """Have the instance that the policy would choose now fetch the blocks that it would load."""
        tenant, keys = chain.owner[0], chain.block_keys
        if not self._budget or self._cluster.shape is None:
            return None
        session = self._sessions.facts(tenant, turn) if turn.id else None
        tokens = len(keys) * self._cluster.shape.block_size + 1
        key = QueueKey(tenant, now, 0)
        request = RoutingRequest(tokens, 1, keys, keys[-1], now, queue_key=key, session=session)
        try:
            decision = self._cluster.plan(request)
        except (Unavailable, InvalidRequest):
            return None
        chosen = decision.prefill
        instance = self._cluster.prefills.get(chosen.id)
        if not chosen.source or instance is None or not instance.facts.takes_copies:
            return None
        if not self._budget.take(chosen.id, chosen.source, chosen.read_s, now):
            return None
        self.to_instances += 1
        self._copies[chain.owner] = OrderedCopy(chosen.id, keys[chosen.used_blocks - 1])
        self._copies.move_to_end(chain.owner)
        if len(self._copies) > MAX_EXPECTED:
            self._copies.popitem(last=False)
        return ReplicatePrefix(chosen.id, keys[: chosen.used_blocks], chosen.source, tenant)

    def check_invariants(self) -> None:
        """Assert that what is remembered is bounded."""
        assert len(self._copies) <= MAX_EXPECTED
        self._retained.check_invariants()

    def digest(self) -> bytes:
        counts = self.to_memory, self.to_instances, self.cancelled
        return digest_of(self._retained, self._budget, list(self._copies.items()), counts)
