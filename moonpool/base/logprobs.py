"""Log probabilities of tokens, as they travel from the sampler to clients.

They are those of the model's own distribution: before temperature, penalties, bias, bans and masks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Protocol, overload

MAX_LOGPROBS = 20
"""Most likely tokens that are told beside each token, at most."""


def bytes_per_token(top: int | None) -> int:
    """Memory for one token's log probabilities, with `top` most likely tokens beside; 0 where none are wanted."""
    return 0 if top is None else 8 * (1 + top)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's."""

    token_id: int
    logprob: float
    rank: int
    """1 = most likely; equals share the better rank."""
    top: tuple[tuple[int, float], ...]
    """The position's most likely tokens with log probabilities, best first, equals by token."""


@dataclass(slots=True)
class Logprobs:
    """Those of consecutive tokens, in columns."""

    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """Of each token."""
    ranks: array[int] = field(default_factory=lambda: array("I"))
    """As `TokenLogprobs.rank`."""
    top_token_ids: array[int] = field(default_factory=lambda: array("i"))
    """The most likely tokens at each position, the same number everywhere, one position after the other."""
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))

    def __len__(self) -> int:
        """Tokens."""
        return len(self.logprobs)

    @property
    def top(self) -> int:
        """Most likely tokens per position."""
        return len(self.top_token_ids) // len(self) if len(self) else 0

    @property
    def consistent(self) -> bool:
        """Whether the columns fit each other."""
        tops = len(self.top_token_ids)
        return len(self.ranks) == len(self) and len(self.top_logprobs) == tops == self.top * len(self)

    def extend(self, more: Logprobs) -> None:
        """Append the following tokens' log probabilities, with as many likely tokens per position."""
        self.logprobs += more.logprobs
        self.ranks += more.ranks
        self.top_token_ids += more.top_token_ids
        self.top_logprobs += more.top_logprobs

    def part(self, begin: int, end: int | None = None) -> Logprobs:
        """Those of the tokens [begin, end); end None = to the last."""
        of, tops = slice(begin, end), self.top
        wide = slice(begin * tops, None if end is None else end * tops)
        return Logprobs(self.logprobs[of], self.ranks[of], self.top_token_ids[wide], self.top_logprobs[wide])

    def of(self, token_ids: Sequence[int]) -> Iterator[TokenLogprobs]:
        """Row by row; `token_ids` are the tokens."""
        return iter(LogprobRows(token_ids, self))


class LogprobColumns(Protocol):
    """What rows are read from: `Logprobs`, or the contract's message, which takes an event loop no time to convert."""

    @property
    def logprobs(self) -> Sequence[float]: ...

    @property
    def ranks(self) -> Sequence[int]: ...

    @property
    def top_token_ids(self) -> Sequence[int]: ...

    @property
    def top_logprobs(self) -> Sequence[float]: ...


class LogprobRows(Sequence[TokenLogprobs]):
    """Tokens' log probabilities as rows, which are made where they are read: in between, columns take a tenth.

    Args:
        token_ids: the tokens.
        columns: theirs, which fit each other.
    """

    def __init__(self, token_ids: Sequence[int], columns: LogprobColumns) -> None:
        self._token_ids = token_ids
        self._logprobs, self._ranks = columns.logprobs, columns.ranks
        self._top_token_ids, self._top_logprobs = columns.top_token_ids, columns.top_logprobs
        self._top = len(self._top_token_ids) // len(self._logprobs) if self._logprobs else 0

    @property
    def scores(self) -> int:
        """Log probabilities: those of the tokens, and of the likely tokens beside each."""
        return len(self) * (1 + self._top)

    def __len__(self) -> int:
        return len(self._logprobs)

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[TokenLogprobs, ...]: ...

    def __getitem__(self, at: int | slice) -> TokenLogprobs | tuple[TokenLogprobs, ...]:
        if isinstance(at, slice):
            return tuple([self[place] for place in range(len(self))[at]])
        place = range(len(self))[at]
        return TokenLogprobs(self._token_ids[place], self._logprobs[place], self._ranks[place], self._likely(place))

    def __iter__(self) -> Iterator[TokenLogprobs]:
        columns = zip(self._token_ids, self._logprobs, self._ranks, strict=True)
        for at, (token, logprob, rank) in enumerate(columns):
            yield TokenLogprobs(token, logprob, rank, self._likely(at))

    def __reduce__(self) -> tuple[type[LogprobRows], tuple[Sequence[int], Logprobs]]:
        logprobs, ranks = array("f", self._logprobs), array("I", self._ranks)  # a message's columns cannot be pickled
        tops = array("i", self._top_token_ids), array("f", self._top_logprobs)
        return LogprobRows, (self._token_ids, Logprobs(logprobs, ranks, *tops))

    def _likely(self, place: int) -> tuple[tuple[int, float], ...]:
        some = slice(place * self._top, (place + 1) * self._top)
        return tuple(zip(self._top_token_ids[some], self._top_logprobs[some], strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class PromptLogprobRows(Sequence[TokenLogprobs | None]):
    """The rows of a prompt's tokens: the first token has None."""

    def __init__(self, rows: LogprobRows) -> None:
        self._rows = rows

    @property
    def scores(self) -> int:
        """See `LogprobRows.scores`."""
        return self._rows.scores

    def __len__(self) -> int:
        return 1 + len(self._rows)

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs | None: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[TokenLogprobs | None, ...]: ...

    def __getitem__(self, at: int | slice) -> TokenLogprobs | tuple[TokenLogprobs | None, ...] | None:
        if isinstance(at, slice):
            return tuple([self[place] for place in range(len(self))[at]])
        place = range(len(self))[at]
        return self._rows[place - 1] if place else None

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        yield None
        yield from self._rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"
