"""Why something did not work, as plain data: what errors are outside of cores."""

from dataclasses import dataclass
from enum import Enum

from moonpool.frozen import frozen


class Kind(Enum):
    """Kinds of failures; the values are the names of the classes in `moonpool.errors`."""

    INVALID = "InvalidRequest"
    UNSUPPORTED = "Unsupported"
    OVERLOADED = "Overloaded"
    UNAVAILABLE = "Unavailable"
    NOT_FOUND = "NotFound"
    MISMATCH = "Mismatch"
    DEADLINE = "DeadlineExceeded"
    TRANSFER = "TransferFailed"
    STREAM = "StreamBroken"
    FRAME = "FrameError"
    INTERNAL = "Internal"


FINAL = (Kind.INVALID, Kind.UNSUPPORTED)
"""Another placement meets the same failure."""

DAMAGED = (Kind.TRANSFER, Kind.FRAME)
"""What was sent has not come whole: chance, unless it goes on. It says little of the instances."""

INNER = (Kind.TRANSFER, Kind.STREAM, Kind.FRAME, Kind.MISMATCH)
"""Failures between instances; a client is told that its request could not be served."""

UNANSWERED = (Kind.UNAVAILABLE, Kind.DEADLINE, Kind.STREAM, Kind.INTERNAL)
"""Whoever was asked may have done it all the same."""

FENCE = "resume.count"
"""The field of the failure of a sequence that another conductor has taken over."""

NO_DECODE_ROOM = "no_decode_room"
"""Reason of a refusal because no decode instance has room."""


@frozen
class Failure:
    """One failure.

    Attributes:
        kind: which error it is.
        message: for a person.
        field: of the request or the instance, for INVALID and MISMATCH.
        reason: machine-readable, for OVERLOADED; likewise the predictions, the limit and the retry time, seconds.
    """

    kind: Kind
    message: str
    field: str = ""
    reason: str = ""
    predicted_ttft_s: float = 0.0
    predicted_tbt_s: float = 0.0
    slo_s: float = 0.0
    retry_after_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    @property
    def fenced(self) -> bool:
        """Whether another conductor has taken the sequence over."""
        return self.kind is Kind.INVALID and self.field == FENCE


DRAINS = Failure(Kind.UNAVAILABLE, "this conductor is draining")
"""What a request is told that has no place when the conductor's drain is over."""


@frozen
class Stale:
    """A prefill instance has not taken a prompt, as its queue is longer than was thought.

    All that is there takes `drain_s` seconds: the prompts up to its `taken`-th.
    """

    drain_s: float
    taken: int


@dataclass(slots=True)
class Series:
    """Attempts of a request that failed one after the other.

    A failure begins a new series where the answer has grown since the one before, and some time has passed: a long
    answer may lose an instance every minute. What ends engines time and again gets no further for it.

    Attributes:
        count: attempts that failed.
        broken: those that failed by more than chance.
    """

    count: int = 0
    broken: int = 0
    _began: float = 0.0
    _last: float = 0.0
    _tokens: int = 0

    def add(self, now: float, failure: Failure, tokens: int, apart_s: float) -> None:
        """Counts an attempt that has just failed when the answer had so many tokens; see `Series`."""
        if not self.count or (tokens > self._tokens and 0.0 < apart_s <= now - self._last):
            self.count, self.broken, self._began = 0, 0, now
        self.count += 1
        self.broken += failure.kind not in DAMAGED
        self._last, self._tokens = now, tokens

    def is_over(self, retries: int, within_s: float) -> bool:
        """Whether no attempt follows: more than `retries` broke, or so many were damaged and it took `within_s`."""
        return self.broken > retries or (self.count > retries and self._last - self._began >= within_s)


def given_up(failure: Failure, attempts: int) -> Failure:
    """What the client is told when the last attempt has failed."""
    if failure.kind in INNER:
        message = f"given up after {attempts} placements; the last failed: {failure}"
        return Failure(Kind.UNAVAILABLE, message)
    return failure
