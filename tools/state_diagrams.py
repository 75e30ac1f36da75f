"""Mermaid diagrams of the state machines: `python -m tools.state_diagrams` rewrites those in docs/states.md.

A diagram stands in the page behind a mark that names an enum and the enum's transition table:

    <!-- states: moonpool.conductor.core.request_states:RequestState:TRANSITIONS -->
"""

import re
import sys
from collections.abc import Mapping, Set
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TypeVar

PAGE = Path(__file__).parents[1] / "docs" / "states.md"

S = TypeVar("S", bound=Enum)

_DIAGRAM = re.compile(r"(<!-- states: ([\w.]+):(\w+):(\w+) -->\n)(?:\n*```mermaid\n.*?```\n)?", re.DOTALL)


def diagram(states: type[S], transitions: Mapping[S, Set[S]]) -> str:
    """Mermaid text for a state machine, in the enum's order.

    The first state is the initial one. A state without transitions is final. A transition from a state to itself is
    drawn if listed in the table.
    """
    members = list(states)
    lines = ["stateDiagram-v2", f"    [*] --> {members[0].name}"]
    for state in members:
        targets = [member for member in members if member in transitions[state]]
        lines += [f"    {state.name} --> {target.name}" for target in targets]
        if not targets:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(lines)


def with_diagrams(page: str) -> str:
    """The page with each marked diagram made from the code of now."""
    return _DIAGRAM.sub(_marked_diagram, page)


def machines(page: str) -> list[tuple[type[Enum], Mapping[Enum, Set[Enum]]]]:
    """The state machines that a page marks: enum and table."""
    return [_machine(*found.groups()[1:]) for found in _DIAGRAM.finditer(page)]


def _machine(module: str, states: str, table: str) -> tuple[type[Enum], Mapping[Enum, Set[Enum]]]:
    code = import_module(module)
    return getattr(code, states), getattr(code, table)


def _marked_diagram(found: re.Match[str]) -> str:
    mark, *machine = found.groups()
    return f"{mark}\n```mermaid\n{diagram(*_machine(*machine))}\n```\n"


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(with_diagrams(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
