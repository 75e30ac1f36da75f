"""A request in the decode scheduler: its sequences, its beam search, and the table of all requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from moonpool.frozen import frozen
from moonpool.kv.keys import BlockKey
from moonpool.scheduling.block_manager import KVOwner
from moonpool.scheduling.fair_share import priority_rank
from services.decode.core.events import BeamCandidates, BeamRules, ReserveBlocks


@frozen
class Hypothesis:
    """A sequence that has ended."""

    number: int
    """In the order in which they ended."""
    score: float


@dataclass(slots=True)
class BeamSearch:
    """A beam search; see `services.decode.core.batch` for its rules."""

    width: int
    longest: int
    """Most tokens of an answer."""
    rules: BeamRules
    length: int = 0
    """Tokens of each beam's answer."""
    scores: list[float] = field(default_factory=lambda: [0.0])
    """Of the beams, the best first: sums of log probabilities."""
    kept: list[Hypothesis] = field(default_factory=list)
    """The best hypotheses so far, the best first; at most `width`."""
    ended: int = 0
    """Hypotheses that were found, also those not kept."""
    over: bool = False

    def step(self, candidates: Sequence[BeamCandidates]) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """Takes what may follow each beam, in their order.

        Returns:
            The beams that go on, the best first, as (parent, candidate); none when the search is over. And what has
            ended and is kept, as (number, parent, candidate).
        """
        self.length += 1
        order = sorted(
            (-(self.scores[beam] + log_probability), beam, index, ends)
            for beam, found in enumerate(candidates)
            for index, (log_probability, ends) in enumerate(found)
        )
        going = [it for it in order if not it[3]][: self.width]
        ended = self._end([it for it in order[: self.width] if it[3]])
        self.over = len(going) < self.width or self._is_decided(-going[0][0])
        if self.over:
            return [], ended
        self.scores = [-negative for negative, *_ in going]
        return [(beam, index) for _, beam, index, _ in going], ended

    def _end(self, found: list[tuple[float, int, int, bool]]) -> list[tuple[int, int, int]]:
        """Keeps the best hypotheses; returns which of the new ones are among them."""
        new = {}
        for negative, beam, index, _ in found:
            self.kept.append(Hypothesis(self.ended, self._scored(-negative, self.length)))
            new[self.ended] = (self.ended, beam, index)
            self.ended += 1
        self.kept = sorted(self.kept, key=lambda it: -it.score)[: self.width]
        return [new[it.number] for it in self.kept if it.number in new]

    def _scored(self, total: float, length: int) -> float:
        return float(total / length**self.rules.length_penalty)

    def _is_decided(self, best: float) -> bool:
        """Whether no beam is to be waited for: there are enough hypotheses, and none is expected to become better."""
        if len(self.kept) < self.width:
            return False
        if self.rules.early_stopping is True:
            return True
        grows = self.rules.early_stopping == "never" and self.rules.length_penalty > 0
        return self._scored(best, self.longest if grows else self.length) <= self.kept[-1].score

    def check_invariants(self) -> None:
        """Asserts that beams and hypotheses are in order and no more than wanted."""
        assert self.scores == sorted(self.scores, reverse=True)
        scores = [it.score for it in self.kept]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) <= min(self.width, self.ended)
        assert 0 <= self.length < self.longest or self.over


class RequestStatus(Enum):
    """Where a request stands."""

    PROMISED = "promised"
    """Room is promised; the held prefix alone is in its table."""
    RECEIVING = "receiving"
    """Its prompt's blocks are bound and KV comes."""
    WHOLE = "whole"
    """All KV is there; the first token is not known."""
    READY = "ready"
    """KV is there for all tokens but the last; it waits for a place in the batch, or for a block."""
    RUNNING = "running"
    """In the batch."""
    CATCHING_UP = "catching up"
    """Comes back from preemption: KV that is gone is computed, chunk by chunk."""
    SWAPPING_OUT = "swapping out"
    PARKED = "parked"
    """Preempted, without blocks."""
    SWAPPING_IN = "swapping in"
    LOADING = "loading"
    """Its full blocks are being read from a kvstore."""
    LEAVING = "leaving"
    """Has ended, but a step or a copy still uses its blocks."""
    LOGGED = "logged"
    """Parked without a conductor: not one of the core's requests until it is adopted."""


NO_STREAM = 0
"""The stream of those that have lost their conductor."""


@frozen
class BlockSharing:
    """How the members of a request share its blocks, apart from where these lie."""

    blocks: int
    """How many there are."""
    tables: tuple[tuple[int, ...], ...]
    """For each member which of them it has, in order. The first member has the first ones; what a further one shares
    with those before it are leading blocks."""


TRANSFERRING = (RequestStatus.PROMISED, RequestStatus.RECEIVING, RequestStatus.WHOLE)
"""States of a request that has not begun: it is one sequence still."""


ACTIVE = (RequestStatus.READY, RequestStatus.RUNNING, RequestStatus.CATCHING_UP)
"""States in which a sequence may be preempted, when no step is running."""


@dataclass(slots=True, eq=False)
class RequestSequence:
    """One sequence of a request."""

    id: int
    keys: list[BlockKey]
    """Of its full blocks, the prompt's and then the answer's."""
    tokens: int
    """Tokens so far, once it has started with the first one sampled; less `Batch.ticks` while it is in the batch."""
    table: list[int] = field(default_factory=list)
    """Its blocks, each referred to once."""
    computed: int = 0
    """Leading tokens whose KV is there, or is computed by an earlier member, while it catches up."""
    stored: list[int] = field(default_factory=list)
    """Leading full blocks that each of its request's kvstores is presumed to have."""
    shared: int = 0
    """Leading tokens whose KV it does not write while it catches up: it is held, or an earlier member computes it."""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A request: a group of sequences that runs, is preempted and comes back together; mostly a group of one.

    Members share blocks by reference. A full block never changes. A part-filled one is copied for whoever writes to it
    while others refer to it. What changes a request keeps the sums of `Room` and `Batch` right.
    """

    id: int
    members: list[RequestSequence]
    """Its sequences: one until it starts, then as many as have not ended, at most `width`. Their ids are its own and
    the following ones."""
    width: int
    """Most sequences that it may have."""
    prompt_tokens: int
    total_tokens: int
    tbt_slo_s: float
    conductor: str
    stores: int
    rank: float = 0.0
    """When it came, and later by its priority (`moonpool.scheduling.fair_share.priority_rank`)."""
    owner: KVOwner = field(default_factory=KVOwner)
    """Whose KV it is, and whether its blocks may be kept."""
    starts_at: float = 0.0
    """When it is expected to start, by who has asked for room."""
    until: float = 0.0
    """When it ends if it was not started, however often its lease is renewed."""
    state: RequestStatus = RequestStatus.PROMISED
    promised: int = 0
    """Blocks promised and not bound."""
    expected_blocks: int = 0
    """Blocks that it is expected to need at its end."""
    claim: int = 0
    """Blocks that it is expected to need and has neither got nor been promised."""
    stream: int | None = None
    """Stream of the conductor that has started or adopted it."""
    resumable: bool = False
    fence: int = 0
    finishes: tuple[int, ...] = ()
    """Why its members end with their first token; 0 = they go on."""
    search: BeamSearch | None = None
    """Set when its sequences are beams."""
    opening: BeamCandidates = ()
    """What may follow the prompt, where beams are wanted."""
    known: tuple[int, ...] = ()
    """Of each sequence, tokens behind the first one that are known, until it begins."""
    known_keys: tuple[tuple[BlockKey, ...], ...] = ()
    """Of the blocks that these fill."""
    ended_tokens: int = 0
    """Of the answers that have ended while others go on."""
    patient: bool = False
    """Nobody waits for its single tokens, and the time between them was not promised."""
    preemptions: int = 0
    logprob_bytes: int = 0
    """Bytes of the log probabilities that are kept with each token of its answer."""
    prompt_here: bool = False
    """Its prompt, or known tokens behind it, are computed here: nobody else writes these to its kvstores."""
    recompute: bool = False
    """Was parked to be computed anew wholly."""
    shape: BlockSharing | None = None
    """Which blocks it had when it was preempted."""
    saved: int = 0
    """Blocks of `shape` that are swapped out, from the first on."""

    @classmethod
    def of(cls, event: ReserveBlocks, now: float, until: float) -> Self:
        """One that asks for room."""
        first = RequestSequence(event.id, list(event.keys), event.tokens, stored=[len(event.keys)] * event.stores)
        longest = event.total_tokens - event.prompt_tokens
        return cls(
            event.id,
            [first],
            event.width,
            event.prompt_tokens,
            event.total_tokens,
            event.tbt_slo_s,
            event.conductor,
            event.stores,
            priority_rank(now, event.priority),
            KVOwner(event.tenant, event.transient),
            now + event.starts_in_s,
            until,
            resumable=event.resumable,
            fence=event.fence,
            logprob_bytes=event.logprob_bytes,
            search=BeamSearch(event.width, longest, event.beams) if event.beams is not None else None,
        )

    @property
    def turn(self) -> tuple[float, int]:
        """By which requests are compared: the least goes first, the highest is preempted first."""
        return self.rank, self.id

    @property
    def is_started(self) -> bool:
        """Whether the first token is known."""
        return self.stream is not None

    @property
    def is_group(self) -> bool:
        """Whether what follows is not decided by its one sequence alone."""
        return self.width > 1 or self.search is not None

    @property
    def places(self) -> int:
        """Places that it takes in a step, now or once it has forked."""
        return self.width if self.state in TRANSFERRING else len(self.members)

    def member(self, number: int) -> RequestSequence | None:
        """Its sequence of this id; None when that has ended."""
        return next((member for member in self.members if member.id == number), None)

    @property
    def blocks(self) -> list[int]:
        """Its blocks, each once: those of the first member in order, then what further ones have of their own."""
        if len(self.members) == 1:
            return self.members[0].table
        return list(dict.fromkeys(block for member in self.members for block in member.table))

    def blocks_of(self, shape: BlockSharing) -> Iterator[int]:
        """The blocks that a shape counts, in order; they are still the members'."""
        seen = set[int]()
        for member, table in zip(self.members, shape.tables, strict=True):
            for number, block in zip(table, member.table, strict=False):
                if number not in seen:
                    seen.add(number)
                    yield block

    @property
    def refs(self) -> Iterator[int]:
        """Its references to blocks: a block is named by each member that has it."""
        return (block for member in self.members for block in member.table)

    @property
    def answer_tokens(self) -> int:
        """Tokens of all its answers; of beams no fewer than their hypotheses have. Not for one in the batch."""
        if self.search is not None:
            return self.search.width * self.search.length
        return self.ended_tokens + sum(max(0, member.tokens - self.prompt_tokens) for member in self.members)

    def keep_nothing(self) -> None:
        """No block of it gets a key from now on, nor is looked for in kvstores."""
        self.owner.transient = True
        for member in self.members:
            member.stored = [0] * self.stores

    def check_invariants(self, *, leased: bool) -> None:
        """Asserts what its state says; `leased`: it has a lease."""
        assert 1 <= len(self.members) <= self.width
        for member in self.members:
            assert len(set(member.table)) == len(member.table), "a block is twice in a table"
        assert (self.promised > 0) <= (self.state is RequestStatus.PROMISED)
        assert leased == (self.state in TRANSFERRING)


class RequestTable:
    """All requests but those that are kept without blocks until they are adopted."""

    def __init__(self) -> None:
        self.requests: dict[int, DecodeRequest] = {}
        self._of: dict[int, DecodeRequest] = {}  # by the ids of all members that they may have

    def add(self, request: DecodeRequest) -> None:
        """It has come, or come back."""
        self.requests[request.id] = request
        self._of |= dict.fromkeys(range(request.id, request.id + request.width), request)

    def remove(self, request: DecodeRequest) -> None:
        """It is not here any more."""
        del self.requests[request.id]
        for number in range(request.id, request.id + request.width):
            del self._of[number]

    def of(self, number: int) -> DecodeRequest:
        """The request of a sequence, which may have ended."""
        return self._of[number]

    def get(self, number: int) -> DecodeRequest | None:
        """The request of a sequence; None when it is not here any more."""
        return self._of.get(number)

    def find(self, number: int) -> RequestSequence | None:
        """A sequence; None when it is not here any more."""
        request = self._of.get(number)
        return request.member(number) if request is not None else None

    def check_invariants(self) -> None:
        """Asserts that each sequence leads to its request."""
        for request in self.requests.values():
            assert all(self._of[member.id] is request for member in request.members)
        assert len(self._of) == sum(request.width for request in self.requests.values())
