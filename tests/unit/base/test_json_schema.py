"""JSON schemas as clients write them: what is followed, what only annotates, and how what is not built is named."""

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import Grammar, check_grammar
from moonpool.base.json_schema import WHITESPACE, close_objects, ignored_words
from moonpool.base.sampling_params import SamplingParams

FLAG = {"type": "boolean"}
BYTES = LLTokenizer("byte")


def check(schema: Any, kind: str = "json_schema") -> None:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    check_grammar(SamplingParams(response_format=kind, grammar=text))  # type: ignore[arg-type]


def answer(schema: dict[str, Any], seed: int) -> str:
    """An answer that follows a schema, drawn byte by byte; short texts are likelier."""
    drawn, text = random.Random(seed), b""
    matcher = LLMatcher(BYTES, Grammar("json_schema", json.dumps(schema)).compiled(), log_level=0)
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        choices = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        ends = [byte for byte in choices if byte in b'"}],']
        byte = drawn.choice(ends) if ends and drawn.random() < 0.3 else drawn.choice(choices)
        assert matcher.consume_token(byte)
        text += bytes([byte])
    return text.decode()


@pytest.mark.parametrize(
    "name",
    [
        "uri-reference",
        "regex",
        "json-pointer",
        "iri",
        "password",
        "binary",
        "byte",
        "path",
        "decimal",
        "int64",
        "idn-email",
    ],
)
def test_a_format_that_only_annotates_is_left_out_with_a_warning(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": name}, "b": {"type": "array"}}}
    check(schema)
    assert ignored_words(schema) == ["properties.a.format"]


def test_formats_that_are_followed_are_no_annotations() -> None:
    schema = {"anyOf": [{"type": "string", "format": "date"}, {"type": "integer", "format": "int64"}]}
    assert ignored_words(schema) == []
    check(schema)


@pytest.mark.parametrize(
    "words",
    [
        {"uniqueItems": False},
        {"if": {"type": "string"}},
        {"then": {"type": "string"}},
        {"unevaluatedProperties": True},
        {"unevaluatedProperties": False},
        {"dependentRequired": {}},
        {"minContains": 1},
        {"propertyNames": {"type": "string"}},
        {"title": "t", "description": "d", "examples": [1], "deprecated": True, "readOnly": True, "$comment": "c"},
        {"contentMediaType": "text/plain", "contentEncoding": "base64", "discriminator": {"propertyName": "kind"}},
        {"x-guidance": {"lenient": True}, "x-order": 3, "default": None},
    ],
    ids=lambda words: next(iter(words)),
)
def test_words_that_constrain_nothing_pass(words: dict[str, Any]) -> None:
    check({"type": "object", "properties": {"a": {"type": "object", "properties": {"b": FLAG}, **words}}})


BIG = 1234567890123456789
OVERLAP = {"oneOf": [{"type": "number"}, {"type": "integer"}]}


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ({"type": "array", "uniqueItems": True}, "properties.a.uniqueItems: is not supported yet"),
        ({"not": {"type": "string"}}, "properties.a.not: is not supported yet"),
        ({"type": "array", "items": {"if": FLAG, "then": FLAG}}, "properties.a.items.if: is not supported yet"),
        ({"anyOf": [FLAG, {"contains": FLAG}]}, "properties.a.anyOf.1.contains: is not supported yet"),
        ({"dependentRequired": {"a": ["b"]}}, "properties.a.dependentRequired: is not supported yet"),
        ({"propertyNames": {"maxLength": 3}}, "properties.a.propertyNames: is not supported yet"),
        ({"$ref": "https://example.com/x"}, "properties.a.$ref: refers to another document"),
        ({"$ref": "#/$defs/x"}, "properties.a: $ref refers to a definition that does not exist"),
        (OVERLAP, "properties.a: oneOf is supported only if no value can match two"),
        ({"pattern": "(?=a)b", "type": "string"}, "properties.a: a pattern is no regular expression"),
        ({"enum": [1, BIG]}, f"properties.a.enum.1: {BIG} has more digits than"),
        ({"enum": [{"b": [-BIG]}]}, f"properties.a.enum.0.b.0: {-BIG} has more digits than"),
        ({"const": BIG}, f"properties.a.const: {BIG} has more digits than"),
        ({"const": 2**63}, f"properties.a.const: {2**63} has more digits than"),
        ({"const": -(2**63)}, f"properties.a.const: {-(2**63)} has more digits than"),
        ({"const": 1e19}, "properties.a.const: 1e+19 has more digits than"),
        ({"type": "integer", "enum": [-9.4e18]}, "properties.a.enum.0: -9.4e+18 has more digits than"),
        ({"type": "integer", "minimum": -1e30, "maximum": -1e30}, "properties.a.minimum: -1e+30 has more digits than"),
        ({"allOf": [{"type": "integer"}, {"const": -9.4e18}]}, "properties.a.allOf.1.const: -9.4e+18 has more"),
        ({"default": [-(2**63)]}, f"properties.a.default.0: {-(2**63)} is below what can be followed"),
        ({"type": "integer", "minimum": -(2**63)}, f"properties.a.minimum: {-(2**63)} has more digits than"),
        ({"type": "integer", "maximum": 2**64 - 1}, f"properties.a.maximum: {2**64 - 1} has more digits than"),
        ({"type": "integer", "exclusiveMaximum": 2**60}, f"properties.a.exclusiveMaximum: {2**60} has more digits"),
        ({"type": "number", "maximum": 2**62}, f"properties.a.maximum: {2**62} has more digits than"),
        ({"multipleOf": BIG}, f"properties.a.multipleOf: {BIG} has more digits than"),
        ({"type": ["integer", "null"], "multipleOf": 2**31}, f"properties.a.multipleOf: {2**31} is too large"),
        ({"multipleOf": 0.0000123456789}, "properties.a.multipleOf: 1.23456789e-05 is too large"),
        (
            {"allOf": [{"multipleOf": 997}, {"anyOf": [{"multipleOf": 991}]}]},
            "properties.a.allOf.1.anyOf.0.multipleOf: 991 is too large together with others",
        ),
        ({"type": "text"}, "properties.a: type must be one of string"),
        ({"enum": []}, "properties.a: no answer can satisfy this schema"),
        ({"type": "object", "minProperties": 2, "properties": {"b": FLAG}}, "properties.a: minProperties and"),
    ],
    ids=lambda argument: next(iter(argument)) if isinstance(argument, dict) else "",
)
def test_what_is_not_built_is_named_with_its_place(inner: dict[str, Any], says: str) -> None:
    schema = {"type": "object", "properties": {"b": FLAG, "a": inner}, "required": ["a"]}
    with pytest.raises(InvalidRequest) as refused:
        check(schema)
    assert refused.value.field == "sampling.grammar"
    assert refused.value.message.startswith(says)


@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        ({"const": 2**60}, [2**60], [2**60 + 1, 2**60 - 1]),
        ({"enum": [2**53, -(2**53) + 1]}, [2**53, -(2**53) + 1], [2**53 + 1, -(2**53)]),
        ({"type": "integer", "minimum": 0, "maximum": 10**18}, [10**18, 10**18 - 1], [10**18 + 1]),
        ({"type": "integer", "exclusiveMaximum": 2**53 - 1}, [2**53 - 2], [2**53 - 1]),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, [2**63 - 1, 2**63 - 2, 0], [2**63, -1, 2**64]),
        ({"type": "integer", "maximum": 2**63 - 1}, [2**63 - 1, -BIG], [2**63]),
        ({"type": "integer"}, [BIG, 2**70], ["1.5"]),
    ],
    ids=str,
)
def test_large_integers_are_followed_digit_by_digit(schema: dict[str, Any], fits: list[Any], fails: list[Any]) -> None:
    for answer in fits + fails:
        compiled = Grammar("json_schema", json.dumps(schema)).compiled()
        matcher = LLMatcher(BYTES, compiled, log_level=0)
        raw = list(str(answer).encode())
        followed = matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting()
        assert followed == (answer in fits), answer


def test_multiples_that_are_cheap_are_followed() -> None:
    check({"type": "object", "properties": {name: {"multipleOf": name} for name in (997, 991, 1000, 10**6)}})
    amount = {"anyOf": [{"type": "number", "multipleOf": 0.01}, {"type": "integer", "multipleOf": 25}]}
    check({"$ref": "#/$defs/amount", "$defs": {"amount": amount}})


@pytest.mark.parametrize(
    "reference", ["#/components/schemas/A~1b", "#/components/schemas/A%7E1b", "#/properties/c/x-of/0"]
)
def test_what_a_reference_names_anywhere_is_a_schema(reference: str) -> None:
    part = {"type": "string", "pattern": r"^\d$"}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": reference}, "c": {"x-of": [{"allOf": [{"$ref": "#/components/schemas/A~1b"}]}]}},
        "components": {"schemas": {"A/b": part}},
        "$defs": {"components.schemas.A-b": FLAG},
        "required": ["a"],
        "additionalProperties": False,
    }
    check(schema)
    matcher = LLMatcher(BYTES, Grammar("json_schema", json.dumps(schema)).compiled(), log_level=0)
    for answer, fits in (('{"a": "5"}', True), ('{"a": "\u0665"}', False), ('{"a": 5}', False)):
        raw = list(answer.encode())
        assert (matcher.validate_tokens(raw) == len(raw)) == fits, answer
    schema["components"] = {"schemas": {"A/b": {"enum": [BIG]}}}
    with pytest.raises(InvalidRequest, match=f"enum.0: {BIG} has more digits than"):
        check(schema)


def test_a_schema_refers_to_few_parts_elsewhere() -> None:
    def refers(count: int) -> dict[str, Any]:
        parts = {f"p{each}": {"$ref": f"#/x/p{each}"} for each in range(count)}
        return {"type": "object", "properties": parts, "x": dict.fromkeys(parts, FLAG)}

    check(refers(64))
    with pytest.raises(InvalidRequest, match="more than 64 parts outside"):
        check(refers(65))


def test_a_reference_to_what_is_no_schema_is_refused() -> None:
    for reference in ("#/x/2", "#/x/a", "#/y", "#/x/0/n", "#/x/99999999999999999999"):
        with pytest.raises(InvalidRequest):
            check({"$ref": reference, "x": [FLAG, {"n": 5}]})


@pytest.mark.parametrize("text", ["[1]", "1", "{", '{"$ref": "#"}', '{"x-whitespace-pattern": 5}'])
def test_a_text_that_is_no_schema(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(text)
    assert not any(word in refused.value.message for word in ("Bias", "verbose", "coerce", "Traceback"))


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of an object, none of which comes twice."""
    found = dict(pairs)
    assert len(found) == len(pairs), pairs
    return found


NAMED = {"additionalProperties": FLAG, "type": "object"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "patternProperties": {"^a[0-9]$": FLAG}, "additionalProperties": False, "required": ["a1"]},
        {"type": "object", "patternProperties": {"^(x|y)$": FLAG, "^z$": {"const": 1}}, "additionalProperties": False},
        {**NAMED, "propertyNames": {"enum": ["red", "green"]}},
        {**NAMED, "propertyNames": {"pattern": "^k[12]$"}},
        {**NAMED, "propertyNames": {"$ref": "#/$defs/K"}, "$defs": {"K": {"enum": ["a", "b"], "type": "string"}}},
        {"type": "object", "properties": {"a": FLAG}, "unevaluatedProperties": False},
    ],
    ids=range(6),
)
def test_answers_follow_the_schema_and_have_no_member_twice(schema: dict[str, Any]) -> None:
    check(schema)
    for seed in range(40):
        text = answer(schema, seed)
        value = json.loads(text, object_pairs_hook=unique)
        jsonschema.validate(value, schema)


def test_whitespace_is_what_the_schema_says() -> None:
    schema = {
        "type": "object",
        "properties": {"a": FLAG, "b": FLAG},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    assert {answer({**schema, WHITESPACE: ""}, seed) for seed in range(20)} == {
        json.dumps({"a": a, "b": b}, separators=(",", ":")) for a in (True, False) for b in (True, False)
    }
    assert all(" " in answer({**schema, WHITESPACE: " "}, seed) for seed in range(5))


def test_closing_objects() -> None:
    """Objects that name members, but not the parts of an `allOf`, nor objects that say what else they have."""
    point = {"type": "object", "properties": {"x": FLAG}}
    closed = {**point, "additionalProperties": False}
    schema = {
        "properties": {"a": {"items": point}, "b": {"type": "object"}, "c": {"allOf": [point, point]}},
        "$defs": {"P": point, "Q": {**point, "additionalProperties": FLAG}},
    }
    assert close_objects(schema) == {
        "properties": {"a": {"items": closed}, "b": {"type": "object"}, "c": {"allOf": [point, point]}},
        "$defs": {"P": closed, "Q": {**point, "additionalProperties": FLAG}},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('root ::= "a" | digits\ndigits ::= [0-9]+', True),
        ("root ::= (((", False),
        ('x ::= "a"', False),
        ('root ::= "\\', False),
    ],
)
def test_a_grammar_may_be_in_llama_cpps_notation(text: str, fits: bool) -> None:
    if fits:
        check(text, "lark")
        matcher = LLMatcher(BYTES, Grammar("lark", text).compiled(), log_level=0)
        assert matcher.try_consume_tokens(list(b"42")) == 2
        return
    with pytest.raises(InvalidRequest, match="not GBNF"):
        check(text, "lark")
