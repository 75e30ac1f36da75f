"""Running batch, and how one request's sequences share KV blocks: forks, copy on write, restoring.

All running sequences advance by one token per step; a step in which no sequence needs a block costs O(1) here.
"""

from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.block_manager import BlockManager
from moonpool.engine.decode.core.actions import Chunk, SetBlockTable
from moonpool.engine.decode.core.events import Candidates
from moonpool.engine.decode.core.request import BlockSharing, DecodeRequest, RequestSequence, RequestStatus
from moonpool.engine.decode.core.settings import DecodeSettings
from moonpool.engine.decode.core.state import DecodeState


class RunningBatch:
    """The sequences that each step advances by one token.

    A sequence's tokens are a base plus the steps so far (`ticks`), so a step changes no sequence. A heap over step
    numbers says which sequence needs a block next. Requests join and leave between steps, with all their sequences.

    Attributes:
        ticks: steps so far.
        context: tokens in all sequences.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.ticks = 0
        self.context = 0
        self._requests: dict[int, DecodeRequest] = {}
        self._sequences: dict[int, tuple[RequestSequence, DecodeRequest]] = {}
        self._needs: list[tuple[int, int]] = []
        self._forked: dict[int, DecodeRequest] = {}
        self._hurried = 0
        self._ids: tuple[int, ...] | None = ()
        self._tbt_s: list[float] | None = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request: DecodeRequest) -> bool:
        return request.id in self._requests

    @property
    def requests(self) -> list[DecodeRequest]:
        """Requests, in the order in which they joined."""
        return list(self._requests.values())

    @property
    def ids(self) -> tuple[int, ...]:
        """The sequences' ids, in the order in which sequences joined."""
        if self._ids is None:
            self._ids = tuple(self._sequences)
        return self._ids

    @property
    def tbt_slo_s(self) -> float:
        """The strictest promised time between tokens, seconds; 0 = none."""
        if self._tbt_s is None:
            self._tbt_s = sorted(request.tbt_slo_s for request in self._requests.values() if request.tbt_slo_s)
        return self._tbt_s[0] if self._tbt_s else 0.0

    @property
    def patient(self) -> bool:
        """Whether no client waits for single tokens."""
        return not self._hurried

    def tokens_of(self, sequence: RequestSequence) -> int:
        """A sequence's tokens, in the batch or not."""
        return sequence.tokens + self.ticks if sequence.id in self._sequences else sequence.tokens

    def context_of(self, request: DecodeRequest) -> int:
        """Tokens in a request's sequences, in the batch or not; before the start, in the sequences to come."""
        if request.spec.width == 1:
            return self.tokens_of(request.sequences[0])
        tokens = sum(map(self.tokens_of, request.sequences))
        return tokens * request.num_seqs // len(request.sequences)

    def join(self, request: DecodeRequest) -> None:
        """Adds a request."""
        self._requests[request.id] = request
        self._hurried += not request.patient
        for sequence in request.sequences:
            self.context += sequence.tokens
            sequence.tokens -= self.ticks
            self._sequences[sequence.id] = sequence, request
            self.grew(sequence)
        self._ids = self._tbt_s = None

    def leave(self, request: DecodeRequest) -> None:
        """Removes a request."""
        for sequence in request.sequences:
            self._remove(sequence)
        del self._requests[request.id]
        self._hurried -= not request.patient
        self._forked.pop(request.id, None)
        self._tbt_s = None

    def end(self, sequence: RequestSequence) -> None:
        """A request's sequence has ended; others continue."""
        self._remove(sequence)

    def _remove(self, sequence: RequestSequence) -> None:
        del self._sequences[sequence.id]
        self._ids = None
        sequence.tokens += self.ticks
        self.context -= sequence.tokens

    def advance(self, steps: int = 1) -> None:
        """Adds a token to each sequence for each step."""
        self.ticks += steps
        self.context += steps * len(self._sequences)

    def gained(self, sequence: RequestSequence, tokens: int) -> None:
        """Notes a sequence's tokens in the last step beyond the token that `advance` counts; -1 = no token."""
        if sequence.id in self._sequences:
            sequence.tokens += tokens
            self.context += tokens
            self.grew(sequence)

    def grew(self, sequence: RequestSequence) -> None:
        """Notes when a sequence needs the next block; call this after giving a block."""
        heappush(self._needs, (self._need(sequence), sequence.id))

    def forked(self, request: DecodeRequest) -> None:
        """Notes that a request's sequences share the block that they write to next."""
        self._forked[request.id] = request

    def due(self) -> list[DecodeRequest]:
        """Takes the requests that need blocks for the next step, lowest id first."""
        found, self._forked = self._forked, {}
        while self._needs and self._needs[0][0] <= self.ticks:
            tick, number = heappop(self._needs)
            sequence, request = self._sequences.get(number, (None, None))
            if sequence is not None and request is not None and self._need(sequence) == tick:
                found[request.id] = request
        return [found[number] for number in sorted(found)]

    @property
    def blocks_ahead(self) -> int:
        """The sequences' blocks that hold no token yet."""
        return sum(
            (self._need(sequence) - 1 - self.ticks) // self._block_size for sequence, _ in self._sequences.values()
        )

    @property
    def has_search(self) -> bool:
        """Whether sequences of a request may fork after each step."""
        return any(request.search is not None for request in self._requests.values())

    def soonest(self, steps: int) -> tuple[DecodeRequest, RequestSequence] | None:
        """The sequence that runs out of blocks first, if within `steps` steps."""
        while self._needs and self._needs[0][0] < self.ticks + steps:
            tick, number = self._needs[0]
            sequence, request = self._sequences.get(number, (None, None))
            if sequence is not None and request is not None and self._need(sequence) == tick:
                return request, sequence
            heappop(self._needs)
        return None

    def covered(self, most: int) -> int:
        """Steps for which all sequences' blocks suffice; at most `most`."""
        short = self.soonest(most)
        return self._need(short[1]) - self.ticks if short is not None else most

    def _need(self, sequence: RequestSequence) -> int:
        """The tick from which the blocks do not hold all tokens."""
        return len(sequence.table) * self._block_size + 1 - sequence.tokens

    def check_invariants(self) -> None:
        """Asserts that the sums and the heap agree with the requests."""
        assert self.context == sum(sequence.tokens + self.ticks for sequence, _ in self._sequences.values())
        sequences = [(sequence.id, request.id) for request in self._requests.values() for sequence in request.sequences]
        assert sequences == [(number, request.id) for number, (_, request) in self._sequences.items()]
        assert self._forked.keys() <= self._requests.keys()
        assert self._hurried == sum(not request.patient for request in self._requests.values())
        noted = set(self._needs)
        for number, (sequence, _) in self._sequences.items():
            assert (self._need(sequence), number) in noted, "a sequence's next block was forgotten"


@frozen
class BlockCopy:
    """A part-filled block's copy, made for one sequence because others refer to the block.

    Attributes:
        index: the block's index in the sequence's table.
        block: the copy.
    """

    request: DecodeRequest
    sequence: RequestSequence
    index: int
    source: int
    block: int


def fork_sequences(request: DecodeRequest, manager: BlockManager) -> None:
    """Forks a request's one sequence into `width` sequences that refer to the same blocks."""
    [first] = request.sequences
    for number in range(first.id + 1, first.id + request.spec.width):
        manager.acquire(first.table, first.past)
        copy = RequestSequence(
            number,
            list(first.keys),
            first.tokens,
            list(first.table),
            stored=list(first.stored),
            borders=list(first.borders),
            past=first.past,
        )
        request.sequences.append(copy)


def take_known_tokens(request: DecodeRequest) -> bool:
    """Adds the tokens known behind the first tokens to the sequences; returns whether there are any."""
    known = request.takeover
    for sequence, tokens, keys in zip(request.sequences, known.known_tokens, known.known_keys, strict=False):
        sequence.tokens += tokens
        sequence.keys += keys
    there, known.known_tokens, known.known_keys = any(known.known_tokens), (), ()
    return there


def most_blocks(settings: DecodeSettings, prompt: int, total: int, width: int) -> int:
    """Blocks for `width` sequences, each up to `total` tokens, that share the prompt's full blocks."""
    shared = prompt // settings.block_size
    return shared + width * (settings.blocks_for(total) - shared)


# --- window blocks ----------------------------------------------------------------------------------------------------


def pass_windows(sequence: RequestSequence, tokens: int, settings: DecodeSettings, manager: BlockManager) -> None:
    """Notes that a sequence reads no windowed slices before the window of the token behind `tokens` tokens."""
    first = min(settings.first_windowed_block(tokens), len(sequence.table))
    if first > sequence.past:
        manager.pass_windows(sequence.table[sequence.past : first])
        sequence.past = first


def count_lacking_window_blocks(writes: list[tuple[RequestSequence, int]], manager: BlockManager) -> int:
    """Window blocks missing for the last tokens' KV, besides those of missing blocks; `writes` as below."""
    if not manager.num_slots:
        return 0
    return sum(index < len(sequence.table) and manager.is_partial(sequence.table[index]) for sequence, index in writes)


def window_blocks_to_resume(request: DecodeRequest, settings: DecodeSettings) -> int:
    """Window blocks that a preempted request is restored with, at most."""
    if not settings.window_blocks:
        return 0
    numbers, growth = set[int](), 0
    for sequence, table in zip(request.sequences, request.preemption.blocks.tables, strict=True):
        numbers.update(table[settings.first_windowed_block(sequence.tokens - 1) :])
        growth += growth_blocks(sequence, table, settings)
    return len(numbers) + growth


def expected_window_blocks(request: DecodeRequest, settings: DecodeSettings) -> int:
    """Window blocks that a request is expected to need beyond those held and promised."""
    if not settings.window_blocks:
        return 0
    have = sum(len(sequence.table) - sequence.past for sequence in request.sequences) + request.promised_window_blocks
    return max(0, min(request.expected_growth, request.num_seqs * (settings.window_blocks + 1) - have))


# --- copy on write and forks -----------------------------------------------------------------------------------------


def count_lacking_blocks(writes: list[tuple[RequestSequence, int]], manager: BlockManager) -> int:
    """Blocks missing for the last tokens' KV; `writes`: sequences, each with the index of the block written to."""
    count, shared = 0, set[int]()
    for sequence, index in writes:
        if index == len(sequence.table):
            count += 1
        elif manager.ref_count(sequence.table[index]) > 1:
            count += sequence.table[index] in shared
            shared.add(sequence.table[index])
    return count


def copy_on_write(
    state: DecodeState, request: DecodeRequest, sequence: RequestSequence, index: int
) -> BlockCopy | None:
    """Gives a sequence a separate block in place of a shared block; None if the block is not shared."""
    source = sequence.table[index]
    if state.blocks.ref_count(source) == 1:
        return None
    [block] = state.blocks.allocate(1)
    state.blocks.give_slots([block])
    _replace_block(state, sequence, index, block)
    return BlockCopy(request, sequence, index, source, block)


def undo_copy_on_write(state: DecodeState, copied: BlockCopy) -> None:
    """Undoes a copy that was not made.

    The source still exists: another sequence in the request refers to the source.
    """
    state.blocks.acquire([copied.source])
    _replace_block(state, copied.sequence, copied.index, copied.source)


def _replace_block(state: DecodeState, sequence: RequestSequence, index: int, block: int) -> None:
    state.blocks.release([sequence.table[index]])
    sequence.table[index] = block
    state.act(SetBlockTable(sequence.id, tuple(sequence.table)))


def advance_search(state: DecodeState, request: DecodeRequest, candidates: Sequence[Candidates]) -> bool:
    """Advances a request's search; sequences fork by reference, and dropped sequences release their blocks.

    Returns:
        Whether the search is over; the sequences are then as before.
    """
    search = request.search
    assert search is not None
    parents, actions = search.advance(request.id, candidates)
    state.out += actions
    if not search.over:
        _fork_from_parents(state, request.sequences, parents)
    return search.over


def _fork_from_parents(state: DecodeState, sequences: list[RequestSequence], parents: list[int]) -> None:
    """Each sequence takes the parent's blocks."""
    before = [(it.table, it.keys, it.stored, it.borders, it.past) for it in sequences]
    pairs = zip(sequences, (before[parent] for parent in parents), strict=True)
    moved = [(sequence, taken) for sequence, taken in pairs if taken[0] != sequence.table]
    for _, (table, *_, past) in moved:
        state.blocks.acquire(table, past)
    for sequence, _ in moved:
        state.blocks.release(sequence.table, sequence.past)
    for sequence, (table, keys, stored, borders, past) in moved:
        sequence.table, sequence.keys, sequence.past = list(table), list(keys), past
        sequence.stored, sequence.borders = list(stored), list(borders)
        state.act(SetBlockTable(sequence.id, tuple(table)))


def group_by_search(
    found: tuple[tuple[int, Candidates], ...], of: Callable[[int], DecodeRequest | None]
) -> list[tuple[DecodeRequest, list[Candidates]]]:
    """Groups a step's candidates by request; leaves out requests that are finishing."""
    requests: dict[int, tuple[DecodeRequest, list[Candidates]]] = {}
    for number, candidates in found:
        request = of(number)
        if request is not None and request.status is not RequestStatus.FINISHING:
            requests.setdefault(request.id, (request, []))[1].append(candidates)
    return list(requests.values())


# --- restoring -------------------------------------------------------------------------------------------------------


def block_sharing_of(request: DecodeRequest, settings: DecodeSettings) -> BlockSharing:
    """How a request shares the blocks with the request's tokens that have KV; leaves out blocks for further tokens."""
    numbers: dict[int, int] = {}
    tables = []
    for sequence in request.sequences:
        written = sequence.table[: settings.blocks_for(sequence.tokens - 1)]
        tables.append(tuple(numbers.setdefault(block, len(numbers)) for block in written))
    return BlockSharing(len(numbers), tuple(tables))


def block_sharing_behind_prompt(request: DecodeRequest, settings: DecodeSettings) -> BlockSharing:
    """How sequences share blocks if known tokens have no KV yet: they share the prompt's full blocks only."""
    shared = count = request.spec.prompt_tokens // settings.block_size
    tables = []
    for sequence in request.sequences:
        own = settings.blocks_for(sequence.tokens - 1) - shared
        tables.append((*range(shared), *range(count, count + own)))
        count += own
    return BlockSharing(count, tuple(tables))


def find_cached_blocks(request: DecodeRequest, manager: BlockManager) -> dict[int, int]:
    """A request's blocks that the pool still has, by index in the request's `BlockSharing`. Not acquired.

    A group's sequences may continue behind any block that they share: all must be whole.
    """
    found: dict[int, int] = {}
    match = manager.match if len(request.sequences) == 1 else manager.match_whole
    for sequence, table in zip(request.sequences, request.preemption.blocks.tables, strict=True):
        for number, block in zip(table, match(sequence.keys), strict=False):
            found.setdefault(number, block)
        if request.preemption.swapped_blocks:
            break  # swapped blocks are copied from one index on
    return found


def rebuild_tables(
    request: DecodeRequest, held: dict[int, int], settings: DecodeSettings, manager: BlockManager
) -> list[int]:
    """Gives a request's sequences their tables again; cannot fail if the blocks are available.

    Args:
        request: preempted, without blocks.
        held: cached blocks, from `find_cached_blocks`.
        settings: the instance's settings.
        manager: the pool's block manager.

    Returns:
        The `BlockSharing`'s blocks, in order.
    """
    sharing = request.preemption.blocks
    leading = count_leading_blocks(request, held)
    for sequence, table in zip(request.sequences, sharing.tables, strict=True):
        if len(sharing.tables) == 1:  # a group may continue behind any block that is held
            sequence.past = settings.first_windowed_block(leading * settings.block_size)
        manager.acquire([held[number] for number in table if number in held], sequence.past)
    missing = [number for number in range(sharing.blocks) if number not in held]
    block_of = held | dict(zip(missing, manager.allocate(len(missing)), strict=True))
    fresh = set(missing)
    for sequence, table in zip(request.sequences, sharing.tables, strict=True):
        manager.acquire([block_of[number] for number in table if number not in held and number not in fresh])
        fresh.difference_update(table)
        sequence.table = [block_of[number] for number in table]
        sequence.table += manager.allocate(growth_blocks(sequence, table, settings))
    return [block_of[number] for number in range(sharing.blocks)]


def growth_blocks(sequence: RequestSequence, table: tuple[int, ...], settings: DecodeSettings) -> int:
    """Blocks that a sequence needs for the last token, which has no KV yet."""
    return settings.blocks_for(sequence.tokens) - len(table)


def blocks_to_resume(request: DecodeRequest, settings: DecodeSettings) -> int:
    """Blocks that a preempted request is restored with."""
    sharing = request.preemption.blocks
    sequences = zip(request.sequences, sharing.tables, strict=True)
    return sharing.blocks + sum(growth_blocks(sequence, table, settings) for sequence, table in sequences)


def count_leading_blocks(request: DecodeRequest, held: Collection[int]) -> int:
    """The first sequence's leading blocks that are held."""
    table = request.preemption.blocks.tables[0]
    return next((number for number in table if number not in held), len(table))


def resume_with_blocks(
    request: DecodeRequest, held: Collection[int], settings: DecodeSettings, manager: BlockManager
) -> None:
    """Restores a request that holds some blocks: WAITING if no KV is missing, else RECOMPUTING."""
    _skip_held(request, held, settings)
    for sequence in request.sequences:
        pass_windows(sequence, sequence.computed, settings, manager)
    request.set_status(RequestStatus.WAITING if is_recomputed(request) else RequestStatus.RECOMPUTING)


def _skip_held(request: DecodeRequest, held: Collection[int], settings: DecodeSettings) -> None:
    """Each sequence begins to compute behind held blocks, and behind blocks that earlier sequences compute."""
    done = set(held)
    for sequence, table in zip(request.sequences, request.preemption.blocks.tables, strict=True):
        blocks = next((index for index, number in enumerate(table) if number not in done), len(table))
        sequence.computed = min(blocks * settings.block_size, sequence.tokens - 1)
        sequence.shared = sequence.computed
        done.update(table)


def begin_prompt_here(request: DecodeRequest, held: int, settings: DecodeSettings, manager: BlockManager) -> None:
    """Lets a request compute the prompt behind the first `held` blocks, as after preemption.

    If the request holds the whole prompt in full blocks, which may not be written again, the request computes the last
    token as a chunk.
    """
    [sequence] = request.sequences
    # A full last block gets a key on being computed, as an answer's block does.
    del sequence.keys[(sequence.tokens - 1) // settings.block_size :]
    there = [min(held, len(sequence.keys))] * request.stores
    sequence.stored, sequence.borders = there, list(there)
    request.prompt_here, request.preemption.sharing = True, block_sharing_of(request, settings)
    if held * settings.block_size >= sequence.tokens:
        _skip_held(request, range(held), settings)
        sequence.shared = sequence.tokens
        request.set_status(RequestStatus.RECOMPUTING)
    else:
        resume_with_blocks(request, range(held), settings, manager)


def tokens_to_recompute(request: DecodeRequest, settings: DecodeSettings) -> int:
    """Tokens computed again if no block of a preempted request is cached."""
    tokens, seen, size = 0, set[int](), settings.block_size
    for sequence, table in zip(request.sequences, request.preemption.blocks.tables, strict=True):
        tokens += sequence.tokens - min(sequence.tokens, size * sum(number in seen for number in table))
        seen.update(table)
    return tokens


# --- recomputing -----------------------------------------------------------------------------------------------------


def recompute_goal(request: DecodeRequest, sequence: RequestSequence) -> int:
    """Leading tokens that a sequence computes before running again; a lone sequence thereby samples the next token."""
    return sequence.tokens - request.is_group


def is_recomputed(request: DecodeRequest) -> bool:
    """Whether only the sequences' last tokens lack KV."""
    return all(sequence.computed >= sequence.tokens - 1 for sequence in request.sequences)


def plan_chunks(recomputing: list[DecodeRequest], tokens: int, state: DecodeState) -> tuple[Chunk, ...]:
    """Chunks with up to `tokens` tokens in all, first request first. Blocks that a sequence shares are computed first.

    The chunks' blocks get window blocks; if these are missing, chunks are shorter. If a chunk's KV is held, the chunk
    is a full hit, even if the pool does not find the block by key any more.
    """
    found = []
    for request in recomputing:
        for sequence in request.sequences:
            left, full_hit = recompute_goal(request, sequence) - sequence.computed, sequence.computed < sequence.shared
            count = min(tokens, left)
            if count > 0 and _may_recompute(request, sequence):
                count = count if full_hit else _give_chunk_window_blocks(state, request, sequence, count)
            if count > 0 and _may_recompute(request, sequence):
                tokens -= count
                sample = sequence.computed + count == sequence.tokens
                found.append(Chunk(sequence.id, sequence.computed, count, sample, full_hit))
    return tuple(found)


def _give_chunk_window_blocks(state: DecodeState, request: DecodeRequest, sequence: RequestSequence, count: int) -> int:
    """Gives window blocks to the blocks of a sequence's next `count` tokens; returns how many tokens have them.

    Layers with a window write KV in each block. Recurrent states are written behind the chunk and where the request's
    other sequences begin; also behind the sequence's last full block if a window block is left.
    """
    settings, manager, size = state.settings, state.blocks, state.settings.block_size
    if not settings.window_blocks:
        return count
    start, end = sequence.computed, sequence.computed + count
    needed, further = set(range(start // size, settings.blocks_for(end))), set[int]()
    if settings.states_alone:
        begins = [other.shared // size for other in request.sequences]
        needed = {max(needed), *(border - 1 for border in begins if start < border * size <= end)}
        further = {border - 1 for border in (sequence.tokens // size,) if start < border * size <= end}
    lacking = [index for index in sorted(needed) if manager.is_partial(sequence.table[index])]
    short = len(lacking) - max(0, state.budget.window_blocks_available)
    if short > 0:
        if settings.states_alone:
            return 0
        end = max(start, lacking[-short] * size)
        del lacking[-short:]
    manager.give_slots(sequence.table[index] for index in lacking)
    if state.budget.window_blocks_available > 0:
        manager.give_slots(sequence.table[index] for index in further)
    return end - start


def _may_recompute(request: DecodeRequest, sequence: RequestSequence) -> bool:
    """Whether the tokens shared with earlier sequences have been computed."""
    before = request.sequences[: request.sequences.index(sequence)]
    return all(other.computed >= min(recompute_goal(request, other), sequence.shared) for other in before)


def take_computed_chunk(
    request: DecodeRequest, chunk: Chunk, settings: DecodeSettings, manager: BlockManager
) -> RequestSequence:
    """Counts a computed chunk and registers keys for blocks that are full now; returns the chunk's sequence."""
    sequence, size = request.find(chunk.id), settings.block_size
    assert sequence is not None, "sequences end in the batch only"
    sequence.computed = chunk.start + chunk.count
    for index in range(chunk.start // size, min(sequence.computed // size, len(sequence.keys))):
        manager.register(sequence.table[index], sequence.keys[index], request.owner)
    pass_windows(sequence, sequence.computed, settings, manager)
    return sequence


# --- checks ----------------------------------------------------------------------------------------------------------


def check_block_writes(batch: RunningBatch, state: DecodeState, copies: list[BlockCopy]) -> None:
    """Asserts that each sequence writes to an unshared block, and that copied blocks stay allocated."""
    for request in batch.requests:
        for sequence in request.sequences:
            written = state.settings.blocks_for(batch.tokens_of(sequence))
            assert len(sequence.table) >= written
            assert state.blocks.ref_count(sequence.table[written - 1]) == 1, "two sequences write to one block"
    sources, blocks = [it.source for it in copies], [it.block for it in copies]
    assert len(set(blocks)) == len(blocks), "two copies to one block"
    assert not set(blocks) & set(sources), "a copy of a copy"
    assert all(map(state.blocks.ref_count, [*sources, *blocks])), "a copy from or to a free block"
