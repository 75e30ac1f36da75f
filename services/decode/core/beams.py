"""Beam search: which beams go on, which end, and when the search is over. No token is seen here.

The step is that of `transformers` 5.23 (`GenerationMixin._beam_search`), which looks at the best
max(2, 1 + end tokens) times `width` candidates of all beams: only the best `width` of them may end, and the best
`width` that do not end go on. Each beam's best (width + end tokens) candidates contain all that can be chosen so.
Equals are taken in the order of their beams, and of the candidates of one beam; the earlier hypothesis is better than
an equal one. Log probabilities are summed in double precision.
"""

from collections.abc import Callable, Sequence

from moonpool.sched.block_manager import BlockManager
from services.decode.core.actions import Action, Ranked, Select, Table
from services.decode.core.events import Candidates
from services.decode.core.request import Member, Request, State


def advance(request: Request, candidates: Sequence[Candidates], manager: BlockManager, out: list[Action]) -> bool:
    """Takes what may follow each beam; members fork by reference and beams that are dropped let their blocks go.

    Returns:
        Whether the search is over; the members are as they were then.
    """
    search = request.search
    assert search is not None
    beams, ended = search.step(candidates)
    out.append(Select(request.id, tuple(beams), tuple(ended), tuple(it.number for it in search.kept)))
    if search.over:
        out.append(Ranked(request.id, tuple((it.number, it.score) for it in search.kept)))
        return True
    _follow(request.members, [parent for parent, _ in beams], manager, out)
    return False


def _follow(members: list[Member], parents: list[int], manager: BlockManager, out: list[Action]) -> None:
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
        out.append(Table(member.id, tuple(table)))


def searches(
    found: tuple[tuple[int, Candidates], ...], of: Callable[[int], Request | None]
) -> list[tuple[Request, list[Candidates]]]:
    """The requests whose beams a step has computed, with what may follow each beam; those that leave are left out."""
    requests: dict[int, tuple[Request, list[Candidates]]] = {}
    for number, candidates in found:
        request = of(number)
        if request is not None and request.state is not State.LEAVING:
            requests.setdefault(request.id, (request, []))[1].append(candidates)
    return list(requests.values())


def check_invariants(request: Request) -> None:
    """Asserts that the members of a search that has begun are its beams: all there, all of one length."""
    search = request.search
    if search is None or not search.length or request.state is State.LEAVING:
        return
    assert len(request.members) == len(search.scores) == request.width
    assert len({member.tokens for member in request.members}) == 1
    assert len({len(member.table) for member in request.members}) == 1
    assert len({len(member.keys) for member in request.members}) == 1
    search.check_invariants()
