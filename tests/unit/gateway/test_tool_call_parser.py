"""Calls in texts, per family of models: whatever the pieces in which the text comes, the same is found."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from moonpool.base.answer_formats import FORMATS
from moonpool.base.checkpoint.past_calls import call_arguments
from moonpool.gateway.reasoning_parsers.base import ReasoningText
from moonpool.gateway.tool_parsers import answer_reader
from moonpool.gateway.tool_parsers.base import (
    ArgumentsDelta,
    ParsedToolCall,
    ParserOutput,
    ToolCallStart,
    ToolParser,
)
from moonpool.gateway.tool_parsers.json_calls import ForcedToolParser

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "add": {"type": "object", "properties": {}},
}
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
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city"',
        [ParsedToolCall("weather", '{"city"')],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', [ParsedToolCall("add", '{"a": 1,}')]),
    ("hermes", "a <tool_call> is a tag", None),
    ("hermes", "a <tool_call", None),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        [ParsedToolCall("add", '{"a": 1e999}')],
    ),
    ("hermes", '<tool_call>{"name": add}</tool_call>', None),
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
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {}}, {"name": "unknown"}]',
        [ParsedToolCall("weather", "{}"), '{"name": "unknown"}'],
    ),
    (
        "deepseek",
        "Yes.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        ["Yes.", WEATHER, ParsedToolCall("add", '{"a": 1}')],
    ),
    ("deepseek", "<｜tool▁call▁begin｜>unknown<｜tool▁sep｜>{}<｜tool▁call▁end｜>", None),
    ("deepseek", "a <｜tool▁call▁begin｜>add<｜tool▁sep｜>{", ["a", ParsedToolCall("add", "{")]),
    ("pythonic", '[weather(city="Paris"), add(a=1, b=[2])]', [WEATHER, ParsedToolCall("add", '{"a": 1, "b": [2]}')]),
    ("pythonic", ' <|python_start|>[weather(city="Paris")]<|python_end|>', [WEATHER]),
    ("pythonic", "[unknown()]", None),
    ("pythonic", "[add(1)]", None),
    ("pythonic", '[weather(city="Par', [ParsedToolCall("weather", '{"city": "Par')]),
    ("pythonic", "Look: [add()]", None),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\n</parameter>\n</function>\n"
        "</tool_call>",
        ["I look.", WEATHER, ParsedToolCall("add", '{"a": 1, "b": "x y"}')],
    ),
    ("qwen3_coder", "see\n <tool_call>\n<function=unknown>\n</function>\n</tool_call>", None),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>", [ParsedToolCall("add", '{"a": ')]),
    ("mistral", "[TOOL_CALLS]" + "x" * 1000 + "{}", None),
    ("mistral", "[TOOL_CALLS]weather", None),
    ("mistral", "see [TOOL_CALLS", None),
]  # fmt: skip


def found(finder: ToolParser, pieces: Sequence[str]) -> list[Any]:
    """What is found in a text that comes in pieces, put together as a client does it."""
    parts: list[ParserOutput] = [part for piece in pieces for part in finder.push(piece)]
    joined: list[Any] = []
    for part in [*parts, *finder.end()]:
        last = joined[-1] if joined else None
        match part:
            case ReasoningText(text):
                if isinstance(last, ReasoningText):
                    joined[-1] = ReasoningText(last.text + text)
                else:
                    joined.append(part)
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


def parser(family: str) -> ToolParser:
    return answer_reader(FORMATS[family], TOOLS)


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize(("family", "text", "expected"), CASES, ids=range(len(CASES)))
def test_calls(family: str, text: str, expected: list[str | ParsedToolCall] | None) -> None:
    """None = no call: the text comes back unchanged."""
    wanted = ([text] if text else []) if expected is None else expected
    assert found(parser(family), [text]) == wanted
    assert found(parser(family), list(text)) == wanted
    generator = random.Random(7)
    for _ in range(20):
        cuts = sorted(generator.sample(range(len(text) + 1), min(len(text), 5)))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert found(parser(family), pieces) == wanted


def test_text_is_not_held_back() -> None:
    """All but what may begin a call, and white space that may stand before one."""
    finder = parser("hermes")
    assert finder.push("I am ") == ["I am"]
    assert finder.push("here <t") == [" here"]
    assert finder.push("d> ") == [" <td>"]
    assert finder.end() == [" "]


def test_many_broken_calls_take_linear_time() -> None:
    """Every character is looked at once: 200,000 of them would take minutes else."""
    text = "<tool_call>{" * 20_000
    assert found(parser("hermes"), cut(text, 50)) == [text]


def test_arguments_are_told_as_they_come() -> None:
    """The name first, as soon as the arguments begin; then each piece of them, and nothing of what is around."""
    finder = parser("hermes")
    assert finder.push('Look.<tool_call>\n{"name": "weather", "argu') == ["Look."]
    assert finder.push('ments": ') == []
    assert finder.push('{"ci') == [ToolCallStart("weather"), ArgumentsDelta('{"ci')]
    assert finder.push('ty": "Pa}') == [ArgumentsDelta('ty": "Pa}')]
    assert finder.push('ris"}}\n</tool_call>\nDone') == [ArgumentsDelta('ris"}'), "\nDone"]


def test_a_call_that_breaks_off_has_begun() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Pa'
    assert found(parser("hermes"), cut(text, 4)) == [ParsedToolCall("weather", '{"city": "Pa')]


def test_what_is_not_offered_is_text_in_pieces_too() -> None:
    text = '<tool_call>{"name": "unknown", "arguments": {"a": {}}}</tool_call>'
    assert found(parser("hermes"), cut(text, 4)) == [text]


def test_a_list_of_calls_in_pieces() -> None:
    """One of another form behind the first one is told when it is whole; what is none is text."""
    first, second = '{"name": "weather", "arguments": {"city": "Paris"}}', f'{{"arguments": {ADD_TEXT}, "name": "add"}}'
    text = f'[{first}, {second}, {{"x": 1}}]'
    for size in (1, 5):
        assert found(ForcedToolParser("", NAMES), cut(text, size)) == [WEATHER, ADD, '{"x": 1}']


@pytest.mark.parametrize("size", [1, 4, 100])
def test_forced_arguments_in_pieces(size: int) -> None:
    """All of the answer is arguments; where it is cut, so are they."""
    for text in ('{"city": "Paris"}', '{"city": "Pa'):
        assert found(ForcedToolParser("weather", NAMES), cut(" " + text, size)) == [ParsedToolCall("weather", text)]
    assert found(ForcedToolParser("weather", NAMES), cut("  ", size)) == ["  "]


def answers(draw: random.Random) -> str:
    """An answer with one to three calls, in the form of hermes."""
    calls = []
    for _ in range(draw.randint(1, 3)):
        value = {draw.choice(("city", "a", "é")): draw.choice(("Paris", 1, None, [2, {"x": "}]"}], True, ""))}
        name = draw.choice(("weather", "add", "add", "unknown"))
        text = json.dumps(value, ensure_ascii=draw.random() < 0.5)
        calls.append(f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>')
    return draw.choice(("", "I look.\n", " ")) + draw.choice(("", "\n")).join(calls)


MALFORMED: list[Callable[[str], str]] = [
    lambda text: text.replace('"}', '",}'),
    lambda text: text.replace(": {", ": ["),
    lambda text: text.replace('"', "'"),
    lambda text: text.replace("}}", "}"),
    lambda text: text.replace("}", "}}"),
    lambda text: text.replace('"name"', '"nam"'),
    lambda text: text.replace("{", "", 1),
    lambda text: text.replace('{"name": ', '{"id": 1, "name": '),
    lambda text: text.replace("true", "True").replace("null", "None"),
    lambda text: text.replace("weather", "weather\n").replace(">", "> "),
]
"""Ways in which models write calls wrongly."""
ROUNDS = 2
"""Rounds of ten answers."""


def test_whole_and_streamed_answers_are_the_same() -> None:
    """Answers malformed in ten ways and cut at every length: whole equals streamed, and history takes each call."""
    draw = random.Random(41)
    for malform in MALFORMED * ROUNDS:
        text = malform(answers(draw))
        for at in range(len(text) + 1):
            whole = found(parser("hermes"), [text[:at]])
            assert found(parser("hermes"), cut(text[:at], 1 if at == len(text) else draw.randint(1, 9))) == whole, text
            for call in whole:
                if isinstance(call, ParsedToolCall):
                    assert isinstance(call_arguments(call.arguments), dict)
