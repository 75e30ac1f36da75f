"""Failures as plain data."""

from dataclasses import dataclass
from enum import Enum

from moonpool.base.frozen import frozen

FENCE_FIELD = "resume.count"
"""The failure's field if another conductor has taken over the sequence."""
STALE = "stale"
"""Reason of an instance in the role both whose prompts take longer than predicted."""
NO_DECODE_ROOM = "no_decode_room"
"""Reason of a refusal because no decode instance has memory."""


class FailureKind(Enum):
    """Kinds of failures; the values are the names of the classes in `moonpool.base.errors`."""

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


FINAL_KINDS = (FailureKind.INVALID, FailureKind.UNSUPPORTED)
"""Another placement meets the same failure."""
DAMAGED_KINDS = (FailureKind.TRANSFER, FailureKind.FRAME)
"""Data was damaged on the way: chance, unless repeated. Tells little about the instances."""
INNER_KINDS = (
    FailureKind.TRANSFER,
    FailureKind.STREAM,
    FailureKind.FRAME,
    FailureKind.MISMATCH,
    FailureKind.DEADLINE,
)
"""Failures between instances; the client gets `Unavailable` instead. The client's own time limit is not over."""
UNANSWERED_KINDS = (FailureKind.UNAVAILABLE, FailureKind.DEADLINE, FailureKind.STREAM, FailureKind.INTERNAL)
"""Failures after which the instance may have done the work all the same."""


@frozen
class Failure:
    """One failure.

    Attributes:
        kind: the error's kind.
        message: for a person.
        field: the request's or the instance's field, for INVALID and MISMATCH.
        reason: machine-readable, for OVERLOADED; likewise the predictions, the limit and the retry time, seconds.
    """

    kind: FailureKind
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
        return self.kind is FailureKind.INVALID and self.field == FENCE_FIELD


CONDUCTOR_DRAINING = Failure(FailureKind.UNAVAILABLE, "this conductor is draining")
"""Error of a request that has no placement when the conductor's drain is over."""


@dataclass(slots=True)
class FailureSeries:
    """Attempts of a request that failed in a row.

    A failure begins a new series if the answer has grown since the last failure and some time has passed: a long answer
    may lose an instance every minute. A request that kills engines does not grow, so such a series ends.

    Attributes:
        count: attempts that failed.
        broken: attempts that failed by more than chance.
    """

    count: int = 0
    broken: int = 0
    _began: float = 0.0
    _last: float = 0.0
    _tokens: int = 0

    def add(self, now: float, failure: Failure, tokens: int, apart_s: float) -> None:
        """Count an attempt that has failed after `tokens` tokens. `apart_s`: least seconds between two series."""
        if not self.count or (tokens > self._tokens and 0.0 < apart_s <= now - self._last):
            self.count, self.broken, self._began = 0, 0, now
        self.count += 1
        self.broken += failure.kind not in DAMAGED_KINDS
        self._last, self._tokens = now, tokens

    def is_over(self, retries: int, within_s: float) -> bool:
        """Whether no attempt follows: more than `retries` broke, or were damaged over at least `within_s` seconds."""
        return self.broken > retries or (self.count > retries and self._last - self._began >= within_s)


def retries_exhausted(failure: Failure, attempts: int) -> Failure:
    """Return the error for a request after the last attempt has failed."""
    if failure.kind in INNER_KINDS:
        message = f"given up after {attempts} placements; the last failed: {failure}"
        return Failure(FailureKind.UNAVAILABLE, message)
    return failure
