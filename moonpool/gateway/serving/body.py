"""JSON bodies as pydantic models, and objects within bodies.

Bodies have strict types. Every known field is honoured, ignored or refused (`FieldContract`). The response names
ignored fields in a header. An unknown field is ignored in a body, and refused in an object within.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import MAX_LOGIT_BIASES
from moonpool.gateway.serving.tolerance import PassedOver, without_nulls

BodyT = TypeVar("BodyT", bound="Body")
_MESSAGES = {"model_type": "must be an object", "dict_type": "must be an object", "missing": "is missing"}
"""Messages by pydantic's error type, in place of messages that name Python classes."""
T = TypeVar("T")


class Body(BaseModel):
    """A JSON body, or an object within a body. The attributes are the honoured fields."""

    ignored: ClassVar[Collection[str]] = ()
    """Known fields that do not change the answer. Those of the base classes count, too."""
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Known fields that are refused, as in `FieldContract.refused`. Those of the base classes count, too."""
    unknown_ignored: ClassVar[bool] = False
    """Whether unknown fields are ignored, not refused."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return without_nulls(value)

    @classmethod
    @cache
    def contract(cls) -> FieldContract:
        """What happens to the fields of this object."""
        bases = [base for base in reversed(cls.__mro__) if issubclass(base, Body)]
        honoured = frozenset(cls.shown_names().values())
        ignored = frozenset(name for base in bases for name in base.ignored) - honoured
        refused = {name: given for base in bases for name, given in base.refused.items() if name not in honoured}
        return FieldContract(honoured, ignored - refused.keys(), refused, cls.unknown_ignored)

    def ignored_fields(self, place: str = "") -> Iterator[str]:
        """Places of the fields that are ignored, here and in the objects within, and of what is passed over.

        Args:
            place: this object's name with a dot at the end; "" for the body.

        Raises:
            InvalidRequest: a field is refused; names the field with the field's place.
        """
        for name, value in (self.model_extra or {}).items():
            contract = self.contract()
            contract.check(place, name, value)
            if name not in contract.refused:
                yield place + name
        for name, part in self._parts():
            if type(part) is PassedOver:
                yield place + name
            else:
                yield from part.ignored_fields(f"{place}{name}.")

    def _parts(self) -> Iterator[tuple[str, Body | PassedOver]]:
        """Objects within this object, with their names."""
        for name, value in self.__dict__.items():
            if value is None:
                continue
            if type(value) is list:
                if value and (type(value[0]) is str or _is_part(value[0].__class__)):  # numbers may be a million
                    shown, parts = self.shown_names()[name], enumerate(value)
                    yield from ((f"{shown}.{index}", part) for index, part in parts if _is_part(part.__class__))
            elif _is_part(value.__class__):
                yield self.shown_names()[name], value

    @classmethod
    @cache
    def shown_names(cls) -> dict[str, str]:
        """The fields' names in bodies, by attribute."""
        return {name: field.alias or name for name, field in cls.model_fields.items()}

    def check(self) -> None:
        """Check what the types of the fields cannot express.

        Raises:
            InvalidRequest: a field is wrong; names the field.
        """


@cache
def _is_part(kind: type) -> bool:
    """Return whether values of a type are parts of a body. Of a value, pydantic takes a microsecond to say so."""
    return issubclass(kind, Body | PassedOver)


@dataclass(frozen=True, slots=True)
class FieldContract:
    """What happens to the fields in a body's object.

    Attributes:
        honoured: fields that count.
        ignored: known fields that do not change the answer; the response warns of them.
        refused: known fields that are not built, each with the values that are accepted because they ask for the
            default behaviour. Null is always accepted.
        unknown_ignored: unknown fields are ignored with the warning; else they are refused.
    """

    honoured: frozenset[str]
    ignored: frozenset[str]
    refused: Mapping[str, tuple[Any, ...]]
    unknown_ignored: bool

    def check(self, place: str, name: str, value: object) -> None:
        """Check a field that is not honoured. `place` is the object's name with a dot at the end.

        Raises:
            InvalidRequest: the field is refused; names the field with the field's place.
        """
        if name in self.refused:
            accepted = any(_same(value, refused) for refused in self.refused[name])
            if not accepted:
                raise InvalidRequest(place + name, "is not supported yet")
        elif name not in self.ignored and not self.unknown_ignored:
            known = ", ".join(sorted(self.honoured))
            raise InvalidRequest(place + name, f"is not known here; known are {known}")


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def validate_body(cls: type[BodyT], content: object) -> BodyT:
    """Build a body from parsed JSON.

    Raises:
        InvalidRequest: `content` is not an object, or a field is wrong; names the field.
    """
    if not isinstance(content, dict):
        raise InvalidRequest("", "a body must be a JSON object")
    try:
        return cls.model_validate(content)
    except ValidationError as error:
        found = _clearest_error(error.errors(include_url=False, include_context=False, include_input=False))
        field = ".".join(str(step) for step in found["loc"] if step != "str" and "[" not in str(step))
        raise InvalidRequest(field, _MESSAGES.get(found["type"], found["msg"])[:200]) from None


def _clearest_error(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first error. If the field may be a string or one kind of list, the error within the list."""
    first = errors[0]["loc"]
    if first[-1] != "str":
        return errors[0]
    branch = len(first) - 1
    within = [error for error in errors if len(error["loc"]) > len(first) and error["loc"][:branch] == first[:branch]]
    return _clearest_error(within) if len({error["loc"][branch] for error in within}) == 1 else errors[0]


class _FailFast:
    """Like pydantic's `FailFast`, which has no hash and therefore cannot be part of a union here."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Mapping[str, Any]:
        return {**handler(source), "fail_fast": True}


FailFastList = Annotated[list[T], _FailFast()]
"""A list with only the first error reported, because a list may have a million wrong items."""


def _check_small(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise PydanticCustomError("too_many", "at most {most} members", {"most": MAX_LOGIT_BIASES})
    return value


SmallObject = Annotated[dict[str, T], BeforeValidator(_check_small)]
"""An object of at most `MAX_LOGIT_BIASES` members."""


def _whole_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64), BeforeValidator(_whole_number)]
"""An integer of 64 bits, which JSON may also write as 2.0."""
_TEXT, _OBJECT = "str", "[object]"
TextOr = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[T, Tag(_OBJECT)],
    Discriminator(lambda value: _TEXT if isinstance(value, str) else _OBJECT),
]
"""A text, or an object of a type."""
