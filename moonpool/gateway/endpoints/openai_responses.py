"""OpenAI's `/v1/responses`: body, handler, response object and stream events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import Response

from moonpool.base import world
from moonpool.base.checkpoint import ChatOptions
from moonpool.base.errors import InvalidRequest, NotFound, Unavailable
from moonpool.base.logprobs import TokenLogprobs
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.telemetry.logs import get_logger
from moonpool.client import GenerateResult, Message, TokenEvent, Usage
from moonpool.gateway.endpoints.base import GatewayContext
from moonpool.gateway.reasoning_parsers.base import ReasoningText
from moonpool.gateway.serving.asgi_reply import to_nobody
from moonpool.gateway.serving.auth import CheckedRequest
from moonpool.gateway.serving.background_responses import EventLog, EventLogResponse
from moonpool.gateway.serving.body import Body, FailFastList, Integer, SmallObject, TextOr
from moonpool.gateway.serving.body_reader import CLEANUP
from moonpool.gateway.serving.errors import ErrorResponse, HttpError, error_response
from moonpool.gateway.serving.generate_body import PromptCacheBody
from moonpool.gateway.serving.generation_response import GenerationResponse
from moonpool.gateway.serving.json_response import json_response, to_json_bytes
from moonpool.gateway.serving.known_fields import ITEM_IGNORED, RESPONSES_IGNORED, RESPONSES_REFUSED
from moonpool.gateway.serving.logprobs import LogprobsFormatter
from moonpool.gateway.serving.messages import ContentPart, joined_text, sdk_tool_call
from moonpool.gateway.serving.offered_tools import FunctionBody, ToolChoice, chosen_tools
from moonpool.gateway.serving.openai_sampling import drawn_seed, token_biases
from moonpool.gateway.serving.response_formatter import ResponseFormatter
from moonpool.gateway.serving.response_pins import PinnedTurn, ResponsePins
from moonpool.gateway.serving.response_store import Item, ResponseStore, StoredRecord
from moonpool.gateway.serving.structured_outputs import (
    FormatAndGrammar,
    StructuredOutputsBody,
    TextFormatBody,
    only_format,
)
from moonpool.gateway.serving.tool_calls import (
    AnswerArgumentsDelta,
    AnswerParser,
    AnswerPart,
    AnswerToolCall,
    ToolSet,
    WholePart,
)
from moonpool.gateway.tool_parsers.base import parse_json

log = get_logger(__name__)
_CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
INCLUDE_LOGPROBS = "message.output_text.logprobs"
"""The one honoured value of `include`."""
_INCLUDE_IGNORED = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values of `include` that ask for parts that no answer has here."""
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


class ResponsesContentPart(ContentPart):
    """A part of an item. A part of an earlier answer has further fields, which are ignored."""

    kinds = _TEXT_PARTS

    annotations: FailFastList[Any] | None = None
    logprobs: FailFastList[Any] | None = None


class ResponsesItem(Body):
    """A message, a call, a call's result, the thinking before an answer, or a stored item's id."""

    ignored = ITEM_IGNORED

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "item_reference",
    ] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | FailFastList[ResponsesContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    input: str | None = None
    output: str | FailFastList[ResponsesContentPart] | None = None

    def ignored_fields(self, place: str = "") -> Iterator[str]:
        if self.type != "reasoning":
            return super().ignored_fields(place)
        return iter(() if self.content else (place.removesuffix("."),))

    def add_to(self, messages: list[Message], field: str) -> None:
        """Add the item to the messages for the SDK. A tool call joins the assistant's message before the call.

        Raises:
            InvalidRequest: a field is missing or is not text; names the field.
        """
        if self.type == "message":
            role = "system" if self.role == "developer" else self._required("role", field)
            if role == "assistant" and messages and messages[-1] == _thought(messages[-1]):
                messages[-1]["content"] = self._text("content", field)
            else:
                messages.append({"role": role, "content": self._text("content", field)})
        elif self.type == "reasoning":
            text = joined_text(self.content or "", f"{field}.content", ("reasoning_text",))
            if text:
                messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        elif self.type in ("function_call_output", "custom_tool_call_output"):
            result: Message = {"role": "tool", "content": self._text("output", field)}
            messages.append({**result, "tool_call_id": self._required("call_id", field)})
        elif self.type == "item_reference":
            raise InvalidRequest(f"{field}.type", "is allowed only in the input of a response")
        else:
            call_id, function = (self._required(name, field) for name in ("call_id", "name"))
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            assert isinstance(calls, list)  # created above
            given = {"input": self.input or ""} if self.type == "custom_tool_call" else self.arguments
            calls.append(sdk_tool_call(call_id, function, given))

    def stored(self, default_id: str) -> Item:
        """The item as stored and listed: with an id, and a message's text as a part."""
        item = {"status": "completed", **self.model_dump(by_alias=True, exclude_unset=True), "type": self.type}
        if self.type == "message" and isinstance(self.content, str):
            part = {"type": "input_text", "text": self.content}
            item["content"] = [_output_text(self.content, []) if self.role == "assistant" else part]
        return {**item, "id": self.id or f"{_ID_PREFIXES[self.type]}_{default_id}"}

    def _required(self, name: str, field: str) -> str:
        value: str | None = getattr(self, name)
        if not value:
            raise InvalidRequest(f"{field}.{name}", "is missing")
        return value

    def _text(self, name: str, field: str) -> str:
        content: str | list[ResponsesContentPart] | None = getattr(self, name)
        if content is None:
            raise InvalidRequest(f"{field}.{name}", "is missing")
        return joined_text(content, f"{field}.{name}", _TEXT_PARTS)


def _thought(message: Message) -> Message:
    """The message, if there was only thinking."""
    return {"role": "assistant", "content": "", "reasoning_content": message.get("reasoning_content", "")}


class ResponsesTool(Body):
    """A function, a custom tool with a text as argument, several functions in a namespace, or an OpenAI tool.

    The model does not see OpenAI's own tools, which clients offer unasked.
    """

    ignored = (
        "cache_control",
        "external_web_access",
        "filters",
        "format",
        "output_schema",
        "search_content_types",
        "search_context_size",
        "user_location",
    )
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
    }

    type: Literal[
        "function",
        "custom",
        "namespace",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: FailFastList[ResponsesTool] | None = None

    @property
    def is_shown(self) -> bool:
        """Whether the model sees the tool."""
        return self.type in ("function", "custom", "namespace")

    def ignored_fields(self, place: str = "") -> Iterator[str]:
        return super().ignored_fields(place) if self.is_shown else iter((place.removesuffix("."),))

    def definitions(self, field: str) -> Iterator[dict[str, Any]]:
        """The functions as chat templates take functions. A custom tool is a function with one text.

        Raises:
            InvalidRequest: a name is missing or wrong; names the field.
        """
        if self.type == "namespace":
            for index, tool in enumerate(self.tools or ()):
                yield from tool.definitions(f"{field}.tools.{index}")
        elif self.is_shown:
            if self.name is None:
                raise InvalidRequest(f"{field}.name", "is missing")
            given = _CUSTOM_PARAMETERS if self.type == "custom" else self.parameters
            function = FunctionBody(name=self.name, description=self.description, parameters=given, strict=self.strict)
            yield function.definition(field)

    def call_kinds(self) -> Iterator[tuple[str, ToolCallForm]]:
        """How calls of the functions come back, by name."""
        for tool in self.tools or ():
            yield from ((name, replace(kind, namespace=self.name or "")) for name, kind in tool.call_kinds())
        if self.name is not None and self.type != "namespace":
            yield self.name, ToolCallForm(custom=self.type == "custom")

    def echoed(self) -> dict[str, Any]:
        """The tool in the response."""
        if self.type != "function":
            return self.model_dump(by_alias=True, exclude_unset=True)
        given = self.model_dump(include={"type", "name", "description", "parameters"})
        return {**given, "strict": bool(self.strict)}


@dataclass(frozen=True, slots=True)
class ToolCallForm:
    """How a call comes back.

    Attributes:
        custom: as a custom tool's call, with a text in place of arguments.
        namespace: the namespace of the function; "" for none.
    """

    custom: bool = False
    namespace: str = ""


class ResponsesText(Body):
    """Options of the answer's text."""

    ignored = ("verbosity",)

    format: TextFormatBody | None = None


class ResponsesStreamOptions(Body):
    """Options for a streamed response, all without effect: the last event has the usage anyway."""

    ignored = ("include_obfuscation", "include_usage")


class ConversationReference(Body):
    """The conversation that a request continues."""

    id: str


class ResponsesBody(PromptCacheBody):
    """Body of `/v1/responses`."""

    ignored = RESPONSES_IGNORED
    refused = RESPONSES_REFUSED

    input: str | FailFastList[ResponsesItem]
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    repetition_penalty: float | None = None
    seed: Integer | None = None
    stop: str | FailFastList[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: SmallObject[float] | None = None
    structured_outputs: StructuredOutputsBody | None = None
    metadata: SmallObject[str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: TextOr[ConversationReference] | None = None
    text: ResponsesText | None = None
    include: FailFastList[str] | None = None
    top_logprobs: Integer | None = None
    tools: FailFastList[ResponsesTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream_options: ResponsesStreamOptions | None = None

    def ignored_fields(self, place: str = "") -> Iterator[str]:
        yield from super().ignored_fields(place)
        yield from (f"include.{index}" for index, value in enumerate(self.include or ()) if value in _INCLUDE_IGNORED)

    def check(self) -> None:
        for index, value in enumerate(self.include or ()):
            if value not in (INCLUDE_LOGPROBS, *_INCLUDE_IGNORED):
                raise InvalidRequest(f"include.{index}", f"only {INCLUDE_LOGPROBS} is supported")
        if self.num_logprobs() is not None and self.tools:
            raise InvalidRequest("tools", "are not allowed together with log probabilities")
        if self.previous_response_id and self.conversation:
            raise InvalidRequest("previous_response_id", "is not allowed together with conversation")
        if self.background and self.store is False:
            raise InvalidRequest("store", "must not be false for a background response, which is read later")

    def session_name(self, header: str) -> str:
        return super().session_name(header) or self.conversation_id

    @property
    def conversation_id(self) -> str:
        """Id of the conversation that the request continues; "" for none."""
        named = self.conversation
        return named.id if isinstance(named, ConversationReference) else named or ""

    def items(self) -> list[ResponsesItem]:
        """The input as items."""
        if isinstance(self.input, str):
            return [ResponsesItem(role="user", content=self.input)]
        return self.input

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.top_logprobs or INCLUDE_LOGPROBS in (self.include or ()) else None

    def to_messages(self, past: Sequence[ResponsesItem], given: Sequence[ResponsesItem]) -> list[Message]:
        """The messages for the SDK, from the items before the request and the request's own.

        Raises:
            InvalidRequest: an item is wrong; names the field.
        """
        messages: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in past:
            item.add_to(messages, "previous_response_id")
        for index, item in enumerate(given):
            item.add_to(messages, f"input.{index}")
        return messages

    def tool_set(self) -> ToolSet | None:
        tools = enumerate(self.tools or ())
        definitions = [it for index, tool in tools for it in tool.definitions(f"tools.{index}")]
        return chosen_tools(definitions, self.tool_choice, parallel=self.parallel_tool_calls is not False)

    def to_sampling_params(self, max_tokens: int) -> SamplingParams:
        names = ("temperature", "top_p", "repetition_penalty", "stop", "ignore_eos", "skip_special_tokens")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        fields["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's -1 = all
        fields["seed"] = drawn_seed(self.seed)
        self._format_field, fields["response_format"], fields["grammar"] = only_format(self._formats())
        return SamplingParams(
            max_tokens=max_tokens, logit_bias=token_biases(self.logit_bias), logprobs=self.num_logprobs(), **fields
        )

    def _formats(self) -> Iterator[tuple[str, FormatAndGrammar]]:
        """The formats that the fields ask for, with the names of the fields."""
        if (text := self._text_format()) is not None:
            yield "text.format", text.format_and_grammar("text.format")
        if self.structured_outputs is not None:
            yield from self.structured_outputs.formats("structured_outputs.")

    def _text_format(self) -> TextFormatBody | None:
        return self.text.format if self.text is not None else None

    def echoed_fields(self, *, stored: bool) -> dict[str, Any]:
        """Fields of the request that the response repeats, and whether the response is stored."""
        return {
            **({"conversation": {"id": self.conversation_id}} if self.conversation_id else {}),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "metadata": self.metadata or {},
            "tools": [tool.echoed() for tool in self.tools or ()],
            "tool_choice": _dumped(self.tool_choice) or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": stored,
            "text": {"format": _dumped(self._text_format()) or {"type": "text"}},
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "background": bool(self.background),
        }


def _dumped(value: Body | str | None) -> Any:
    """The value as sent by the client, for the response to repeat."""
    return value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, Body) else value


@dataclass(frozen=True, slots=True)
class ResponsesTurn:
    """A request in a conversation: the earlier items, and the request's own.

    Attributes:
        store: where responses and conversations are.
        pins: KV pins for conversations.
        tenant: the caller's.
        request_id: id of the request.
        body: the request.
        past: items of the responses or the conversation that the request continues.
        given: items of the request, references resolved.
        model: name of the model or LoRA adapter, as the conductor knows the name; "" for the model.
    """

    store: ResponseStore
    pins: ResponsePins
    tenant: str
    request_id: str
    body: ResponsesBody
    past: Sequence[ResponsesItem]
    given: Sequence[ResponsesItem]
    model: str

    @classmethod
    async def of(cls, gateway: GatewayContext, checked: CheckedRequest[ResponsesBody], model: str) -> ResponsesTurn:
        """Look up what a request refers to.

        Raises:
            HttpError: a response or the conversation is not stored; names the field.
            InvalidRequest: an item is not stored, or the items are too many or too large; names the field.
        """
        body, tenant, past = checked.body, checked.caller.tenant, list[Item]()
        store = gateway.responses
        kind = "previous_response_id" if body.previous_response_id else "conversation"
        try:
            if body.previous_response_id:
                before = await store.get(tenant, body.previous_response_id)
                if before.body["status"] in UNDER_WAY:
                    raise InvalidRequest("previous_response_id", "has no answer yet")
                past = await store.history(tenant, body.previous_response_id)
            elif body.conversation_id:
                past = await store.items(tenant, body.conversation_id)
        except NotFound as error:
            code = f"{kind.removesuffix('_id')}_not_found"
            status = HTTPStatus.BAD_REQUEST if body.previous_response_id else HTTPStatus.NOT_FOUND
            raise HttpError(status, code, str(error), parameter=kind) from None
        except InvalidRequest as error:
            raise InvalidRequest(error.field or kind, error.message) from None
        given = body.items()
        known = await asyncio.to_thread(lambda: [ResponsesItem.model_validate(item) for item in past])
        await _resolve(store, tenant, given)
        return cls(store, gateway.pins, tenant, checked.request_id, body, known, given, model)

    @property
    def is_stored(self) -> bool:
        """Whether the response can be asked for later."""
        return self.body.store is not False and self.store.enabled

    def messages(self) -> list[Message]:
        """The prompt for the SDK.

        Raises:
            InvalidRequest: an item is wrong; names the field.
        """
        return self.body.to_messages(self.past, self.given)

    async def keep(self, response: Mapping[str, Any]) -> None:
        """Store the response, and add the response's items to the conversation.

        Raises:
            Unavailable: there is no room for them.
        """
        given = self._items()
        if self.is_stored:
            await self.put(response)
        if self.body.conversation_id:
            with suppress(NotFound):  # the conversation was deleted meanwhile
                await self.store.append(self.tenant, self.body.conversation_id, [*given, *response["output"]])
        self._pin(response)

    def _pin(self, response: Mapping[str, Any]) -> None:
        """Pin a conversation's KV once the conversation has shown that it continues."""
        before = self.body.previous_response_id or self.body.conversation_id
        kept = self.is_stored or self.body.conversation_id
        if not before or not kept:
            return
        messages, tools = self.messages(), self.body.tool_set()
        for item in response["output"]:
            ResponsesItem.model_validate(item).add_to(messages, "output")
        name = self.body.conversation_id or response["id"]
        shown, salt = tools.definitions if tools else (), self.body.cache_salt or ""
        self.pins.keep(PinnedTurn(self.tenant, name, before, messages, shown, salt, self.model))

    async def put(self, response: Mapping[str, Any]) -> None:
        """Store the response, replacing a response with the same id.

        Raises:
            Unavailable: no room for the response.
        """
        record = StoredRecord(response["id"], _without_output(response), self.body.previous_response_id or "")
        await self.store.put(self.tenant, record, self._items(), response["output"])

    def _items(self) -> list[Item]:
        return [item.stored(f"{self.request_id}_in_{index}") for index, item in enumerate(self.given)]


def _without_output(response: Mapping[str, Any]) -> dict[str, Any]:
    """A response without the output, whose items are stored one by one."""
    return {name: value for name, value in response.items() if name != "output"}


async def _resolve(store: ResponseStore, tenant: str, items: list[ResponsesItem]) -> None:
    """Puts stored items in the place of references to them.

    Raises:
        InvalidRequest: an item is not stored, or the items are too many or too large; names the field.
    """
    places = [place for place, item in enumerate(items) if item.type == "item_reference"]
    names = [items[place].id or "" for place in places]
    try:
        found = await store.find_items(tenant, names) if names else []
    except InvalidRequest as error:
        raise InvalidRequest("input", error.message) from None
    for place, name, item in zip(places, names, found, strict=True):
        if item is None:
            raise InvalidRequest(f"input.{place}.id", store.missing(name))
        items[place] = ResponsesItem.model_validate(item)


async def responses(gateway: GatewayContext, request: Request) -> Response | GenerationResponse | EventLogResponse:
    """Answer a conversation of items."""
    checked = await gateway.auth.read_body(request, ResponsesBody)
    body, state = checked.body, await gateway.cluster.state()
    limit = body.max_output_tokens
    job = gateway.builder.prepare(checked, state, state.max_tokens if limit is None else limit)
    turn = await ResponsesTurn.of(gateway, checked, job.arguments.get("model", ""))
    job.prompts = [{"messages": turn.messages()}]
    parser = gateway.builder.offer_tools(job, body.tool_set())
    logprobs = LogprobsFormatter.of(gateway.tokenizer, body, state)
    options = ResponsesOptions(
        echoed_fields=body.echoed_fields(stored=turn.is_stored),
        call_kinds=dict(pair for tool in body.tools or () for pair in tool.call_kinds()),
        keep=turn.keep,
    )
    if not body.background:
        return gateway.generate(job, ResponsesFormatter(job.model_name, parser, logprobs, options))
    waiting = BackgroundTurn(
        gateway,
        turn,
        {"id": f"resp_{turn.request_id}", **_head(job.model_name, options.echoed_fields)},
        EventLog() if body.stream else None,
    )
    job.on_placed = waiting.placed
    formatter = BackgroundFormatter(waiting.head, job.model_name, parser, logprobs, options)
    await waiting.start(gateway.generate(job, formatter), request.scope[CLEANUP])
    if waiting.events is None:
        return json_response(waiting.response("queued"), job.headers)
    return EventLogResponse(waiting.events, 0, {**job.headers, "x-request-id": job.client_id or turn.request_id})


@dataclass(frozen=True, slots=True)
class BackgroundTurn:
    """A request whose client does not wait: the response is stored before being computed, and changes status.

    Attributes:
        gateway: where the response is computed and stored.
        turn: the request in the conversation.
        head: the response's fields independent of the status.
        events: the events of a response that was asked for as a stream; None = not streamed.
    """

    gateway: GatewayContext
    turn: ResponsesTurn
    head: Mapping[str, Any]
    events: EventLog | None

    @property
    def name(self) -> str:
        """Id of the response."""
        return str(self.head["id"])

    def response(self, status: str, error: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The response without an answer."""
        return {**self.head, **_UNANSWERED, "status": status, "error": error, "output": []}

    async def start(self, generation: GenerationResponse, held: ExitStack) -> None:
        """Store the response and begin to compute the answer, which then has what is `held`.

        Raises:
            HttpError: the tenant has too many responses under way, or this gateway stores none.
            Unavailable: there is no room for the response.
        """
        if not self.turn.is_stored:
            raise InvalidRequest("background", "this gateway stores nothing (response_store_bytes is 0)")
        self.gateway.background.check_room(self.turn.tenant)
        queued = self.response("queued")
        await self.turn.put(queued)
        self._tell("created", queued)
        self._tell("queued", queued)
        work = self._work(generation)
        self.gateway.background.start(self.turn.tenant, self.name, work, held.pop_all(), self.events)

    def placed(self) -> None:
        """Note that an instance has taken the request."""
        if self.gateway.background.placed(self.turn.tenant, self.name):
            self._tell("in_progress", self.response("in_progress"))

    def _tell(self, kind: str, response: Mapping[str, Any]) -> None:
        if self.events is not None:
            self.events.add(_event(f"response.{kind}", len(self.events), response=response))

    async def _work(self, generation: GenerationResponse) -> None:
        """Compute the response; an answer that fails or is cancelled is stored as such."""
        ended = self.response("cancelled")
        try:
            error = await generation.complete(to_nobody if self.events is None else self.events.send)
            if error is None:
                return
            ended = self.response("failed", _failure(error))
        except asyncio.CancelledError:
            pass  # the gateway stops, or the client has cancelled the response
        except Exception as error:  # no caller waits for the task
            log.exception("background_response_failed", response=self.name)
            ended = self.response("failed", _failure(error_response(error)))
        with suppress(NotFound, Unavailable):  # the response was deleted meanwhile
            await self.turn.store.replace_body(self.turn.tenant, StoredRecord(self.name, _without_output(ended)))
        if ended["status"] == "failed":
            self._tell("failed", ended)


async def count_input_tokens(gateway: GatewayContext, request: Request) -> Response:
    """Number of tokens in the prompt that a request would have."""
    checked = await gateway.auth.read_body(request, ResponsesBody)
    turn, tools = await ResponsesTurn.of(gateway, checked, ""), checked.body.tool_set()
    definitions = tools.definitions if tools else ()
    max_tokens = await gateway.max_model_len()
    tokens = await gateway.tokenizer.encode_chat(turn.messages(), definitions, max_tokens, ChatOptions())
    checked.caller.budget.charge_work(len(tokens))
    content = {"object": "response.input_tokens", "input_tokens": len(tokens)}
    return json_response(content, checked.warning_headers)


UNDER_WAY = ("queued", "in_progress")
"""Status of a response that has no answer yet."""
_UNANSWERED = {"error": None, "incomplete_details": None, "usage": None}


def _head(model: str, echoed_fields: Mapping[str, Any]) -> dict[str, Any]:
    """A response's fields independent of the status, except the id."""
    return {"object": "response", "created_at": int(world.unix_time()), "model": model, **echoed_fields}


def _failure(error: ErrorResponse) -> dict[str, str]:
    return {"code": "server_error", "message": error.message}


@dataclass(frozen=True, slots=True)
class ResponsesOptions:
    """The request's options that the response repeats.

    Attributes:
        echoed_fields: fields of the request that the response repeats.
        call_kinds: how calls come back, by the name of the function.
        keep: stores the response that has ended.
    """

    echoed_fields: Mapping[str, Any]
    call_kinds: Mapping[str, ToolCallForm]
    keep: Callable[[Mapping[str, Any]], Awaitable[None]]


class ResponsesFormatter(ResponseFormatter):
    """Writes a response, or the response's events. The output is a list of items, one per text or tool call."""

    def __init__(
        self, model: str, parser: AnswerParser, logprobs: LogprobsFormatter, options: ResponsesOptions
    ) -> None:
        """Write answers of `model`.

        Args:
            model: name of the model in the response.
            parser: finds the tool calls in the answer.
            logprobs: writes log probabilities.
            options: the request's options that the response repeats.
        """
        self._model = model
        self._parser = parser
        self._logprobs_formatter = logprobs
        self._options = options
        self._ended: dict[str, Any] = {}  # the response
        self._request_id = ""
        self._head: dict[str, Any] = {}
        self._num_events = 0
        self._items: list[dict[str, Any]] = []  # complete items
        # The open item is thinking, a text or a call, or there is none.
        self._reasoning: list[str] | None = None
        self._text: list[str] | None = None
        self._call: AnswerToolCall | None = None  # with the arguments so far
        self._new_logprobs: list[TokenLogprobs] = []  # not sent yet
        self._text_logprobs: list[dict[str, Any]] = []  # of the open text

    def start(self, request_id: str, *, emulated: bool) -> None:
        self._parser.start(request_id)
        self._request_id = request_id
        head = _head(self._model, self._options.echoed_fields)
        self._head = {"id": f"resp_{request_id}", **head, **({"emulated": True} if emulated else {})}

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        parts = self._parser.parse_full(result.text, 0)
        self._text_logprobs = self._format_logprobs(result.logprobs)
        output = [self._item(index, part, "completed") for index, part in enumerate(parts)]
        if parts and isinstance(parts[-1], AnswerToolCall) and result.finish_reason == "length":
            output[-1]["status"] = "incomplete"
        return self._ended_response(output, result)

    def first_events(self) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", []))

    def text_event(self, text: str, choice: int) -> bytes:
        return b"".join(map(self._part_events, self._parser.push(text, choice)))

    def add_tokens(self, event: TokenEvent) -> None:
        self._new_logprobs += event.logprobs

    def last_events(self, result: GenerateResult) -> Iterator[bytes]:
        yield from map(self._part_events, self._parser.end(0))
        yield self._close_text() + self._close_reasoning()
        yield self._close_call("incomplete" if result.finish_reason == "length" else "completed")
        response = self._ended_response(self._items, result)
        yield self._event(f"response.{response['status']}", response=response)

    def error_event(self, error: ErrorResponse) -> bytes:
        response = {**self._response("failed", self._items), "error": _failure(error)}
        return self._event("response.failed", response=response)

    def error_body(self, error: ErrorResponse) -> dict[str, Any]:
        return error.body()

    def _format_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = self._logprobs_formatter.chat(logprobs)["content"] if logprobs else []
        return content

    def _ended_response(self, output: list[dict[str, Any]], result: GenerateResult) -> dict[str, Any]:
        """The response object after the answer has ended."""
        cut = result.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed", output)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        usage = responses_usage(result.usage, self._parser.reasoning_tokens(result.choices))
        self._ended = {**response, "usage": usage}
        return self._ended

    async def keep(self) -> None:
        await self._options.keep(self._ended)

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, **_UNANSWERED, "status": status, "output": output}

    def _item(self, index: int, part: WholePart, status: str) -> dict[str, Any]:
        """An item of the output; `status` is "in_progress", "completed" or "incomplete"."""
        if isinstance(part, str):
            content = [_output_text(part, self._text_logprobs)] if status == "completed" else []
            message_id = f"msg_{self._request_id}_{index}"
            return {"type": "message", "id": message_id, "status": status, "role": "assistant", "content": content}
        if isinstance(part, ReasoningText):
            content = [_reasoning_text(part.text)] if status == "completed" else []
            reasoning_id = f"rs_{self._request_id}_{index}"
            return {"type": "reasoning", "id": reasoning_id, "status": status, "summary": [], "content": content}
        kind, item_id = self._kind(part), self._call_id(part, index)
        if kind.custom:
            call = {"call_id": part.id, "name": part.name, "input": _custom_input(part.arguments)}
            return {"type": "custom_tool_call", "id": item_id, "status": status, **call}
        call = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
        call |= {"namespace": kind.namespace} if kind.namespace else {}
        return {"type": "function_call", "id": item_id, "status": status, **call}

    def _kind(self, call: AnswerToolCall) -> ToolCallForm:
        return self._options.call_kinds.get(call.name, ToolCallForm())

    def _call_id(self, call: AnswerToolCall, index: int) -> str:
        return f"{'ctc' if self._kind(call).custom else 'fc'}_{self._request_id}_{index}"

    def _part_events(self, part: AnswerPart) -> bytes:
        """Events for a part: more text or thinking, a new tool call, or more arguments for the open call."""
        match part:
            case ReasoningText():
                return self._add_reasoning(part)
            case str():
                before = self._close_reasoning() + self._close_call()
                before += self._open_text() if self._text is None else b""
                assert self._text is not None
                self._text.append(part)
                new, self._new_logprobs = self._format_logprobs(self._new_logprobs), []
                self._text_logprobs += new
                return before + self._text_item_event("response.output_text.delta", delta=part, logprobs=new)
            case AnswerArgumentsDelta():
                return self._add_arguments(part.arguments)
        before = self._close_reasoning() + self._close_text() + self._close_call()
        self._call, index = replace(part, arguments=""), len(self._items)
        item = self._item(index, self._call, "in_progress")
        started = self._event("response.output_item.added", output_index=index, item=item)
        return before + started + self._add_arguments(part.arguments)

    def _add_reasoning(self, part: ReasoningText) -> bytes:
        """Events with more thinking."""
        index, before = len(self._items), b""
        if self._reasoning is None:
            self._reasoning = []
            item = self._item(index, ReasoningText(""), "in_progress")
            before = self._event("response.output_item.added", output_index=index, item=item)
        self._reasoning.append(part.text)
        return before + self._reasoning_event("delta", delta=part.text)

    def _close_reasoning(self) -> bytes:
        if self._reasoning is None:
            return b""
        text, index = "".join(self._reasoning), len(self._items)
        done, item = self._reasoning_event("done", text=text), self._item(index, ReasoningText(text), "completed")
        self._items.append(item)
        self._reasoning = None
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _reasoning_event(self, kind: str, **fields: str) -> bytes:
        index = len(self._items)
        position = {"item_id": f"rs_{self._request_id}_{index}", "output_index": index, "content_index": 0}
        return self._event(f"response.reasoning_text.{kind}", **position, **fields)

    def _add_arguments(self, arguments: str) -> bytes:
        """The event with more arguments of the open call."""
        if self._call is None or not arguments:
            return b""
        self._call = replace(self._call, arguments=self._call.arguments + arguments)
        if self._kind(self._call).custom:  # the text is known once the arguments are whole
            return b""
        return self._event("response.function_call_arguments.delta", **self._call_position(), delta=arguments)

    def _close_call(self, status: str = "completed") -> bytes:
        if self._call is None:
            return b""
        call, position, index = self._call, self._call_position(), len(self._items)
        item = self._item(index, call, status)
        self._items.append(item)
        self._call = None
        if self._kind(call).custom:
            done = self._event("response.custom_tool_call_input.delta", **position, delta=item["input"])
            done += self._event("response.custom_tool_call_input.done", **position, input=item["input"])
        else:
            name = "response.function_call_arguments.done"
            done = self._event(name, **position, name=call.name, arguments=call.arguments)
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _call_position(self) -> dict[str, Any]:
        """Id and index of the open call."""
        assert self._call is not None
        index = len(self._items)
        return {"item_id": self._call_id(self._call, index), "output_index": index}

    def _open_text(self) -> bytes:
        self._text = []
        index = len(self._items)
        item = self._event("response.output_item.added", output_index=index, item=self._item(index, "", "in_progress"))
        return item + self._text_item_event("response.content_part.added", part=_output_text("", []))

    def _close_text(self) -> bytes:
        if self._text is None:
            return b""
        text, index = "".join(self._text), len(self._items)
        # Some tokens have no text, for example the token that ends an answer.
        self._text_logprobs += self._format_logprobs(self._new_logprobs)
        self._new_logprobs = []
        done = self._text_item_event("response.output_text.done", text=text, logprobs=self._text_logprobs)
        done += self._text_item_event("response.content_part.done", part=_output_text(text, self._text_logprobs))
        item = self._item(index, text, "completed")
        self._items.append(item)
        self._text, self._text_logprobs = None, []
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _text_item_event(self, event_type: str, **fields: Any) -> bytes:
        """An event of the open text."""
        index = len(self._items)
        return self._event(
            event_type, item_id=f"msg_{self._request_id}_{index}", output_index=index, content_index=0, **fields
        )

    def _event(self, event_type: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return _event(event_type, number, **fields)


class BackgroundFormatter(ResponsesFormatter):
    """As `ResponsesFormatter`, after the three events that a background response has before the answer."""

    def __init__(
        self,
        head: Mapping[str, Any],
        model: str,
        parser: AnswerParser,
        logprobs: LogprobsFormatter,
        options: ResponsesOptions,
    ) -> None:
        """As `ResponsesFormatter`; `head`: the response's fields independent of the status."""
        super().__init__(model, parser, logprobs, options)
        self._stored_head = head
        self._num_events = 3

    def start(self, request_id: str, *, emulated: bool) -> None:
        super().start(request_id, emulated=emulated)
        self._head |= self._stored_head

    def first_events(self) -> Iterator[bytes]:
        return iter(())


def _event(event_type: str, number: int, **fields: Any) -> bytes:
    """A server-sent event."""
    content = to_json_bytes({"type": event_type, "sequence_number": number, **fields})
    return b"event: %s\ndata: %s\n\n" % (event_type.encode(), content)


def responses_usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """`usage` under the names of this API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _custom_input(arguments: str) -> str:
    """The text in a custom tool's call, whose arguments have the text as `input`."""
    value = parse_json(arguments)
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _reasoning_text(text: str) -> dict[str, str]:
    return {"type": "reasoning_text", "text": text}


def _output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
