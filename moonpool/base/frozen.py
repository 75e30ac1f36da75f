"""Values that are made many thousand times a second: frozen for the type checker, plain dataclasses at run time."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make a class a dataclass with slots, equal and hashed by its fields; objects must not change.

    mypy refuses whoever assigns to a field. Run time does not enforce this: a dataclass that refuses takes four times
    as long to make, and cores make several for each event.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
