"""A prompt in the prefill scheduler: status and transitions, blocks, prefix and loads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from moonpool.base.scheduling.block_manager import KVOwner
from moonpool.base.scheduling.fair_share import QueueKey, priority_rank
from moonpool.base.scheduling.request import EngineRequest
from moonpool.engine.prefill.core.events import (
    AddRequest,
    WriteBackTarget,
)
from moonpool.engine.prefill.core.outgoing_kv import OutgoingKV
from moonpool.engine.prefill.core.settings import PrefillSettings
from moonpool.engine.scheduler.block_table import BlockTable
from moonpool.engine.scheduler.prefix_sources import KVSource, PrefixLoaded, PrefixMiss


class PrefillStatus(Enum):
    """A request's state; `TRANSITIONS` has the changes that may happen."""

    WAITING = "waiting"
    """In the queue, without blocks."""
    STARTED = "started"
    """Has blocks for the whole prompt. No step was planned; the prefix may be loading."""
    COMPUTING = "computing"
    """Steps compute the prompt; the KV is sent meanwhile."""
    COMPUTED = "computed"
    """The first token was reported. The KV is sent, or decode's verdict is awaited."""
    ENDED = "ended"
    """No longer among the scheduler's requests; I/O may still pin the request's blocks."""


TRANSITIONS: Mapping[PrefillStatus, frozenset[PrefillStatus]] = {
    PrefillStatus.WAITING: frozenset({PrefillStatus.STARTED, PrefillStatus.ENDED}),
    PrefillStatus.STARTED: frozenset({PrefillStatus.COMPUTING, PrefillStatus.ENDED}),
    PrefillStatus.COMPUTING: frozenset({PrefillStatus.COMPUTED, PrefillStatus.ENDED}),
    PrefillStatus.COMPUTED: frozenset({PrefillStatus.ENDED}),
    PrefillStatus.ENDED: frozenset(),
}
"""Statuses that may follow each status. A request begins as WAITING."""


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """A prefix that is being loaded: blocks [first, end) of the request.

    Attributes:
        io: the load's I/O number.
        source: index in the request's sources.
        began_at: when the load began, seconds.
        progressed_at: when the last layer arrived, or the load began, seconds.
        first_at: when the first layer arrived, seconds.
        layers: leading layers that have arrived.
        stalled: a step has waited too long for a layer: no step follows the load layer by layer any more.
    """

    io: int
    source: int
    first: int
    end: int
    began_at: float
    progressed_at: float
    first_at: float = 0.0
    layers: int = 0
    stalled: bool = False


@dataclass(slots=True, eq=False)
class OvertakenLoad:
    """A load that took longer than computing: both go on. For each block, the first to finish counts.

    Attributes:
        load: the load.
        table: blocks that the load writes, from `load.first` on; pinned by the load in flight and by the request.
        whole: the load has arrived whole.
    """

    load: PrefixLoad
    table: BlockTable
    whole: bool = False


@dataclass(slots=True, eq=False)
class PromptPrefix:
    """A prompt's leading part that need not be computed.

    Attributes:
        blocks: leading blocks that were cached or loaded. May grow until the first step is planned.
        cached: leading tokens not to compute, because they were cached.
        loaded: further tokens not to compute, because they were loaded.
        next_source: index of the source tried next.
        load: the load in flight that the request waits for.
        overtaken: the load that computing has overtaken.
        overtaken_tokens: tokens that were computed while their load was under way.
        misses: blocks that a kvstore lacked.
        loads: loads that arrived whole.
    """

    blocks: int = 0
    cached: int = 0
    loaded: int = 0
    next_source: int = 0
    load: PrefixLoad | None = None
    overtaken: OvertakenLoad | None = None
    overtaken_tokens: int = 0
    misses: list[PrefixMiss] = field(default_factory=list)
    loads: list[PrefixLoaded] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """One prompt.

    Attributes:
        asked: what the conductor asked for.
        outgoing: KV on the way to decode; None = the KV is not sent.
        added_at: when the request was queued, seconds.
        queue_key: place in the fair queue.
        expected_tokens: leading tokens expected not to be computed; for predictions, until the request starts.
        owner: the KV's tenant, and whether the blocks may be kept.
        load_s: predicted seconds for loading what is expected to come from a source.
        shared_tokens: leading tokens that earlier requests compute and register; for predictions, until the first step.
        status: set by `set_status` only.
        first_step_at: when the first step was planned, seconds.
        foreign_steps: steps without this prompt since the prompt's last step, while the prompt could go on.
        step_tokens: most tokens in a step while no other prompt has something to compute; 0 = not decided.
        token_at: when the first token was told, seconds; the last step may still be under way.
        table: the request's blocks; bound at the start, unbound once no KV is left to compute or send.
        prefix: leading blocks that were cached or loaded, and the load in flight.
        computed: leading tokens that are cached, loaded or computed, in all layers. Never shrinks.
        scheduled: leading tokens that have KV, or are in flight.
        slices_in_flight: the request's live slices in steps in flight.
        gated: the slice in flight follows the load: no further slice is planned until that slice is done.
        blocked_by: I/O on blocks that are to be computed again: until the I/O ends, no slice is planned.
        put_until: for each copy, blocks before this index were written or need not be.
        borders: counts of leading full blocks behind which this prompt or others may be continued.
    """

    asked: AddRequest
    outgoing: OutgoingKV | None
    added_at: float
    queue_key: QueueKey
    expected_tokens: int
    owner: KVOwner
    load_s: float = 0.0
    shared_tokens: int = 0
    status: PrefillStatus = PrefillStatus.WAITING
    first_step_at: float | None = None
    foreign_steps: int = 0
    step_tokens: int = 0
    token_at: float | None = None
    table: BlockTable | None = None
    prefix: PromptPrefix = field(default_factory=PromptPrefix)
    computed: int = 0
    scheduled: int = 0
    slices_in_flight: int = 0
    gated: bool = False
    blocked_by: set[int] = field(default_factory=set)
    put_until: list[int] = field(default_factory=list)
    borders: frozenset[int] = frozenset()

    @classmethod
    def of(cls, event: AddRequest, settings: PrefillSettings, now: float) -> "PrefillRequest":
        """Return a request on arrival."""
        spec, outgoing = event.request, None
        if event.held_blocks is not None:
            outgoing = OutgoingKV.of(settings, spec.tokens, event.held_blocks)
        believed = max((source.blocks for source in event.sources), default=0) if event.reuse else 0
        expected = settings.reused_tokens(spec.tokens, believed)
        place = QueueKey(spec.tenant, priority_rank(now, spec.priority), event.id, spec.weight).delayed(event.delay_s)
        return cls(event, outgoing, now, place, expected, KVOwner(spec.tenant, spec.transient))

    @property
    def id(self) -> int:
        return self.asked.id

    @property
    def spec(self) -> EngineRequest:
        """The request's record: tokens, keys, tenant."""
        return self.asked.request

    @property
    def reuse(self) -> bool:
        """Whether cached and stored blocks may be used; otherwise every token is computed."""
        return self.asked.reuse

    @property
    def sources(self) -> tuple[KVSource, ...]:
        """Instances that a prefix may be loaded from, best first."""
        return self.asked.sources if self.asked.reuse else ()

    @property
    def copies(self) -> tuple[WriteBackTarget, ...]:
        """Kvstores that blocks are written to."""
        return self.asked.copies

    def set_status(self, status: PrefillStatus) -> None:
        """Change the status, along `TRANSITIONS` only."""
        assert status in TRANSITIONS[self.status], f"request {self.id} cannot go from {self.status} to {status}"
        self.status = status

    @property
    def may_match(self) -> bool:
        """Whether cached blocks may still be used: no step was planned, and no prefix is loaded or loading."""
        return self.first_step_at is None and self.prefix.load is None and not self.prefix.loaded

    @property
    def finished(self) -> bool:
        """Whether all KV is computed and the next token was sampled."""
        return self.computed == self.spec.tokens
