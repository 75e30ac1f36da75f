"""A decode instance's sequences and what they hold: growing block tables, sharing, who is preempted. No time in it.

A `Seat` stands for all samples of one request: they have equal lengths, and all of them run or none. The samples share
the prompt's full blocks; what is after them is each one's own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from simulator.cluster.config import DecodeMemory
from simulator.cluster.requests import Attempt

PROTECTED_AFTER = 2
"""Who was preempted so often is preempted only when nobody else is left."""


@dataclass(slots=True, eq=False)
class Seat:
    """One attempt at a decode instance."""

    attempt: Attempt
    number: int
    """In the order of coming."""
    context: int
    """Tokens of each sample, the next one to be computed included."""
    left: int
    """Tokens that each sample still makes."""
    blocks: int = 0
    preempted: int = 0
    restored: bool = True
    """Its KV is in the pool, or is made anew when it runs."""
    stay: int = 0
    """Counts its times of running: what was planned for an earlier one is void."""
    first_leap: int = 0
    first_step: int = 0
    whole: bool = False
    """All KV of the prompt has come."""
    started: bool = False
    """The first token is known."""

    @property
    def samples(self) -> int:
        return self.attempt.request.samples


@dataclass(slots=True)
class Room:
    """Blocks of a pool by number; which is which does not matter."""

    total: int
    block_tokens: int
    rules: DecodeMemory
    free: int = field(init=False)

    def __post_init__(self) -> None:
        self.free = self.total

    def shared_blocks(self, seat: Seat) -> int:
        """Blocks that all samples of a seat have in common."""
        return seat.attempt.tokens // self.block_tokens if self.rules.sharing else 0

    def wanted(self, seat: Seat) -> int:
        """Blocks that a seat needs to begin."""
        longest = seat.context if self.rules.growing else seat.attempt.request.tokens + self.rules.max_tokens
        shared = self.shared_blocks(seat)
        return shared + seat.samples * (-(-max(longest, seat.context) // self.block_tokens) - shared)

    def fits(self, seat: Seat, *, alone: bool) -> bool:
        """Whether a seat may be let in; the watermark is left free for those that grow, unless nobody is there."""
        spare = 0 if alone or not self.rules.growing else int(self.rules.watermark * self.total)
        return self.free - spare >= self.wanted(seat)

    def take(self, seat: Seat, blocks: int) -> None:
        assert blocks <= self.free
        self.free -= blocks
        seat.blocks += blocks

    def give_back(self, seat: Seat) -> None:
        self.free += seat.blocks
        seat.blocks = 0

    def steps_covered(self, seat: Seat) -> int:
        """Steps from now that the seat's blocks are enough for."""
        return -(-seat.context // self.block_tokens) * self.block_tokens - seat.context + 1


class Running:
    """The seats that take part in steps, in the order of their joining.

    Attributes:
        sequences: samples of all of them.
        context: tokens of context of all samples.
        saved: of these, tokens that lie in shared blocks and are counted more than once.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self.seats: dict[int, Seat] = {}
        self.sequences = self.context = self.saved = 0
        self._ends: list[tuple[int, int, int]] = []  # (step before which it is over, number, stay)
        self._needs: list[tuple[int, int, int]] = []  # (step before which it needs blocks, number, stay)

    def join(self, seat: Seat, step: int) -> None:
        """A seat takes part from step number `step` on."""
        seat.stay += 1
        seat.first_step = step
        self.seats[seat.number] = seat
        self._count(seat, 1)
        heappush(self._ends, (step + seat.left, seat.number, seat.stay))
        if self._room.rules.growing:
            heappush(self._needs, (step + self._room.steps_covered(seat), seat.number, seat.stay))

    def leave(self, seat: Seat, step: int) -> None:
        """A seat takes no part in step number `step` and later ones."""
        del self.seats[seat.number]
        made = step - seat.first_step
        self._count(seat, -1, made)
        seat.context += made
        seat.left -= made

    def _count(self, seat: Seat, sign: int, made: int = 0) -> None:
        self.sequences += sign * seat.samples
        self.context += sign * seat.samples * (seat.context + made)
        self.saved += sign * (seat.samples - 1) * self._room.shared_blocks(seat) * self._room.block_tokens

    def advance(self, steps: int) -> None:
        """Every sample has got so many tokens."""
        self.context += steps * self.sequences

    def ended(self, step: int) -> Iterator[Seat]:
        """Takes out the seats that are complete before step number `step`."""
        while (seat := self._first(self._ends)) is not None and self._ends[0][0] <= step:
            heappop(self._ends)
            self.leave(seat, step)
            yield seat

    def needy(self, before: int) -> Seat | None:
        """The seat that needs blocks next, at a step before number `before`; None when none does."""
        seat = self._first(self._needs)
        return seat if seat is not None and self._needs[0][0] < before else None

    def grow(self, seat: Seat) -> None:
        """Gives the seat that `needy` named a block for each sample."""
        step, number, stay = heappop(self._needs)
        assert number == seat.number
        self._room.take(seat, seat.samples)
        heappush(self._needs, (step + self._room.block_tokens, number, stay))

    def quiet_steps(self, step: int) -> int:
        """Steps from number `step` on in which nobody ends and there are blocks for everybody."""
        assert self._first(self._ends) is not None
        quiet = self._ends[0][0] - step
        if self._first(self._needs) is None:
            return quiet
        enough = self._room.free // self.sequences * self._room.block_tokens
        return min(quiet, max(enough, self._needs[0][0] - step))

    def _first(self, heap: list[tuple[int, int, int]]) -> Seat | None:
        """The seat of a heap's first valid entry; entries of earlier stays are dropped."""
        while heap:
            _, number, stay = heap[0]
            seat = self.seats.get(number)
            if seat is not None and seat.stay == stay:
                return seat
            heappop(heap)
        return None


def last_come(seats: Iterable[Seat]) -> Seat | None:
    """Who is preempted: who came last; never who came first, and those preempted often only if nobody else is there."""
    others = sorted(seats, key=lambda seat: seat.number)[1:]
    rest = [seat for seat in others if seat.preempted < PROTECTED_AFTER]
    return (rest or others)[-1] if others else None
