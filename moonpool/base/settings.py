"""A setting's one statement: a field of a core's settings record that holds default, meaning and bounds.

A service's config shows the field as a flag or setting (`stated` in `moonpool.base.config`), the service copies the
given values (`stated_values`), and the simulator reads the same default (`default_of`).
"""

from collections.abc import Mapping
from dataclasses import field, fields
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_STATEMENT = "setting"


def setting(default: Any, meaning: str, **bounds: float) -> Any:
    """A field that an operator sets.

    Args:
        default: value that a service has if none is given.
        meaning: text for docs/flags.md, with the unit.
        bounds: `ge`, `gt`, `le` and `lt`, as in pydantic.
    """
    return field(default=default, metadata={_STATEMENT: (meaning, bounds)})


def statements(record: type[Any]) -> dict[str, tuple[str, Mapping[str, float]]]:
    """Meaning and bounds of each setting that a record states, by name."""
    return {field.name: field.metadata[_STATEMENT] for field in fields(record) if _STATEMENT in field.metadata}


def default_of(record: type[Any], name: str) -> Any:
    """A field's default."""
    return next(field.default for field in fields(record) if field.name == name)


def stated_values(record: type[Any], config: object) -> dict[str, Any]:
    """What a service's config says of each setting that the record states."""
    return {name: getattr(config, name) for name in statements(record)}


def complete(settings: "partial[T]", left_out: Mapping[str, str]) -> T:
    """A record of which each field is given, or left at the default for a reason.

    Args:
        settings: the record, and the fields that are given.
        left_out: reasons, by field.

    Raises:
        TypeError: a field is neither given nor left out, or both, or unknown.
    """
    names = {field.name for field in fields(settings.func)}  # type: ignore[arg-type]  # a record, which mypy sees as a callable
    if wrong := names ^ settings.keywords.keys() ^ left_out.keys():
        raise TypeError(f"{', '.join(sorted(wrong))}: must be given, or left out for a reason")
    return settings()
