"""What a core is, and the events and the bookkeeping that all cores share.

A core decides; whoever drives it (an asyncio driver in a service, a heap of events in the simulator) does what was
decided and tells the core how it went. Events and actions are frozen (`moonpool.frozen`). A core has no clock, no I/O
and no hidden randomness, so the same events at the same times give the same actions.
"""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from moonpool.core.digest import digest_of
from moonpool.frozen import frozen

E_contra = TypeVar("E_contra", contravariant=True)
A = TypeVar("A")
T = TypeVar("T")


@frozen
class Tick:
    """Time has passed; handed in when `Core.due` is reached, or at any other moment."""


@frozen
class Ended(Generic[T]):
    """The I/O that an action has started is over, by success, failure or cancelling.

    Each action that starts I/O carries an `io` number and is answered by exactly one `Ended`, also after `Cancel`. What
    the I/O uses (blocks, room) stays held until then.
    """

    io: int
    result: T


@frozen
class Cancel:
    """An action: the I/O is not wanted any more. Its `Ended` still comes."""

    io: int


class Core(Protocol[E_contra, A]):
    """A state machine without I/O. Its state must be picklable: journals keep snapshots of it."""

    def handle(self, now: float, event: E_contra | Tick, out: list[A]) -> None:
        """Takes an event and appends what is to be done.

        Args:
            now: seconds of any clock that never goes back.
            event: a frozen value.
            out: gets the actions, in the order in which they are to be done.
        """

    def due(self) -> float | None:
        """When the core wants a `Tick` if nothing else happens; None = never."""

    def check_invariants(self) -> None:
        """Asserts what must hold between any two events."""

    def digest(self) -> bytes:
        """Hash of the whole state; equal for equal states in any process (see `moonpool.core.digest`)."""


class Outstanding(Generic[T]):
    """I/O that was started and has not ended, with what each one holds. Numbers are never used twice."""

    def __init__(self) -> None:
        self._next = 1
        self._open: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, io: int) -> bool:
        return io in self._open

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return iter(list(self._open.items()))

    def begin(self, holds: T) -> int:
        """Note that I/O starts; returns its number."""
        io, self._next = self._next, self._next + 1
        self._open[io] = holds
        return io

    def get(self, io: int) -> T | None:
        """What the I/O holds; None when it has ended."""
        return self._open.get(io)

    def digest(self) -> bytes:
        """Hash of what is out, and of the next number."""
        return digest_of(self._next, self._open)

    def end(self, io: int) -> T:
        """Note that the I/O has ended; returns what it held.

        Raises:
            KeyError: it ended before, or never began: a defect of the driver.
        """
        return self._open.pop(io)
