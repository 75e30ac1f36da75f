"""How the members of a request share blocks: forks, copies on write, and the way back from preemption."""

from collections.abc import Collection

from moonpool.frozen import frozen
from moonpool.sched.block_manager import BlockManager
from services.decode.core.actions import Action, Chunk, Table
from services.decode.core.batch import Batch
from services.decode.core.config import CoreConfig
from services.decode.core.request import Member, Request, Shape, State


@frozen
class Copied:
    """A member got a copy of a part-filled block, because others refer to it."""

    request: Request
    member: Member
    index: int
    """Of the block in the member's table."""
    source: int
    block: int
    """The copy."""


def fork(request: Request, manager: BlockManager) -> None:
    """Makes a request's one sequence into as many as it may have: the others refer to the same blocks."""
    [first] = request.members
    for number in range(first.id + 1, first.id + request.width):
        manager.acquire(first.table)
        copy = Member(number, list(first.keys), first.tokens, list(first.table), stored=list(first.stored))
        request.members.append(copy)


def take_known(request: Request) -> bool:
    """Gives the members the tokens that are known behind their first ones; returns whether there are any."""
    for member, tokens, keys in zip(request.members, request.known, request.known_keys, strict=False):
        member.tokens += tokens
        member.keys += keys
    there, request.known, request.known_keys = any(request.known), (), ()
    return there


def longest_blocks(config: CoreConfig, prompt: int, total: int, width: int) -> int:
    """Blocks that `width` sequences of up to `total` tokens need which share the full blocks of their prompt."""
    shared = prompt // config.block_tokens
    return shared + width * (config.blocks_for(total) - shared)


# --- copy on write ---------------------------------------------------------------------------------------------------


def lacking(places: list[tuple[Member, int]], manager: BlockManager) -> int:
    """Blocks without which members cannot write their last token's KV; `places` are they and the block it goes to."""
    count, shared = 0, set[int]()
    for member, index in places:
        if index == len(member.table):
            count += 1
        elif manager.ref_count(member.table[index]) > 1:
            count += member.table[index] in shared
            shared.add(member.table[index])
    return count


def copy_block(request: Request, member: Member, index: int, manager: BlockManager, out: list[Action]) -> Copied | None:
    """Gives a member a block of its own in place of one that others refer to; None where nobody else does."""
    source = member.table[index]
    if manager.ref_count(source) == 1:
        return None
    [block] = manager.allocate(1)
    _replace(member, index, block, manager, out)
    return Copied(request, member, index, source, block)


def undo_copy(copied: Copied, manager: BlockManager, out: list[Action]) -> None:
    """Takes back a copy that was not made. The source is there: another member of the request refers to it."""
    manager.acquire([copied.source])
    _replace(copied.member, copied.index, copied.source, manager, out)


def _replace(member: Member, index: int, block: int, manager: BlockManager, out: list[Action]) -> None:
    manager.release([member.table[index]])
    member.table[index] = block
    out.append(Table(member.id, tuple(member.table)))


# --- coming back -----------------------------------------------------------------------------------------------------


def shape_of(request: Request, config: CoreConfig) -> Shape:
    """How a request shares the blocks of its tokens with KV; what it has got for further tokens is left out."""
    numbers: dict[int, int] = {}
    tables = []
    for member in request.members:
        written = member.table[: config.blocks_for(member.tokens - 1)]
        tables.append(tuple(numbers.setdefault(block, len(numbers)) for block in written))
    return Shape(len(numbers), tuple(tables))


def shape_behind_prompt(request: Request, config: CoreConfig) -> Shape:
    """How members share blocks whose known tokens have no KV yet: the prompt's full ones are shared, no others."""
    shared = count = request.prompt_tokens // config.block_tokens
    tables = []
    for member in request.members:
        own = config.blocks_for(member.tokens - 1) - shared
        tables.append((*range(shared), *range(count, count + own)))
        count += own
    return Shape(count, tuple(tables))


def find(request: Request, manager: BlockManager) -> dict[int, int]:
    """Blocks of a request's shape that the pool still has, by their number in it. Not acquired."""
    assert request.shape is not None
    found: dict[int, int] = {}
    for member, table in zip(request.members, request.shape.tables, strict=True):
        for number, block in zip(table, manager.match(member.keys), strict=False):
            found.setdefault(number, block)
        if request.saved:
            break  # what was swapped out is copied from one block on
    return found


def rebuild(request: Request, held: dict[int, int], config: CoreConfig, manager: BlockManager) -> list[int]:
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
        member.table += manager.allocate(growth(member, table, config))
    return [place[number] for number in range(shape.blocks)]


def growth(member: Member, table: tuple[int, ...], config: CoreConfig) -> int:
    """Blocks that a member needs for its last token, whose KV is not there yet."""
    return config.blocks_for(member.tokens) - len(table)


def needed(request: Request, config: CoreConfig) -> int:
    """Blocks that a preempted request comes back with."""
    assert request.shape is not None
    members = zip(request.members, request.shape.tables, strict=True)
    return request.shape.blocks + sum(growth(member, table, config) for member, table in members)


def leading(request: Request, held: Collection[int]) -> int:
    """Leading blocks of the first member that are held."""
    assert request.shape is not None
    return next((number for number in request.shape.tables[0] if number not in held), len(request.shape.tables[0]))


def comes_with(request: Request, held: Collection[int], config: CoreConfig) -> None:
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
    request.state = State.READY if is_whole(request) else State.CATCHING_UP


def begins_here(request: Request, held: int, config: CoreConfig) -> None:
    """A request that holds so many blocks of its prompt computes the rest, as if it came back.

    One that holds the whole prompt in full blocks, none of which may be written again, computes its last token as a
    chunk.
    """
    [member] = request.members
    # A last block that is full has its key when it is computed, as an answer's.
    del member.keys[(member.tokens - 1) // config.block_tokens :]
    member.stored = [min(held, len(member.keys))] * request.stores
    request.prompt_here, request.shape = True, shape_of(request, config)
    comes_with(request, range(held), config)
    if held * config.block_tokens >= member.tokens:
        request.state, member.shared = State.CATCHING_UP, member.tokens


def tokens_to_compute(request: Request, config: CoreConfig) -> int:
    """Tokens that would be computed again if nothing of a preempted request were held."""
    assert request.shape is not None
    tokens, seen = 0, set[int]()
    for member, table in zip(request.members, request.shape.tables, strict=True):
        tokens += member.tokens - min(member.tokens, config.block_tokens * sum(number in seen for number in table))
        seen.update(table)
    return tokens


# --- catching up -----------------------------------------------------------------------------------------------------


def goal(request: Request, member: Member) -> int:
    """Leading tokens that a member computes before it runs again: one alone samples its next token with that."""
    return member.tokens - request.is_group


def is_whole(request: Request) -> bool:
    """Whether all KV is there but that of the members' last tokens."""
    return all(member.computed >= member.tokens - 1 for member in request.members)


def chunks(catching: list[Request], tokens: int) -> tuple[Chunk, ...]:
    """Chunks of up to so many tokens in all, first come first. No member computes before what it shares is there.

    A chunk of a token whose KV is held is a full hit, also when its block is found by nobody any more.
    """
    found = []
    for request in catching:
        for member in request.members:
            count = min(tokens, goal(request, member) - member.computed)
            if count > 0 and _may_compute(request, member):
                tokens -= count
                sample = member.computed + count == member.tokens
                found.append(Chunk(member.id, member.computed, count, sample, member.computed < member.shared))
    return tuple(found)


def _may_compute(request: Request, member: Member) -> bool:
    """Whether what a member shares with those before it has been computed."""
    before = request.members[: request.members.index(member)]
    return all(other.computed >= min(goal(request, other), member.shared) for other in before)


def computed(request: Request, chunk: Chunk, config: CoreConfig, manager: BlockManager) -> Member:
    """A chunk was computed: its member's blocks that are full now can be found by their keys."""
    member, size = request.member(chunk.id), config.block_tokens
    assert member is not None, "members end in the batch only"
    member.computed = chunk.start + chunk.count
    for index in range(chunk.start // size, min(member.computed // size, len(member.keys))):
        manager.register(member.table[index], member.keys[index], request.owner)
    return member


# --- checks ----------------------------------------------------------------------------------------------------------


def check_writes(batch: Batch, manager: BlockManager, config: CoreConfig, copies: list[Copied]) -> None:
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
