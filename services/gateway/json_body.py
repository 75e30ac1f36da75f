"""JSON bodies of requests and responses: size limits, reading, validation and writing.

Bodies are pydantic models, strict about known fields; unknown fields are reported in a header and not refused. A
field that would change the answer and is not built is refused by name (`UNSUPPORTED`), unless its value asks for the
default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from moonpool.client import Slo
from moonpool.errors import InvalidRequest
from moonpool.sampling_params import MAX_LOGIT_BIASES, SamplingParams
from services.gateway.errors import HttpError
from services.gateway.tool_calls import ToolSet

UNCHECKED_BYTES = 64 << 10
"""Bodies up to this size are not looked at: whatever they hold, it is little."""


class JsonPartCounts(NamedTuple):
    """How many parts a JSON value has, itself included.

    Attributes:
        objects, lists: such as turns, and prompts of token ids.
        members: of all objects.
        texts: names of members among them.
        items: commas between members and between items of lists, such as token ids.
    """

    objects: int
    lists: int
    members: int
    texts: int
    items: int


MAX_JSON_PARTS = JsonPartCounts(objects=1 << 14, lists=1 << 14, members=1 << 16, texts=1 << 17, items=1 << 20)


def count_json_parts(raw: bytes) -> JsonPartCounts:
    """The parts of a text that is JSON. Of one that is not, it says how much a reader may meet before it gives up."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # so each quote begins or ends a text
    texts = unescaped.count(b'"') // 2
    if texts > MAX_JSON_PARTS.texts:
        return JsonPartCounts(0, 0, 0, texts, 0)
    outside = b"".join(unescaped.split(b'"')[::2])
    objects, lists, members, items = map(outside.count, (b"{", b"[", b":", b","))
    return JsonPartCounts(objects, lists, members, texts, items)


def check_json_parts(raw: bytes) -> None:
    """Refuse a body that would take long to read.

    Raises:
        InvalidRequest: it has too many parts.
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
"""Fields of OpenAI and vLLM that are not built, with the values that ask for nothing."""


T = TypeVar("T")


BodyT = TypeVar("BodyT", bound="Body")


class _FailFast:
    """As pydantic's `FailFast`, which cannot be part of a union here: it has no hash."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Mapping[str, Any]:
        return {**handler(source), "fail_fast": True}


FailFastList = Annotated[list[T], _FailFast()]
"""A list of which the first fault is told, not all of them: there may be a million."""


def _check_small(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MAX_LOGIT_BIASES:
        raise PydanticCustomError("too_many", "at most {most} members", {"most": MAX_LOGIT_BIASES})
    return given


SmallObject = Annotated[dict[str, T], BeforeValidator(_check_small)]
"""An object of not many members: all of its faults are told."""


class Body(BaseModel):
    """A body or a part of one."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED
    """Fields that are refused, with the values that ask for nothing."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    def ignored(self) -> Iterator[str]:
        """Names of fields, also of its parts, that nothing is done with; fields that are null count as absent.

        Raises:
            InvalidRequest: names a field that is known and not built.
        """
        for name, value in (self.model_extra or {}).items():
            if name in self.unsupported:
                _refuse_unless_harmless(name, value, self.unsupported[name])
            elif value is not None:
                yield name
        for name, part in self.parts():
            yield from (f"{name}.{inner}" for inner in part.ignored())

    def parts(self) -> Iterator[tuple[str, Body]]:
        """Parts that have fields of their own, by name."""
        return iter(())

    def check(self) -> None:
        """Check what the types do not say.

        Raises:
            InvalidRequest: names the field that is wrong.
        """


def _refuse_unless_harmless(name: str, value: object, harmless: tuple[Any, ...]) -> None:
    if not any(type(value) is type(one) and value == one for one in harmless):
        raise InvalidRequest(name, "is not supported yet")


class SloBody(Body):
    """Moonpool's own: latency limits, seconds; a request that would miss one is answered with 429.

    It waits for up to `queue_s` before that.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    queue_s: float | None = None


class GenerateBody(Body):
    """A body that asks for an answer."""

    model: str | None = None
    stream: bool | None = None
    slo: SloBody | None = None
    priority: int | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        if self.slo is not None:
            yield "slo", self.slo

    def limits(self) -> Slo | None:
        """The latency limits."""
        slo = self.slo
        return None if slo is None else Slo(ttft_s=slo.ttft_s, tbt_s=slo.tbt_s, queue_s=slo.queue_s)

    def tools_offered(self) -> ToolSet | None:
        """Functions that the model may call.

        Raises:
            InvalidRequest: names what is wrong about them, or not built.
        """
        return None

    def scored(self) -> int | None:
        """Likely tokens that are told beside each token of the answer; None = no log probabilities."""
        return None

    def wants_scores(self) -> bool:
        """Whether log probabilities are told, of the answer or of the prompt."""
        return self.scored() is not None

    def sampling(self, max_tokens: int) -> SamplingParams:
        """How tokens are chosen, at most `max_tokens` of them. Values are checked by the conductor.

        Raises:
            InvalidRequest: names a field that cannot be passed on.
        """
        raise NotImplementedError


def validate_body(cls: type[BodyT], content: object) -> BodyT:
    """Check a body that was read.

    Raises:
        InvalidRequest: it is no object, or a field is wrong; names it.
    """
    if not isinstance(content, dict):
        raise InvalidRequest("", "a body must be a JSON object")
    try:
        return cls.model_validate(content)
    except ValidationError as error:
        fault = _clearest_fault(error.errors(include_url=False, include_context=False, include_input=False))
        place = ".".join(str(step) for step in fault["loc"] if step != "str" and "[" not in str(step))
        raise InvalidRequest(place, fault["msg"][:200]) from None


def _clearest_fault(faults: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first fault; of a field that is a text or one kind of list, what is wrong within the list."""
    first = faults[0]["loc"]
    if first[-1] != "str":
        return faults[0]
    branch = len(first) - 1
    within = [fault for fault in faults if len(fault["loc"]) > len(first) and fault["loc"][:branch] == first[:branch]]
    return _clearest_fault(within) if len({fault["loc"][branch] for fault in within}) == 1 else faults[0]


JSON_TYPE = "application/json"


async def read_body(request: Request, cls: type[BodyT], max_bytes: int, timeout_s: float) -> BodyT:
    """Read and check a body.

    Raises:
        HttpError: it is of another type than JSON, too large, or too slow.
        InvalidRequest: it is no JSON, or a field is wrong; names it.
        ClientDisconnect: the client has gone.
    """
    _check_content_type(request)
    if _content_length(request) > max_bytes:
        raise _body_too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return validate_body(cls, await _parse(await _read_raw(request, max_bytes)))
    except TimeoutError:
        raise HttpError(
            HTTPStatus.REQUEST_TIMEOUT, "timeout", f"the body did not come within {timeout_s:g} s", close=True
        ) from None


async def _read_raw(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _body_too_large(max_bytes)
    return bytes(body)


async def _parse(raw: bytes) -> object:
    """What JSON says. Of what is large each step has a turn of the event loop of its own."""
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
    """Refuse what a web page of another site can send without being asked."""
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
    """The length that the head says; 0 = it does not. The HTTP parser has refused what is no number."""
    return int(request.headers.get("content-length", "0"))


def _body_too_large(max_bytes: int) -> HttpError:
    return HttpError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "request_too_large",
        f"a body has at most {max_bytes} bytes",
        close=True,
    )


def json_response(content: dict[str, object], headers: dict[str, str] | None = None) -> Response:
    """An answer with a JSON object."""
    return Response(to_json_bytes(content), HTTPStatus.OK, headers, media_type=JSON_TYPE)


def to_json_bytes(content: Mapping[str, Any]) -> bytes:
    """JSON without spaces; numbers that JSON does not have become null."""
    return to_json(content, inf_nan_mode="null")  # a third of the time of `json`, once per token
