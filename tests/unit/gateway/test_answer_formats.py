"""Every row of the table of formats: found by its chat template, and read as the family writes."""

import itertools
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from moonpool.base.answer_formats import (
    FORMAT_ROWS,
    FORMATS,
    REASONING_FORMATS,
    ArgumentCalls,
    found_format,
    written_calls,
)
from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import Tokenizer
from moonpool.base.families import FAMILIES
from moonpool.base.families.wrapped import WRAPPER
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.client.testing import FakeConductor, answer
from moonpool.gateway.reasoning_parsers.base import ReasoningText
from moonpool.gateway.service import tell_formats
from moonpool.gateway.serving.answer_parser import AnswerParser, AnswerReading, AnswerToolCall, WholePart
from moonpool.gateway.serving.tokenizer import GatewayTokenizer, ParserNames
from moonpool.gateway.serving.tool_set import ToolSet, tool_definition
from moonpool.v1 import conductor_pb2 as pb
from moonpool.v1 import kv_pb2

from .fakes import answering
from .formats_table import formats_table
from .spoken import SPOKEN, Call

ROWS = [row.name for row in FORMAT_ROWS]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object"},
    },
}
DEFINITIONS = [tool_definition("tools.0", name, None, PARAMETERS) for name in ("weather", "add", "write_file")]
TOOLS = ToolSet(DEFINITIONS)
PARIS: Call = ("weather", {"city": "Paris", "days": 2})
ADD: Call = ("add", {"tags": ["a", "b"], "exact": True})


def parsed(
    name: str,
    text: str,
    pieces: Sequence[str] | None = None,
    tools: ToolSet | None = TOOLS,
    *,
    is_cut: bool = False,
) -> list[Any]:
    """What an answer has, joined: texts, `("thought", TEXT)`, and calls as `(NAME, ARGUMENTS)`."""
    row = FORMATS[name]
    thinks = row.reasoning[0] if row.reasoning else None
    parser = AnswerParser(AnswerReading(tools, row, thinks))
    parser.start("r1")
    if pieces is None:
        return [plain(part) for part in parser.parse_full(text, 0, is_cut=is_cut)]
    joined: list[WholePart] = []
    for part in [part for piece in pieces for part in parser.push(piece, 0)] + parser.end(0, is_cut=is_cut):
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        elif isinstance(part, ReasoningText) and isinstance(last, ReasoningText):
            joined[-1] = ReasoningText(last.text + part.text)
        elif isinstance(part, str | ReasoningText | AnswerToolCall):
            joined.append(part)
        else:
            assert isinstance(last, AnswerToolCall), "a call has begun"
            joined[-1] = AnswerToolCall(last.number, last.id, last.name, last.arguments + part.arguments)
    return [plain(part) for part in joined]


def plain(part: WholePart) -> Any:
    if isinstance(part, ReasoningText):
        return ("thought", part.text)
    return part if isinstance(part, str) else (part.name, part.arguments)


def read_calls(found: Sequence[Any]) -> list[Call]:
    return [(name, json.loads(text)) for name, text in (part for part in found if not isinstance(part, str))]


def said(name: str, thought: str = "", text: str = "", calls: Sequence[Call] = ()) -> str:
    """An answer as the family writes it."""
    spoken = SPOKEN[name]
    before, behind = spoken.thought or ("", "")
    begin, end = spoken.text
    if name == "openai" and text and calls:
        begin, end = "<|channel|>commentary<|message|>", "<|end|><|start|>assistant"
    return (
        (f"{before}{thought}{behind}" if thought else "")
        + (f"{begin}{text}{end}" if text else "")
        + (("\n" if text and name != "openai" else "") + spoken.write(calls) if calls else "")
    )


def test_every_row_is_tried() -> None:
    assert sorted(SPOKEN) == sorted(ROWS)
    assert len({name for row in FORMAT_ROWS for name in row.names}) == sum(len(row.names) for row in FORMAT_ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_found_by_its_template_alone(name: str) -> None:
    """By one row each, whatever the model's class is."""
    found = found_format(SPOKEN[name].template)
    assert found.row is FORMATS[name], found.note
    assert not found.note
    assert found.reasoning is None or found.reasoning in FORMATS[name].reasoning
    assert (found.reasoning is None) == (SPOKEN[name].thought is None)
    escaped = SPOKEN[name].template.replace('"', '\\"')  # within a text of Jinja
    assert found_format(escaped).row is FORMATS[name]


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "ernie45", "hunyuan_a13b"])
def test_words_of_json_do_not_make_a_template_hermes(name: str) -> None:
    """Functions are shown as JSON in many templates."""
    words = '{"name": "x", "arguments": {}} <tool_call></tool_call>'
    assert found_format(SPOKEN[name].template + words).row is FORMATS[name]


def test_what_no_row_fits_is_told_and_not_guessed() -> None:
    for template in ("{{ tools }}<tool_call>", "<tool_call><tool_name>x</tool_name></tool_call>", "<functioncall>", ""):
        found = found_format(template, "Glm4MoeForCausalLM")
        assert found.row is None
        assert "no known format of tool calls fits" in found.note
        assert "glm45" in found.note


def test_the_class_is_a_witness() -> None:
    hermes, both = SPOKEN["hermes"].template, SPOKEN["mistral"].template + SPOKEN["kimi_k2"].template
    assert not found_format(hermes, "Qwen3ForCausalLM").note
    assert "chat template shows hermes" in found_format(hermes, "GptOssForCausalLM").note
    assert found_format(hermes, "GptOssForCausalLM").row is FORMATS["hermes"]
    assert found_format(both).row is None
    assert "fits several formats of tool calls (kimi_k2, mistral)" in found_format(both).note
    assert found_format(both, "KimiK2ForCausalLM").row is FORMATS["kimi_k2"]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("shape", ["call", "thought", "thought and call", "text", "text and call", "all", "several"])
def test_official_forms(name: str, shape: str) -> None:
    """Whole, and cut everywhere."""
    spoken = SPOKEN[name]
    thinks, speaks = "thought" in shape or shape == "all", "text" in shape or shape in ("all", "thought")
    calls = (
        [PARIS, ADD] if shape == "several" and spoken.several else [PARIS] if shape not in ("text", "thought") else []
    )
    if (thinks and spoken.thought is None) or (speaks and calls and spoken.is_whole):
        pytest.skip("the family does not write this")
    text = said(name, "I look." if thinks else "", "Here." if speaks else "", calls)
    found = parsed(name, text)
    expected = [("thought", "I look.")] * thinks + ["Here."] * speaks
    assert found[: len(expected)] == expected, text
    assert read_calls(found[len(expected) :]) == calls, text
    for size in (1, 2, 3, 7):
        assert parsed(name, text, [text[at : at + size] for at in range(0, len(text), size)]) == found
    for at in range(len(text)):
        assert parsed(name, text, [text[:at], text[at:]]) == found, text[:at]


@pytest.mark.parametrize("name", ROWS)
def test_a_call_comes_back_in_the_history(name: str) -> None:
    """The next turn's prompt has the call in the family's own form, with the id of its own."""
    template = SPOKEN[name].template
    made = Tokenizer(tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json")), {"default": template})
    parser = AnswerParser(AnswerReading(TOOLS, FORMATS[name]))
    parser.start("r1")
    (call,) = (part for part in parser.parse_full(said(name, calls=[PARIS]), 0) if isinstance(part, AnswerToolCall))
    function = {"name": call.name, "arguments": call.arguments}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": "sun"},
    ]
    chat = made.render_chat(turns, DEFINITIONS).text
    again = chat.partition("[assistant]")[2].partition("[tool]")[0]
    assert read_calls(parsed(name, again)) == [PARIS]
    if name == "kimi_k2":
        assert call.id == "functions.weather:0"
        assert "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>" in again


@pytest.mark.parametrize("name", [name for name in ROWS if name != "openai"])
def test_calls_that_are_written_for_a_template_are_read_again(name: str) -> None:
    """Where a template leaves past calls out."""
    draw = random.Random(50)
    for _ in range(30):
        calls = [drawn_call(name, draw) for _ in range(1 + SPOKEN[name].several)]
        assert read_calls(parsed(name, written_calls(FORMATS[name], calls))) == calls


def rendered(name: str, ids: Sequence[str]) -> str:
    """A prompt with past calls of these ids, each with a result."""
    template = SPOKEN[name].template.replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}")
    template = template.replace("{{ f.name | tojson }}", "{{ c.id }} {{ f.name | tojson }}")
    made = Tokenizer(tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json")), {"default": template})
    function = {"name": "weather", "arguments": "{}"}
    turns: list[dict[str, Any]] = []
    for each in ids:
        call = {"id": each, "type": "function", "function": function}
        turns += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": each, "content": "sun"},
        ]
    return made.render_chat(turns, DEFINITIONS).text


def test_ids_of_other_models_become_the_familys_own() -> None:
    """Of calls and results alike; own ids stay, and families without a form of ids show what clients send."""
    kimi = rendered("kimi_k2", ["functions.weather:7", "toolu_01"])
    assert kimi.count("functions.weather:7") == kimi.count("functions.weather:1") == 2
    assert "toolu_01" not in kimi
    mistral = rendered("mistral", ["abcDEF123", "toolu_01"])
    assert mistral.count("abcDEF123") == 2
    assert "toolu_01" not in mistral
    assert rendered("hermes", ["toolu_01"]).count("toolu_01") == 2


def test_thinking_comes_back_under_the_templates_name() -> None:
    """A template may refuse text beside thinking in a message with calls, as gpt-oss's does."""
    template = "{% if tools %}{% endif %}{% for m in messages %}[{{ m.thinking }}|{{ m.content }}]{% endfor %}"
    made = Tokenizer(tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json")), {"default": template})
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]}
    assert made.render_chat([turn]).text == "[Hm.|]"
    assert made.render_chat([{**turn, "content": "Here."}]).text.startswith("[|Here.")
    backend = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    other = Tokenizer(backend, {"default": template + "{{ messages[0].reasoning_content }}"})
    assert other.render_chat([turn]).text == "[|]Hm."


MARKED = (
    *("</parameter>", "<parameter=city>", "</function>", "<function=add>", "<tool_call>", "</tool_call>"),
    *("<arg_key>x</arg_key>", "</arg_value>", "<arg_value>", '<invoke name="add">', "</invoke>", "<|call|>", "<|end|>"),
    *(
        "<|tool_call_end|>",
        "]",
        "})",
        "}",
        '"',
        "'",
        "\\",
        "[TOOL_CALLS]",
        '<|"|>',
        "<escape>",
        "<end_function_call>",
        "<|tool_call:end|>",
        "<tool_call|>",
        "</function_calls>",
    ),
    *("<|END_ACTION|>", "\n", "```", "</tool_calls>", "<｜tool▁call▁end｜>", "é", " ", "a"),
)
"""Pieces of values."""


def whole_call(name: str) -> str:
    """A call as a text that a value may quote."""
    return SPOKEN[name].write([("add", {"city": "x"})])


def value(name: str, draw: random.Random) -> Any:
    kind = draw.randrange(8)
    if kind == 0:
        return draw.choice((0, -7, 1234567890123456789))
    if kind == 1:
        return draw.choice((True, False))
    if kind == 2:
        return [text_value(name, draw) for _ in range(draw.randrange(3))]
    return text_value(name, draw)


def text_value(name: str, draw: random.Random) -> str:
    """A text with marks, also of the family's own; for families whose values are not escaped, one that can be told."""
    pieces = [draw.choice(MARKED) for _ in range(draw.randrange(6))]
    text = "".join(f"{piece}a" for piece in pieces)
    spoken = SPOKEN[name].write([("weather", {"city": "x"})])
    quoted = draw.random() < 0.3 and name not in UNESCAPED_QUOTES
    return f"see {whole_call(name)} there" if quoted else f"x{text if can_be_told(name, text) else spoken[:0]}"


UNESCAPED_QUOTES = ("gemma4", "functiongemma")
"""Families whose texts have one kind of quotes without an escape."""


def can_be_told(name: str, text: str) -> bool:
    """Whether a value of a family's form is told from what follows: unbalanced functions are not."""
    if name in ("qwen3_coder", "seed_oss"):
        return "<function=" not in text
    if name in ("minimax_m2", "deepseek_v32", "dots"):
        return "<invoke" not in text
    if name == "glm45":
        return "<tool_call>" not in text
    return True


KEYS = {"city": str, "days": int, "exact": bool, "tags": list}


def drawn_call(name: str, draw: random.Random) -> Call:
    arguments: dict[str, Any] = {}
    for _ in range(draw.randrange(4)):
        found = value(name, draw)
        key = next(key for key, kind in KEYS.items() if type(found) is kind)
        arguments[key] = found
    return draw.choice(("weather", "add", "write_file")), arguments


@pytest.mark.parametrize("name", ROWS)
def test_marks_within_values_stay_values(name: str) -> None:
    """200 calls; whole, and in random pieces."""
    draw = random.Random(47)
    for _ in range(200):
        calls = [drawn_call(name, draw) for _ in range(1 if not SPOKEN[name].several else draw.randint(1, 2))]
        text = said(name, calls=calls)
        found = parsed(name, text)
        assert read_calls(found) == calls, text
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(12))
        assert parsed(name, text, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]) == found


@pytest.mark.parametrize("name", ROWS)
def test_cut_answers_read_the_same_whole_and_streamed(name: str) -> None:
    """A call that has begun is a call, without marks; before, nothing is shown of it; no other call comes of a cut."""
    draw = random.Random(48)
    for _ in range(4):
        call = drawn_call(name, draw)
        text = said(name, calls=[call])
        for at in range(len(text)):
            check_cut(name, call, text[:at])
            assert parsed(name, text[:at], list(text[:at])) == parsed(name, text[:at])


def check_cut(name: str, call: Call, cut: str) -> None:
    """Check an answer that is the beginning of a call."""
    found = parsed(name, cut, is_cut=True)
    assert parsed(name, cut, [cut[n : n + 5] for n in range(0, len(cut), 5)], is_cut=True) == found
    if not SPOKEN[name].is_whole:
        assert all(len(part) < 3 for part in found if isinstance(part, str)), cut
    calls = [part for part in found if not isinstance(part, str)]
    assert [part[0] for part in calls] in ([], [call[0]]), cut
    if calls and is_json(calls[0][1]) and not cut.endswith(MARKED):  # which may be where the call ends
        assert json.loads(calls[0][1]) == call[1], cut


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


MALFORMED: list[Callable[[str, random.Random], str]] = [
    lambda text, draw: text.replace(">", "", 1),
    lambda text, draw: text.replace("<", "", 1),
    lambda text, draw: text[draw.randrange(len(text)) :],
    lambda text, draw: text.replace('"', "'"),
    lambda text, draw: text.replace("weather", "unknown").replace("add", "unknown").replace("write_file", "unknown"),
    lambda text, draw: text.replace("}", "").replace(")", ""),
    lambda text, draw: text.replace("</", "<"),
    lambda text, draw: text.replace(">", "\n>"),
    lambda text, draw: text + text,
    lambda text, draw: "".join(text[at] for at in range(len(text)) if draw.random() > 0.05),
    lambda text, draw: (lambda at: text[:at] + draw.choice(MARKED) + text[at:])(draw.randrange(len(text) + 1)),
]
"""Ways in which models write calls wrongly."""


@pytest.mark.parametrize("name", ROWS)
def test_malformed_answers_break_nothing(name: str) -> None:
    """Read alike whole and in pieces, and only offered functions are called."""
    draw = random.Random(49)
    for malform, _ in itertools.product(MALFORMED, range(12)):
        check_malformed(name, malform(said(name, calls=[drawn_call(name, draw)]), draw))


def check_malformed(name: str, text: str) -> None:
    """Check an answer that is written wrongly."""
    found = parsed(name, text)
    assert parsed(name, text, list(text)) == found, text
    names = [part[0] for part in found if not isinstance(part, str)]
    assert set(names) <= {*TOOLS.names, "thought"}, text


@pytest.mark.parametrize("name", ["seed_oss", "qwen3_coder"])
@pytest.mark.parametrize("space", ["\n", " \n ", "\t"])
def test_space_around_a_key_is_read_alike_in_pieces(name: str, space: str) -> None:
    text = said(name, calls=[("weather", {"days": -7, "city": "x a"})])
    for written in (text.replace("=city", f"=city{space}"), text.replace("=city", f"={space}city")):
        check_malformed(name, written)
        assert read_calls(parsed(name, written)) == [("weather", {"days": -7, "city": "x a"})]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ROWS)
def test_two_hundred_calls_cut_everywhere_and_malformed(name: str) -> None:
    """As the tests before, for 200 calls of a new seed, which a failure shows; MOONPOOL_SEED repeats it."""
    seed = int(os.environ.get("MOONPOOL_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"MOONPOOL_SEED={seed}")
    draw = random.Random(seed)
    for _ in range(200):
        call = drawn_call(name, draw)
        text = said(name, calls=[call])
        assert read_calls(parsed(name, text)) == [call], text
        for at in range(len(text)):
            check_cut(name, call, text[:at])
        for malform in MALFORMED:
            check_malformed(name, malform(text, draw))


@pytest.mark.parametrize("name", [name for name in ROWS if not SPOKEN[name].is_whole])
def test_text_that_names_other_functions_stays_text(name: str) -> None:
    text = said(name, calls=[("unknown", {"city": "x"})])
    found = parsed(name, text)
    assert all(isinstance(part, str) for part in found)


QUOTED = """see:
<tool_call>
<function=add>
<parameter=city>
Rome
</parameter>
</function>
</tool_call>
and a </parameter> b"""


def test_values_of_tags_end_where_the_form_goes_on() -> None:
    written = SPOKEN["qwen3_coder"].write([("write_file", {"city": QUOTED})])
    assert read_calls(parsed("qwen3_coder", written)) == [("write_file", {"city": QUOTED})]


@pytest.mark.parametrize("begun", ["<function=", "<function=add>\n<parameter="])
@pytest.mark.parametrize("space", [" ", "\n"])
def test_space_in_a_mark_takes_no_time(begun: str, space: str) -> None:
    """Each piece of an answer is read on the event loop: hundreds of spaces took up to 77 ms each."""
    text = f"<tool_call>\n{begun}{space * 550}<"
    began = time.process_time()
    parsed("qwen3_coder", text, list(text))
    assert time.process_time() - began < 3


OPEN, SHUT = "<tool_call>", "</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n{SHUT}",
            [("weather", '{"city": "Paris"}')],
        ),
        ("Sure:\n<function=weather>\n</function>\n</tool_call>\nDone", ["Sure:", ("weather", "{}"), "\nDone"]),
        ("Write <function=weather> to call.", ["Write <function=weather> to call."]),
        ("```\n<function=weather>\n</function>\n```", ["```\n<function=weather>\n</function>\n```"]),
        (
            f"{OPEN}\n<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>\n<function=add>\n</function>\n{SHUT}",
            [("weather", '{"days": 2}'), ("add", "{}")],
        ),
        (
            f"{OPEN}\n<function=weather>\n<parameter=city>\nParis\n<parameter=days>\n2\n</parameter>\n</function>\n{SHUT}",
            [("weather", '{"city": "Paris", "days": 2}')],
        ),
        (
            f"{OPEN}\n<function=weather>\n<parameter=city>\nParis\n</function>\n{SHUT}",
            [("weather", '{"city": "Paris"}')],
        ),
        (
            f"{OPEN}\n<function=weather>\n<parameter=city>\nuse <function=x> to\n</parameter>\n</function>\n{SHUT}",
            [("weather", '{"city": "use <function=x> to"}')],
        ),
        (f"{OPEN}\n<function=weather>\n<parameter=city>\nPar", [("weather", '{"city": "Par')]),
        (f"{OPEN}\n<function=weather>\n<parameter=city>\nPar\n</param", [("weather", '{"city": "Par')]),
    ],
)
def test_tags_as_models_write_them(text: str, expected: list[Any]) -> None:
    assert parsed("qwen3_coder", text) == parsed("qwen3_coder", text, list(text)) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("functiongemma", "call:weather{days:<escape>2<escape>,exact:<escape>True<escape>,city:<escape>3<escape>}"),
        ("gemma4", 'call:weather{days:<|"|> 2 <|"|>,exact:<|"|>true<|"|>,city:<|"|>3<|"|>}'),
        ("pythonic", '[weather(days="2", exact="true", city="3")]'),
        ("lfm2", """[weather(days='2', exact='True', city="3")]"""),
    ],
)
def test_quoted_numbers_are_numbers_where_the_schema_has_no_texts(name: str, text: str) -> None:
    syntax = FORMATS[name].calls
    assert isinstance(syntax, ArgumentCalls)
    written = text if name == "pythonic" else f"{syntax.begins[0]}{text}{syntax.end}"
    expected = [("weather", {"days": 2, "exact": True, "city": "3"})]
    assert read_calls(parsed(name, written)) == read_calls(parsed(name, written, list(written))) == expected
    other = written.replace("days", "unknown").replace("exact", "tags")
    assert read_calls(parsed(name, other))[0][1]["unknown"].strip() == "2"


def test_an_answer_of_glm_4_begins_with_a_function_that_is_offered() -> None:
    """And with an object behind the name; anything else is text."""
    assert parsed("glm4", 'weather\n{"city": "x"}') == [("weather", '{"city": "x"}')]
    for text in ("weather\nis {fine}", 'unknown\n{"city": "x"}', 'So: weather\n{"city": "x"}', "weather", "weather\n"):
        assert "".join(parsed("glm4", text)) == "".join(parsed("glm4", text, list(text))) == text


def test_gpt_oss_has_channels() -> None:
    """Also without functions; several thoughts and a preamble; a call on the channel of thoughts."""
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four."
    assert parsed("openai", text, tools=None) == [("thought", "Hm."), "Four."]
    assert parsed("openai", f"{text}<|return|>", list(f"{text}<|return|>")) == [("thought", "Hm."), "Four."]
    twice = text.replace("<|start|>", "<|start|>assistant<|channel|>analysis<|message|>Well.<|end|><|start|>", 1)
    assert parsed("openai", twice) == [("thought", "Hm.\n\nWell."), "Four."]
    called = '<|channel|>analysis to=functions.add code<|message|>{"city": "<|call|>"}<|call|>'
    assert parsed("openai", called) == [("add", '{"city": "<|call|>"}')]
    other = ' to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{"days": 1}'
    assert parsed("openai", other) == parsed("openai", other, list(other)) == [("weather", '{"days": 1}')]
    assert parsed("openai", '{"plain": 1}') == ['{"plain": 1}']


def speaking(text: str, reason: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_STOP) -> FakeConductor:
    """Answers with a text, seven characters a token."""

    def say(_: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
        messages = answer(range(len(pieces)), request_id="r1", reason=reason)
        for message, piece in zip(messages[1:-1], pieces, strict=True):
            message.delta.text = piece
        return messages

    return FakeConductor(say)


def with_template(name: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    return Tokenizer(backend, {"default": SPOKEN[name].template})


@pytest.mark.parametrize("name", ["kimi_k2", "openai", "gemma4"])
async def test_ids_and_thoughts_in_a_chat(name: str) -> None:
    """Through the gateway, whole; Kimi's ids are as the model writes them."""
    text = said(name, "Hm.", calls=[PARIS]).replace(":0<", ":5<")
    async with answering(speaking(text), with_template(name)) as gateway:
        message = (await gateway.chat(tools=DEFINITIONS)).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm."
        assert not message["content"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == PARIS[1]
        if name == "kimi_k2":
            assert call["id"] == "functions.weather:5"


async def test_channels_in_three_interfaces() -> None:
    """Without functions, too."""
    async with answering(speaking(said("openai", "Hm.", "Four.")), with_template("openai")) as gateway:
        message = (await gateway.chat()).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Four.")
        assert not gateway.asked.sampling.skip_special_tokens
        body: dict[str, object] = {"input": "2 + 2?"}
        items = (await gateway.http.post("/v1/responses", json=body)).json()["output"]
        assert [item["type"] for item in items] == ["reasoning", "message"]
        assert items[1]["content"][0]["text"] == "Four."
        asked = {"messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 50}
        blocks = (await gateway.http.post("/v1/messages", json=asked)).json()["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text"]
        assert (blocks[0]["thinking"], blocks[1]["text"]) == ("Hm.", "Four.")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_answer_shows_no_marks(*, stream: bool) -> None:
    """A call that has only begun is not shown, but a text that ends in a mark by itself is."""
    for reason, shown in ((kv_pb2.FINISH_REASON_LENGTH, "Here."), (kv_pb2.FINISH_REASON_STOP, "Here.\n<tool_call>")):
        async with answering(speaking("Here.\n<tool_call>", reason), with_template("qwen3_coder")) as gateway:
            answered = await gateway.chat(tools=DEFINITIONS, stream=stream)
            if stream:
                events = [json.loads(line[6:]) for line in answered.text.splitlines() if line.startswith("data: {")]
                deltas = [choice["delta"] for event in events for choice in event["choices"]]
                assert "".join(delta.get("content") or "" for delta in deltas) == shown
            else:
                assert answered.json()["choices"][0]["message"]["content"] == shown


async def test_a_model_without_a_known_form_is_refused_by_name() -> None:
    """Unless a call is forced: the answer then follows a schema."""
    template = "{% if tools %}<calls>{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    made = Tokenizer(tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json")), {"default": template})
    async with answering(speaking('{"city": "x"}'), made) as gateway:
        refused = await gateway.chat(tools=DEFINITIONS)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        assert "--tool-call-parser has kimi_k2, " in refused.json()["error"]["message"]
        choice = {"type": "function", "function": {"name": "weather"}}
        message = (await gateway.chat(tools=DEFINITIONS, tool_choice=choice)).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "x"}'}


def test_the_start_says_how_answers_are_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for template, told in ((SPOKEN["glm45"].template, "glm45"), ("{{ tools }}{{ messages }}", "no known format")):
        made = Tokenizer(tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json")), {"default": template})
        with ThreadPoolExecutor(1) as threads:
            tell_formats(GatewayTokenizer("tiny", made, TenantTurns(threads), ParserNames(), "Glm4MoeForCausalLM"))
        assert told in caplog.text


def test_classes_of_rows_are_served() -> None:
    """Every class that a row names is one that Moonpool computes, or wraps such a decoder."""
    named = {name for row in FORMAT_ROWS for name in row.architectures}
    assert {name.replace(WRAPPER, "ForCausalLM") for name in named if name[0].isupper()} <= {*FAMILIES}


def test_long_values_take_linear_time() -> None:
    """Every character is looked at once: 200,000 of them would take minutes else."""
    text = "x <b>" * 40_000
    for name in ("qwen3_coder", "glm45", "gemma4", "lfm2", "openai"):
        written = said(name, calls=[("weather", {"city": text})])
        found = parsed(name, written, [written[at : at + 50] for at in range(0, len(written), 50)])
        assert read_calls(found) == [("weather", {"city": text})]


def test_the_documented_table_is_the_table() -> None:
    """`python -m tests.unit.gateway.formats_table` prints the table."""
    page = Path(__file__).parents[3] / "docs" / "gateway.md"
    assert formats_table() in page.read_text(encoding="utf-8")


def test_names_are_vllms() -> None:
    wanted = ("kimi_k2", "glm45", "glm47", "openai", "minimax_m2", "qwen3_coder", "qwen3_xml", "hermes", "deepseek_v3")
    more = ("deepseek_v31", "gemma4", "granite", "granite4", "cohere_command3", "lfm2", "seed_oss", "hunyuan_a13b")
    rest = ("phi4_mini_json", "olmo3", "mistral", "llama3_json", "llama4_pythonic", "pythonic")
    assert {*wanted, *more, *rest} <= FORMATS.keys()
    thinking = ("deepseek_r1", "qwen3", "mistral", "gemma4", "openai_gptoss", "seed_oss", "kimi_k2", "granite", "glm45")
    assert set(thinking) <= REASONING_FORMATS.keys()
