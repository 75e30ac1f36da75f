"""Schemas that pydantic makes of types, and schemas as MCP servers have them: followed, whatever annotates them."""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import Annotated, Any, Literal, Required

import jsonschema
import pydantic
import pytest
from pydantic import BaseModel, Field, TypeAdapter, create_model
from typing_extensions import TypedDict

from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import check_grammar
from moonpool.base.sampling_params import SamplingParams
from tests.unit.base.test_json_schema import answer

SEEDS, MORE_SEEDS = 2, 10


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(BaseModel):
    """A place."""

    x: int
    y: float = Field(0.5, description="up", examples=[1.5], deprecated=True)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None = None


class Node(BaseModel):
    value: int
    children: list["Node"] = []


class Partial(TypedDict, total=False):
    a: Required[int]
    b: str


TYPES: list[Any] = [
    str, int, float, bool, None, bytes, Any, object, Colour, Level, Literal["a", "b", 1], Point, Node, Partial,
    list[int], list[int | list[str]], tuple[int, str], tuple[int, ...], Sequence[Point], dict[str, int],
    dict[int, str], dict[Colour, int], dict[Literal["a", "b"], Point], Mapping[str, Point], int | str | None,
    Cat | Dog, Annotated[Cat | Dog, Field(discriminator="kind")],
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, uuid.UUID, decimal.Decimal, pathlib.Path,
    ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, re.Pattern,
    pydantic.AnyUrl, pydantic.HttpUrl, pydantic.PostgresDsn, pydantic.SecretStr, pydantic.Base64Str, pydantic.UUID4,
    pydantic.FilePath, pydantic.DirectoryPath, pydantic.Json, pydantic.Json[list[int]], pydantic.ByteSize,
    pydantic.PastDate, pydantic.FutureDatetime, pydantic.AwareDatetime, pydantic.ImportString, pydantic.PositiveInt,
    pydantic.NonNegativeFloat, pydantic.conint(multiple_of=3), pydantic.confloat(multiple_of=0.5),
    pydantic.condecimal(max_digits=5, decimal_places=2), pydantic.conlist(int, min_length=1, max_length=3),
    pydantic.constr(pattern=r"^[a-z]+$", min_length=2, max_length=5), pydantic.constr(pattern=r"^\d{3}-\d{4}$"),
    pydantic.constr(to_upper=True), Annotated[int, Field(ge=0, le=10, json_schema_extra={"x-order": 1})],
]  # fmt: skip
SHAPES: dict[str, Callable[[Any], Any]] = {
    "required": lambda kind: (kind, ...),
    "optional": lambda kind: (kind | None if kind is not None else None, Field(None, title="Perhaps", description="d")),
    "listed": lambda kind: (GenericAlias(list, (kind,)), Field(..., min_length=1, max_length=2)),
}


def check_followed(schema: dict[str, Any], seeds: int = SEEDS) -> None:
    """Fails when the schema is refused, or an answer violates the schema."""
    check_grammar(SamplingParams(response_format="json_schema", grammar=json.dumps(schema)))
    for seed in range(seeds):
        jsonschema.validate(json.loads(answer(schema, seed)), schema)


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MORE_SEEDS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES)
def test_schemas_of_pydantic(shape: str, seeds: int) -> None:
    for kind in TYPES:
        check_followed(TypeAdapter(create_model("Answer", field=SHAPES[shape](kind))).json_schema(), seeds)


def test_a_set_is_refused_with_its_place() -> None:
    with pytest.raises(InvalidRequest, match="uniqueItems: is not supported yet"):
        check_followed(TypeAdapter(create_model("Answer", field=(set[str], ...))).json_schema())


DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": False}
TEXT = {"type": "string"}
MCP: list[dict[str, Any]] = [
    {**DRAFT, "properties": {"path": {**TEXT, "format": "path", "description": "File to read"}}, "required": ["path"]},
    {**DRAFT, "properties": {"url": {**TEXT, "format": "uri"}, "limit": {"type": "integer", "exclusiveMinimum": 0}}},
    {**DRAFT, "properties": {"edits": {"type": "array", "items": {**DRAFT, "properties": {"old": TEXT, "new": TEXT}}}}},
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {}, "required": [], "title": "list_allArguments"},
    {
        "type": "object",
        "properties": {"q": {"title": "Q", **TEXT}, "n": {"default": 10, "title": "N", "type": "integer"}},
    },
    {**DRAFT, "properties": {"sort": {"anyOf": [{"enum": ["asc", "desc"]}, {"type": "null"}], "default": None}}},
    {**DRAFT, "properties": {"labels": {"type": "object", "additionalProperties": TEXT, "propertyNames": TEXT}}},
    {**DRAFT, "properties": {"token": {**TEXT, "format": "password", "writeOnly": True, "x-secret": True}}},
    {**DRAFT, "properties": {"id": {"type": ["string", "integer"], "format": "int64"}}, "examples": [{"id": 1}]},
    {
        **DRAFT,
        "properties": {"at": {"$ref": "#/definitions/point"}},
        "definitions": {"point": Point.model_json_schema()},
    },
    {**DRAFT, "properties": {"tags": {"type": "array", "items": TEXT, "uniqueItems": False, "default": []}}},
]


@pytest.mark.parametrize("schema", MCP, ids=range(len(MCP)))
def test_schemas_of_mcp_servers(schema: dict[str, Any]) -> None:
    check_followed(schema, MORE_SEEDS)
