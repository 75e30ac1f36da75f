"""JSON schemas for structured answers: closing objects, dropping words without effect, naming unsupported words.

Free of llguidance, so that every process may use the functions. A *place* is where a schema stands within the whole,
for example "properties.name.items"; "" is the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import count
from typing import Any
from urllib.parse import unquote

from moonpool.base.ecma_regex import from_ecma

WHITESPACE = "x-whitespace-pattern"
"""Word at a schema's top: a regular expression for what may stand between the JSON's parts; "" = no text."""
_SCHEMA_WORDS = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
"""Words with a schema as value. `items` may also be a list of schemas."""
_LIST_WORDS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
"""Words with a schema list as value."""
_MAPPING_WORDS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
"""Words with an object of schemas as value."""
Change = Callable[[str, dict[str, Any]], Mapping[str, Any]]
"""Takes a place and the schema there, with inner schemas already changed; returns the schema to put there."""


def map_schemas(schema: Mapping[str, Any], change: Change, place: str = "") -> Mapping[str, Any]:
    """A schema in which `change` has replaced every schema, the innermost first."""
    changed: dict[str, Any] = {}
    for word, value in schema.items():
        at = f"{place}.{word}" if place else word
        if isinstance(value, list) and word in _LIST_WORDS:
            changed[word] = [_mapped(inner, change, f"{at}.{index}") for index, inner in enumerate(value)]
        elif isinstance(value, Mapping) and word in _MAPPING_WORDS:
            changed[word] = {name: _mapped(inner, change, f"{at}.{name}") for name, inner in value.items()}
        else:
            changed[word] = _mapped(value, change, at) if word in _SCHEMA_WORDS else value
    return change(place, changed)


def _mapped(value: Any, change: Change, place: str) -> Any:
    """The value, changed if the value is a schema. True and false are schemas that need no change."""
    return map_schemas(value, change, place) if isinstance(value, Mapping) else value


def close_objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with objects that have only the members named in the schema.

    Objects without `properties` stay open, and so do parts of an `allOf`, which do not know each other's members.
    """

    def close(place: str, found: dict[str, Any]) -> Mapping[str, Any]:
        named = "properties" in found and "allOf" not in found and "$ref" not in found
        if not named or "additionalProperties" in found or "unevaluatedProperties" in found or _in_all_of(place):
            return found
        return {**found, "additionalProperties": False}

    return map_schemas(schema, close)


def moved_schema(schema: Mapping[str, Any], pointer: str) -> Mapping[str, Any]:
    """A schema with references adjusted for its place at `pointer` in another schema, for example "/$defs/f"."""

    def move(place: str, found: dict[str, Any]) -> Mapping[str, Any]:
        reference = found.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return found
        return {**found, "$ref": f"#{pointer}{reference.removeprefix('#')}"}

    return map_schemas(schema, move)


def _in_all_of(place: str) -> bool:
    return place.rpartition(".")[0].rpartition(".")[2] == "allOf"


def inner_schemas(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The schemas within a schema with their places, the innermost first; the given schema is not among them."""
    found: list[tuple[str, Mapping[str, Any]]] = []

    def note(place: str, part: dict[str, Any]) -> Mapping[str, Any]:
        if place:
            found.append((place, part))
        return part

    map_schemas(schema, note)
    return found


_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)  # fmt: skip
"""Formats that an answer follows. Others are annotations, as JSON Schema has them."""
_DROPPED = ("x-guidance",)
_NOT_BUILT = (
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains",
    "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "$dynamicRef",
    "$recursiveRef",
)  # fmt: skip
_TRIVIAL: Mapping[str, tuple[Any, ...]] = {
    "contains": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "minContains": (0,),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
"""Values with which unsupported words have no effect."""
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
"""Words beside which `unevaluatedProperties` means more than `additionalProperties`."""
_FAULTS = (
    ("Unsatisfiable", "no answer can satisfy this schema"),
    ("oneOf", "oneOf is supported only if no value can match two of its schemas, for example by a `const` in each"),
    ("regex", "a pattern is no regular expression that can be followed; look-around is not supported"),
    ("Pointer", "$ref refers to a definition that does not exist"),
    ("NoExtensionBias", "$ref refers to itself without an end"),
    ("min/maxProperties", "minProperties and maxProperties are supported only if all members are listed as required"),
    ("Invalid type", "type must be one of string, number, integer, boolean, object, array and null"),
    ("must be a", "a word has a value of a wrong type"),
    ("Unimplemented", "a word is not supported yet"),
    ("not supported", "a word is not supported with this value"),
)
"""Words of llguidance's errors, and what they mean."""


class SchemaWordError(ValueError):
    """A schema has a word that is not supported. The message names the word with the word's place."""

    def __init__(self, place: str, word: str, message: str) -> None:
        super().__init__(f"{place}.{word}: {message}" if place else f"{word}: {message}")


def ignored_words(schema: Mapping[str, Any]) -> list[str]:
    """Places of a schema's words without effect here: formats that are only annotations."""
    found: list[str] = []

    def note(place: str, part: dict[str, Any]) -> Mapping[str, Any]:
        if "format" in part and not _is_followed(part):
            found.append(f"{place}.format" if place else "format")
        return part

    map_schemas(schema, note)
    return found


def _is_followed(schema: Mapping[str, Any]) -> bool:
    """Whether the format of a schema constrains an answer, or cannot, because the answer is no text."""
    return schema["format"] in _FORMATS or schema.get("type") in ("integer", "number", "boolean", "null")


def normalise(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """An equal schema in the words that are supported.

    Formats that are only annotations, and words without effect, are left out.

    Raises:
        SchemaWordError: a word is not supported; names the word with the word's place.
    """
    schema = _with_definitions(schema)
    definitions = schema.get("$defs") if isinstance(schema.get("$defs"), Mapping) else {}

    def change(place: str, part: dict[str, Any]) -> Mapping[str, Any]:
        kept = {word: value for word, value in part.items() if word not in _DROPPED}
        if "format" in kept and kept["format"] not in _FORMATS:
            del kept["format"]
        check_numbers(place, kept)
        _drop_trivial(kept)
        _close_unevaluated(kept)
        _list_names(kept, definitions or {})
        for word in _NOT_BUILT:
            if word in kept:
                raise SchemaWordError(place, word, "is not supported yet")
        if isinstance(reference := kept.get("$ref"), str) and not reference.startswith("#"):
            raise SchemaWordError(place, "$ref", "refers to another document, which is never fetched")
        return kept

    changed = map_schemas(map_schemas(schema, change), _write_patterns)
    check_range("", changed)
    check_multiples(changed)
    return changed


_MAX_MOVED = 64
"""Schemas outside of the places of schemas that a schema may refer to."""


def _with_definitions(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with a copy in `$defs` of what `$ref` names elsewhere, such as "#/components/schemas/A".

    Raises:
        SchemaWordError: there are too many of these.
    """
    definitions = schema.get("$defs", {})
    if not isinstance(definitions, Mapping):
        return schema
    names, copies = dict[str, str](), dict[str, Any]()
    while True:
        whole = {**schema, "$defs": {**definitions, **copies}}
        known = {"", *(place for place, _ in inner_schemas(whole))}

        def refer(place: str, part: dict[str, Any], known: set[str] = known) -> Mapping[str, Any]:
            words = _pointer_words(part.get("$ref"))
            target, at = _at(schema, words), ".".join(words)
            if at not in names:
                if at in known or not isinstance(target, Mapping):
                    return part  # a schema's place, or nothing: then the library says so
                if len(names) == _MAX_MOVED:
                    raise SchemaWordError(
                        place, "$ref", f"more than {_MAX_MOVED} parts outside of $defs are referred to"
                    )
                name = re.sub(r"[^\w.]", "-", at)
                while name in definitions or name in copies:
                    name += "-"
                names[at] = name
                copies[names[at]] = target
            return {**part, "$ref": f"#/$defs/{names[at]}"}

        referred = map_schemas(whole, refer)
        if len(whole["$defs"]) == len(definitions) + len(copies):
            return referred if copies else schema


def _pointer_words(reference: Any) -> list[str]:
    """The names on the way to what a reference within the document names; [] = the whole, or another reference."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return []
    return [word.replace("~1", "/").replace("~0", "~") for word in unquote(reference[2:]).split("/")]


def _at(value: Any, words: Sequence[str]) -> Any:
    """What is within a JSON value behind these names and numbers; None = nothing."""
    for word in words:
        if isinstance(value, Mapping):
            value = value.get(word)
        elif isinstance(value, list) and word.isascii() and word.isdigit() and int(word[:9]) < len(value):
            value = value[int(word[:9])]
        else:
            return None
    return value


def _write_patterns(place: str, schema: dict[str, Any]) -> Mapping[str, Any]:
    """Return the schema with patterns in the notation of the library that follows them."""
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = from_ecma(pattern)
    if isinstance(patterns := schema.get("patternProperties"), Mapping):
        schema["patternProperties"] = {from_ecma(name): inner for name, inner in patterns.items()}
    return schema


_EXACT = 1 << 53
"""Up to here the library that follows schemas, whose numbers are 64-bit floats, tells one integer from the next."""
_MOST = 1 << 63
"""The library has 64 bits for integers, with a sign, and takes the nearest of these for any other number."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def check_numbers(place: str, schema: Mapping[str, Any]) -> None:
    """Check that each number of a schema is followed digit by digit.

    Raises:
        SchemaWordError: the library would follow another number; names the word with the word's place.
    """
    for word in _BOUNDS:
        exact = word in ("minimum", "maximum") and schema.get("type") == "integer"
        if exact and word == "maximum" and schema.get(word) == _MOST - 1:
            continue  # int64's: the library rounds to 2^63, and takes the largest integer of 64 bits for that
        _check_number(place, word, schema.get(word), exact=exact)
    _check_number(place, "const", schema.get("const"))
    _check_number(place, "enum", schema.get("enum"))


def _check_number(place: str, word: str, value: Any, *, exact: bool = True) -> None:
    """Check a number, or those within a value. `exact`: the library follows every number that a float holds."""
    if isinstance(value, list | Mapping):
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check_number(place, f"{word}.{name}", inner, exact=exact)
    elif isinstance(value, float) and not math.isfinite(value):
        raise SchemaWordError(place, word, "must be a finite number")
    elif isinstance(value, int | float) and abs(value) > _EXACT and not (exact and _is_followed_exactly(value)):
        raise SchemaWordError(place, word, f"{value} has more digits than can be followed one by one")


def _is_followed_exactly(value: float) -> bool:
    return abs(value) < _MOST and int(float(value)) == value


def check_range(place: str, value: Any) -> None:
    """Check that no number is so low that the library would end this process: some lower than int64's least do.

    All of a value is looked at, since references may lead anywhere.

    Raises:
        SchemaWordError: there is one; names the number's place.
    """
    if isinstance(value, list | Mapping):
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            check_range(f"{place}.{name}" if place else f"{name}", inner)
    elif isinstance(value, int | float) and value < _LEAST:
        above, _, word = place.rpartition(".")
        raise SchemaWordError(above, word, f"{value} is below what can be followed")


_MOST_MULTIPLE = 100_000
"""The library tells so many remainders apart in some 0.3 s; beyond, nothing bounds its time and memory."""
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")


def check_multiples(schema: Mapping[str, Any], at: str = "") -> None:
    """Check that following each `multipleOf` is cheap, also all together where schemas may meet in one number.

    `at`: the schema's place, if the schema is a part of something.

    Raises:
        SchemaWordError: one is too large, or with those before it; names the word with the word's place.
    """
    parts = (*inner_schemas(schema), ("", schema))
    meet = any(word in part for _, part in parts for word in _COMBINING)
    together = Fraction(1)
    for place, part in parts:
        told = part.get("multipleOf")
        if not isinstance(told, int | float) or isinstance(told, bool) or told <= 0:
            continue  # the library says what is wrong
        multiple = Fraction(str(told))
        together = _common_multiple(together, multiple) if meet else multiple
        if not _is_cheap(multiple) or not _is_cheap(together):
            message = "is too large" if not _is_cheap(multiple) else "is too large together with others"
            raise SchemaWordError(".".join(filter(None, (at, place))), "multipleOf", f"{told} {message}")


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))


def _is_cheap(multiple: Fraction) -> bool:
    """Whether a multiple has few remainders: its digits without the point say how many; tens cost nothing."""
    places = next(places for places in count() if (10**places) % multiple.denominator == 0)
    digits = str(int(multiple * 10**places))
    return int(digits) <= _MOST_MULTIPLE or int(digits.rstrip("0")) <= 10


_LEAST = -_MOST + (1 << 10)
"""The float next to -2^63: lower integers may be rounded to -2^63."""


def _drop_trivial(schema: dict[str, Any]) -> None:
    """Leave out words without effect."""
    for word, values in _TRIVIAL.items():
        if word in schema and any(schema[word] == value and type(schema[word]) is type(value) for value in values):
            del schema[word]
    if "if" not in schema or not {"then", "else"} & schema.keys():
        for word in ("if", "then", "else"):
            schema.pop(word, None)
    if "contains" not in schema:
        for word in ("minContains", "maxContains"):
            schema.pop(word, None)


def _close_unevaluated(schema: dict[str, Any]) -> None:
    """Write `unevaluatedProperties` as `additionalProperties` where both mean the same."""
    if "unevaluatedProperties" in schema and not any(word in schema for word in _APPLICATORS):
        value = schema.pop("unevaluatedProperties")
        schema.setdefault("additionalProperties", value)


def _list_names(schema: dict[str, Any], definitions: Mapping[str, Any]) -> None:
    """Write `propertyNames` as `properties` or `patternProperties`, if all members have one schema."""
    names = schema.get("propertyNames")
    if isinstance(names, Mapping) and str(names.get("$ref", "")).startswith("#/$defs/"):
        names = definitions.get(str(names["$ref"]).removeprefix("#/$defs/"))
    inner = schema.get("additionalProperties", True)
    if not isinstance(names, Mapping) or inner is False or {"properties", "patternProperties"} & schema.keys():
        return
    words = {word for word in names if word not in ("type", "title", "description", "default", "examples")}
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if words <= {"enum", "const"} and isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        schema["properties"] = dict.fromkeys(listed, inner)
    elif words == {"pattern"}:
        schema["patternProperties"] = {names["pattern"]: inner}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def explain_fault(wrong: str) -> str:
    """What llguidance's error about a schema means, in the words of JSON Schema."""
    return next((meaning for word, meaning in _FAULTS if word in wrong), "is too large or too ambiguous to be followed")
