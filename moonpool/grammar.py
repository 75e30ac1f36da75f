"""What an answer may look like: JSON, a JSON schema, a regular expression or a grammar, by the library llguidance.

Free of torch: a conductor checks with it before any work is done, an engine computes with it which tokens may follow.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from moonpool.errors import InvalidRequest
from moonpool.json_schema import WHITESPACE, SchemaWordError, explain_fault, inner_schemas, map_schemas, normalise
from moonpool.sampling_params import MAX_GRAMMAR_BYTES, ResponseFormat, SamplingParams

FORMATS: tuple[str, ...] = get_args(ResponseFormat)
_WHITESPACE = r"(\n[ \t]{0,16}| )?"
"""Between the parts of JSON. Without a bound, small models write spaces up to the last token."""
_MAX_REASON = 400
MAX_NAMES = 64
"""Names of members that a pattern may stand for, to be listed one by one."""
_MAX_NAME_STEPS, _MAX_NAME_BYTES = 2048, 64
_MAX_FAULT_PARTS = 32
"""Parts of a schema that are tried alone, to name the place of a fault."""
LIMITS = LLParserLimits(
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    step_max_items=10_000,
    step_lexer_fuel=100_000,
    verbose_errors=False,
)
"""What a grammar may cost at most: some 100 MB, and some 0.3 s in a step; the same where it is checked and used."""


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
        """What some parameters ask for; None = any text."""
        return cls(params.response_format, params.grammar) if params.response_format else None

    def compiled(self) -> str:
        """Llguidance's form of it.

        Raises:
            ValueError: a schema is no JSON object, or the format is not known.
        """
        match self.format:
            case "json_object":
                return _json_grammar('{"type": "object"}')
            case "json_schema":
                return _json_grammar(self.text)
            case "regex":
                return LLMatcher.grammar_from_regex(self.text)
            case "lark":
                return LLMatcher.grammar_from_lark(_lark(self.text))
        raise ValueError(f"must be one of {', '.join(FORMATS)}, not {self.format!r}")


def _lark(text: str) -> str:
    """A grammar in Lark's notation, translated if it is in llama.cpp's (GBNF), whose rules are `name ::= ...`."""
    if is_lark_syntax(text) or "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except (RecursionError, MemoryError):
        raise
    except Exception as error:  # the translator raises plain exceptions, and IndexError at the end of the text
        raise ValueError(f"the grammar's notation is not GBNF: {error}") from None


def _json_grammar(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    whitespace = schema.pop(WHITESPACE, _WHITESPACE)
    if not isinstance(whitespace, str):
        raise ValueError(f"{WHITESPACE}: must be a regular expression")
    built = json.dumps(map_schemas(normalise(schema), _name_members))
    if not whitespace:
        return LLMatcher.grammar_from_json_schema(built, overrides={"whitespace_flexible": False})
    return LLMatcher.grammar_from_json_schema(built, overrides={"whitespace_pattern": whitespace})


def _name_members(place: str, schema: dict[str, Any]) -> Mapping[str, Any]:
    """A schema whose patterns of few names are the names themselves, so that no member comes twice."""
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
    """The names that match a pattern, at most `MAX_NAMES`; None if there are more, or the pattern is wrong."""
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
class TaggedSchema:
    """JSON that stands between two texts.

    Attributes:
        trigger: the text that shows that such a piece begins; `begin` begins with it.
        begin: text before the JSON.
        schema: the JSON schema.
        end: text behind the JSON.
    """

    trigger: str
    begin: str
    schema: Mapping[str, Any]
    end: str


def tagged_grammar(tagged: Sequence[TaggedSchema], *, special: bool) -> str:
    """A Lark grammar of free text in which every trigger begins one of `tagged`.

    `special`: the triggers are special tokens.
    """
    tags = [
        StructTag(
            trigger=it.trigger,
            begin=it.begin,
            grammar={"x-guidance": {"whitespace_pattern": _WHITESPACE}, **it.schema},
            end=it.end,
        )
        for it in tagged
    ]
    return StructTag.to_grammar(tags, assume_special=special)


def _first_fault(compiled: str) -> str:
    """What is wrong, also what shows only where the first token is looked for; "" = nothing."""
    wrong = LLMatcher.validate_grammar(compiled, limits=LIMITS)
    if wrong:
        return str(wrong)
    parser = LLMatcher(LLTokenizer("byte"), compiled, log_level=0, limits=LIMITS)
    parser.compute_bitmask()
    return str(parser.get_error())


def check_grammar(params: SamplingParams, field_prefix: str = "sampling") -> None:
    """Checks that the grammar, if there is one, can be followed; takes up to half a second.

    Nothing is ever fetched, whatever a schema refers to.

    Raises:
        InvalidRequest: the grammar is wrong, too large, or uses what is not supported; names "FIELD_PREFIX.grammar".
            Of a schema, the message names the word at fault and its place in the schema.
    """
    grammar = Grammar.of(params)
    if grammar is None:
        return
    field = f"{field_prefix}.grammar"
    if len(grammar.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(field, f"has more than {MAX_GRAMMAR_BYTES} bytes")
    try:
        wrong = _first_fault(grammar.compiled())
    except SchemaWordError as error:
        raise InvalidRequest(field, str(error)) from None
    except (ValueError, RecursionError) as error:
        wrong = str(error) or "nested too deeply"
    if wrong and grammar.format in ("json_schema", "json_object"):
        raise InvalidRequest(field, _schema_fault(grammar.text, wrong))
    if wrong:
        raise InvalidRequest(field, f"is no {_NOTATIONS.get(grammar.format, grammar.format)}: {wrong[:_MAX_REASON]}")


_NOTATIONS = {"regex": "regular expression that can be followed", "lark": "grammar that can be followed"}


def _schema_fault(text: str, wrong: str) -> str:
    """The message about a schema that cannot be followed, with the place of the smallest schema at fault."""
    place = ""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        return "is no JSON schema: it must be a JSON object that is not nested too deeply"
    parts = itertools.islice(inner_schemas(schema), _MAX_FAULT_PARTS)
    definitions = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    for where, part in parts:  # the innermost schemas are first
        alone = json.dumps({**definitions, **part})
        try:
            fault = _first_fault(_json_grammar(alone))
        except (ValueError, RecursionError) as error:
            fault = str(error)
        if fault:
            place, wrong = where, fault
            break
    return f"{place}: {explain_fault(wrong)}" if place else explain_fault(wrong)
