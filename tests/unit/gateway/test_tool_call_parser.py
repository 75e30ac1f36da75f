"""Calls in texts, per family of models: whatever the pieces in which the text comes, the same is found."""

import random

import pytest

from services.gateway.serving.tool_calls import (
    TOOL_CALL_FORMATS,
    ArgumentsDelta,
    ForcedToolParser,
    MarkedToolParser,
    ParsedToolCall,
    ParserOutput,
    ToolCallStart,
    ToolParser,
    tool_call_format_of,
)

NAMES = ("weather", "add")
WEATHER = ParsedToolCall("weather", '{"city": "Paris"}')
ADD = ParsedToolCall("add", '{"a": 1, "b": [2, {"c": "}]\\""}]}')
ADD_TEXT = '{"a": 1, "b": [2, {"c": "}]\\""}]}'

CASES: list[tuple[str, str, list[str | ParsedToolCall] | None]] = [
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
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', [ParsedToolCall("add", "{}")]),
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


def found(family: str, pieces: list[str]) -> list[str | ParsedToolCall]:
    """What is found in a text that comes in pieces; texts that follow one another are one."""
    finder = MarkedToolParser(TOOL_CALL_FORMATS[family], NAMES)
    parts = [part for piece in pieces for part in finder.push(piece)] + finder.end()
    joined: list[str | ParsedToolCall] = []
    for part in parts:
        assert isinstance(part, str | ParsedToolCall)
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(("family", "text", "expected"), CASES, ids=range(len(CASES)))
def test_calls(family: str, text: str, expected: list[str | ParsedToolCall] | None) -> None:
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
    finder = MarkedToolParser(TOOL_CALL_FORMATS["hermes"], NAMES)
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
    assert tool_call_format_of(template) == family


def told(finder: ToolParser, text: str, size: int) -> list[str | ParsedToolCall]:
    """What is told piece by piece of a text that comes in pieces of a size, put together as a client does it."""
    parts: list[ParserOutput] = [part for at in range(0, len(text), size) for part in finder.push(text[at : at + size])]
    joined: list[str | ParsedToolCall] = []
    for part in [*parts, *finder.end()]:
        last = joined[-1] if joined else None
        match part:
            case ToolCallStart(name):
                joined.append(ParsedToolCall(name, ""))
            case ArgumentsDelta(more):
                assert isinstance(last, ParsedToolCall), "a call has begun"
                joined[-1] = ParsedToolCall(last.name, last.arguments + more)
            case str() if isinstance(last, str):
                joined[-1] = last + part
            case _:
                joined.append(part)
    return joined


WHOLE = [case for case in CASES if case[2] is not None or "<tool_call>{" not in case[1]]
"""Cases in which no call begins that is none."""


@pytest.mark.parametrize(("family", "text", "expected"), WHOLE, ids=range(len(WHOLE)))
def test_calls_in_pieces(family: str, text: str, expected: list[str | ParsedToolCall] | None) -> None:
    """The same calls are told in pieces, and what is none, or not offered, is text here too."""
    if expected is None and "unknown" in text:
        return  # behind a call that was told already
    for size in (1, 3, 7, 1000):
        finder = MarkedToolParser(TOOL_CALL_FORMATS[family], NAMES, streaming=True)
        assert told(finder, text, size) == ([text] if expected is None and text else expected or [])


def test_arguments_are_told_as_they_come() -> None:
    """The name first, as soon as the arguments begin; then each piece of them, and nothing of what is around."""
    finder = MarkedToolParser(TOOL_CALL_FORMATS["hermes"], NAMES, streaming=True)
    assert finder.push('Look.<tool_call>\n{"name": "weather", "argu') == ["Look."]
    assert finder.push('ments": ') == []
    assert finder.push('{"ci') == [ToolCallStart("weather"), ArgumentsDelta('{"ci')]
    assert finder.push('ty": "Pa}') == [ArgumentsDelta('ty": "Pa}')]
    assert finder.push('ris"}}\n</tool_call>\nDone') == [ArgumentsDelta('ris"}'), "Done"]


def test_a_call_that_breaks_off_has_begun() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Pa'
    assert told(MarkedToolParser(TOOL_CALL_FORMATS["hermes"], NAMES, streaming=True), text, 4) == [
        ParsedToolCall("weather", '{"city": "Pa')
    ]


def test_what_is_not_offered_is_text_in_pieces_too() -> None:
    text = '<tool_call>{"name": "unknown", "arguments": {"a": {}}}</tool_call>'
    assert told(MarkedToolParser(TOOL_CALL_FORMATS["hermes"], NAMES, streaming=True), text, 4) == [text]


def test_a_list_of_calls_in_pieces() -> None:
    """One of another form behind the first one is told when it is whole; what is none is text."""
    first, second = '{"name": "weather", "arguments": {"city": "Paris"}}', f'{{"arguments": {ADD_TEXT}, "name": "add"}}'
    text = f'[{first}, {second}, {{"x": 1}}]'
    for size in (1, 5):
        assert told(ForcedToolParser("", NAMES, streaming=True), text, size) == [WEATHER, ADD, '{"x": 1}']


@pytest.mark.parametrize("size", [1, 4, 100])
def test_forced_arguments_in_pieces(size: int) -> None:
    """All of the answer is arguments; where it is cut, so are they."""
    for text in ('{"city": "Paris"}', '{"city": "Pa'):
        assert told(ForcedToolParser("weather", NAMES, streaming=True), " " + text, size) == [
            ParsedToolCall("weather", text)
        ]
    assert told(ForcedToolParser("weather", NAMES, streaming=True), "  ", size) == ["  "]
