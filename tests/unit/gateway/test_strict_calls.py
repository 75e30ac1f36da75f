"""Calls of strict functions follow their schemas in every family's form, also where no call is forced."""

import itertools
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moonpool.base.answer_formats import FORMAT_ROWS, FORMATS
from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import AnswerGrammar, Thinking, check_grammar
from moonpool.base.sampling_params import SamplingParams
from moonpool.gateway.reasoning_parsers.base import ReasoningText
from moonpool.gateway.serving.tool_set import ToolSet, tool_definition
from moonpool.gateway.tool_parsers import answer_reader
from moonpool.gateway.tool_parsers.base import ParsedToolCall

from .spoken import SPOKEN, Call
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
ONE = '{"city": "Paris", "days": 2}'
SEP, CALL, CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
PARIS: Call = ("weather", {"city": "Paris", "days": 2})
NOW: Call = ("now", {})
ROWS = [row.name for row in FORMAT_ROWS]
PYTHONIC = ("pythonic", "lfm2", "olmo3", "minicpm3")


def coder(name: str, **arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def strictly(name: str, calls: Sequence[Call]) -> str:
    """Calls as a row's grammar has them: in Python's forms, values are JSON."""
    if name not in PYTHONIC:
        return SPOKEN[name].write(calls).removesuffix("<|call|>")  # ends an answer of gpt-oss
    texts = [
        f"{function}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})"
        for function, arguments in calls
    ]
    if name == "olmo3":
        return "<function_calls>\n" + "\n".join(texts) + "\n</function_calls>"
    if name == "minicpm3":
        return "<|tool_call_start|>\n```python\n" + "\n".join(texts) + "\n```\n<|tool_call_end|>"
    begin, end = ("<|tool_call_start|>", "<|tool_call_end|>") if name == "lfm2" else ("", "")
    return f"{begin}[{', '.join(texts)}]{end}"


def accepted(name: str) -> list[tuple[str, list[Any]]]:
    """Answers that follow the schemas, and what they say."""
    full: Call = ("weather", {"unit": "F", "city": "a b", "days": 3, "warm": True, "colour": "red"})
    found: list[tuple[str, list[Any]]] = [(strictly(name, [call]), [call]) for call in (PARIS, NOW, full)]
    found.append((strictly(name, [("free", {"x": 1, "y": "a"})]), [("free", {"x": 1, "y": "a"})]))
    if SPOKEN[name].several:
        found.append((strictly(name, [PARIS, NOW]), [PARIS, NOW]))
    if not SPOKEN[name].is_whole and name != "openai":
        found.append((f"Well.\n{strictly(name, [PARIS])}", ["Well.", PARIS]))
    return [*found, *MORE_ACCEPTED.get(name, [])]


MORE_ACCEPTED: dict[str, list[tuple[str, list[Any]]]] = {
    "llama3_json": [
        (f'Well.<|python_tag|>{{"name": "weather", "parameters": {ONE}}}', ["Well.", PARIS]),
        ('{"names": 1} is text', ['{"names": 1} is text']),
    ],
    "mistral": [
        (f"Well.[TOOL_CALLS]weather[ARGS]{ONE}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}", ["Well.", PARIS, NOW])
    ],
    "deepseek_v3": [(f"Well.{CALL}function{SEP}weather\n```json\n{ONE}\n```{CALL_END}", ["Well.", PARIS])],
    "pythonic": [
        (' <|python_start|>[weather(city="Paris", days=2)]<|python_end|>', [PARIS]),
        ("[1] is a note, [see](weather)", ["[1] is a note, [see](weather)"]),
    ],
    "qwen3_coder": [(coder("weather", city="a\nb", days="3"), [("weather", {"city": "a\nb", "days": 3})])],
    "openai": [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.",
            [("thought", "Hm."), "Four."],
        ),
        (" to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}", [NOW]),
    ],
}


def refused(name: str) -> list[str]:
    """Answers whose calls violate the schemas."""
    wrong: list[dict[str, Any]] = [
        {"city": "Paris", "days": "x"},
        {"city": "Paris"},
        {"city": "too long a name", "days": 1},
        {"unit": "K", "city": "a", "days": 1},
        {"city": "a", "days": 1, "more": 1},
    ]
    return [strictly(name, [("weather", arguments)]) for arguments in wrong]


BEGUN = {
    **{name: [SPOKEN[name].write([NOW]).partition("now")[0].rstrip("\n")] for name in ROWS},
    "llama3_json": ['{"name": ', "<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]["],
    "hermes": ["<tool_call>"],
    "ernie45": ["<tool_call>"],
    "deepseek_v3": [CALL],
    "kimi_k2": ["<|tool_call_begin|>"],
    "pythonic": ["[weather("],
    "openai": ["<|channel|>commentary to=functions."],
    "glm4": ["weather\n{"],
}
"""Beginnings of calls."""
BYTES = LLTokenizer("byte")
THINKING = Thinking("<think>", "</think>", is_open=False)


def said(found: Sequence[Any]) -> list[Any]:
    """What was found, with calls as `(NAME, ARGUMENTS)`."""
    return [
        part
        if isinstance(part, str)
        else ("thought", part.text)
        if isinstance(part, ReasoningText)
        else (part.name, json.loads(part.arguments))
        for part in found
    ]


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


@pytest.mark.parametrize("family", ROWS)
def test_calls_that_follow_their_schemas_are_answers(family: str) -> None:
    lark = grammar(family)
    texts: list[tuple[str, list[Any]]] = [("", []), ("Any <text> {", ["Any <text> {"])]
    for text, parts in [*accepted(family), *(texts if family != "openai" else [])]:
        assert is_answer(lark, text), text
        assert said(found(answer_reader(FORMATS[family], ToolSet(TOOLS).parameters), [text])) == parts


@pytest.mark.parametrize("family", ROWS)
def test_calls_that_violate_their_schemas_are_none(family: str) -> None:
    lark = grammar(family)
    for text in refused(family):
        parser, tokens = matcher(lark), list(text.encode())
        assert parser.try_consume_tokens(tokens) < len(tokens), text


@pytest.mark.parametrize("family", ROWS)
def test_whatever_a_model_writes_its_calls_are_valid(family: str) -> None:
    """Models draw any allowed byte once a call has begun; seeds 0 to 9."""
    tools, calls = ToolSet(TOOLS[:2]), 0
    lark, schemas = tools.grammar(FORMATS[family], AnswerGrammar(lambda text: None)), tools.parameters
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


@pytest.mark.parametrize("family", ["llama3_json", "pythonic"])
def test_a_call_that_is_the_whole_answer_may_follow_the_thinking(family: str) -> None:
    lark = grammar(family, thinking=THINKING)
    call, wrong = accepted(family)[0][0], refused(family)[0]
    assert is_answer(lark, f"<think>hm</think>\n{call}")
    assert is_answer(lark, "<think>hm</think>\nhello")
    assert is_answer(lark, call)
    assert not is_answer(lark, f"<think>hm</think>\n{wrong}")
    begun = grammar(family, thinking=replace(THINKING, is_open=True))
    assert is_answer(begun, f"hm</think>\n{call}")
    assert not is_answer(begun, f"hm</think>\n{wrong}")


MARK = re.compile(r"<[|｜/]?[^<>\s]+>|\[[A-Z_]+\]")


@pytest.mark.parametrize("family", ROWS)
def test_marks_may_be_special_tokens(family: str) -> None:
    """All marks of a row that have no name of a function or an argument within."""
    texts = [*((text, True) for text, _ in accepted(family)), *((text, False) for text in refused(family))]
    written = "".join(text for text, _ in texts)
    own = sorted({mark for mark in MARK.findall(written) if not re.search(r"[=\"]", mark)})
    backend = Tokenizer(
        models.BPE({letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<think>", "</think>", *own])
    marks: Mapping[str, int] = {added.content: token for token, added in backend.get_added_tokens_decoder().items()}
    tokenizer = LLTokenizer(backend.to_str(), eos_token=[marks["<end>"]])
    lark = grammar(family, marks.get, THINKING)
    for text, is_accepted in texts:
        parser = matcher(lark, tokenizer)
        tokens = backend.encode(text if family == "openai" else f"<think>hm</think>{text.strip()}").ids
        assert (parser.try_consume_tokens(tokens) == len(tokens)) == is_accepted, text


def forced(family: str, choice: str = "", *, parallel: bool = True, thinking: Thinking | None = None) -> str:
    tools = ToolSet(TOOLS, parallel, choice)
    return tools.grammar(FORMATS[family], AnswerGrammar(lambda text: None, thinking))


@pytest.mark.parametrize("family", ROWS)
def test_forced_answers_are_calls_in_the_familys_own_form(family: str) -> None:
    lark, single, named = forced(family), forced(family, parallel=False), forced(family, "now")
    one, other, both = (
        strictly(family, [PARIS]),
        strictly(family, [NOW]),
        strictly(family, [PARIS, NOW][: 1 + SPOKEN[family].several]),
    )
    assert is_answer(lark, one)
    assert is_answer(lark, both)
    assert is_answer(single, one)
    assert is_answer(named, other)
    assert not is_answer(named, one)
    for grammar_of, text in [(lark, "Well."), (lark, ""), *((lark, text) for text in refused(family))]:
        assert not is_answer(grammar_of, text), text
    if SPOKEN[family].several:
        assert not is_answer(single, both)
        assert not is_answer(named, strictly(family, [NOW, NOW]))


@pytest.mark.parametrize("family", [name for name in ROWS if name != "openai"])
def test_forced_answers_may_begin_with_thinking(family: str) -> None:
    call = strictly(family, [PARIS])
    closed, opened = (forced(family, thinking=replace(THINKING, is_open=is_open)) for is_open in (False, True))
    assert is_answer(closed, call)
    assert is_answer(closed, f"<think>\nhm\n</think>\n\n{call}")
    assert is_answer(opened, f"hm</think>{call}")
    assert not is_answer(opened, call)
    assert not is_answer(closed, "<think>hm</think>Well.")


@pytest.mark.parametrize("family", ROWS)
def test_whatever_a_model_writes_a_forced_answer_calls(family: str) -> None:
    """Any allowed byte; seeds 0 to 4."""
    for seed, (parallel, choice) in itertools.product(range(5), ((True, ""), (False, ""), (True, "weather"))):
        tools = ToolSet(TOOLS[:2], parallel, choice)
        lark = tools.grammar(FORMATS[family], AnswerGrammar(lambda text: None))
        begun = BEGUN[family][0] if family == "openai" else ""  # a thought may be as long as the model likes
        text = drawn(matcher(lark), begun, random.Random(seed))
        calls = found(answer_reader(FORMATS[family], tools.parameters), [text])
        assert calls, text
        assert len(calls) == 1 or (parallel and not choice), text
        for call in calls:
            assert isinstance(call, ParsedToolCall), text
            jsonschema.validate(json.loads(call.arguments), dict(tools.parameters[call.name]))


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
        assert json.loads(call.arguments) == arguments
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
