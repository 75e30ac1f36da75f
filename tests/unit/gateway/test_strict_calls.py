"""Calls of strict functions follow their schemas in every family's form, also where no call is forced."""

import itertools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import AnswerGrammar, Thinking, check_grammar
from moonpool.base.sampling_params import SamplingParams
from moonpool.gateway.serving.tool_set import ToolSet, tool_definition
from moonpool.base.answer_formats import FORMATS
from moonpool.gateway.tool_parsers import answer_reader
from moonpool.gateway.tool_parsers.base import ParsedToolCall

from .test_tool_call_parser import found

COLOUR = {"type": "string", "enum": ["red", "blue"]}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "warm": {"type": "boolean"},
        "colour": {"$ref": "#/$defs/colour"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"colour": COLOUR},
}
CLOSED = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    tool_definition("tools.0", "weather", None, WEATHER, strict=True),
    tool_definition("tools.1", "now", None, CLOSED, strict=True),
    tool_definition("tools.2", "free", None, {"type": "object"}),
]
PARIS = ParsedToolCall("weather", '{"city": "Paris", "days": 2}')
NOW = ParsedToolCall("now", "{}")
ONE, WRONG = '{"city": "Paris", "days": 2}', '{"city": "Paris", "days": "x"}'
SEP, CALL, CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def coder(name: str, **arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


ACCEPTED: dict[str, list[tuple[str, list[str | ParsedToolCall]]]] = {
    "hermes": [
        (f'Well.\n<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>', ["Well.", PARIS]),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', [NOW]),
    ],
    "llama3": [
        (f'{{"name": "weather", "parameters": {ONE}}}; {{"name": "now", "parameters": {{}}}}', [PARIS, NOW]),
        (f'Well.<|python_tag|>{{"name": "weather", "parameters": {ONE}}}', ["Well.", PARIS]),
        ('{"names": 1} is text', ['{"names": 1} is text']),
    ],
    "mistral": [
        (
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ONE}}}, {{"name": "now", "arguments": {{}}}}]',
            [PARIS, NOW],
        ),
        (f"Well.[TOOL_CALLS]weather[ARGS]{ONE}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}", ["Well.", PARIS, NOW]),
    ],
    "deepseek": [
        (f"Well.{CALL}function{SEP}weather\n```json\n{ONE}\n```{CALL_END}", ["Well.", PARIS]),
        (f"{CALL}weather{SEP}{ONE}{CALL_END}{CALL}now{SEP}{{}}{CALL_END}", [PARIS]),
    ],
    "pythonic": [
        ('[weather(city="Paris", days=2), now()]', [PARIS, NOW]),
        (' <|python_start|>[weather(city="Paris", days=2)]<|python_end|>', [PARIS]),
        (
            '[weather(unit="C", city="Rome", days=2, warm=true)]',
            [ParsedToolCall("weather", '{"unit": "C", "city": "Rome", "days": 2, "warm": true}')],
        ),
        ("[1] is a note, [see](weather)", ["[1] is a note, [see](weather)"]),
    ],
    "qwen3_coder": [
        (f"Well.\n{coder('weather', city='Paris', days='2')}", ["Well.", PARIS]),
        (coder("now"), [NOW]),
        (
            coder("weather", unit="F", city="a\nb", days="3", colour='"red"'),
            [ParsedToolCall("weather", '{"unit": "F", "city": "a\\nb", "days": 3, "colour": "red"}')],
        ),
        (coder("free", x="1", y="a"), [ParsedToolCall("free", '{"x": 1, "y": "a"}')]),
    ],
}
REFUSED: dict[str, list[str]] = {
    "hermes": [f'<tool_call>\n{{"name": "weather", "arguments": {WRONG}'],
    "llama3": [
        f'{{"name": "weather", "parameters": {WRONG}',
        f'<|python_tag|>{{"name": "weather", "parameters": {WRONG}',
    ],
    "mistral": [f'[TOOL_CALLS][{{"name": "weather", "arguments": {WRONG}', f"[TOOL_CALLS]weather[ARGS]{WRONG}"],
    "deepseek": [f"{CALL}function{SEP}weather\n```json\n{WRONG}", f"{CALL}weather{SEP}{WRONG}"],
    "pythonic": ['[weather(city="Paris", days="x"', "[weather(days=1", "[now(a=1", '[now(), weather(city="Paris")]'],
    "qwen3_coder": [
        coder("weather", city="Paris", days="x"),
        coder("weather", city="Paris"),
        coder("weather", city="too long a name", days="1"),
        coder("weather", unit="K", city="a", days="1"),
    ],
}
BEGUN = {
    "hermes": ["<tool_call>"],
    "llama3": ['{"name": ', "<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]["],
    "deepseek": [CALL],
    "pythonic": ["[weather("],
    "qwen3_coder": ["<tool_call>"],
}
"""Beginnings of calls."""
BYTES = LLTokenizer("byte")
THINKING = Thinking("<think>", "</think>", is_open=False)


def grammar(
    family: str, special_id: Callable[[str], int | None] = lambda text: None, thinking: Thinking | None = None
) -> str:
    return ToolSet(TOOLS).grammar(FORMATS[family], AnswerGrammar(special_id, thinking))


def matcher(lark: str, tokenizer: LLTokenizer = BYTES) -> LLMatcher:
    check_grammar(SamplingParams(response_format="lark", grammar=lark))
    return LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)


def is_answer(lark: str, text: str) -> bool:
    parser, tokens = matcher(lark), list(text.encode())
    return parser.try_consume_tokens(tokens) == len(tokens) and bool(parser.is_accepting())


def test_every_family_is_tried() -> None:
    assert ACCEPTED.keys() == REFUSED.keys() == BEGUN.keys() == TOOL_PARSERS.keys()


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_calls_that_follow_their_schemas_are_answers(family: str) -> None:
    lark = grammar(family)
    texts: list[tuple[str, list[str | ParsedToolCall]]] = [("", []), ("Any <text> {", ["Any <text> {"])]
    for text, parts in [*ACCEPTED[family], *texts]:
        assert is_answer(lark, text), text
        read = found(answer_reader(FORMATS[family], ToolSet(TOOLS).parameters), [text])
        assert read[: len(parts)] == parts


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_calls_that_violate_their_schemas_are_none(family: str) -> None:
    lark = grammar(family)
    for text in REFUSED[family]:
        parser, tokens = matcher(lark), list(text.encode())
        assert parser.try_consume_tokens(tokens) < len(tokens), text


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_whatever_a_model_writes_its_calls_are_valid(family: str) -> None:
    """Models draw any allowed byte once a call has begun; seeds 0 to 9."""
    lark, schemas, calls = grammar(family), ToolSet(TOOLS).parameters, 0
    for seed, begun in itertools.product(range(10), BEGUN[family]):
        text = drawn(matcher(lark), begun, random.Random(seed))
        for part in found(answer_reader(FORMATS[family], schemas), [text]):
            if isinstance(part, ParsedToolCall):
                calls += 1
                jsonschema.validate(json.loads(part.arguments), dict(schemas[part.name]))
    assert calls >= 5


def drawn(parser: LLMatcher, begun: str, draw: random.Random) -> str:
    """An answer that begins with a text and ends as soon as it may, of printable characters."""
    written = bytearray(begun.encode())
    assert parser.consume_tokens(list(written))
    while not parser.is_accepting() and len(written) < 2000:
        mask = parser.compute_bitmask()
        allowed = [byte for byte in range(10, 127) if mask[byte // 8] >> byte % 8 & 1 and (byte == 10 or byte > 31)]
        allowed = allowed or [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]  # of a mark
        ending = [byte for byte in allowed if byte in b'"})]\n<']
        byte = draw.choice(ending if ending and draw.random() < 0.6 else allowed)
        written.append(byte)
        assert parser.consume_token(byte)
    return written.decode()


@pytest.mark.parametrize("family", ["llama3", "pythonic"])
def test_a_call_that_is_the_whole_answer_may_follow_the_thinking(family: str) -> None:
    lark = grammar(family, thinking=THINKING)
    call, wrong = ACCEPTED[family][0][0], REFUSED[family][0]
    assert is_answer(lark, f"<think>hm</think>\n{call}")
    assert is_answer(lark, "<think>hm</think>\nhello")
    assert is_answer(lark, call)
    assert not is_answer(lark, f"<think>hm</think>\n{wrong}")
    begun = grammar(family, thinking=replace(THINKING, is_open=True))
    assert is_answer(begun, f"hm</think>\n{call}")
    assert not is_answer(begun, f"hm</think>\n{wrong}")


MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "deepseek": (CALL, CALL_END, SEP, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}


@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_marks_may_be_special_tokens(family: str) -> None:
    backend = Tokenizer(
        models.BPE({letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<think>", "</think>", *MARKS[family]]
    backend.add_special_tokens(["<end>", *special])
    marks: Mapping[str, int] = {added.content: token for token, added in backend.get_added_tokens_decoder().items()}
    tokenizer = LLTokenizer(backend.to_str(), eos_token=[marks["<end>"]])
    lark = grammar(family, marks.get, THINKING)
    for text, accepted in [
        *((text, True) for text, _ in ACCEPTED[family]),
        *((text, False) for text in REFUSED[family]),
    ]:
        parser = matcher(lark, tokenizer)
        tokens = backend.encode(f"<think>hm</think>{text.strip()}").ids
        assert (parser.try_consume_tokens(tokens) == len(tokens)) == accepted, text


EITHER: dict[str, Any] = {
    "anyOf": [{"$ref": "#/$defs/city"}, {"$ref": "#/$defs/place"}, {"type": "null"}],
    "$defs": {
        "city": {**CLOSED, "properties": {"city": COLOUR, "days": {"type": "integer"}}, "required": ["city"]},
        "place": {**CLOSED, "properties": {"place": {"$ref": "#/$defs/point"}}, "required": ["place"]},
        "point": {**CLOSED, "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
TREE = {**CLOSED, "properties": {"size": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["size"]}
NAMED = {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": COLOUR}, "required": ["b"]}]}
OUTERMOST: list[tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = [
    (EITHER, [{"city": "red", "days": 2}, {"city": "blue"}, {"place": {"x": 1}}], [{}, {"city": "red", "place": {}}]),
    ({"$ref": "#/$defs/city", "$defs": EITHER["$defs"]}, [{"city": "red"}], [{"city": "x"}, {"place": {"x": 1}}]),
    (TREE, [{"size": 1, "next": {"size": 2}}], [{"size": 1, "next": {}}, {"size": "x"}]),
    (NAMED, [{"a": 1, "b": "red", "c": 1}], []),
    ({**EITHER, "properties": {"city": {}}, "additionalProperties": False}, [{"city": "red"}], [{"place": {"x": 1}}]),
]
"""Schemas with other words than `properties` outermost; arguments that follow each, and arguments that do not."""


def written(family: str, arguments: dict[str, Any]) -> str:
    """A call of f in a family's form."""
    if family == "qwen3_coder":
        texts = {
            name: argument if isinstance(argument, str) else json.dumps(argument)
            for name, argument in arguments.items()
        }
        return coder("f", **texts)
    if family == "pythonic":
        return f"[f({', '.join(f'{name}={json.dumps(argument)}' for name, argument in arguments.items())})]"
    return f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("family", ["hermes", "pythonic", "qwen3_coder"])
@pytest.mark.parametrize(("schema", "followed", "violated"), OUTERMOST)
def test_any_words_may_be_outermost(
    family: str, schema: dict[str, Any], followed: list[dict[str, Any]], violated: list[dict[str, Any]]
) -> None:
    tools = ToolSet([tool_definition("tools.0", "f", None, schema, strict=True)])
    lark = tools.grammar(FORMATS[family], AnswerGrammar(lambda text: None))
    for arguments in followed:
        if family == "qwen3_coder" and schema is NAMED:
            continue  # an open object: any text
        text = written(family, arguments)
        assert is_answer(lark, text), text
        (call,) = found(answer_reader(FORMATS[family], tools.parameters), [text])
        assert json.loads(call.arguments) == arguments  # type: ignore[union-attr]
    for arguments in violated:
        assert not is_answer(lark, written(family, arguments)), arguments


@pytest.mark.parametrize(
    ("family", "schema", "message"),
    [
        ("pythonic", {**CLOSED, "patternProperties": {"^x": {}}}, "cannot have patternProperties outermost"),
        ("qwen3_coder", {**CLOSED, "patternProperties": {"^x": {}}}, "cannot have patternProperties outermost"),
        (
            "qwen3_coder",
            {"anyOf": [{**CLOSED, "properties": {str(number): {}}} for number in range(65)]},
            "at most 64 forms",
        ),
        ("qwen3_coder", {**CLOSED, "required": ["a"]}, "no arguments can satisfy"),
        ("qwen3_coder", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "without an end"),
        ("qwen3_coder", {"$ref": "#/$defs/none"}, "no arguments can satisfy"),
        ("pythonic", {**CLOSED, "properties": {"a-b": {}}}, "'a-b', which is no name in Python"),
        ("pythonic", {**CLOSED, "properties": {"from": {}}}, "'from', which is no name in Python"),
    ],
)
def test_parameters_that_the_form_cannot_hold_are_refused(family: str, schema: dict[str, Any], message: str) -> None:
    tools = [tool_definition("tools.0", "f", None, schema, strict=True)]
    with pytest.raises(InvalidRequest, match=message) as refused:
        ToolSet(tools).grammar(FORMATS[family], AnswerGrammar(lambda text: None))
    assert refused.value.field == "tools"


def test_patterns_of_texts_are_followed() -> None:
    """Texts that are no JSON follow length and pattern, which need not match the whole text unless it says so."""
    code = {"type": "string", "pattern": "^a/[0-9]+$"}
    part = {"type": "string", "pattern": "x+", "minLength": 3}
    schema = {**CLOSED, "properties": {"code": code, "part": part}, "required": ["code", "part"]}
    tools = [tool_definition("tools.0", "f", None, schema, strict=True)]
    lark = ToolSet(tools).grammar(FORMATS["qwen3_coder"], AnswerGrammar(lambda text: None))
    assert is_answer(lark, coder("f", code="a/12", part="axb"))
    for arguments in ({"code": "a/b", "part": "axb"}, {"code": "a/1", "part": "x"}, {"code": "a/1", "part": "abc"}):
        assert not is_answer(lark, coder("f", **arguments)), arguments
