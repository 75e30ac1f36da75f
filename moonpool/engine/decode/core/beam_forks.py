"""A step of a beam search: beams fork by reference, and dropped beams release their blocks."""

from collections.abc import Callable, Sequence

from moonpool.engine.decode.core.actions import SetBlockTable
from moonpool.engine.decode.core.events import Candidates
from moonpool.engine.decode.core.request import DecodeRequest, RequestSequence, RequestStatus
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.scheduler.block_table import BlockTable


def advance_search(state: DecodeState, request: DecodeRequest, candidates: Sequence[Candidates]) -> bool:
    """Advance a request's search; sequences fork by reference, and dropped sequences release their blocks.

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
    before = [(other.table, other.keys, other.stored, other.borders) for other in sequences]
    pairs = zip(sequences, (before[parent] for parent in parents), strict=True)
    moved = [(sequence, taken) for sequence, taken in pairs if taken[0].blocks != sequence.table.blocks]
    for _, (table, *_) in moved:
        state.blocks.acquire(table.blocks, table.past)
    for sequence, _ in moved:
        sequence.table.unpin(state.blocks)
    for sequence, (table, keys, stored, borders) in moved:
        sequence.table, sequence.keys = BlockTable(list(table.blocks), table.past), list(keys)
        sequence.stored, sequence.borders = list(stored), list(borders)
        state.act(SetBlockTable(sequence.id, tuple(table.blocks)))


def group_by_search(
    found: tuple[tuple[int, Candidates], ...], of: Callable[[int], DecodeRequest | None]
) -> list[tuple[DecodeRequest, list[Candidates]]]:
    """Group a step's candidates by request, without requests that are finishing."""
    requests: dict[int, tuple[DecodeRequest, list[Candidates]]] = {}
    for number, candidates in found:
        request = of(number)
        if request is not None and request.status is not RequestStatus.FINISHING:
            requests.setdefault(request.id, (request, []))[1].append(candidates)
    return list(requests.values())
