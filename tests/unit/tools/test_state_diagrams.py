"""The state diagrams in docs/states.md are those of the code."""

from enum import Enum

from tools.state_diagrams import PAGE, diagram, with_diagrams


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
