"""Values as text that says the same after classes and fields were renamed.

A class is `#n`, numbered by first appearance in a recording; fields are rendered in declared order without names, enum
members by position. Sets are sorted by their text, mappings keep their order, floats are `repr`. A text for people
(with a blank) is `"..."`: wording is no decision.
"""

import json
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum, Flag
from typing import Any

from tools.decisions.places import ORDERS

Form = Callable[[Any], str]


class Canon:
    """Renders one recording's values.

    Attributes:
        classes: names of the classes that were met; the n-th is `#n`.
    """

    def __init__(self) -> None:
        self.classes: list[str] = []
        self._forms: dict[type, Form] = {}

    def text(self, value: object) -> str:
        """The value as one line.

        Raises:
            TypeError: a value is of a kind that has no canonical form.
        """
        kind = type(value)
        form = self._forms.get(kind)
        if form is None:
            form = self._forms[kind] = self._form(kind)
        return form(value)

    def _form(self, kind: type) -> Form:
        if issubclass(kind, Enum):
            return self._enum(kind)
        if is_dataclass(kind):
            return self._record(kind, [field.name for field in fields(kind)])
        if hasattr(kind, "_fields"):
            return self._record(kind, list(kind._fields))
        return self._plain(kind)

    def _plain(self, kind: type) -> Form:
        forms: list[tuple[tuple[type, ...], Form]] = [
            ((type(None), bool, int, float, range), repr),
            ((str,), lambda value: '"..."' if " " in value else json.dumps(value)),
            ((bytes, bytearray, memoryview), lambda value: bytes(value).hex() or "-"),
            ((tuple, list, deque, array), lambda value: f"[{', '.join(map(self.text, value))}]"),
            ((Set,), lambda value: f"{{{', '.join(sorted(map(self.text, value)))}}}"),
            ((Mapping,), lambda value: f"{{{', '.join(map(self.text, value.items()))}}}"),
        ]
        for kinds, form in forms:
            if issubclass(kind, kinds):
                return form
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} has no canonical form")

    def _number(self, kind: type) -> str:
        self.classes.append(kind.__name__)
        return f"#{len(self.classes) - 1}"

    def _enum(self, kind: type[Enum]) -> Form:
        number = self._number(kind)
        if issubclass(kind, Flag):
            return lambda value: f"{number}:{value.value}"
        texts = {member: f"{number}:{place}" for place, member in enumerate(kind)}
        return lambda value: texts[value]

    def _record(self, kind: type, names: list[str]) -> Form:
        number, paths = self._number(kind), [name.split(".") for name in ORDERS.get(kind.__name__, names)]

        def form(value: Any) -> str:
            return f"{number}({', '.join([self.text(_follow(value, path)) for path in paths])})"

        return form


def _follow(value: Any, path: list[str]) -> object:
    for name in path:
        value = getattr(value, name)
    return value
