"""What an answer may look like: JSON, a JSON schema, a regular expression or a grammar, by the library llguidance.

Free of torch: a conductor checks with this module before any work is done, an engine computes with it which tokens may
follow.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from moonpool.base.bundled import model_dir
from moonpool.base.ecma_regex import from_ecma
from moonpool.base.errors import InvalidRequest
from moonpool.base.json_parts import parse_json
from moonpool.base.json_schema import (
    WHITESPACE,
    SchemaWordError,
    check_multiples,
    check_numbers,
    check_range,
    explain_fault,
    inner_schemas,
    map_schemas,
    normalise,
)
from moonpool.base.sampling_params import MAX_GRAMMAR_BYTES, ResponseFormat, SamplingParams

FORMATS: tuple[str, ...] = get_args(ResponseFormat)
_WHITESPACE = r"(\n[ \t]{0,16}| )?"
"""Between the parts of JSON. Without a bound, small models write spaces up to the last token."""
_MAX_REASON = 400
MAX_NAMES = 64
"""Member names that a pattern may stand for, to be listed one by one."""
_MAX_NAME_STEPS, _MAX_NAME_BYTES = 2048, 64
_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
"""A text that may be a special token."""
_TOKEN_ID = re.compile(r"<\[\d+\]>")
_MAX_FAULT_PARTS = 32
"""Schema parts that are tried alone, to name a fault's place."""
LIMITS = LLParserLimits(
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    step_max_items=10_000,
    step_lexer_fuel=100_000,
    verbose_errors=False,
)
"""What a grammar may cost at most: some 100 MB, and some 0.3 s for a mask; the same for checking and use."""
MAX_CHECK_S = 0.25
"""Processor time for compiling a grammar and the first masks. One mask more is begun at most."""
PROBED_TOKENS = 4
"""Masks that a check makes."""
SLICES = [*LLTokenizer.general_slices(), *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (2, 3, 4, 6, 20))]
"""Tokens that match one of these expressions are allowed together if a format allows the expression; only the others
are checked one by one. The library's own, and shorter texts: for texts near their longest length.
"""
_NOTATIONS = {"regex": "regular expression that can be followed", "lark": "grammar that can be followed"}


@dataclass(frozen=True, slots=True)
class Grammar:
    """Which texts are answers.

    Attributes:
        format: how `text` is meant.
        text: the schema, expression or grammar; "" for "json_object".
    """

    format: str
    text: str

    @classmethod
    def of(cls, params: SamplingParams) -> Grammar | None:
        """Return what some parameters ask for; None = any text."""
        return cls(params.response_format, params.grammar) if params.response_format else None

    def compiled(self) -> str:
        """Return the grammar in llguidance's form.

        Raises:
            ValueError: a schema is no JSON object, or the format is not known.
        """
        match self.format:
            case "json_object":
                return _json_grammar('{"type": "object"}')
            case "json_schema":
                return _json_grammar(self.text)
            case "regex":
                return LLMatcher.grammar_from_regex(from_ecma(self.text))
            case "lark":
                return LLMatcher.grammar_from_lark(_lark(self.text))
        raise ValueError(f"must be one of {', '.join(FORMATS)}, not {self.format!r}")


_LARK_PARTS = re.compile(r"""(?s)(?P<json>%json)|"(?:\\.|[^"\\])*"|(?:\#|//)[^\n]*|/(?:\\.|[^/\\])+/|<[^<>\s]+>""")
"""Schemas of a grammar in Lark's notation, and what may quote one: texts, comments, expressions, special tokens."""


def _lark(text: str) -> str:
    """A grammar in Lark's notation, translated from llama.cpp's (GBNF), whose rules are `name ::= ...`, if need be.

    Raises:
        SchemaWordError: a schema within the grammar has a number that would not be followed.
        ValueError: the grammar's notation is none.
    """
    if "::=" in text and not is_lark_syntax(text):
        try:
            text = gbnf_to_lark(text)
        except (RecursionError, MemoryError):
            raise
        except Exception as error:  # the translator raises plain exceptions, and IndexError at the end of the text
            raise ValueError(f"the grammar's notation is not GBNF: {error}") from None
    _check_lark_schemas(text)
    return text


def _check_lark_schemas(text: str) -> None:
    """Check the numbers of schemas within a grammar (`%json {...}`); all else of them the library itself refuses."""
    at = 0
    while (found := _LARK_PARTS.search(text, at)) is not None:
        at = found.end()
        if not found["json"]:
            continue
        behind = text[at:].lstrip(" \t\r\n")
        try:
            schema, length = json.JSONDecoder().raw_decode(behind)
        except json.JSONDecodeError:
            continue  # the library says what is wrong
        at = len(text) - len(behind) + length
        if isinstance(schema, dict):
            check_range("%json", schema)
            map_schemas(schema, _check_part, "%json")
            check_multiples(schema, "%json")


def _check_part(place: str, schema: dict[str, Any]) -> Mapping[str, Any]:
    check_numbers(place, schema)
    return schema


def _json_grammar(text: str) -> str:
    schema = parse_json(text)
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    whitespace = schema.pop(WHITESPACE, _WHITESPACE)
    if not isinstance(whitespace, str):
        raise ValueError(f"{WHITESPACE}: must be a regular expression")
    built = json.dumps(_built(schema))
    if not whitespace:
        return LLMatcher.grammar_from_json_schema(built, overrides={"whitespace_flexible": False})
    return LLMatcher.grammar_from_json_schema(built, overrides={"whitespace_pattern": from_ecma(whitespace)})


def _built(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema in words of llguidance."""
    return map_schemas(normalise(schema), _name_members)


def _name_members(place: str, schema: dict[str, Any]) -> Mapping[str, Any]:
    """Return a schema with patterns of few names replaced by the names, so that no member comes twice."""
    patterns, members = schema.get("patternProperties"), schema.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(members, dict):
        return schema
    names = {pattern: _names(pattern) for pattern in patterns}
    counts = Counter(name for found in names.values() for name in found or ())
    if any(name in members or count > 1 for name, count in counts.items()):
        return schema
    few = {pattern: found for pattern, found in names.items() if found is not None}
    named = {name: patterns[pattern] for pattern, found in few.items() for name in found}
    rest = {pattern: inner for pattern, inner in patterns.items() if pattern not in few}
    kept = {word: value for word, value in schema.items() if word != "patternProperties"}
    return {**kept, "properties": {**members, **named}, **({"patternProperties": rest} if rest else {})}


@functools.lru_cache(maxsize=64)
def _names(pattern: str) -> tuple[str, ...] | None:
    """Return the names that match a pattern, at most `MAX_NAMES`; None if there are more, or the pattern is wrong."""
    text = json.dumps({"type": "string", "pattern": pattern})
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(text), log_level=0, limits=LIMITS)
    found: list[bytes] = []
    paths = [(b"", matcher)]
    for _ in range(_MAX_NAME_STEPS):
        if not paths:
            return tuple(dict.fromkeys(json.loads(name) for name in found))
        begun, matcher = paths.pop()
        if matcher.is_error() or len(begun) > _MAX_NAME_BYTES:
            return None
        if matcher.is_stopped():
            found.append(begun)
            continue
        allowed = matcher.compute_bitmask()
        following = [byte for byte in range(256) if allowed[byte // 8] >> byte % 8 & 1]
        if len(found) + len(paths) + len(following) > MAX_NAMES:
            return None
        for byte in reversed(following):
            after = matcher.deep_copy()
            after.consume_token(byte)
            paths.append((begun + bytes([byte]), after))
    return None


@dataclass(frozen=True, slots=True)
class Thinking:
    """The thinking before an answer.

    Attributes:
        begin, end: text before and behind the thinking, each of which may be a special token.
        is_open: the answer begins within the thinking, because the prompt has begun the thinking.
    """

    begin: str
    end: str
    is_open: bool


class AnswerGrammar:
    """Writes the Lark grammar of answers that are free text, in which some texts begin what has a form.

    A form is the right side of a Lark rule, made with `mark`, `text`, `json` and `text_until`.
    """

    def __init__(self, special_id: Callable[[str], int | None], thinking: Thinking | None = None) -> None:
        """Start without forms: any text is an answer.

        Args:
            special_id: returns the id of a special token; None if the text is no special token.
            thinking: the thinking before answers; None for none.
        """
        self._special_id = special_id
        self._thinking = thinking
        self._rules: list[str] = [r"TEXT: /(.|\n)*/"]
        self._triggers: list[tuple[str, str]] = []  # what begins a form, and the rule of the form
        self._opening = ""  # the rule of a whole answer that has a form

    def mark(self, mark: str) -> str:
        """Return a text of the model's own, which may be a special token."""
        token = self._special_id(mark)
        return self.text(mark) if token is None else f"<[{token}]>"

    def text(self, text: str) -> str:
        """Return a text."""
        return json.dumps(text, ensure_ascii=False)

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON of a schema.

        Raises:
            SchemaWordError: a word is not supported; names the word with the word's place.
        """
        flexible = {"x-guidance": {"whitespace_pattern": _WHITESPACE}}
        return f"%json {json.dumps({**flexible, **_built(schema)})}"

    def token(self, expression: str, text: str) -> str:
        """Return what matches a regular expression and then is a text, read as one piece."""
        name = self._name("token").upper()
        self._rules.append(f"{name}: /{expression}/ {self.text(text)}")
        return name

    def text_until(self, end: str, expressions: Sequence[str] = ()) -> str:
        """Return a text that matches all regular expressions, up to the first `end` and with `end`.

        A special token in `end` ends the text.
        """
        matched = " & ".join(f"/{_unslashed(expression)}/" for expression in (r"(.|\n)*", *expressions))
        mark, behind = self._first_special(end)
        if mark:
            name = self._name("text").upper()
            self._rules.append(f"{name}: {matched}")
            return " ".join(filter(None, [name, self.mark(mark), behind and self.text(behind)]))
        name = self._name("until")
        self._rules.append(f"{name}[lazy]: ({matched}) {self.text(end)}")
        return name

    def _first_special(self, text: str) -> tuple[str, str]:
        """Return a text's first special token, and what is behind; nothing if there is none."""
        found = next((mark for mark in _MARK.finditer(text) if self._special_id(mark[0]) is not None), None)
        return ("", "") if found is None else (found[0], text[found.end() :])

    def form(self, forms: Sequence[str]) -> str:
        """Several forms as one alternative."""
        name = self._name("form")
        self._rules.append(f"{name}: {' | '.join(forms)}")
        return name

    def add(self, trigger: str, forms: Sequence[str]) -> None:
        """One of `forms` follows the text `trigger` everywhere; `trigger` may be or have a special token."""
        self._triggers.append((trigger, self.form(forms)))

    def pass_mark(self, mark: str) -> None:
        """A special token may stand in the text. Other marks are text anyway."""
        if self._special_id(mark) is not None:
            self._triggers.append((mark, ""))

    def open_with(self, forms: Sequence[str], begins: str) -> None:
        """One of `forms` is the whole answer, after the thinking, if the answer matches `begins` and anything."""
        self._opening = self.form(forms)
        self._rules.append(rf"FIRST: /(.|\n)*/ & ~/({begins})(.|\n)*/" + self._without_thinking())

    def forced_lark(self, form: str) -> str:
        """Return the grammar of an answer that is a form, after the thinking."""
        thought = self._thought()
        self._rules.append(r"SPACE: /[ \n\t]{1,4}/")
        return self.lark_of(f"{thought} SPACE? {form}" if thought else form)

    def expression(self, expression: str) -> str:
        """Return what matches a regular expression."""
        return f"/{_unslashed(expression)}/"

    def piece(self, text: str, trigger: str, form: str) -> str:
        """Return text of a terminal up to the first `trigger`, which may be a special token, and then a form."""
        return self._piece(text, trigger, form)

    def lark_of(self, start: str) -> str:
        """Return the grammar whose answers are `start`, made with the other methods; its free text is TEXT."""
        return "\n".join([f"start: {start}", *self._rules])

    def lark(self) -> str:
        """Return the grammar."""
        if self._thinking is not None and not self._opening:
            self.pass_mark(self._thinking.begin)
            self.pass_mark(self._thinking.end)
        pieces = "".join(f" {self._piece('TEXT', *trigger)} |" for trigger in self._triggers)
        more = f"({pieces.removesuffix('|').strip()})* TEXT" if pieces else "TEXT"
        if not self._opening:
            start = more
        else:
            begun = [f"{self._piece('FIRST', *trigger)} {more}" for trigger in self._triggers]
            start = f"{self._thought()} ({' | '.join([self._opening, 'FIRST', *begun])})"
        return "\n".join([f"start: {start}", *self._rules])

    def _piece(self, text: str, trigger: str, form: str) -> str:
        """Free text, `trigger` and the form."""
        if self._special_id(trigger) is not None:
            return f"{text} {self.mark(trigger)} {form}".rstrip()
        mark, behind = self._first_special(trigger)
        if mark:  # no text holds the token, so that the text before may be read to the token
            before = trigger.partition(mark)[0]
            if before:
                name = self._name("before").upper()
                self._rules.append(f"{name}: {text} {self.text(before)}")
                text = name
            return " ".join(filter(None, [text, self.mark(mark), behind and self.text(behind), form]))
        name = self._name("trigger")
        self._rules.append(f"{name}[lazy]: {text} {self.text(trigger)}")
        return f"{name} {form}".rstrip()

    def _thought(self) -> str:
        """Return the thinking, up to the first end mark."""
        if self._thinking is None:
            return ""
        begin, end = self._thinking.begin, self._thinking.end
        if self._special_id(end) is not None:
            return (
                f"TEXT {self.mark(end)}" if self._thinking.is_open else f"({self.mark(begin)} TEXT {self.mark(end)})?"
            )
        thought = self.text_until(end, () if self._thinking.is_open else [rf"[ \n\t]*{re.escape(begin)}(.|\n)*"])
        return thought if self._thinking.is_open else f"{thought}?"

    def _without_thinking(self) -> str:
        """Return what excludes the end of thinking from a text, so that what follows the end begins anew."""
        if self._thinking is None:
            return ""
        return rf" & ~/(.|\n)*{_unslashed(re.escape(self._thinking.end))}(.|\n)*/"

    def _name(self, kind: str) -> str:
        return f"{kind}_{len(self._rules)}"


class _TooSlowError(Exception):
    """Following a grammar takes too long."""

    def __str__(self) -> str:
        return f"is too complex: following it takes more than {MAX_CHECK_S:g} s of processor time"


def _first_fault(compiled: str) -> str:
    """Return what is wrong, also what shows only where the first tokens are looked for; "" = no fault.

    A cost over the limit is measured a second time: the first time may have paid for what else the machine did.

    Raises:
        _TooSlowError: the cost was over the limit both times.
    """
    probe = _probe()  # built before the clock runs
    try:
        return _measured_fault(probe, compiled)
    except _TooSlowError:
        return _measured_fault(probe, compiled)


def _measured_fault(probe: LLTokenizer, compiled: str) -> str:
    """Return the first fault; see `_first_fault`. Measures once."""
    began_ns = time.thread_time_ns()
    wrong = LLMatcher.validate_grammar(compiled, limits=LIMITS)
    if wrong:
        return str(wrong)
    # Model tokens are checked as another token, because the checking vocabulary may lack them.
    parser = LLMatcher(probe, _TOKEN_ID.sub("<[258]>", compiled), log_level=0, limits=LIMITS)
    for _ in range(PROBED_TOKENS):
        allowed = parser.compute_bitmask()
        if parser.is_error():
            return str(parser.get_error())
        if time.thread_time_ns() - began_ns > MAX_CHECK_S * 1e9:
            raise _TooSlowError
        if parser.is_stopped() or not any(allowed):
            break
        parser.consume_token(_middle_token(allowed))
    return ""


def _middle_token(allowed: bytes) -> int:
    """Return a token that may follow: the middle one."""
    bits = int.from_bytes(allowed, "little")
    tokens = [token for token in range(bits.bit_length()) if bits >> token & 1]
    return tokens[len(tokens) // 2]


def prepare_checks() -> None:
    """Build what `check_grammar` needs, so that the first check takes no longer than others."""
    _probe()


@functools.cache
def _probe() -> LLTokenizer:
    """Return the bundled model's vocabulary, with which the cost of a grammar is measured."""
    return LLTokenizer(json.dumps(json.loads((model_dir() / "tokenizer.json").read_text())), slices=SLICES)


def _unslashed(expression: str) -> str:
    """A regular expression that may stand between slashes."""
    return re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], expression)


def text_expressions(schema: Mapping[str, Any]) -> list[str]:
    """Regular expressions for the texts that a string schema allows, by length and pattern."""
    found = []
    if "minLength" in schema or "maxLength" in schema:
        found.append(rf"(.|\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}")
    if "pattern" in schema:
        pattern = from_ecma(str(schema["pattern"]))
        begin = "" if pattern.startswith("^") else r"(.|\n)*"
        end = "" if pattern.endswith("$") else r"(.|\n)*"
        found.append(f"{begin}({pattern.removeprefix('^').removesuffix('$')}){end}")
    return found


def check_grammar(params: SamplingParams, field_prefix: str = "sampling") -> None:
    """Check that the grammar, if there is one, can be followed, and at what cost; takes up to a second.

    Fetches nothing, whatever a schema refers to.

    Raises:
        InvalidRequest: the grammar is wrong, too large, or uses what is not supported; names "FIELD_PREFIX.grammar".
            For a schema, the message names the faulty word and the word's place.
    """
    grammar = Grammar.of(params)
    if grammar is None:
        return
    field = f"{field_prefix}.grammar"
    if len(grammar.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(field, f"has more than {MAX_GRAMMAR_BYTES} bytes")
    try:
        wrong = _fault(grammar)
    except _TooSlowError as error:
        wrong = str(error)
    if wrong:
        raise InvalidRequest(field, wrong)


@functools.lru_cache(maxsize=256)
def _fault(grammar: Grammar) -> str:
    """Return what is wrong with a grammar, for the client; "" = no fault.

    Raises:
        _TooSlowError: following the grammar takes too long. A measured cost is no fact to remember, so the next request
            measures anew.
    """
    try:
        wrong = _first_fault(grammar.compiled())
    except SchemaWordError as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        wrong = str(error) or "nested too deeply"
    if wrong and grammar.format in ("json_schema", "json_object"):
        return _schema_fault(grammar.text, wrong)
    return wrong and f"is no {_NOTATIONS.get(grammar.format, grammar.format)}: {wrong[:_MAX_REASON]}"


def _schema_fault(text: str, wrong: str) -> str:
    """Return the message about a schema that cannot be followed, with the place of the smallest schema at fault."""
    place = ""
    try:
        schema = parse_json(text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        return "is no JSON schema: it must be a JSON object that is not nested too deeply"
    began_ns = time.thread_time_ns()
    parts = itertools.islice(inner_schemas(schema), _MAX_FAULT_PARTS)
    definitions = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    for where, part in parts:  # the innermost schemas are first
        if time.thread_time_ns() - began_ns > MAX_CHECK_S * 1e9:
            break
        alone = json.dumps({**definitions, **part})
        try:
            fault = _first_fault(_json_grammar(alone))
        except (ValueError, RecursionError, _TooSlowError) as error:
            fault = str(error)
        if fault:
            place, wrong = where, fault
            break
    return f"{place}: {explain_fault(wrong)}" if place else explain_fault(wrong)
