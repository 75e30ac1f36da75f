"""Sessions: requests in one conversation or one agent's run; each request continues an earlier request's prompt."""

from dataclasses import dataclass, replace
from math import isfinite

from moonpool.base.errors import InvalidRequest
from moonpool.base.frozen import frozen

MAX_SESSION_CHARS = 256
MAX_RETENTION = 8
MAX_SESSION_S = 7 * 86_400.0
"""Longest time that a client can tell: a week."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """What a client says about a request's session. Changes no answer.

    Attributes:
        id: names the session among the tenant's; "": the rest holds for this turn alone.
        return_s: seconds from the answer's end to the session's next request; None: not known.
        last: no further turn follows; the session's KV is evicted first.
        keep_s: seconds after the answer for which the KV is worth keeping; None: no end.
        retention: -8 to 8; KV with a value higher by one is kept as if expected back in half the time.
    """

    id: str = ""
    return_s: float | None = None
    last: bool = False
    keep_s: float | None = None
    retention: int = 0

    def check(self, field: str = "session") -> None:
        """Check the values.

        Raises:
            InvalidRequest: a value is wrong; names the value below `field`.
        """
        if len(self.id) > MAX_SESSION_CHARS or not self.id.isprintable():
            raise InvalidRequest(f"{field}.id", f"at most {MAX_SESSION_CHARS} printable characters")
        for name, seconds in (("return_s", self.return_s), ("keep_s", self.keep_s)):
            if seconds is not None and not (isfinite(seconds) and 0.0 <= seconds <= MAX_SESSION_S):
                raise InvalidRequest(f"{field}.{name}", f"must be in [0, {MAX_SESSION_S:g}] seconds, is {seconds:g}")
        if abs(self.retention) > MAX_RETENTION:
            raise InvalidRequest(f"{field}.retention", f"must be in [-{MAX_RETENTION}, {MAX_RETENTION}]")


@frozen
class SessionHint:
    """What a kvstore is told about a session after a turn.

    Attributes:
        session: names the session, for any tenant.
        tail: key of the last full block of the turn's prompt.
        return_s: seconds from now to the next turn, as expected; None = not known.
        told: the client has said when; else the time is the usual one, and a session that is late stays away for long.
        keep_s: seconds for which the blocks are worth keeping; None = no end.
        retention: each step halves the seconds to the next use.
        ended: no turn follows.
    """

    session: bytes
    tail: bytes
    return_s: float | None = None
    told: bool = False
    keep_s: float | None = None
    retention: int = 0
    ended: bool = False

    def after(self, seconds: float) -> "SessionHint":
        """The hint, so many seconds later."""
        return_s, keep_s = (None if it is None else max(0.0, it - seconds) for it in (self.return_s, self.keep_s))
        return replace(self, return_s=return_s, keep_s=keep_s)
