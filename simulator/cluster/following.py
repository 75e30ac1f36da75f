"""Follows a request's answers at decode: tokens go to the request, their number to the conductor's core."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.conductor.core.failures import Failure
from services.conductor.core.messages import Event, Finish, Result, Tokens
from simulator.cluster.requests import Made, Request


@dataclass(slots=True, eq=False)
class Following:
    """Follows what runs together of a request at decode: tokens go to its answers, their number to the core."""

    io: int
    request: Request
    post: Callable[[Event], None]
    ended: Callable[[int, Result], None]
    unfollow: Callable[[], None]
    going: int
    """Answers that decode has not ended."""
    spoken: bool = False
    """Something has come."""

    def members(self, positions: Iterable[int]) -> list["Member"]:
        """One for each answer, whose next tokens come from a position on."""
        return [Member(self, choice, position) for choice, position in enumerate(positions)]

    def tokens(self, count: int, *, over: bool) -> None:
        """One of the answers has so many more tokens; with `over` decode has ended it."""
        self.going -= over
        finish = Finish.STOP if self.request.whole else None
        if count or finish or not self.spoken:
            self.spoken = True
            self.post(Tokens(self.io, count, finish, known=not self.going))
        if not self.going:
            self.ended(self.io, None)

    def fail(self, failure: Failure) -> None:
        """None of the answers can go on."""
        self.unfollow()
        self.ended(self.io, failure)


@dataclass(slots=True, eq=False)
class Member:
    """Follows one of the answers."""

    of: Following
    choice: int
    position: int
    """Of the next token that comes; those that the answer has are dropped."""

    def tokens(self, made: Made | None, *, over: bool) -> None:
        """Tokens have come; with `over` the answer has ended with them."""
        answer, count = self.of.request.answers[self.choice], 0
        if made is not None:
            new = made.after(answer.made - self.position)
            self.position += made.count
            if new is not None:
                answer.take(new)
                count = new.count
        self.of.tokens(count, over=over)

    def fail(self, failure: Failure) -> None:
        """The answer cannot go on."""
        self.of.fail(failure)
