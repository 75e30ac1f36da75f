"""The running batch, and how the sequences of one request share KV blocks: forks, copy on write, resuming, beams.

All running sequences advance by one token per step; a step in which no sequence needs a block costs O(1) here.

The beam search step is that of `transformers` 5.23 (`GenerationMixin._beam_search`), which considers the best max(2,
1 + end tokens) times `width` candidates of all beams: only the best `width` may end, and the best `width` that do not
end go on. The best (width + end tokens) candidates of each beam contain all that can be chosen. Ties go to the
earlier beam, then to the earlier candidate of a beam; of equal hypotheses the earlier one is better. Log
probabilities are summed in double precision.
"""

from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush

from moonpool.frozen import frozen
from moonpool.scheduling.block_manager import BlockManager
from services.decode.core.actions import Action, BeamsRanked, Chunk, SelectBeams, SetBlockTable
from services.decode.core.events import BeamCandidates
from services.decode.core.request import BlockSharing, DecodeRequest, RequestSequence, RequestStatus
from services.decode.core.settings import DecodeSettings


class RunningBatch:
    """All sequences advance by one token with each step, so their tokens are a base plus the steps (`ticks`).

    The block that is needed next is at the top of a heap over step numbers. Requests join and leave between steps only,
    with all their members.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.ticks = 0
        self.context = 0
        """Tokens of all sequences."""
        self._requests: dict[int, DecodeRequest] = {}
        self._members: dict[int, tuple[RequestSequence, DecodeRequest]] = {}
        self._needs: list[tuple[int, int]] = []
        self._forked: dict[int, DecodeRequest] = {}
        self._hurried = 0
        self._ids: tuple[int, ...] | None = ()
        self._tbt_s: list[float] | None = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: DecodeRequest) -> bool:
        return request.id in self._requests

    @property
    def requests(self) -> list[DecodeRequest]:
        """In the order in which they came."""
        return list(self._requests.values())

    @property
    def ids(self) -> tuple[int, ...]:
        """Of the sequences, in the order in which they came."""
        if self._ids is None:
            self._ids = tuple(self._members)
        return self._ids

    @property
    def tbt_slo_s(self) -> float:
        """The strictest time between tokens that a request was promised; 0 = none was."""
        if self._tbt_s is None:
            self._tbt_s = sorted(request.tbt_slo_s for request in self._requests.values() if request.tbt_slo_s)
        return self._tbt_s[0] if self._tbt_s else 0.0

    @property
    def patient(self) -> bool:
        """Whether nobody waits for single tokens."""
        return not self._hurried

    def tokens_of(self, member: RequestSequence) -> int:
        """Tokens of a sequence, in the batch or not."""
        return member.tokens + self.ticks if member.id in self._members else member.tokens

    def context_of(self, request: DecodeRequest) -> int:
        """Tokens of all sequences of a request, in the batch or not, or of those that it will begin with."""
        if request.width == 1:
            return self.tokens_of(request.members[0])
        tokens = sum(map(self.tokens_of, request.members))
        return tokens * request.places // len(request.members)

    def join(self, request: DecodeRequest) -> None:
        """Takes a request in."""
        self._requests[request.id] = request
        self._hurried += not request.patient
        for member in request.members:
            self.context += member.tokens
            member.tokens -= self.ticks
            self._members[member.id] = member, request
            self.grew(member)
        self._ids = self._tbt_s = None

    def leave(self, request: DecodeRequest) -> None:
        """Lets a request go."""
        for member in request.members:
            self._let_go(member)
        del self._requests[request.id]
        self._hurried -= not request.patient
        self._forked.pop(request.id, None)
        self._tbt_s = None

    def end(self, member: RequestSequence) -> None:
        """One sequence of a request has ended; others go on."""
        self._let_go(member)

    def _let_go(self, member: RequestSequence) -> None:
        del self._members[member.id]
        self._ids = None
        member.tokens += self.ticks
        self.context -= member.tokens

    def advance(self, steps: int = 1) -> None:
        """Each sequence has got a token in each of these steps."""
        self.ticks += steps
        self.context += steps * len(self._members)

    def grew(self, member: RequestSequence) -> None:
        """Notes when a sequence needs its next block; call it when it has got one."""
        heappush(self._needs, (self._need(member), member.id))

    def forked(self, request: DecodeRequest) -> None:
        """Notes that its members share the block that they write to next."""
        self._forked[request.id] = request

    def due(self) -> list[DecodeRequest]:
        """Takes the requests that need blocks for the next step, first come first."""
        found, self._forked = self._forked, {}
        while self._needs and self._needs[0][0] <= self.ticks:
            tick, number = heappop(self._needs)
            member, request = self._members.get(number, (None, None))
            if member is not None and request is not None and self._need(member) == tick:
                found[request.id] = request
        return [found[number] for number in sorted(found)]

    @property
    def blocks_ahead(self) -> int:
        """Blocks of the members that hold none of their tokens yet."""
        return sum((self._need(member) - 1 - self.ticks) // self._block_tokens for member, _ in self._members.values())

    @property
    def is_plain(self) -> bool:
        """Whether nobody in it may have several sequences, or is a beam."""
        return not any(request.is_group for request in self._requests.values())

    def soonest(self, steps: int) -> tuple[DecodeRequest, RequestSequence] | None:
        """The sequence whose blocks are the first not to be enough, if that is within so many steps."""
        while self._needs and self._needs[0][0] < self.ticks + steps:
            tick, number = self._needs[0]
            member, request = self._members.get(number, (None, None))
            if member is not None and request is not None and self._need(member) == tick:
                return request, member
            heappop(self._needs)
        return None

    def covered(self, most: int) -> int:
        """Steps from now on for which the blocks of all members are enough; `most` at most."""
        short = self.soonest(most)
        return self._need(short[1]) - self.ticks if short is not None else most

    def _need(self, member: RequestSequence) -> int:
        """The tick from which on the blocks do not hold all tokens."""
        return len(member.table) * self._block_tokens + 1 - member.tokens

    def check_invariants(self) -> None:
        """Asserts that the sums and the heap agree with the requests."""
        assert self.context == sum(member.tokens + self.ticks for member, _ in self._members.values())
        members = [(member.id, request.id) for request in self._requests.values() for member in request.members]
        assert members == [(number, request.id) for number, (_, request) in self._members.items()]
        assert self._forked.keys() <= self._requests.keys()
        assert self._hurried == sum(not request.patient for request in self._requests.values())
        noted = set(self._needs)
        for number, (member, _) in self._members.items():
            assert (self._need(member), number) in noted, "a sequence's next block was forgotten"


@frozen
class BlockCopy:
    """A member got a copy of a part-filled block, because others refer to it."""

    request: DecodeRequest
    member: RequestSequence
    index: int
    """Of the block in the member's table."""
    source: int
    block: int
    """The copy."""


def fork_sequences(request: DecodeRequest, manager: BlockManager) -> None:
    """Makes a request's one sequence into as many as it may have: the others refer to the same blocks."""
    [first] = request.members
    for number in range(first.id + 1, first.id + request.width):
        manager.acquire(first.table)
        copy = RequestSequence(number, list(first.keys), first.tokens, list(first.table), stored=list(first.stored))
        request.members.append(copy)


def take_known_tokens(request: DecodeRequest) -> bool:
    """Gives the members the tokens that are known behind their first ones; returns whether there are any."""
    for member, tokens, keys in zip(request.members, request.known, request.known_keys, strict=False):
        member.tokens += tokens
        member.keys += keys
    there, request.known, request.known_keys = any(request.known), (), ()
    return there


def most_blocks(config: DecodeSettings, prompt: int, total: int, width: int) -> int:
    """Blocks that `width` sequences of up to `total` tokens need which share the full blocks of their prompt."""
    shared = prompt // config.block_tokens
    return shared + width * (config.blocks_for(total) - shared)


# --- copy on write ---------------------------------------------------------------------------------------------------


def count_lacking_blocks(places: list[tuple[RequestSequence, int]], manager: BlockManager) -> int:
    """Blocks without which members cannot write their last token's KV; `places` are they and the block it goes to."""
    count, shared = 0, set[int]()
    for member, index in places:
        if index == len(member.table):
            count += 1
        elif manager.ref_count(member.table[index]) > 1:
            count += member.table[index] in shared
            shared.add(member.table[index])
    return count


def copy_on_write(
    request: DecodeRequest, member: RequestSequence, index: int, manager: BlockManager, out: list[Action]
) -> BlockCopy | None:
    """Gives a member a block of its own in place of one that others refer to; None where nobody else does."""
    source = member.table[index]
    if manager.ref_count(source) == 1:
        return None
    [block] = manager.allocate(1)
    _replace_block(member, index, block, manager, out)
    return BlockCopy(request, member, index, source, block)


def undo_copy_on_write(copied: BlockCopy, manager: BlockManager, out: list[Action]) -> None:
    """Takes back a copy that was not made. The source is there: another member of the request refers to it."""
    manager.acquire([copied.source])
    _replace_block(copied.member, copied.index, copied.source, manager, out)


def _replace_block(member: RequestSequence, index: int, block: int, manager: BlockManager, out: list[Action]) -> None:
    manager.release([member.table[index]])
    member.table[index] = block
    out.append(SetBlockTable(member.id, tuple(member.table)))


# --- coming back -----------------------------------------------------------------------------------------------------


def block_sharing_of(request: DecodeRequest, config: DecodeSettings) -> BlockSharing:
    """How a request shares the blocks of its tokens with KV; what it has got for further tokens is left out."""
    numbers: dict[int, int] = {}
    tables = []
    for member in request.members:
        written = member.table[: config.blocks_for(member.tokens - 1)]
        tables.append(tuple(numbers.setdefault(block, len(numbers)) for block in written))
    return BlockSharing(len(numbers), tuple(tables))


def block_sharing_behind_prompt(request: DecodeRequest, config: DecodeSettings) -> BlockSharing:
    """How members share blocks whose known tokens have no KV yet: the prompt's full ones are shared, no others."""
    shared = count = request.prompt_tokens // config.block_tokens
    tables = []
    for member in request.members:
        own = config.blocks_for(member.tokens - 1) - shared
        tables.append((*range(shared), *range(count, count + own)))
        count += own
    return BlockSharing(count, tuple(tables))


def find_cached_blocks(request: DecodeRequest, manager: BlockManager) -> dict[int, int]:
    """Blocks of a request's shape that the pool still has, by their number in it. Not acquired."""
    assert request.shape is not None
    found: dict[int, int] = {}
    for member, table in zip(request.members, request.shape.tables, strict=True):
        for number, block in zip(table, manager.match(member.keys), strict=False):
            found.setdefault(number, block)
        if request.saved:
            break  # what was swapped out is copied from one block on
    return found


def rebuild_tables(
    request: DecodeRequest, held: dict[int, int], config: DecodeSettings, manager: BlockManager
) -> list[int]:
    """Gives a request's members their tables again; cannot fail when there is room.

    Args:
        request: preempted, without blocks.
        held: what `find` gave.
        config: of the core.
        manager: of the pool.

    Returns:
        The blocks of its shape, in order.
    """
    shape = request.shape
    assert shape is not None
    for table in shape.tables:
        manager.acquire([held[number] for number in table if number in held])
    missing = [number for number in range(shape.blocks) if number not in held]
    place = held | dict(zip(missing, manager.allocate(len(missing)), strict=True))
    fresh = set(missing)
    for member, table in zip(request.members, shape.tables, strict=True):
        manager.acquire([place[number] for number in table if number not in held and number not in fresh])
        fresh.difference_update(table)
        member.table = [place[number] for number in table]
        member.table += manager.allocate(growth_blocks(member, table, config))
    return [place[number] for number in range(shape.blocks)]


def growth_blocks(member: RequestSequence, table: tuple[int, ...], config: DecodeSettings) -> int:
    """Blocks that a member needs for its last token, whose KV is not there yet."""
    return config.blocks_for(member.tokens) - len(table)


def blocks_to_resume(request: DecodeRequest, config: DecodeSettings) -> int:
    """Blocks that a preempted request comes back with."""
    assert request.shape is not None
    members = zip(request.members, request.shape.tables, strict=True)
    return request.shape.blocks + sum(growth_blocks(member, table, config) for member, table in members)


def count_leading_blocks(request: DecodeRequest, held: Collection[int]) -> int:
    """Leading blocks of the first member that are held."""
    assert request.shape is not None
    return next((number for number in request.shape.tables[0] if number not in held), len(request.shape.tables[0]))


def resume_with_blocks(request: DecodeRequest, held: Collection[int], config: DecodeSettings) -> None:
    """A request comes back with some blocks of its shape: ready with all that have KV, else it catches up.

    Each member begins to compute behind what is held, and behind what members before it compute.
    """
    assert request.shape is not None
    done = set(held)
    for member, table in zip(request.members, request.shape.tables, strict=True):
        blocks = next((index for index, number in enumerate(table) if number not in done), len(table))
        member.computed = min(blocks * config.block_tokens, member.tokens - 1)
        member.shared = member.computed
        done.update(table)
    request.state = RequestStatus.READY if is_recomputed(request) else RequestStatus.CATCHING_UP


def begin_prompt_here(request: DecodeRequest, held: int, config: DecodeSettings) -> None:
    """A request that holds so many blocks of its prompt computes the rest, as if it came back.

    One that holds the whole prompt in full blocks, none of which may be written again, computes its last token as a
    chunk.
    """
    [member] = request.members
    # A last block that is full has its key when it is computed, as an answer's.
    del member.keys[(member.tokens - 1) // config.block_tokens :]
    member.stored = [min(held, len(member.keys))] * request.stores
    request.prompt_here, request.shape = True, block_sharing_of(request, config)
    resume_with_blocks(request, range(held), config)
    if held * config.block_tokens >= member.tokens:
        request.state, member.shared = RequestStatus.CATCHING_UP, member.tokens


def tokens_to_recompute(request: DecodeRequest, config: DecodeSettings) -> int:
    """Tokens that would be computed again if nothing of a preempted request were held."""
    assert request.shape is not None
    tokens, seen = 0, set[int]()
    for member, table in zip(request.members, request.shape.tables, strict=True):
        tokens += member.tokens - min(member.tokens, config.block_tokens * sum(number in seen for number in table))
        seen.update(table)
    return tokens


# --- catching up -----------------------------------------------------------------------------------------------------


def recompute_goal(request: DecodeRequest, member: RequestSequence) -> int:
    """Leading tokens that a member computes before it runs again: one alone samples its next token with that."""
    return member.tokens - request.is_group


def is_recomputed(request: DecodeRequest) -> bool:
    """Whether all KV is there but that of the members' last tokens."""
    return all(member.computed >= member.tokens - 1 for member in request.members)


def plan_chunks(catching: list[DecodeRequest], tokens: int) -> tuple[Chunk, ...]:
    """Chunks of up to so many tokens in all, first come first. No member computes before what it shares is there.

    A chunk of a token whose KV is held is a full hit, also when its block is found by nobody any more.
    """
    found = []
    for request in catching:
        for member in request.members:
            count = min(tokens, recompute_goal(request, member) - member.computed)
            if count > 0 and _may_recompute(request, member):
                tokens -= count
                sample = member.computed + count == member.tokens
                found.append(Chunk(member.id, member.computed, count, sample, member.computed < member.shared))
    return tuple(found)


def _may_recompute(request: DecodeRequest, member: RequestSequence) -> bool:
    """Whether what a member shares with those before it has been computed."""
    before = request.members[: request.members.index(member)]
    return all(other.computed >= min(recompute_goal(request, other), member.shared) for other in before)


def take_computed_chunk(
    request: DecodeRequest, chunk: Chunk, config: DecodeSettings, manager: BlockManager
) -> RequestSequence:
    """A chunk was computed: its member's blocks that are full now can be found by their keys."""
    member, size = request.member(chunk.id), config.block_tokens
    assert member is not None, "members end in the batch only"
    member.computed = chunk.start + chunk.count
    for index in range(chunk.start // size, min(member.computed // size, len(member.keys))):
        manager.register(member.table[index], member.keys[index], request.owner)
    return member


# --- checks ----------------------------------------------------------------------------------------------------------


def check_block_writes(
    batch: RunningBatch, manager: BlockManager, config: DecodeSettings, copies: list[BlockCopy]
) -> None:
    """Asserts that each sequence writes to a block of its own, and that blocks which are copied stay."""
    for request in batch.requests:
        for member in request.members:
            written = config.blocks_for(batch.tokens_of(member))
            assert len(member.table) >= written
            assert manager.ref_count(member.table[written - 1]) == 1, "two sequences write to one block"
    sources, blocks = [it.source for it in copies], [it.block for it in copies]
    assert len(set(blocks)) == len(blocks), "two copies to one block"
    assert not set(blocks) & set(sources), "a copy of a copy"
    assert all(map(manager.ref_count, [*sources, *blocks])), "a copy from or to a free block"


def advance_beams(
    request: DecodeRequest, candidates: Sequence[BeamCandidates], manager: BlockManager, out: list[Action]
) -> bool:
    """Takes what may follow each beam; members fork by reference and beams that are dropped let their blocks go.

    Returns:
        Whether the search is over; the members are as they were then.
    """
    search = request.search
    assert search is not None
    beams, ended = search.step(candidates)
    out.append(SelectBeams(request.id, tuple(beams), tuple(ended), tuple(it.number for it in search.kept)))
    if search.over:
        out.append(BeamsRanked(request.id, tuple((it.number, it.score) for it in search.kept)))
        return True
    _fork_from_parents(request.members, [parent for parent, _ in beams], manager, out)
    return False


def _fork_from_parents(
    members: list[RequestSequence], parents: list[int], manager: BlockManager, out: list[Action]
) -> None:
    """Each member takes the blocks of its parent."""
    before = [(member.table, member.keys, member.stored) for member in members]
    pairs = zip(members, (before[parent] for parent in parents), strict=True)
    moved = [(member, taken) for member, taken in pairs if taken[0] != member.table]
    for _, (table, _, _) in moved:
        manager.acquire(table)
    for member, _ in moved:
        manager.release(member.table)
    for member, (table, keys, stored) in moved:
        member.table, member.keys, member.stored = list(table), list(keys), list(stored)
        out.append(SetBlockTable(member.id, tuple(table)))


def group_by_search(
    found: tuple[tuple[int, BeamCandidates], ...], of: Callable[[int], DecodeRequest | None]
) -> list[tuple[DecodeRequest, list[BeamCandidates]]]:
    """The requests whose beams a step has computed, with what may follow each beam; those that leave are left out."""
    requests: dict[int, tuple[DecodeRequest, list[BeamCandidates]]] = {}
    for number, candidates in found:
        request = of(number)
        if request is not None and request.state is not RequestStatus.LEAVING:
            requests.setdefault(request.id, (request, []))[1].append(candidates)
    return list(requests.values())


def check_beams(request: DecodeRequest) -> None:
    """Asserts that the members of a search that has begun are its beams: all there, all of one length."""
    search = request.search
    if search is None or not search.length or request.state is RequestStatus.LEAVING:
        return
    assert len(request.members) == len(search.scores) == request.width
    assert len({member.tokens for member in request.members}) == 1
    assert len({len(member.table) for member in request.members}) == 1
    assert len({len(member.keys) for member in request.members}) == 1
    search.check_invariants()
