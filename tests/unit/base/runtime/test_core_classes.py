"""The classes that a journal may name: all that cores use, and none that does more than keep its parts."""

import typing
from collections.abc import Iterator

from moonpool.base.runtime.core_classes import core_classes
from moonpool.base.runtime.core_codec import class_name


def test_names_are_those_of_the_modules_that_have_the_classes() -> None:
    classes = core_classes()
    assert len(classes) > 300
    assert {name: class_name(cls) for name, cls in classes.items() if class_name(cls) != name} == {}
    assert [name for name in classes if ".cli." in name or "fork_server" in name or "transport" in name] == []


def test_no_object_runs_code_when_it_ends() -> None:
    assert [name for name, cls in core_classes().items() if hasattr(cls, "__del__")] == []


def test_every_class_of_a_part_is_there() -> None:
    """Else a journal could be written and not be read."""
    classes, seen, missing = core_classes(), 0, set()
    for cls in classes.values():
        try:
            hints = typing.get_type_hints(cls)
        except TypeError:  # array[int] is for the type checker alone
            continue
        for part in (part for hint in hints.values() for part in named_in(hint)):
            seen += 1
            if part.__module__.startswith("moonpool") and class_name(part) not in classes:
                missing.add(class_name(part))
    assert missing == set()
    assert seen > 500


def named_in(hint: object) -> Iterator[type]:
    for found in (hint, typing.get_origin(hint)):
        if isinstance(found, type):
            yield found
    for argument in typing.get_args(hint):
        yield from named_in(argument)
