"""JSON bodies of requests and responses: size limits, reading, validation and writing.

Bodies are pydantic models with strict types. Unknown fields are ignored and named in a response header. A field that
changes the answer and is not implemented is refused by name (`UNSUPPORTED`), unless its value asks for the default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from moonpool.client import Slo
from moonpool.errors import InvalidRequest
from moonpool.kv.keys import MAX_SALT_CHARS
from moonpool.sampling_params import MAX_LOGIT_BIASES, SamplingParams
from services.gateway.serving.errors import HttpError
from services.gateway.serving.tool_calls import ToolSet

UNCHECKED_BYTES = 64 << 10
"""Bodies up to this size are parsed without counting their parts first."""


class JsonPartCounts(NamedTuple):
    """Number of parts of a JSON value, including the value itself.

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


MAX_JSON_PARTS = JsonPartCounts(objects=1 << 14, arrays=1 << 14, members=1 << 16, strings=1 << 17, items=1 << 20)


def count_json_parts(raw: bytes) -> JsonPartCounts:
    """Count the parts of JSON text. For text that is not JSON, the counts bound the work of a parser."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # so each quote begins or ends a string
    strings = unescaped.count(b'"') // 2
    if strings > MAX_JSON_PARTS.strings:
        return JsonPartCounts(0, 0, 0, strings, 0)
    outside = b"".join(unescaped.split(b'"')[::2])
    objects, arrays, members, items = map(outside.count, (b"{", b"[", b":", b","))
    return JsonPartCounts(objects, arrays, members, strings, items)


def check_json_parts(raw: bytes) -> None:
    """Refuse a body that would take long to parse.

    Raises:
        InvalidRequest: the body has too many parts.
    """
    if len(raw) <= UNCHECKED_BYTES:
        return
    for what, count, most in zip(JsonPartCounts._fields, count_json_parts(raw), MAX_JSON_PARTS, strict=True):
        if count > most:
            raise InvalidRequest("", f"a body has at most {most} {what}")


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "include_stop_str_in_output": (None, False),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "return_tokens_as_token_ids": (None, False),
}
"""Fields of OpenAI and vLLM that are not implemented, each with the values that ask for the default."""
T = TypeVar("T")
BodyT = TypeVar("BodyT", bound="Body")


class _FailFast:
    """Like pydantic's `FailFast`, which has no hash and therefore cannot be part of a union here."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Mapping[str, Any]:
        return {**handler(source), "fail_fast": True}


FailFastList = Annotated[list[T], _FailFast()]
"""A list whose first error is reported, because a list may have a million wrong items."""


def _check_small(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise PydanticCustomError("too_many", "at most {most} members", {"most": MAX_LOGIT_BIASES})
    return value


SmallObject = Annotated[dict[str, T], BeforeValidator(_check_small)]
"""An object of at most `MAX_LOGIT_BIASES` members."""


class Body(BaseModel):
    """A JSON body, or an object within a body."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED
    """Fields that are refused, each with the values that are accepted because they ask for the default."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    def unknown_fields(self) -> Iterator[str]:
        """Names of the fields that are ignored, here and in the parts. A null field counts as absent.

        Raises:
            InvalidRequest: a field is not implemented; names the field.
        """
        for name, value in (self.model_extra or {}).items():
            if name in self.unsupported:
                _check_default(name, value, self.unsupported[name])
            elif value is not None:
                yield name
        for name, part in self.parts():
            yield from (f"{name}.{inner}" for inner in part.unknown_fields())

    def parts(self) -> Iterator[tuple[str, Body]]:
        """Objects within this body that have fields of their own, with their names."""
        return iter(())

    def check(self) -> None:
        """Check what the types of the fields cannot express.

        Raises:
            InvalidRequest: a field is wrong; names the field.
        """


def _check_default(name: str, value: object, defaults: tuple[Any, ...]) -> None:
    if not any(type(value) is type(default) and value == default for default in defaults):
        raise InvalidRequest(name, "is not supported yet")


class SloBody(Body):
    """Moonpool's latency limits, in seconds. A request that would miss a limit is answered with 429.

    Such a request first waits up to `queue_s` seconds for a placement that keeps the limits.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    queue_s: float | None = None


class GenerateBody(Body):
    """A body that asks the model for an answer."""

    model: str | None = None
    stream: bool | None = None
    slo: SloBody | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)

    def parts(self) -> Iterator[tuple[str, Body]]:
        if self.slo is not None:
            yield "slo", self.slo

    def to_slo(self) -> Slo | None:
        """Latency limits for the SDK."""
        slo = self.slo
        return None if slo is None else Slo(ttft_s=slo.ttft_s, tbt_s=slo.tbt_s, queue_s=slo.queue_s)

    def tool_set(self) -> ToolSet | None:
        """Functions that the model may call. None: no functions.

        Raises:
            InvalidRequest: a tool is wrong or not supported; names the field.
        """
        return None

    def num_logprobs(self) -> int | None:
        """Number of top log probabilities to return with each token. None: no log probabilities."""
        return None

    def wants_logprobs(self) -> bool:
        """Whether the response has log probabilities, of the answer or of the prompt."""
        return self.num_logprobs() is not None

    def to_sampling_params(self, max_tokens: int) -> SamplingParams:
        """Sampling parameters for the SDK, with at most `max_tokens` tokens. The conductor checks the values.

        Raises:
            InvalidRequest: a field cannot be translated; names the field.
        """
        raise NotImplementedError


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


_MESSAGES = {"model_type": "must be an object"}
"""Messages by pydantic's error type, in place of messages that name Python classes."""


def _clearest_error(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first error. If the field may be a string or one kind of list, the error within the list."""
    first = errors[0]["loc"]
    if first[-1] != "str":
        return errors[0]
    branch = len(first) - 1
    within = [error for error in errors if len(error["loc"]) > len(first) and error["loc"][:branch] == first[:branch]]
    return _clearest_error(within) if len({error["loc"][branch] for error in within}) == 1 else errors[0]


JSON_TYPE = "application/json"


async def read_body(request: Request, cls: type[BodyT], max_bytes: int, timeout_s: float) -> BodyT:
    """Read, parse and check the body of a request.

    Raises:
        HttpError: the body has another content type than JSON, is too large, or does not arrive within `timeout_s`.
        InvalidRequest: the body is not JSON, or a field is wrong; names the field.
        ClientDisconnect: the client has closed the connection.
    """
    _check_content_type(request)
    if _content_length(request) > max_bytes:
        raise _body_too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return validate_body(cls, await _parse(await _read_raw(request, max_bytes)))
    except TimeoutError:
        raise HttpError(
            HTTPStatus.REQUEST_TIMEOUT, "timeout", f"the body did not arrive within {timeout_s:g} s", close=True
        ) from None


async def _read_raw(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _body_too_large(max_bytes)
    return bytes(body)


async def _parse(raw: bytes) -> object:
    """Parse JSON. For a large body, other tasks run between the steps."""
    large = len(raw) > UNCHECKED_BYTES
    check_json_parts(raw)
    if large:
        await asyncio.sleep(0)
    try:
        content: object = from_json(raw)
    except ValueError as error:
        raise InvalidRequest("", f"invalid JSON: {error}") from None
    if large:
        await asyncio.sleep(0)
    return content


def _check_content_type(request: Request) -> None:
    """Refuse content types that a web page of another site can send without a CORS preflight."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != JSON_TYPE:
        raise HttpError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            f"Content-Type must be {JSON_TYPE}",
            parameter="content-type",
            close=True,
        )


def _content_length(request: Request) -> int:
    """Value of the header Content-Length; 0 without one. The HTTP parser has refused values that are not numbers."""
    return int(request.headers.get("content-length", "0"))


def _body_too_large(max_bytes: int) -> HttpError:
    return HttpError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "request_too_large",
        f"a body has at most {max_bytes} bytes",
        close=True,
    )


def json_response(content: dict[str, object], headers: dict[str, str] | None = None) -> Response:
    """A response with a JSON object."""
    return Response(to_json_bytes(content), HTTPStatus.OK, headers, media_type=JSON_TYPE)


def to_json_bytes(content: Mapping[str, Any]) -> bytes:
    """JSON without spaces. NaN and infinity become null."""
    return to_json(content, inf_nan_mode="null")  # a third of the time of `json`, once per token
