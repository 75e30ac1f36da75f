"""JSON bodies of requests and responses: size limits, reading, validation and writing.

Bodies are pydantic models with strict types. Every known field is honoured, ignored or refused (`FieldContract`). The
response names ignored fields in a header. An unknown field is ignored in a body, and refused in an object within.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from operator import le
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    Tag,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError, from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.kv.keys import MAX_SALT_CHARS
from moonpool.base.sampling_params import MAX_LOGIT_BIASES, SamplingParams
from moonpool.client import SessionTurn, Slo
from moonpool.gateway.serving.errors import HttpError
from moonpool.gateway.serving.tool_calls import ToolSet

UNCHECKED_BYTES = 64 << 10
"""Bodies up to this size are parsed without counting their parts first."""


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


T = TypeVar("T")
BodyT = TypeVar("BodyT", bound="Body")


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


Integer = Annotated[int, BeforeValidator(_whole_number)]
"""An integer, which JSON may also write as 2.0."""
_TEXT, _OBJECT = "str", "[object]"
TextOr = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[T, Tag(_OBJECT)],
    Discriminator(lambda value: _TEXT if isinstance(value, str) else _OBJECT),
]
"""A text, or an object of a type."""


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
            accepted = any(_same(value, each) for each in self.refused[name])
            if not accepted:
                raise InvalidRequest(place + name, "is not supported yet")
        elif name not in self.ignored and not self.unknown_ignored:
            known = ", ".join(sorted(self.honoured))
            raise InvalidRequest(place + name, f"is not known here; known are {known}")


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


class Body(BaseModel):
    """A JSON body, or an object within a body. The attributes are the honoured fields."""

    ignored: ClassVar[Collection[str]] = ()
    """Known fields that do not change the answer. Those of the base classes count, too."""
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Known fields that are refused, as in `FieldContract.refused`. Those of the base classes count, too."""
    unknown_ignored: ClassVar[bool] = False
    """Whether unknown fields are ignored, not refused."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    @cache
    def contract(cls) -> FieldContract:
        """What happens to the fields of this object."""
        bases = [base for base in reversed(cls.__mro__) if issubclass(base, Body)]
        honoured = frozenset(field.alias or name for name, field in cls.model_fields.items())
        ignored = frozenset(name for base in bases for name in base.ignored) - honoured
        refused = {name: given for base in bases for name, given in base.refused.items() if name not in honoured}
        return FieldContract(honoured, ignored - refused.keys(), refused, cls.unknown_ignored)

    def ignored_fields(self, place: str = "") -> Iterator[str]:
        """Places of the fields that are ignored, here and in the objects within. A null field counts as absent.

        Args:
            place: this object's name with a dot at the end; "" for the body.

        Raises:
            InvalidRequest: a field is refused; names the field with the field's place.
        """
        contract = self.contract()
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                contract.check(place, name, value)
                if name not in contract.refused:
                    yield place + name
        for name, part in self._parts():
            yield from part.ignored_fields(f"{place}{name}.")

    def _parts(self) -> Iterator[tuple[str, Body]]:
        """Objects within this object, with their names."""
        for name, field in type(self).model_fields.items():
            value, shown = getattr(self, name), field.alias or name
            if isinstance(value, Body):
                yield shown, value
            elif isinstance(value, list) and value and isinstance(value[0], Body | str):  # numbers may be a million
                yield from ((f"{shown}.{index}", part) for index, part in enumerate(value) if isinstance(part, Body))

    def check(self) -> None:
        """Check what the types of the fields cannot express.

        Raises:
            InvalidRequest: a field is wrong; names the field.
        """


class SloBody(Body):
    """Moonpool's latency limits, in seconds. A request that would miss a limit is answered with 429.

    Such a request first waits up to `queue_s` seconds for a placement that keeps the limits.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    queue_s: float | None = None


class SessionBody(Body):
    """The session that the request is a turn of, and what the client knows of the session. Times are seconds."""

    id: str | None = None
    return_s: float | None = None
    keep_s: float | None = None
    last: bool | None = None
    retention: Integer | None = None

    def to_turn(self, name: str = "", keep_s: float | None = None) -> SessionTurn:
        """The session for the SDK. `name` and `keep_s` count where the body has none."""
        return SessionTurn(
            id=self.id or name,
            return_s=self.return_s,
            keep_s=keep_s if self.keep_s is None else self.keep_s,
            last=bool(self.last),
            retention=self.retention or 0,
        )


class GenerateBody(Body):
    """A body that asks the model for an answer."""

    unknown_ignored = True

    model: str | None = None
    stream: bool | None = None
    slo: SloBody | None = None
    priority: Integer | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    session: SessionBody | None = None

    _format_field: str = PrivateAttr("")

    @property
    def format_field(self) -> str:
        """Name of the field that says what the answer looks like, for errors; "" before `to_sampling_params`."""
        return self._format_field

    def to_slo(self) -> Slo | None:
        """Latency limits for the SDK."""
        slo = self.slo
        return None if slo is None else Slo(ttft_s=slo.ttft_s, tbt_s=slo.tbt_s, queue_s=slo.queue_s)

    def to_session(self, header: str = "") -> SessionTurn | None:
        """The session for the SDK; None if the request names none and does not say how long KV is worth keeping.

        `header` is the name in the request's head, "" for none.
        """
        turn = (self.session or SessionBody()).to_turn(self.session_name(header), self.keep_s())
        return None if turn == SessionTurn() else turn

    def session_name(self, header: str) -> str:
        """Name of the session where `session` has none; "" for none."""
        return header

    def keep_s(self) -> float | None:
        """Seconds for which other fields say that KV is worth keeping; None: they do not say."""
        return None

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
        """Whether the response has log probabilities, for the answer or for the prompt."""
        return self.num_logprobs() is not None

    def to_sampling_params(self, max_tokens: int) -> SamplingParams:
        """Sampling parameters for the SDK, with at most `max_tokens` tokens. The conductor checks the values.

        Raises:
            InvalidRequest: a field cannot be translated; names the field.
        """
        raise NotImplementedError


_TTL_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class PromptCacheOptions(Body):
    """How OpenAI's prompt cache is used."""

    ignored = ("comparison_response_id", "mode", "prewarm")

    ttl: Annotated[str, Field(pattern=r"^[0-9]{1,5}[smhd]$")] | None = None


class PromptCacheBody(GenerateBody):
    """OpenAI's fields for the prompt cache: the key names a session, the others say how long KV is worth keeping."""

    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    def session_name(self, header: str) -> str:
        return header or self.prompt_cache_key or ""

    def keep_s(self) -> float | None:
        if self.prompt_cache_options is not None and (ttl := self.prompt_cache_options.ttl):
            return float(ttl[:-1]) * _TTL_UNITS_S[ttl[-1]]
        return _TTL_UNITS_S["d"] if self.prompt_cache_retention == "24h" else None


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


_MESSAGES = {"model_type": "must be an object", "dict_type": "must be an object", "missing": "is missing"}
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
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


BODY_COPIES = 4
"""Memory for a request in progress, as a multiple of the body's size: the text, and the derived objects."""
CLEANUP = "moonpool.cleanup"
"""Key of a request's scope: an `ExitStack` that is closed after the response."""


class BodyMemory:
    """The memory that the bodies of all requests in progress may take.

    A tenant may take as much as is still free, so that one tenant gets at most half of the memory, and a later tenant
    finds some.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: Counter[str] = Counter()

    @property
    def held_bytes(self) -> int:
        """Memory that is taken now, in bytes."""
        return self._held.total()

    @contextmanager
    def hold(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Hold memory for one body while the body of the `with` runs. Yields a function that takes more bytes.

        That function raises Unavailable if the memory is used up.
        """
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            wanted = num_bytes * BODY_COPIES
            if self._held[tenant] + wanted > self._most_bytes - self.held_bytes:
                raise Unavailable(
                    f"the bodies of requests in progress take as much as body_memory_bytes allows ({self._most_bytes})"
                )
            taken += wanted
            self._held[tenant] += wanted

        try:
            yield take
        finally:
            self._held[tenant] -= taken
            if not self._held[tenant]:
                del self._held[tenant]


PACE_BYTES_PER_S, PACE_AHEAD_BYTES = 8 << 20, 8 << 20
"""How fast a tenant's bodies are read for long, and how much may come at once: more text than engines compute, and a
tenth of a processor to read and parse.
"""
MAX_PACED = 1024
"""Tenants beyond which those whose bytes are all due are forgotten."""


class BodyPace:
    """How fast each tenant's bodies are read: to read and parse large ones takes processors from others' answers."""

    def __init__(self, bytes_per_s: float = PACE_BYTES_PER_S, ahead_bytes: int = PACE_AHEAD_BYTES) -> None:
        self._bytes_per_s = bytes_per_s
        self._ahead_s = ahead_bytes / bytes_per_s
        self._due: dict[str, float] = {}  # by tenant, when what was read so far is due at this pace

    @property
    def num_tenants(self) -> int:
        """Tenants that are remembered."""
        return len(self._due)

    def wait_s(self, tenant: str, num_bytes: int, now: float) -> float:
        """Count bytes that a tenant's body has brought; returns the seconds to wait before more are read."""
        due = max(self._due.get(tenant, 0.0), now) + num_bytes / self._bytes_per_s
        if len(self._due) >= MAX_PACED:
            self._due = {name: its for name, its in self._due.items() if its > now}
        self._due[tenant] = due
        return max(0.0, due - now - self._ahead_s)


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Reads and parses bodies.

    Attributes:
        max_bytes: maximum size of a body.
        timeout_s: seconds in which a body must arrive.
        memory: the memory of all bodies.
        threads: parse bodies of more than `UNCHECKED_BYTES`.
        pace: how fast bodies are read.
    """

    max_bytes: int
    timeout_s: float
    memory: BodyMemory
    threads: Executor
    pace: BodyPace

    async def read(self, request: Request, cls: type[BodyT], tenant: str) -> BodyT:
        """Read, parse and check the body of a tenant's request. The body's memory is held until the response has ended.

        Raises:
            HttpError: the body has another content type than JSON, is too large, or does not arrive in time.
            Unavailable: the memory of all bodies is used up.
            InvalidRequest: the body is not JSON, or a field is wrong; names the field.
            ClientDisconnect: the client has closed the connection.
        """
        _check_content_type(request)
        _check_content_encoding(request)
        if _content_length(request) > self.max_bytes:
            raise _body_too_large(self.max_bytes)
        take = request.scope[CLEANUP].enter_context(self.memory.hold(tenant))
        try:
            async with asyncio.timeout(self.timeout_s):
                raw = await self._read_raw(request, tenant, take)
        except TimeoutError:
            message = f"the body did not arrive within {self.timeout_s:g} s"
            raise HttpError(HTTPStatus.REQUEST_TIMEOUT, "timeout", message, close=True) from None
        if len(raw) <= UNCHECKED_BYTES:
            return _parse_body(cls, raw)
        return await asyncio.get_running_loop().run_in_executor(self.threads, _parse_body, cls, raw)

    async def _read_raw(self, request: Request, tenant: str, take: Callable[[int], None]) -> bytes:
        body, clock = bytearray(), asyncio.get_running_loop().time
        async for chunk in request.stream():
            take(len(chunk))
            body += chunk
            if len(body) > self.max_bytes:
                raise _body_too_large(self.max_bytes)
            wait_s = self.pace.wait_s(tenant, len(chunk), clock())
            if wait_s > 0.0 and len(body) > UNCHECKED_BYTES:  # small bodies do not wait behind large ones
                await asyncio.sleep(wait_s)  # the connection is not read meanwhile
        return bytes(body)


def _parse_body(cls: type[BodyT], raw: bytes) -> BodyT:
    raw = raw.removeprefix(_BYTE_ORDER_MARK)
    check_json_parts(raw)
    try:
        content: object = from_json(raw, cache_strings="keys")
    except ValueError as error:
        raise InvalidRequest("", f"invalid JSON: {error}") from None
    body = validate_body(cls, content)
    body.check()
    return body


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


def _check_content_encoding(request: Request) -> None:
    """Refuse compressed bodies, whose size is unknown before they are unpacked."""
    given = request.headers.get("content-encoding", "identity").strip().lower()
    if given not in ("", "identity"):
        raise HttpError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            f"a body must not be compressed: Content-Encoding {given[:32]!r} is not supported",
            parameter="content-encoding",
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
    return to_json(content, inf_nan_mode="null")  # a third of `json`'s time, once per token
