"""A request in the decode scheduler: status and transitions, sequences, and the table of all requests."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_manager import KVOwner
from moonpool.base.scheduling.fair_share import QueueKey, priority_rank
from moonpool.base.scheduling.request import EngineRequest
from moonpool.engine.decode.core.beam_search import BeamSearch
from moonpool.engine.decode.core.events import ReserveBlocks
from moonpool.engine.decode.core.present_tenants import PresentTenants
from moonpool.engine.scheduler.block_table import BlockTable
from moonpool.engine.scheduler.prefix_sources import KVSource, PrefixLoaded, PrefixMiss

NO_STREAM = 0
"""`DecodeRequest.stream` after losing the conductor."""


class RequestStatus(Enum):
    """State of a request; `TRANSITIONS` has the changes that may happen."""

    PROMISED = "promised"
    """Blocks are promised. Only the cached prefix is in the block table."""
    QUEUED = "queued"
    """The prompt is computed here and waits for its turn; the blocks are still promised."""
    RECEIVING = "receiving"
    """Blocks are bound and the prompt's KV arrives."""
    RECEIVED = "received"
    """All KV has arrived and the first token is not known; or a whole prompt was computed here, and answers begin."""
    WAITING = "waiting"
    """Has KV for all tokens but the last. Waits for a slot in the batch, or for a block."""
    RUNNING = "running"
    """In the batch."""
    LOADING = "loading"
    """The prompt is computed here, and its prefix is loaded into the blocks from a kvstore or another instance."""
    RECOMPUTING = "recomputing"
    """Computes missing KV chunk by chunk: after preemption, behind known tokens, or of a prompt computed here."""
    SWAPPING_OUT = "swapping out"
    """Preempted; the blocks are copied to DRAM."""
    PREEMPTED = "preempted"
    """Has no blocks; waits until they can be restored."""
    SWAPPING_IN = "swapping in"
    """The blocks are copied back from DRAM."""
    FINISHING = "finishing"
    """Has ended; a step, a copy or a transfer still uses the request's blocks."""
    PARKED = "parked"
    """Without conductor and blocks, and not in the request table until a conductor takes the request over."""


_S = RequestStatus

_RESTORED = (_S.WAITING, _S.RECOMPUTING, _S.SWAPPING_IN)

TRANSITIONS: Mapping[RequestStatus, frozenset[RequestStatus]] = {
    _S.PROMISED: frozenset({_S.RECEIVING, _S.QUEUED, _S.WAITING, _S.RECOMPUTING, _S.FINISHING}),
    _S.QUEUED: frozenset({_S.LOADING, _S.RECOMPUTING, _S.FINISHING}),
    _S.LOADING: frozenset({_S.RECOMPUTING, _S.FINISHING}),
    _S.RECEIVING: frozenset({_S.RECEIVED, _S.FINISHING}),
    _S.RECEIVED: frozenset({_S.WAITING, _S.FINISHING}),
    _S.WAITING: frozenset({_S.RUNNING, _S.PREEMPTED, _S.SWAPPING_OUT, _S.FINISHING, _S.PARKED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.PREEMPTED, _S.SWAPPING_OUT, _S.FINISHING, _S.PARKED}),
    _S.RECOMPUTING: frozenset({_S.RECEIVED, _S.RUNNING, _S.WAITING, _S.PREEMPTED, _S.FINISHING, _S.PARKED}),
    _S.SWAPPING_OUT: frozenset({_S.PREEMPTED, _S.FINISHING}),
    _S.PREEMPTED: frozenset({*_RESTORED, _S.FINISHING, _S.PARKED}),
    _S.SWAPPING_IN: frozenset({_S.WAITING, _S.PREEMPTED, _S.FINISHING}),
    _S.FINISHING: frozenset(),
    _S.PARKED: frozenset({_S.PREEMPTED}),
}
"""Statuses that may follow each status. A request begins as PROMISED."""
TRANSFERRING = (RequestStatus.PROMISED, RequestStatus.RECEIVING, RequestStatus.RECEIVED)
"""The request has not started: there is only one sequence, and a lease."""
PREEMPTIBLE = (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.RECOMPUTING)
"""The request may be preempted if no step in flight computes the request."""
COPYING = (RequestStatus.SWAPPING_OUT, RequestStatus.SWAPPING_IN)
"""A copy uses the request's blocks."""
MOVING = (*COPYING, RequestStatus.LOADING)
"""A copy or a load uses the request's blocks."""


@frozen
class BlockSharing:
    """How a request's sequences share blocks, independent of block ids.

    Attributes:
        blocks: number of blocks. How a request's sequences share blocks, whatever the block ids are. The first sequence
        has the first indices; blocks that a further sequence shares with earlier sequences are leading blocks.
    """

    blocks: int
    tables: tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class RequestSequence:
    """One sequence in a request.

    Attributes:
        id: the request's id, or an id that follows.
        keys: keys of full blocks: the prompt's, then the answer's.
        tokens: prompt and answer so far, with the first sampled token once started. In the batch: less
            `RunningBatch.ticks`.
        computed: leading tokens that have KV, or get KV from an earlier sequence; while recomputing.
        stored: for each of the request's kvstores, leading full blocks believed to be there.
        borders: for each kvstore, the most leading blocks whose window is believed to be there; only with windows.
        shared: leading tokens whose KV another sequence writes; while recomputing.
    """

    id: int
    keys: list[BlockKey]
    tokens: int
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    stored: list[int] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)
    shared: int = 0


@dataclass(slots=True)
class TakeoverState:
    """What another conductor needs to take a request over.

    Attributes:
        fence: number of the last takeover; a higher number wins.
        known_tokens: for each sequence, tokens known behind the first token; until the sequence begins.
        known_keys: keys of the blocks that these tokens fill.
    """

    fence: int
    known_tokens: tuple[int, ...] = ()
    known_keys: tuple[tuple[BlockKey, ...], ...] = ()


@dataclass(slots=True)
class PreemptionState:
    """How a request was preempted.

    Attributes:
        count: preemptions so far.
        sharing: how the sequences shared blocks; None before the first preemption.
        swapped_blocks: leading blocks of `sharing` that are in DRAM.
        since: step of the first preemption since the request last was in the batch; None if there was no preemption.
    """

    count: int = 0
    sharing: BlockSharing | None = None
    swapped_blocks: int = 0
    since: int | None = None

    @property
    def blocks(self) -> BlockSharing:
        """How the sequences shared blocks; for a request that was preempted."""
        assert self.sharing is not None
        return self.sharing


@dataclass(slots=True)
class PrefixState:
    """The leading part of a whole prompt that need not be computed.

    Attributes:
        held: leading blocks that were cached.
        io: the last load's I/O number; 0 = no load has begun.
        asked_end: blocks that the prompt has if that load arrives whole.
        misses: blocks that a kvstore lacked.
        loads: loads that arrived whole.
    """

    held: int = 0
    io: int = 0
    asked_end: int = 0
    misses: list[PrefixMiss] = field(default_factory=list)
    loads: list[PrefixLoaded] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A request: a group of sequences that runs, is preempted and restored together; mostly one sequence.

    Sequences share blocks by reference. A full block never changes. A part-filled block is copied for a writing
    sequence while others refer to the block. Whoever changes a request keeps the sums of `BlockBudget` and
    `RunningBatch` right.

    Attributes:
        asked: what the conductor asked for.
        sequences: one until the request starts, then all that have not ended, at most the width.
        tbt_slo_s: promised seconds between tokens; 0 = no promise, or no promise any more.
        conductor: identity of the conductor that has the request now; "" = unknown.
        rank: time of arrival, later for a lower priority (`moonpool.base.scheduling.fair_share.priority_rank`).
        owner: the KV's tenant, and whether blocks may be kept.
        starts_at: expected start, seconds.
        until: when the promise ends, however often the lease is renewed, seconds.
        status: set by `set_status` only.
        promised: blocks promised and not bound.
        promised_window_blocks: window blocks promised and not bound.
        expected_blocks: blocks expected at the end.
        expected_growth: part of `expected_blocks` neither present nor promised.
        stream: stream of the conductor that started the request or took the request over; None before.
        finishes: for each sequence, why the sequence ends with the first token; 0 = continues.
        patient: no client waits for single tokens, and no time between tokens was promised.
        ended_tokens: tokens in answers that have ended while others continue.
        prompt_here: the prompt, or known tokens behind the prompt, are computed here; no other instance writes these to
            the kvstores.
        search: chooses which sequences fork; None = each sequence continues alone.
        held_by_stores: see `QueuePrompt.held`.
        sources: where the prefix of a whole prompt may be loaded from, the best first.
        prefix: of a whole prompt whose turn has come.
        turn: place among the whole prompts computed here, until the first token; None = no such prompt.
        takeover: what another conductor needs for a takeover.
        preemption: how the request was preempted.
    """

    asked: ReserveBlocks
    sequences: list[RequestSequence]
    tbt_slo_s: float
    conductor: str
    rank: float
    owner: KVOwner
    starts_at: float
    until: float
    takeover: TakeoverState
    search: BeamSearch | None
    preemption: PreemptionState = field(default_factory=PreemptionState)
    status: RequestStatus = RequestStatus.PROMISED
    promised: int = 0
    promised_window_blocks: int = 0
    expected_blocks: int = 0
    expected_growth: int = 0
    stream: int | None = None
    finishes: tuple[int, ...] = ()
    patient: bool = False
    ended_tokens: int = 0
    prompt_here: bool = False
    turn: QueueKey | None = None
    held_by_stores: tuple[int | None, ...] = ()
    sources: tuple[KVSource, ...] = ()
    prefix: PrefixState = field(default_factory=PrefixState)

    @classmethod
    def of(cls, event: ReserveBlocks, now: float, until: float) -> Self:
        """Return a request on arrival."""
        spec = event.request
        there = [len(spec.keys)] * event.stores
        first = RequestSequence(event.id, list(spec.keys), spec.tokens, stored=there, borders=list(there))
        longest = event.total_tokens - spec.prompt_tokens
        return cls(
            asked=event,
            sequences=[first],
            tbt_slo_s=event.tbt_slo_s,
            conductor=event.conductor,
            rank=priority_rank(now, spec.priority),
            owner=KVOwner(spec.tenant, spec.transient),
            starts_at=now + event.starts_in_s,
            until=until,
            takeover=TakeoverState(event.fence),
            search=BeamSearch(spec.width, longest, event.search) if event.search is not None else None,
        )

    @property
    def id(self) -> int:
        """Id for the request and the first sequence; further sequences have the ids that follow."""
        return self.asked.id

    @property
    def spec(self) -> EngineRequest:
        """The request's record: prompt, width, tenant."""
        return self.asked.request

    @property
    def total_tokens(self) -> int:
        """Most tokens in a sequence."""
        return self.asked.total_tokens

    @property
    def stores(self) -> int:
        """Number of kvstores that full blocks are written to."""
        return self.asked.stores

    @property
    def store_beliefs(self) -> list[int | None]:
        """For each kvstore, leading blocks of the prompt that it is believed to hold; None = unknown."""
        return [*self.held_by_stores, *[None] * self.stores][: self.stores]

    def set_status(self, status: RequestStatus) -> None:
        """Change the status, along `TRANSITIONS` only."""
        assert status in TRANSITIONS[self.status], f"request {self.id} cannot go from {self.status} to {status}"
        self.status = status

    @property
    def order_key(self) -> tuple[float, int]:
        """Order requests: the lowest goes first, the highest is preempted first."""
        return self.rank, self.id

    @property
    def is_started(self) -> bool:
        """Whether the first token is known."""
        return self.stream is not None

    @property
    def lacks_first_token(self) -> bool:
        """Whether the whole prompt is computed here and no answer has begun; there is one sequence."""
        return self.turn is not None

    @property
    def waits_as_prompt(self) -> bool:
        """Whether the whole prompt is, or will be, computed here, and no answer has begun."""
        coming = self.asked.computes_prompt and self.status is RequestStatus.PROMISED
        return coming or (self.turn is not None and self.status is not RequestStatus.FINISHING)

    @property
    def is_group(self) -> bool:
        """Whether the request has, or may have, more than one plain sequence."""
        return self.spec.width > 1 or self.search is not None

    @property
    def num_seqs(self) -> int:
        """Sequences now, or after the sequences fork: each takes a batch slot."""
        unborn = self.lacks_first_token or self.status in TRANSFERRING
        return self.spec.width if unborn else len(self.sequences)

    def find(self, number: int) -> RequestSequence | None:
        """Return the sequence with this id; None after the sequence's end."""
        return next((sequence for sequence in self.sequences if sequence.id == number), None)

    def take_known_tokens(self) -> bool:
        """Add the tokens known behind the first tokens to the sequences; return whether there are any."""
        known = self.takeover
        for sequence, tokens, keys in zip(self.sequences, known.known_tokens, known.known_keys, strict=False):
            sequence.tokens += tokens
            sequence.keys += keys
        has_known, known.known_tokens, known.known_keys = any(known.known_tokens), (), ()
        return has_known

    @property
    def blocks(self) -> list[int]:
        """The request's blocks, each once: the first sequence's in order, then blocks of further sequences only."""
        if len(self.sequences) == 1:
            return self.sequences[0].table.blocks
        return list(dict.fromkeys(block for sequence in self.sequences for block in sequence.table.blocks))

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """The sequences' block tables."""
        return tuple([sequence.table for sequence in self.sequences])

    def blocks_of(self, sharing: BlockSharing) -> Iterator[int]:
        """Return the blocks that `sharing` counts, in order, while the sequences still have them."""
        seen = set[int]()
        for sequence, table in zip(self.sequences, sharing.tables, strict=True):
            for number, block in zip(table, sequence.table.blocks, strict=False):
                if number not in seen:
                    seen.add(number)
                    yield block

    @property
    def refs(self) -> Iterator[int]:
        """Block references: a block appears once for each sequence that has the block."""
        return (block for sequence in self.sequences for block in sequence.table.blocks)

    @property
    def answer_tokens(self) -> int:
        """Tokens in all answers; at least the hypotheses' tokens. Not for a request in the batch."""
        if self.search is not None:
            return self.search.width * self.search.length
        return self.ended_tokens + sum(max(0, sequence.tokens - self.spec.prompt_tokens) for sequence in self.sequences)

    def keep_nothing(self) -> None:
        """From now on give no block a key, and look none up in kvstores."""
        self.owner.transient = True
        for sequence in self.sequences:
            sequence.stored, sequence.borders = [0] * self.stores, [0] * self.stores

    def check_invariants(self, *, leased: bool) -> None:
        """Assert what the status means. `leased`: the request has a lease."""
        assert 1 <= len(self.sequences) <= self.spec.width
        assert not self.promised or self.status in (RequestStatus.PROMISED, RequestStatus.QUEUED)
        assert leased == (self.status in TRANSFERRING)
        self._check_search()

    def _check_search(self) -> None:
        """Assert that a search that has begun has a score for each sequence."""
        search = self.search
        if search is None or not search.length or self.status is RequestStatus.FINISHING:
            return
        assert len(self.sequences) == len(search.scores) == self.spec.width
        assert (
            len({(sequence.tokens, len(sequence.table.blocks), len(sequence.keys)) for sequence in self.sequences}) == 1
        )
        search.check_invariants()


class RequestTable:
    """All requests except parked requests, by their ids and their sequences' ids; their tenants."""

    def __init__(self) -> None:
        self.requests: dict[int, DecodeRequest] = {}
        self.tenants = PresentTenants()
        self._by_sequence: dict[int, DecodeRequest] = {}  # also of sequences that have ended, or not begun

    def add(self, request: DecodeRequest) -> None:
        self.requests[request.id] = request
        self.tenants.add(request.spec.tenant)
        self._by_sequence |= dict.fromkeys(range(request.id, request.id + request.spec.width), request)

    def remove(self, request: DecodeRequest, now: float) -> None:
        del self.requests[request.id]
        self.tenants.remove(request.spec.tenant, now)
        for number in range(request.id, request.id + request.spec.width):
            del self._by_sequence[number]

    def of(self, number: int) -> DecodeRequest:
        """Return the request to which a sequence belongs; the sequence may have ended."""
        return self._by_sequence[number]

    def get(self, number: int) -> DecodeRequest | None:
        """Return the request to which a sequence belongs; None if the request is not in the table."""
        return self._by_sequence.get(number)

    def find(self, number: int) -> RequestSequence | None:
        """Return a sequence; None if the sequence has ended or the request is not in the table."""
        request = self._by_sequence.get(number)
        return request.find(number) if request is not None else None

    def check_invariants(self) -> None:
        """Assert that each sequence leads to the right request, and that the tenants are the requests'."""
        self.tenants.check_invariants([request.spec.tenant for request in self.requests.values()])
        for request in self.requests.values():
            assert all(self._by_sequence[sequence.id] is request for sequence in request.sequences)
        assert len(self._by_sequence) == sum(request.spec.width for request in self.requests.values())
