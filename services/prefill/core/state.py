"""State of the prefill core: settings, jobs, I/O under way and what it holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.core.fair import FairQueue, Place, Shares, rank
from moonpool.core.kernel import Cancel, Outstanding
from moonpool.cost import Speeds, SpeedTracker
from moonpool.kv.keys import BlockKey
from moonpool.sched.block_manager import BlockManager, Owner
from moonpool.sched.lending import Lending
from services.prefill.core.actions import Action, Loaded, Miss
from services.prefill.core.events import Arrive, Copy, Source
from services.prefill.core.outgoing import Outgoing


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an instance's core is told once."""

    blocks: int
    """Of the KV pool."""
    block_tokens: int
    layers: int
    slice_bytes: int
    """One layer of one block."""
    step_tokens: int
    """Tokens computed by one step at most; at least one block."""
    stages: int = 1
    """Steps in flight at most."""
    max_started: int = 64
    """Jobs that hold blocks at most."""
    max_queue: int = 1024
    """Jobs at most; more are refused."""
    load_timeout_s: float = 5.0
    """A load may take so many seconds beyond what is predicted."""
    verdict_timeout_s: float = 30.0

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.layers * self.slice_bytes // self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-tokens // self.block_tokens)

    def reused_tokens(self, tokens: int, blocks: int) -> int:
        """Tokens of a prompt that need not be computed where its leading blocks are there: the last one always is."""
        return min(blocks * self.block_tokens, tokens - 1)


@dataclass(slots=True, eq=False)
class Table:
    """A job's blocks. They are released when neither the job nor any I/O holds them."""

    blocks: list[int]
    holds: int = 1


@dataclass(slots=True, eq=False)
class Load:
    """A prefix that is being loaded: blocks [first, end) of the job."""

    io: int
    source: int
    first: int
    end: int
    moved_at: float
    """When the last layer came, or the load began."""
    first_at: float = 0.0
    """When the first layer came."""
    layers: int = 0
    """Leading layers that are there."""
    overtaken: bool = False
    """It has stalled under a step: no step follows it layer by layer any more."""


@dataclass(slots=True, eq=False)
class Job:
    """One prompt."""

    number: int
    num_tokens: int
    keys: tuple[BlockKey, ...]
    sources: tuple[Source, ...]
    copies: tuple[Copy, ...]
    outgoing: Outgoing | None
    added_at: float
    place: Place
    expected_tokens: int
    """Leading tokens that are expected not to be computed; for predictions, until the job starts."""
    owner: Owner
    shared_tokens: int = 0
    """Leading tokens that jobs before it compute here, and register; for predictions, until its first step."""
    reuse: bool = True
    """False = nothing of it may be cached or loaded."""
    next_source: int = 0
    first_step_at: float | None = None
    token_at: float | None = None
    table: Table | None = None
    """Bound when the job starts, given up when nothing of it is to be computed or sent."""
    prefix_blocks: int = 0
    """Leading blocks that were found in the own pool, or loaded. May grow until the first step is planned."""
    cached: int = 0
    """Leading tokens that need not be computed as they were found in the own pool."""
    loaded: int = 0
    """Tokens after these that need not as they were loaded."""
    computed: int = 0
    """Leading tokens that are cached, loaded or computed: their KV is in the pool in all layers. Never shrinks."""
    scheduled: int = 0
    """Leading tokens that are there, or in flight."""
    load: Load | None = None
    flying: int = 0
    """Shares in flight that count."""
    gated: bool = False
    """The share in flight follows the load: nothing is built on it until it is done."""
    settling: set[int] = field(default_factory=set)
    """I/O that reads or writes blocks which are to be computed anew: until it ends, nothing is planned."""
    put_until: list[int] = field(default_factory=list)
    """Per copy, blocks before this one were offered or need not be."""
    misses: list[Miss] = field(default_factory=list)
    loads: list[Loaded] = field(default_factory=list)

    @classmethod
    def of(cls, event: Arrive, settings: Settings, now: float) -> "Job":
        """A job as it arrives."""
        outgoing = None
        if event.held_blocks is not None:
            outgoing = Outgoing.of(settings.layers, settings.blocks_for(event.num_tokens), event.held_blocks)
        sources = event.sources if event.reuse else ()
        believed = max((source.blocks for source in sources), default=0)
        expected = settings.reused_tokens(event.num_tokens, believed)
        place = Place(event.tenant, rank(now, event.priority), event.job, event.weight)
        given = event.job, event.num_tokens, event.keys, sources, event.copies
        owner = Owner(event.tenant, event.transient)
        return cls(*given, outgoing, now, place, expected, owner, reuse=event.reuse)

    @property
    def finished(self) -> bool:
        """Whether all KV is there and the next token was sampled."""
        return self.computed == self.num_tokens


@dataclass(slots=True, eq=False)
class Share:
    """A job's part of a step in flight."""

    job: int
    start: int
    end: int
    first: bool
    """The job's computing begins here."""
    last: bool
    loading: bool
    """Tokens before `start` come through the step's gates."""
    full_hit: bool
    """The KV of its tokens is there, or comes through the gates: it writes none."""
    live: bool = True
    """It counts."""


@dataclass(slots=True, eq=False)
class StepFlight:
    """A step that the engine has."""

    shares: list[Share]
    tables: tuple[Table, ...]
    gated: bool
    moved_at: float
    """When its last layer was done, or it came to the front of the engine."""
    began_at: float
    opened: int = -1
    """Highest layer whose gate is open."""
    layers: int = 0
    """Leading layers that are computed."""


@dataclass(slots=True, eq=False)
class LoadFlight:
    """A read from a kvstore, or from another instance's pool."""

    job: int
    source: Source
    nbytes: int
    wanted: int
    """Blocks."""
    tables: tuple[Table, ...]


@dataclass(slots=True, eq=False)
class CopyFlight:
    """A chain's blocks that are being copied here: those before `first` were here."""

    number: int
    keys: tuple[BlockKey, ...]
    owner: Owner
    blocks: tuple[int, ...]
    first: int
    source: Source
    nbytes: int
    tables: tuple[Table, ...] = ()


@dataclass(slots=True, eq=False)
class TransferFlight:
    """Opening a transfer, or waiting for its verdict: holds no blocks."""

    job: int
    opens: bool
    tables: tuple[Table, ...] = ()


@dataclass(slots=True, eq=False)
class SendFlight:
    """Slices on their way out of the pool."""

    job: int
    tables: tuple[Table, ...]


@dataclass(slots=True, eq=False)
class PutFlight:
    """Blocks that are being written to a kvstore."""

    blocks: tuple[int, ...]
    tables: tuple[Table, ...] = ()


Flight = StepFlight | LoadFlight | CopyFlight | TransferFlight | SendFlight | PutFlight


class State:
    """What the parts of the core share.

    Attributes:
        settings: what the core was told.
        manager: the pool's blocks.
        lending: those that other instances read.
        tracker: predicts seconds with all of the engine's cores, and learns from what was measured.
        share: of them, that steps have had lately: others of the host have the rest.
        jobs: all that have not ended, by number.
        shares: of the tenants; steps are charged to them, in predicted seconds.
        waiting: those without blocks, in fair order.
        started: those with blocks, in the order of starting.
        ios: I/O under way, with what it holds.
        steps: those of it that the engine computes, in their order.
        now: time of the event that is being handled.
        out: its actions.
    """

    def __init__(self, settings: Settings, speeds: Speeds) -> None:
        self.settings = settings
        self.manager = BlockManager(settings.blocks)
        self.lending = Lending(self.manager)
        self.tracker = SpeedTracker(speeds)
        self.share = 1.0
        self.jobs: dict[int, Job] = {}
        self.shares = Shares()
        self.waiting = FairQueue(self.shares)
        self.started: dict[int, Job] = {}
        self.ios: Outstanding[Flight] = Outstanding()
        self.steps: dict[int, StepFlight] = {}
        self.now = 0.0
        self.out: list[Action] = []

    @property
    def front(self) -> StepFlight | None:
        """The step that the engine computes, or the first of those in its pipeline."""
        return next(iter(self.steps.values()), None)

    def do(self, action: Action) -> None:
        """Notes an action."""
        self.out.append(action)

    def begin(self, flight: Flight) -> int:
        """I/O begins, which holds tables of the flight; returns its number."""
        for table in flight.tables:
            table.holds += 1
        return self.ios.begin(flight)

    def end(self, io: int) -> Flight:
        """I/O has ended: what it held is given back, and whoever waits for its end goes on."""
        flight = self.ios.end(io)
        for table in flight.tables:
            self.drop(table)
        for number in _jobs_of(flight):
            job = self.jobs.get(number)
            if job is not None and job.settling:
                job.settling.discard(io)
        return flight

    def cancel(self, io: int | None) -> None:
        """The I/O is not wanted any more, if it is still under way."""
        if io is not None and io in self.ios:
            self.do(Cancel(io))

    def drop(self, table: Table) -> None:
        """One hold less; the last one releases the blocks."""
        table.holds -= 1
        if not table.holds:
            self.manager.release(table.blocks)

    def unbind(self, job: Job) -> None:
        """The job itself needs its blocks no more."""
        if job.table is not None:
            self.drop(job.table)
            job.table = None

    def reusable_blocks(self, job: Job) -> int:
        """Leading blocks that may be cached or loaded: full ones."""
        return job.num_tokens // self.settings.block_tokens if job.reuse else 0

    def hold_prefix(self, job: Job, blocks: int) -> None:
        """So many leading blocks of a job that has not begun were found in the pool."""
        job.prefix_blocks = blocks
        job.cached = job.computed = job.scheduled = self.settings.reused_tokens(job.num_tokens, blocks)

    def advance(self, job: Job, end: int) -> None:
        """Tokens up to `end` are in the pool: the blocks they fill get their identity."""
        size = self.settings.block_tokens
        assert job.table is not None
        for index in range(job.computed // size, end // size):
            self.manager.register(job.table.blocks[index], job.keys[index], job.owner)
        job.computed = end
        job.scheduled = max(job.scheduled, end)


def _jobs_of(flight: Flight) -> Sequence[int]:
    match flight:
        case SendFlight() | LoadFlight() | TransferFlight():
            return (flight.job,)
        case StepFlight():
            return [share.job for share in flight.shares]
        case PutFlight() | CopyFlight():
            return ()
