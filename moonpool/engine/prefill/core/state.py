"""State that the prefill scheduler's parts share: requests, blocks, and I/O in flight."""

from moonpool.base.scheduling.block_lending import BlockLending
from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.base.scheduling.fair_share import FairQueue, FairShares
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.recent_and_usual import RecentRate
from moonpool.base.scheduling.speed_tracker import SpeedTracker
from moonpool.base.scheduling.state_machine import CancelIo
from moonpool.engine.prefill.core.actions import Action
from moonpool.engine.prefill.core.in_flight import IoInFlight, ReplicaFlight, StepFlight, requests_of
from moonpool.engine.prefill.core.request import PrefillRequest
from moonpool.engine.prefill.core.settings import PrefillSettings
from moonpool.engine.scheduler.block_table import PinnedIo
from moonpool.engine.scheduler.block_writes import BlockWrites
from moonpool.engine.scheduler.windows import pass_windows


class PrefillState:
    """State that the prefill scheduler's parts share.

    Attributes:
        settings: the instance's settings.
        manager: the pool's block manager.
        lending: blocks that other instances read.
        tracker: measured speeds of the engine with all cores; predicts times.
        recent: seconds of steps planned, divided among the stages: how busy the engine is.
        core_share: part of the engine's cores that steps have had lately; other processes on the host had the rest.
        requests: all requests that have not ended, by number.
        shares: the tenants' shares; steps are charged to them, in predicted seconds.
        waiting: requests without blocks, in fair order.
        started: requests that have, or had, blocks, in the order of starting.
        ios: I/O in flight, with the blocks that each pins.
        writes: blocks being written to kvstores.
        steps: steps in flight, in order.
        replica: the replication in flight.
        now: time of the event being handled, seconds.
        out: actions of the event being handled.
    """

    def __init__(self, settings: PrefillSettings, speeds: Speeds) -> None:
        self.settings = settings
        self.manager = BlockManager(settings.num_blocks, settings.window_blocks, settings.window_slots)
        self.lending = BlockLending(self.manager)
        self.tracker = SpeedTracker(speeds)
        self.recent = RecentRate()
        self.core_share = 1.0
        self.requests: dict[int, PrefillRequest] = {}
        self.shares = FairShares()
        self.waiting = FairQueue(self.shares)
        self.started: dict[int, PrefillRequest] = {}
        self.ios: PinnedIo[IoInFlight] = PinnedIo(self.manager)
        self.writes = BlockWrites(self.manager)
        self.steps: dict[int, StepFlight] = {}
        self.replica: ReplicaFlight | None = None
        self.now = 0.0
        self.out: list[Action] = []

    @property
    def front(self) -> StepFlight | None:
        """The step that the engine computes, or the first in the pipeline."""
        return next(iter(self.steps.values()), None)

    def act(self, action: Action) -> None:
        """Add an action."""
        self.out.append(action)

    def end(self, io: int) -> IoInFlight:
        """End I/O: unpin the tables, and unblock requests that waited for the end."""
        flight = self.ios.end(io)
        for number in requests_of(flight):
            request = self.requests.get(number)
            if request is not None and request.blocked_by:
                request.blocked_by.discard(io)
        return flight

    def cancel(self, io: int | None) -> None:
        """Cancel I/O that is still in flight."""
        if io is not None and io in self.ios:
            self.act(CancelIo(io))

    def unbind(self, request: PrefillRequest) -> None:
        """Drop the request's own pin on the blocks."""
        if request.table is not None:
            request.table.unpin(self.manager)
            request.table = None

    def reusable_blocks(self, request: PrefillRequest) -> int:
        """Return how many full blocks may be cached or loaded; with recurrent states, only before the last token."""
        return self.settings.reusable_blocks(request.spec.tokens) if request.reuse else 0

    def hold_prefix(self, request: PrefillRequest, held: list[int], more: list[int]) -> None:
        """Take cached leading blocks for a request without steps: `held` were taken before; acquire `more`."""
        assert request.table is not None
        blocks = len(held) + len(more)
        first = self.settings.first_windowed_block(blocks * self.settings.block_size)
        self.manager.acquire(more, max(0, first - len(held)))
        self.manager.pass_windows(held[request.table.past : first])
        request.table.past = first
        request.prefix.blocks = blocks
        request.prefix.cached = request.computed = request.scheduled = self.settings.reused_tokens(
            request.spec.tokens, blocks
        )

    def note_borders(self, request: PrefillRequest) -> None:
        """Note behind which blocks the prompt, or another that leaves the chain, may be continued."""
        if not self.settings.window_blocks:
            return
        tokens, size = request.spec.tokens, self.settings.block_size
        found = len(self.manager.find(request.spec.keys))
        # The same prompt is continued behind its last full block, or before that block if a state must not be reused.
        ends = (tokens // size, self.settings.reusable_blocks(tokens), request.prefix.blocks, found)
        request.borders = frozenset((*ends, *(copy.held or 0 for copy in request.copies)))

    def pass_windows(self, request: PrefillRequest) -> None:
        """Note that the request reads no windowed slices behind the next token's window."""
        if request.table is not None:
            pass_windows(request.table, request.computed, self.settings, self.manager, request.borders)

    def advance(self, request: PrefillRequest, end: int) -> None:
        """Register the keys of the full blocks up to token `end`, whose KV is there."""
        assert request.table is not None
        size = self.settings.block_size
        blocks = range(request.computed // size, end // size)
        request.table.register(request.spec.keys, blocks, self.manager, request.owner)
        request.computed = end
        request.scheduled = max(request.scheduled, end)
