"""Logs of requests that no conductor follows: how long each is kept, and how many bytes all may take.

The tokens themselves are the shell's.
"""

from collections.abc import Iterator
from dataclasses import replace

from moonpool.core.digest import digest_of
from moonpool.frozen import frozen
from services.decode.core.actions import Action, Forget
from services.decode.core.request import Request

LOG_BYTES = 512
"""Of a log beside its tokens and keys."""
TOKEN_BYTES = 4
KEY_BYTES = 32


@frozen
class Log:
    """One request.

    Attributes:
        until: when it is forgotten.
        bytes: that it counts for.
        fence: of who had it last.
        request: itself, if it could go on; None when it has ended.
    """

    until: float
    bytes: int
    fence: int
    request: Request | None = None


class Logs:
    """All logs, oldest first.

    Args:
        ttl_s: seconds for which one is kept.
        max_bytes: of all; beyond it the oldest ones go.
    """

    def __init__(self, ttl_s: float, max_bytes: int) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._logs: dict[int, Log] = {}
        self.bytes = 0
        """Of all logs."""

    def __len__(self) -> int:
        return len(self._logs)

    def __iter__(self) -> Iterator[tuple[int, Log]]:
        return iter(self._logs.items())

    def get(self, number: int) -> Log | None:
        """The log of a request."""
        return self._logs.get(number)

    def due(self) -> float | None:
        """When the oldest one is forgotten."""
        return next(iter(self._logs.values())).until if self._logs else None

    def ended(self, now: float, request: Request, out: list[Action]) -> None:
        """Keeps the answers of a request that has ended."""
        size = LOG_BYTES + TOKEN_BYTES * request.answer_tokens + _scores_bytes(request)
        self._keep(request.id, Log(now + self._ttl_s, size, request.fence), out)

    @property
    def waiting(self) -> list[Request]:
        """Sequences that could go on."""
        return [log.request for log in self._logs.values() if log.request is not None]

    def parked(self, now: float, request: Request, out: list[Action]) -> None:
        """Keeps a request that could go on: its tokens (as they came, and as they are), its scores and its keys."""
        size = LOG_BYTES + TOKEN_BYTES * _tokens(request) + _scores_bytes(request)
        size += KEY_BYTES * sum(len(member.keys) for member in request.members)
        self._keep(request.id, Log(now + self._ttl_s, size, request.fence, request), out)

    def read(self, number: int, fence: int) -> None:
        """Somebody with a higher fence reads one. It does not live longer for it."""
        self._logs[number] = replace(self._logs[number], fence=fence)

    def take(self, number: int) -> Request:
        """Takes out a sequence that goes on."""
        log = self._remove(number)
        assert log.request is not None, "it has ended"
        return log.request

    def expire(self, now: float, out: list[Action]) -> None:
        """Forgets what is too old."""
        while self._logs and (first := next(iter(self._logs.items())))[1].until <= now:
            self._forget(first[0], out)

    def _keep(self, number: int, log: Log, out: list[Action]) -> None:
        self._logs[number] = log
        self.bytes += log.bytes
        while self.bytes > self._max_bytes:
            self._forget(next(iter(self._logs)), out)

    def _forget(self, number: int, out: list[Action]) -> None:
        self._remove(number)
        out.append(Forget(number))

    def _remove(self, number: int) -> Log:
        log = self._logs.pop(number)
        self.bytes -= log.bytes
        return log

    def check_invariants(self) -> None:
        """Asserts that the bytes are those of the logs, within the bound, and that the oldest is the first to go."""
        assert self.bytes == sum(log.bytes for log in self._logs.values()) <= self._max_bytes
        ends = [log.until for log in self._logs.values()]
        assert ends == sorted(ends)

    def digest(self) -> bytes:
        """Hash of all of it."""
        return digest_of(self._logs)


def _tokens(request: Request) -> int:
    """Those that are kept of one that could go on: of each sequence, and of each that has ended, the prompt's too."""
    tokens = sum(2 * member.tokens for member in request.members)
    if request.search is not None:
        search = request.search
        return tokens + len(search.kept) * (request.prompt_tokens + search.length)
    return tokens + (request.width - len(request.members)) * request.prompt_tokens + request.ended_tokens


def _scores_bytes(request: Request) -> int:
    """Of the log probabilities of its answers."""
    return request.logprob_bytes * request.answer_tokens
