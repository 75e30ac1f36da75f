"""Texts of which each character has an origin: the template, an assistant's turn, or what else a conversation has.

A template may cut, join and replace texts as it likes; the origins follow. Where an operation has no exact rule here,
its whole result counts as the conversation's: so a control token may become plain text, but no text a control token.
Numbers of the conversation, and what is computed from these, are known as such until they are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, SupportsIndex

from jinja2 import Undefined
from jinja2.runtime import Macro

WRITTEN, ANSWERED, SAID = range(3)
"""Origins: written by the template; of an assistant's turn; of another turn, of tools or of a request's variables."""
_ORIGINS = [bytes([origin]) for origin in (WRITTEN, ANSWERED, SAID)]
_PRIVATE = range(0xE000, 0xF900)
"""Characters for private use, which mark strings while something else writes around them."""
_MARKED = (ANSWERED, SAID, SAID, WRITTEN)
"""What follows each of four marks: a text of either origin, a number, and the end of what another mark began."""


class TracedInt(int):
    """An integer of the conversation, or made of one."""


class TracedFloat(float):
    """A number of the conversation, or made of one."""


class TracedText(str):
    """A text with origins. Equals, hashes and orders as a plain text does."""

    _origins: bytes

    def __new__(cls, text: str, origins: bytes | None = None) -> TracedText:
        """`origins`: of each character; None = all are the conversation's."""
        made = super().__new__(cls, text)
        made._origins = bytes([SAID]) * len(made) if origins is None else origins
        return made

    def __str__(self) -> str:
        return self

    def __format__(self, spec: str, /) -> str:
        return TracedText(super().__format__(spec)) if spec else self

    def __iter__(self) -> Iterator[str]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice, /) -> TracedText:
        origins = self._origins[key]
        return TracedText(super().__getitem__(key), origins if isinstance(origins, bytes) else bytes([origins]))

    def __add__(self, other: str, /) -> TracedText:
        return TracedText(super().__add__(other), self._origins + origins_of(other))

    def __radd__(self, other: str, /) -> TracedText:
        return TracedText(str.__add__(other, self), origins_of(other) + self._origins)

    def __mul__(self, times: SupportsIndex, /) -> TracedText:
        return TracedText(super().__mul__(times), self._origins * times)

    __rmul__ = __mul__

    def __mod__(self, value: Any, /) -> TracedText:
        return TracedText(super().__mod__(value))

    def join(self, parts: Iterable[str], /) -> TracedText:
        """Join texts, each with its origins."""
        parts = list(parts)
        return TracedText(super().join(parts), self._origins.join(map(origins_of, parts)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> TracedText:
        """Replace parts; what is put in keeps its origins."""
        if not old or not isinstance(new, str):
            return TracedText(super().replace(old, new, count))
        return TracedText(new, origins_of(new)).join(self.split(old, count))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Cut at `sep`."""
        return self._located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Cut at `sep`, from the end."""
        return self._located(super().rsplit(sep, maxsplit), sep)

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        found, at = list[str](), 0
        for part in parts:
            if sep is None:  # only spaces lie before a part
                at = self.find(part, at)
            found.append(self[at : at + len(part)])
            at += len(part) + len(sep or "")
        return found

    def splitlines(self, keepends: bool = False) -> list[str]:
        """Cut at the ends of lines."""
        found, at = list[str](), 0
        for line, whole in zip(super().splitlines(keepends), super().splitlines(keepends=True), strict=True):
            found.append(self[at : at + len(line)])
            at += len(whole)
        return found

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """Cut at the first `sep`."""
        return self._in_three(super().partition(sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """Cut at the last `sep`."""
        return self._in_three(super().rpartition(sep))

    def _in_three(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second = len(parts[0]), len(parts[0]) + len(parts[1])
        return self[:first], self[first:second], self[second:]

    def strip(self, chars: str | None = None, /) -> TracedText:
        """Leave characters at both ends out."""
        begin = len(self) - len(super().lstrip(chars))
        return self[begin : begin + len(super().strip(chars))]

    def lstrip(self, chars: str | None = None, /) -> TracedText:
        """Leave characters at the begin out."""
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> TracedText:
        """Leave characters at the end out."""
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str, /) -> TracedText:
        """Leave a beginning out."""
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str, /) -> TracedText:
        """Leave an end out."""
        return self[: len(super().removesuffix(suffix))]


def _spelled(name: str) -> Callable[[TracedText], TracedText]:
    """A method that changes the case of characters. It may write two for one, and never one for two."""
    plain = getattr(str, name)

    def method(self: TracedText) -> TracedText:
        text = plain(self)
        return TracedText(text, origins_of(self) if len(text) == len(self) else None)

    return method


def _whole(name: str) -> Callable[..., TracedText]:
    """A method whose whole result counts as the conversation's."""
    plain = getattr(str, name)
    return lambda self, *args: TracedText(plain(self, *args))


for _name in ("capitalize", "casefold", "lower", "swapcase", "title", "upper"):
    setattr(TracedText, _name, _spelled(_name))
for _name in ("center", "expandtabs", "ljust", "rjust", "translate", "zfill"):
    setattr(TracedText, _name, _whole(_name))


def origins_of(text: str) -> bytes:
    """The origin of each character."""
    return text._origins if isinstance(text, TracedText) else bytes(len(text))


def traced(value: Any, origin: int) -> Any:
    """Return plain JSON data whose strings and keys have this origin; its numbers are the conversation's."""
    if isinstance(value, str):
        return TracedText(value, bytes([origin]) * len(value))
    if isinstance(value, dict):
        return {traced(key, origin): traced(item, origin) for key, item in value.items()}
    return [traced(item, origin) for item in value] if isinstance(value, list) else traced_number(value)


def traced_number(value: Any) -> Any:
    """Return a number as one of the conversation, anything else as it is."""
    if type(value) is int:
        return TracedInt(value)
    return TracedFloat(value) if type(value) is float else value


def joined(parts: Iterable[str], between: str = "") -> str:
    """Join texts, each with its origins."""
    parts = list(parts)
    return lifted(between, parts).join(parts)


def lifted(text: str, others: Any) -> str:
    """Return `text` as one whose methods keep the origins of `others`, if these have any."""
    return TracedText(text, bytes(len(text))) if type(text) is str and has_traced(others) else text


def has_traced(value: Any) -> bool:
    """Tell whether a value may have characters or numbers that are not the template's."""
    if isinstance(value, str):
        return isinstance(value, TracedText)
    if isinstance(value, TracedInt | TracedFloat):
        return True
    if isinstance(value, dict):
        return any(has_traced(key) or has_traced(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return any(map(has_traced, value))
    return not isinstance(value, int | float | Macro | Undefined | None)


def text_of(value: Any) -> str:
    """Return a value as a template writes it."""
    if isinstance(value, str):
        return value
    return TracedText(str(value)) if has_traced(value) else str(value)


def written(write: Callable[[Any], str], value: Any, *, json: bool = False) -> str:
    """Call `write`, which writes a text around strings and numbers of `value`; what it writes itself is the template's.

    `json`: it writes strings in quotes, and numbers without.
    """
    plain = write(value)
    if not has_traced(value):
        return plain
    used = set(re.findall(r"[\ue000-\uf8ff]|\\u[ef][0-9a-f]{3}", plain))
    marks = list(islice((char for char in map(chr, _PRIVATE) if not {char, _escaped(char)} & used), len(_MARKED)))
    try:
        marked = write(_marked(value, marks))
    except (TypeError, ValueError, LookupError):  # of other kinds of values
        return TracedText(plain)
    for mark in marks:
        marked = marked.replace(_escaped(mark), mark)
    if json:  # a number that is marked is a string
        marked = re.sub(f'"({marks[2]}[^"]*{marks[3]})"', r"\1", marked)
    parts, origins, within = list[str](), list[bytes](), [WRITTEN]
    for part in re.split(f"([{''.join(marks)}])", marked):
        if part not in marks:
            parts.append(part)
            origins.append(_ORIGINS[within[-1]] * len(part))
        elif part != marks[-1]:
            within.append(_MARKED[marks.index(part)])
        elif len(within) > 1:
            within.pop()
    text = "".join(parts)
    return TracedText(plain, b"".join(origins) if text == plain and len(within) == 1 else None)


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}"


def _marked(value: Any, marks: list[str]) -> Any:
    """Return plain data with marks around the strings that have origins, and around the conversation's numbers."""
    if len(marks) < len(_MARKED):
        raise ValueError("no marks are left")
    if isinstance(value, TracedText):
        origins = set(origins_of(value))
        mark = marks[0] if origins == {ANSWERED} else marks[1]
        return f"{mark}{str.__str__(value)}{marks[3]}" if origins - {WRITTEN} else str.__str__(value)
    if isinstance(value, TracedInt | TracedFloat):
        return f"{marks[2]}{value}{marks[3]}"
    if isinstance(value, dict):
        return {_marked(key, marks): _marked(item, marks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_marked(item, marks) for item in value])
    if has_traced(value):
        raise TypeError(f"{type(value).__name__} has no marks")
    return value
