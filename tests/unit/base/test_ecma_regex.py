"""Regular expressions mean what ECMAScript says: classes, dots, escapes, and brackets within classes."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from moonpool.base.ecma_regex import from_ecma
from moonpool.base.grammar import LIMITS, Grammar, check_grammar, text_expressions
from moonpool.base.sampling_params import SamplingParams

ARABIC_THREE = "\u0663"


def matches(response_format: str, grammar: str, answer: str) -> bool:
    """Whether an answer, and nothing before its end, follows a grammar."""
    compiled = Grammar(response_format, grammar).compiled()
    matcher = LLMatcher(LLTokenizer("byte"), compiled, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    raw = list(answer.encode())
    return matcher.try_consume_tokens(raw) == len(raw) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("pattern", "fits", "fails"),
    [
        (r"\d", "0369", ARABIC_THREE + "a"),
        (r"\D", ARABIC_THREE + "a", "3"),
        (r"\w", "aZ_9", "é-"),
        (r"\W", "é-", "a_"),
        (r"\s", " \t\n\u000b\u00a0\u1680\u2028\u3000\ufeff", "a\u0085"),
        (r"\S", "a\u0085", " \ufeff"),
        (r"[\w-z]", "a_-z", "+é"),
        (r"[a-\d]", "a-5", "b"),
        (r"[^\D3]", "12", "3a" + ARABIC_THREE),
        (r"[--/]", "-./", "0"),
        (r"[[a]", "[a", "b"),
        (r"[a&&b]", "a&b", "c"),
        (r"[a~~b]", "a~b", "c"),
        (r"[\]a^]", "]a^", "\\"),
        (r"[\b]", "\b", "b"),
        (r"[^]", "a\n", ""),
        (r".", "aé" + ARABIC_THREE, "\n\r\u2028"),
        (r"(?s).", "a\n", ""),
        (r"\cJ", "\n", "J"),
        (r"\0", "\0", "0"),
        (r"\u00e9|\x41", "éA", "u"),
        (r"\ud83d\ude00|\u{1F601}", "\U0001f600\U0001f601", "u"),
        (r"\.", ".", "a"),
        (r"\\", "\\", "a"),
        (r"\p{Lu}", "AÉ", "aé"),
    ],
)
def test_an_expression_is_ecmascripts(pattern: str, fits: str, fails: str) -> None:
    schema = json.dumps({"type": "string", "pattern": f"^({pattern})$"})
    for answer in fits + fails:
        assert matches("regex", pattern, answer) == (answer in fits), answer
        if answer >= " ":
            written = json.dumps(answer, ensure_ascii=False)
            assert matches("json_schema", schema, written) == (answer in fits), answer


def test_quantifiers_and_groups_stay() -> None:
    for pattern in (r"(?<year>[0-9]{4})-(?:a|b)?c*?", r"x{2,}", "", r"\/"):
        assert from_ecma(pattern) == pattern


def test_what_is_no_expression_stays_none() -> None:
    for pattern in ("[a", "(", "a)", r"\u{12", "[z-a]", r"(a)\1"):
        assert LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(from_ecma(pattern)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "patternProperties": {r"^k\d$": {"const": 1}}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"pattern": r"^k[\d_]$"}, "additionalProperties": {"const": 1}},
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/name"},
            "additionalProperties": {"const": 1},
            "$defs": {"name": {"type": "string", "pattern": r"^k\d$"}},
        },
    ],
)
def test_patterns_of_names(schema: dict[str, object]) -> None:
    assert matches("json_schema", json.dumps(schema), '{"k1": 1}')
    assert not matches("json_schema", json.dumps(schema), f'{{"k{ARABIC_THREE}": 1}}')


def test_texts_of_strict_calls() -> None:
    assert text_expressions({"pattern": r"^\d$"}) == ["([0-9])"]


def test_a_pattern_of_white_space_is_checked() -> None:
    check_grammar(SamplingParams(response_format="json_schema", grammar=r'{"x-whitespace-pattern": "\\s?"}'))
    assert matches("json_schema", r'{"type": "array", "x-whitespace-pattern": "\\s?"}', "[\ufeff]")
