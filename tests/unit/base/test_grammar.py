"""Grammars are checked before any work: what is wrong, too large or not supported is refused by its name."""

import json
import time
from typing import Any

import pytest

from moonpool.base import grammar
from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import check_grammar
from moonpool.base.sampling_params import MAX_GRAMMAR_BYTES, SamplingParams
from tests.unit.engine.schemas import SCHEMAS

RULES = 1500
AMBIGUOUS = "start: " + " ".join(f"r{i}" for i in range(RULES)) + f'\nr{RULES - 1}: "y"\n'
AMBIGUOUS += "\n".join(f'r{i}: r{i + 1}* | "x"' for i in range(RULES - 1))
"""Well-formed, and with too many ways to begin."""


def fault(**values: Any) -> str:
    params = SamplingParams(**values)
    try:
        params.check(10, "s")
        check_grammar(params, "s")
    except InvalidRequest as error:
        return error.field
    return ""


def test_what_can_be_followed_passes() -> None:
    for schema in SCHEMAS.values():
        check_grammar(SamplingParams(response_format="json_schema", grammar=json.dumps(schema)))
    check_grammar(SamplingParams(response_format="json_object"))
    check_grammar(SamplingParams(response_format="regex", grammar="a+"))
    check_grammar(SamplingParams(response_format="lark", grammar='start: "a" | "b"'))
    check_grammar(SamplingParams())


@pytest.mark.parametrize(
    "schema",
    [
        "no JSON",
        "[1]",
        "true",
        '{"type": "objec"}',
        '{"type": "object", "properties": {"a": {"not": {"type": "string"}}}}',
        '{"type": "string", "pattern": "(?=a)b"}',
        '{"$ref": "http://127.0.0.1:9/never-fetched.json"}',
        '{"$ref": "file:///etc/passwd"}',
        "[" * 60_000,
        json.dumps({"enum": ["x" * 99] * 1000}),
    ],
    ids=str,
)
def test_schemas_that_are_refused(schema: str) -> None:
    assert fault(response_format="json_schema", grammar=schema) == "s.grammar"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(["),
        ("regex", "(" * 5000 + "a" + ")" * 5000),
        ("lark", AMBIGUOUS),
        ("lark", "start: missing"),
        ("lark", "a" * (MAX_GRAMMAR_BYTES + 1)),
        ("regex", "\ud800"),
    ],
)
def test_expressions_and_grammars_that_are_refused(kind: str, text: str) -> None:
    assert fault(response_format=kind, grammar=text) == "s.grammar"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"response_format": "xml"}, "s.response_format"),
        ({"response_format": "json_schema"}, "s.grammar"),
        ({"response_format": "json_object", "grammar": "{}"}, "s.grammar"),
        ({"grammar": "{}"}, "s.grammar"),
        ({"response_format": "json_object", "min_tokens": 3}, "s.min_tokens"),
        ({"response_format": "json_object", "ignore_eos": True}, "s.ignore_eos"),
        ({"response_format": "json_object", "bad_words": ["x"]}, "s.bad_words"),
        ({"response_format": "json_object", "beam_width": 2}, "s.response_format"),
    ],
)
def test_what_does_not_go_together(values: dict[str, Any], field: str) -> None:
    assert fault(**values) == field


def overlapping(lexemes: int) -> str:
    names = [f"L{number}" for number in range(lexemes)]
    rules = [
        f"L{at}: /[a-z ]*{chr(97 + at % 26)}{chr(97 + at // 26)}[a-z ]{{2,{at % 7 + 5}}}/" for at in range(lexemes)
    ]
    return f"start: item*\nitem: {' | '.join(names)}\n" + "\n".join(rules)


def test_a_grammar_that_costs_too_much_is_refused_by_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is within all limits; what it costs is measured."""
    check_grammar(SamplingParams(response_format="lark", grammar=overlapping(10)))
    monkeypatch.setattr(grammar, "MAX_CHECK_S", 0.001)
    with pytest.raises(InvalidRequest, match=r"is too complex: following it takes more than 0.001 s of processor time"):
        check_grammar(SamplingParams(response_format="lark", grammar=overlapping(40)))


@pytest.mark.parametrize("slow", [1, 2])
def test_one_slow_moment_of_the_machine_refuses_no_grammar(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    """A cost is measured twice before a grammar is refused, and no measured cost is remembered."""
    asked = SamplingParams(response_format="regex", grammar=f"slow{slow}")
    clock_ns = iter([0, 10**9] * slow)
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(clock_ns, 0))
    if slow == 2:
        with pytest.raises(InvalidRequest, match="is too complex"):
            check_grammar(asked)
    check_grammar(asked)
    assert next(clock_ns, None) is None


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('start: %json {"const": -9223372036854775808}', "%json.const: -9223372036854775808 is below"),
        ('start: "%json" /"\\//  %json \n {"a": {"type": "integer", "const": -9.4e18}}', "%json.a.const: -9.4e+18 is"),
        ('start: /\n"/ %json {"x": [-1e300]} "', "%json.x.0: -1e+300 is below"),
        ('start: <"> %json {"enum": [1234567890123456789]} # "', "%json.enum.0: 1234567890123456789 has more digits"),
        ('start: %json {"multipleOf": 9999991}', "%json.multipleOf: 9999991 is too large"),
        ('start ::= "a"\n// %json {"const": 1}\nb ::= %json {"const": -9.4e18}', ""),
    ],
)  # fmt: skip
def test_numbers_of_schemas_within_a_grammar_are_checked(grammar: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_grammar(SamplingParams(response_format="lark", grammar=grammar))
    assert refused.value.message.startswith(says)


def test_what_only_looks_like_a_schema_within_a_grammar_is_none() -> None:
    quoted = r"%json {\"const\": -9.4e18}"
    grammar = f'start: "{quoted}" %json {{"const": 5}} // %json {{"const": -9.4e18}}\n'
    check_grammar(SamplingParams(response_format="lark", grammar=grammar))
