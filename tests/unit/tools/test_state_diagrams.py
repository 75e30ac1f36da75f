"""The state diagrams in docs/states.md are those of the code."""

from collections.abc import Mapping, Set
from enum import Enum

import pytest

from tools.state_diagrams import PAGE, diagram, machines, with_diagrams

MACHINES = machines(PAGE.read_text(encoding="utf-8"))


class Light(Enum):
    RED = 1
    GREEN = 2
    BROKEN = 3


def test_a_diagram_begins_with_the_first_state_and_ends_where_no_transition_leads_on() -> None:
    table = {
        Light.RED: frozenset({Light.BROKEN, Light.GREEN}),
        Light.GREEN: frozenset({Light.GREEN, Light.RED}),
        Light.BROKEN: frozenset[Light](),
    }
    assert diagram(Light, table).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> RED",
        "    RED --> GREEN",
        "    RED --> BROKEN",
        "    GREEN --> RED",
        "    GREEN --> GREEN",
        "    BROKEN --> [*]",
    ]


def test_the_page_has_the_diagrams_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_diagrams(page) == page, "run `python -m tools.state_diagrams`"
    assert page.count("<!-- states: ") == page.count("```mermaid\n")


@pytest.mark.parametrize(("states", "table"), MACHINES, ids=lambda value: getattr(value, "__name__", ""))
def test_each_state_is_reached_and_an_end_is_reached_from_it(
    states: type[Enum], table: Mapping[Enum, Set[Enum]]
) -> None:
    first, *others = states
    assert set(table) == set(states)
    assert reached(first, table) == {first, *others}
    ends = {state for state in states if not table[state]}
    assert ends
    assert all(reached(state, table) & ends for state in states)


def reached(first: Enum, table: Mapping[Enum, Set[Enum]]) -> set[Enum]:
    found, todo = {first}, [first]
    while todo:
        new = table[todo.pop()] - found
        found |= new
        todo += new
    return found
