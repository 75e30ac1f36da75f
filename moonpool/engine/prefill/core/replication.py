"""Replication of hot blocks from other instances.

Replication takes spare capacity only: one order at a time, and at most half the free or cached blocks that no waiting
prompt needs. Until a request uses them, replicated blocks are evicted first (`BlockManager`).
"""

from collections.abc import Iterator

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_manager import KVOwner
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.engine.prefill.core.actions import (
    EndReplication,
    ReadReplica,
)
from moonpool.engine.prefill.core.events import (
    ReplicateBlocks,
)
from moonpool.engine.prefill.core.in_flight import ReplicaFlight
from moonpool.engine.prefill.core.loads import (
    PrefixLoads,
)
from moonpool.engine.prefill.core.state import PrefillState
from moonpool.engine.scheduler.block_table import BlockTable
from moonpool.engine.scheduler.prefix_sources import LoadEnded

REPLICA_PART = 2
"""A replication takes at most 1 / this number of the free or cached blocks that waiting prompts do not need."""
MAX_ORDERS = 16
"""Orders that may wait for the order in flight; further orders are skipped."""


class Replication:
    """Replicates blocks from other instances, one order at a time.

    Attributes:
        copied_blocks: blocks that arrived whole.
    """

    def __init__(self, state: PrefillState, loads: PrefixLoads) -> None:
        self._state = state
        self._loads = loads
        self._io: int | None = None
        self._orders: dict[int, ReplicateBlocks] = {}
        self.copied_blocks = 0

    @property
    def owners(self) -> Iterator[tuple[KVOwner, tuple[BlockKey, ...]]]:
        """Owner and keys of the blocks in flight."""
        flight = self._state.replica
        if flight is not None:
            yield flight.owner, flight.keys

    def begin(self, event: ReplicateBlocks) -> None:
        """Read a chain's blocks that are not cached, behind earlier orders; or skips the order."""
        if len(self._orders) < MAX_ORDERS:
            self._orders[event.number] = event
            self._begin_next()
        else:
            self._state.act(EndReplication(event.number, 0))

    def _begin_next(self) -> None:
        while self._io is None and self._orders:
            event = self._orders.pop(next(iter(self._orders)))
            if not self._begin(event):
                self._state.act(EndReplication(event.number, 0))

    def _begin(self, event: ReplicateBlocks) -> bool:
        """Read the blocks; False if all blocks are cached, or the pool has no room now."""
        state, manager = self._state, self._state.manager
        held = manager.match(event.keys)
        missing = len(event.keys) - len(held)
        needed = sum([state.settings.blocks_for(state.requests[number].spec.tokens) for number in state.waiting])
        spare = manager.num_available - needed - sum(map(manager.is_cached, held))
        windows = min(missing, state.settings.window_blocks)
        full = missing * REPLICA_PART > spare or windows * REPLICA_PART > manager.num_slots_available
        if not missing or full or self._loads.sources.is_paused(event.source, self._state.now):
            return False
        manager.acquire(held, len(held))
        table = BlockTable([*held, *manager.allocate(missing)], past=len(held))
        manager.give_slots(table.blocks[len(table.blocks) - windows :])
        nbytes, owner = state.settings.moved_bytes(missing), KVOwner(event.tenant)
        state.replica = ReplicaFlight(event.number, event.keys, owner, table, event.source, nbytes, state.now)
        self._io = state.ios.begin(state.replica)
        timeout_s = self._loads.sources.timeout_s(event.source, nbytes)
        state.act(ReadReplica(self._io, event.number, len(held), tuple(table.blocks[len(held) :]), timeout_s))
        return True

    def ended(self, flight: ReplicaFlight, result: LoadEnded) -> None:
        """Keep the blocks that arrived whole."""
        self._io = self._state.replica = None
        manager, table, first = self._state.manager, flight.table, flight.table.past
        self._loads.sources.learn(flight.source, flight.nbytes, len(flight.keys) - first, result, self._state.now)
        end = first + result.blocks
        fresh = table.blocks[first:end]
        for block, key in zip(fresh, flight.keys[first:end], strict=True):
            manager.register(block, key, flight.owner)
        table.unpin(manager)  # not before: a block with a key stays in the pool
        manager.note_copies(fresh)
        self.copied_blocks += result.blocks
        self._state.act(EndReplication(flight.number, result.blocks))
        self._begin_next()

    def call_off(self, tail: BlockKey) -> None:
        """Cancel the replication of the chain that ends with this key."""
        for number in [number for number, event in self._orders.items() if event.keys[-1] == tail]:
            del self._orders[number]
            self._state.act(EndReplication(number, 0))
        flight = self._state.replica
        if flight is not None and flight.keys[-1] == tail:
            self._state.cancel(self._io)

    def stop(self) -> None:
        """Cancel all replications."""
        for number in self._orders:
            self._state.act(EndReplication(number, 0))
        self._orders.clear()
        self._state.cancel(self._io)

    def digest(self) -> bytes:
        """Return a hash over the orders, the replication in flight and the counter."""
        return digest_of(self._io, self._orders, self._state.replica, self.copied_blocks)
