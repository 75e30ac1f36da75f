"""Calls in texts, per family of models: whatever the pieces in which the text comes, the same is found."""

import random

import pytest

from services.gateway.calls import FAMILIES, CallFinder, FoundCall, family_of

NAMES = ("weather", "add")
WEATHER = FoundCall("weather", '{"city": "Paris"}')
ADD = FoundCall("add", '{"a": 1, "b": [2, {"c": "}]\\""}]}')
ADD_TEXT = '{"a": 1, "b": [2, {"c": "}]\\""}]}'

CASES: list[tuple[str, str, list[str | FoundCall] | None]] = [
    ("hermes", "", []),
    ("hermes", "  plain text \n", ["  plain text \n"]),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', [WEATHER]),
    (
        "hermes",
        'I look.\n\n<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\n<tool_call>\n'
        f'{{"arguments": {ADD_TEXT}, "name": "add"}}\n</tool_call>\n\n',
        ["I look.", WEATHER, ADD],
    ),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}', [WEATHER]),  # cut by an end token
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool', [WEATHER]),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\nDone.',
        [WEATHER, "Done."],
    ),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', [WEATHER]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', [FoundCall("add", "{}")]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city"', None),
    ("hermes", "a <tool_call> is a tag", None),
    ("hermes", "a <tool_call", None),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', None),
    ("hermes", '<tool_call>{"name": add}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 300 + "1" + "}" * 301 + "</tool_call>", None),
    ("hermes", '{"name": "weather", "arguments": {"city": "Paris"}}', None),
    (
        "hermes",
        'no <tool_call>{"x": 1} but <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}',
        ['no <tool_call>{"x": 1} but', WEATHER],
    ),
    ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}', [WEATHER]),
    ("llama3", ' <|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', [WEATHER]),
    (
        "llama3",
        f'{{"name": "weather", "parameters": {{"city": "Paris"}}}}; {{"name": "add", "parameters": {ADD_TEXT}}}',
        [WEATHER, ADD],
    ),
    ("llama3", ' {"name": "Ann", "parameters": {"age": 5}}\n', None),
    ("llama3", 'Look: {"name": "weather", "parameters": {"city": "Paris"}}', None),
    ("llama3", '<|python_tag|>brave.call(query="x")', None),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]', [WEATHER]),
    (
        "mistral",
        f'Yes.[TOOL_CALLS][{{"name": "weather", "arguments": {{"city": "Paris"}}}}, '
        f'{{"name": "add", "arguments": {ADD_TEXT}}}]',
        ["Yes.", WEATHER, ADD],
    ),
    ("mistral", f'[TOOL_CALLS]weather[ARGS]{{"city": "Paris"}}[TOOL_CALLS]add{ADD_TEXT}', [WEATHER, ADD]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]abc123DEF[ARGS]{"city": "Paris"}', [WEATHER]),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {}}, {"name": "unknown"}]', None),
    ("mistral", "[TOOL_CALLS]" + "x" * 1000 + "{}", None),
    ("mistral", "[TOOL_CALLS]weather", None),
    ("mistral", "see [TOOL_CALLS", None),
]  # fmt: skip


def found(family: str, pieces: list[str]) -> list[str | FoundCall]:
    """What is found in a text that comes in pieces; texts that follow one another are one."""
    finder = CallFinder(FAMILIES[family], NAMES)
    parts = [part for piece in pieces for part in finder.push(piece)] + finder.end()
    joined: list[str | FoundCall] = []
    for part in parts:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(("family", "text", "expected"), CASES, ids=range(len(CASES)))
def test_calls(family: str, text: str, expected: list[str | FoundCall] | None) -> None:
    """None = no call: the text comes back unchanged."""
    wanted = [text] if expected is None else expected
    assert found(family, [text]) == wanted
    assert found(family, list(text)) == wanted
    generator = random.Random(7)
    for _ in range(20):
        cuts = sorted(generator.sample(range(len(text) + 1), min(len(text), 5)))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert found(family, pieces) == wanted


def test_text_is_not_held_back() -> None:
    """All but what may begin a call, and white space that may stand before one."""
    finder = CallFinder(FAMILIES["hermes"], NAMES)
    assert finder.push("I am ") == ["I am"]
    assert finder.push("here <t") == [" here"]
    assert finder.push("d> ") == [" <td>"]
    assert finder.end() == [" "]


def test_many_broken_calls_take_linear_time() -> None:
    """Every character is looked at once: 200,000 of them would take minutes else."""
    text = "<tool_call>{" * 20_000
    assert found("hermes", [text[at : at + 50] for at in range(0, len(text), 50)]) == [text]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS] ' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("""<|start_header_id|> {"name": function name, "parameters": ...}""", "llama3"),
        ("{{ '<tool_call>\\n<function=' }}", ""),
        ("{{ message.content }}", ""),
        ("", ""),
    ],
)
def test_family(template: str, family: str) -> None:
    assert family_of(template) == family
