"""Blocks that the conductor has copied here because many prompts ask for them: read from a peer, kept as cache.

A copy is nobody's prompt, so it takes only what can be spared: one at a time, none while prompts wait for blocks, and
at most half of what is free or cached. Until they are used, copied blocks are the first to be evicted (`BlockManager`).
"""

from collections.abc import Iterator

from moonpool.core.digest import digest_of
from moonpool.kv.keys import BlockKey
from moonpool.sched.block_manager import Owner
from services.prefill.core.actions import CopyBlocks, EndCopy
from services.prefill.core.events import CopyIn, LoadEnded
from services.prefill.core.loads import Loads
from services.prefill.core.state import CopyFlight, State

SHARE = 2
"""A copy takes one of so many blocks that are free or cached at most."""


class Copies:
    """Carries copies out.

    Attributes:
        copied_blocks: blocks that came whole.
    """

    def __init__(self, state: State, loads: Loads) -> None:
        self._state = state
        self._loads = loads
        self._io: int | None = None
        self.copied_blocks = 0

    @property
    def flight(self) -> CopyFlight | None:
        """The copy under way."""
        found = self._state.ios.get(self._io) if self._io is not None else None
        return found if isinstance(found, CopyFlight) else None

    @property
    def owners(self) -> Iterator[tuple[Owner, tuple[BlockKey, ...]]]:
        """Whose KV is under way, with its keys."""
        flight = self.flight
        if flight is not None:
            yield flight.owner, flight.keys

    def begin(self, event: CopyIn) -> None:
        """Reads the blocks of a chain that are not here, or passes it over."""
        state, manager = self._state, self._state.manager
        held = manager.match(event.keys)
        missing = len(event.keys) - len(held)
        spare = manager.num_available - sum(map(manager.is_cached, held))
        busy = self._io is not None or len(state.waiting) or self._loads.is_paused(event.source)
        if busy or not missing or missing * SHARE > spare:
            state.do(EndCopy(event.number, 0))
            return
        manager.acquire(held)
        blocks = (*held, *manager.allocate(missing))
        nbytes = missing * state.settings.layers * state.settings.slice_bytes
        flight = CopyFlight(event.number, event.keys, Owner(event.tenant), blocks, len(held), event.source, nbytes)
        self._io = state.begin(flight)
        timeout_s = self._loads.timeout_s(event.source, nbytes)
        state.do(CopyBlocks(self._io, event.number, len(held), blocks[len(held) :], timeout_s))

    def ended(self, flight: CopyFlight, result: LoadEnded) -> None:
        """What has come whole is kept."""
        self._io = None
        self._loads.learn(flight.source, flight.nbytes, len(flight.keys) - flight.first, result)
        manager, end = self._state.manager, flight.first + result.blocks
        fresh = flight.blocks[flight.first : end]
        for block, key in zip(fresh, flight.keys[flight.first : end], strict=True):
            manager.register(block, key, flight.owner)
        manager.release(flight.blocks)
        manager.note_copies(fresh)
        self.copied_blocks += result.blocks
        self._state.do(EndCopy(flight.number, result.blocks))

    def stop(self) -> None:
        """Nothing is wanted any more."""
        self._state.cancel(self._io)

    def digest(self) -> bytes:
        """Hash of what is under way, and of the count."""
        return digest_of(self._io, self.flight, self.copied_blocks)
