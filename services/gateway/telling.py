"""Calls of functions as clients get them: whole, or piece by piece while the model writes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from services.gateway.objects import CallObject, FoundCall, Item, call_of, parsed


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of a function begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next characters of the arguments of the call that has begun."""

    text: str


Found = str | FoundCall | CallBegins | Arguments
"""What an answer's text is made of: text, calls, and pieces of calls."""


class Telling:
    """Tells the calls of an object before its end: each from when its name is known, and its arguments have begun.

    What stands in the arguments is not looked at before it is told: a call that breaks off, or whose JSON is broken
    behind that place, is a call all the same.
    """

    def __init__(self, calls: CallObject, names: Collection[str]) -> None:
        """`names` are the functions that may be called."""
        self._calls = calls
        self._names = names
        self._told = 0  # calls that were told, or passed over
        self._at: int | None = None  # in the arguments that are being told
        self.begun = False
        """Something was told."""

    def tell(self, text: str) -> Iterator[Found]:
        """What is new in the object's text so far."""
        while self._told < len(self._calls.items):
            item = self._calls.items[self._told]
            if item.name not in self._names:
                if item.end is None or not self.begun:
                    return
                yield from self._passed(item, text)
                continue
            if self._at is None:
                self.begun, self._at = True, item.arguments
                yield CallBegins(item.name)
            end = len(text) if item.arguments_end is None else item.arguments_end
            if end > self._at:
                yield Arguments(text[self._at : end])
            self._at = end
            if item.arguments_end is None:
                return
            self._told, self._at = self._told + 1, None

    def _passed(self, item: Item, text: str) -> Iterator[Found]:
        """A call behind others that is of another form, or none: it is told when it is whole."""
        whole = text[item.begin : item.end]
        self._told += 1
        yield call_of(parsed(whole), self._names) or whole
