"""JSON and YAML from elsewhere: read with one kind of error, and how much JSON there is to parse."""

from __future__ import annotations

import json
from operator import le
from typing import Any, NamedTuple

from moonpool.base.errors import InvalidRequest

UNCHECKED_BYTES = 64 << 10
"""Bodies up to this size are parsed without counting their parts first."""
MAX_YAML_PARTS = 1 << 20
"""Values of a YAML text, each counted as often as aliases and merges repeat it."""
MAX_YAML_NUMBER = 1 << 10
"""Signs of a number in YAML: PyYAML reads 1:1:1, in parts of 60, in quadratic time."""
_YAML_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def parse_json(text: str | bytes | bytearray) -> Any:
    """Read JSON that somebody else has written.

    Raises:
        ValueError: the text is no JSON, has a number of more than 4,300 digits, or is nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deep") from None


def parse_yaml(text: str) -> Any:
    """Read YAML that somebody else has written; plain values only.

    Raises:
        ValueError: the text is no YAML, has a date that is none, is nested too deep, or has too many parts or too
            long a number.
    """
    import yaml  # engine processes read none

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_parts(node, {}) > MAX_YAML_PARTS:
            raise ValueError(f"has more than {MAX_YAML_PARTS} parts, or a part within itself")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(f"is no YAML: {error}") from None
    except (AttributeError, LookupError, OverflowError) as error:  # PyYAML's own, of a tag such as !!bool
        raise ValueError("is no YAML: a value is not what its tag says") from error
    except RecursionError:
        raise ValueError("is nested too deep") from None


def _num_parts(node: Any, counted: dict[int, int]) -> int:
    """Count a YAML node and the nodes within; `counted` has those whose numbers are known, by identity.

    Raises:
        ValueError: a number is too long.
    """
    if node.tag in _YAML_NUMBERS and len(node.value) > MAX_YAML_NUMBER:
        raise ValueError(f"has a number of more than {MAX_YAML_NUMBER} signs")
    if (known := counted.get(id(node))) is not None:
        return known
    counted[id(node)] = MAX_YAML_PARTS + 1  # if it is met within itself
    inner = node.value if isinstance(node.value, list) else ()
    parts = (part for item in inner for part in (item if isinstance(item, tuple) else (item,)))
    counted[id(node)] = found = 1 + sum(_num_parts(part, counted) for part in parts)
    return found


class JsonPartCounts(NamedTuple):
    """Number of parts in a JSON value, the value included.

    Attributes:
        objects: JSON objects, for example messages.
        arrays: JSON arrays, for example prompts of token ids.
        members: members of all objects.
        strings: strings, including the names of members.
        items: commas between members and between items of arrays, for example token ids.
    """

    objects: int
    arrays: int
    members: int
    strings: int
    items: int


MAX_JSON_PARTS = JsonPartCounts(objects=1 << 13, arrays=1 << 13, members=1 << 15, strings=1 << 16, items=1 << 17)
"""Parsing holds the interpreter lock, so one body's parts bound how long other requests may wait for the lock."""


def check_json_parts(raw: bytes) -> None:
    """Refuse a body that would take long to parse.

    Raises:
        InvalidRequest: the body has too many parts.
    """
    # Counting signs also within strings is far cheaper, and enough for most bodies.
    if len(raw) <= UNCHECKED_BYTES or all(map(le, _most_json_parts(raw), MAX_JSON_PARTS)):
        return
    for what, count, most in zip(JsonPartCounts._fields, count_json_parts(raw), MAX_JSON_PARTS, strict=True):
        if count > most:
            raise InvalidRequest("", f"a body has at most {most} {what}")


def count_json_parts(raw: bytes) -> JsonPartCounts:
    """Count the parts of JSON text. For text that is not JSON, the counts bound the work of a parser."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # so each quote begins or ends a string
    strings = unescaped.count(b'"') // 2
    if strings > MAX_JSON_PARTS.strings:
        return JsonPartCounts(0, 0, 0, strings, 0)
    outside = b"".join(unescaped.split(b'"')[::2])
    objects, arrays, members, items = map(outside.count, (b"{", b"[", b":", b","))
    return JsonPartCounts(objects, arrays, members, strings, items)


def _most_json_parts(raw: bytes) -> JsonPartCounts:
    """As `count_json_parts`, with the signs within strings."""
    objects, arrays, members, quotes, items = map(raw.count, (b"{", b"[", b":", b'"', b","))
    return JsonPartCounts(objects, arrays, members, quotes // 2, items)
