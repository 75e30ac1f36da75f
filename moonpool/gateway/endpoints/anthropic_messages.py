"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: bodies, handlers, response objects and error bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from moonpool.base.checkpoint import ChatOptions
from moonpool.base.checkpoint.past_calls import call_arguments
from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import ITEM_LIMITS, SamplingParams
from moonpool.client import GenerateResult, Message, MessagePart, TokenEvent, ToolCall, Usage
from moonpool.gateway.reasoning_parsers.base import ReasoningText
from moonpool.gateway.serving.answer_parser import AnswerArgumentsDelta, AnswerParser, AnswerPart, WholePart
from moonpool.gateway.serving.auth import CheckedRequest
from moonpool.gateway.serving.body import Body, FailFastList, Integer
from moonpool.gateway.serving.client_watch import while_connected
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.errors import ErrorResponse
from moonpool.gateway.serving.generate_body import GenerateBody
from moonpool.gateway.serving.generation_response import GenerationResponse
from moonpool.gateway.serving.json_response import json_response, to_json_bytes
from moonpool.gateway.serving.known_fields import (
    ANTHROPIC_IGNORED,
    ANTHROPIC_MESSAGE_IGNORED,
    ANTHROPIC_REFUSED,
    BLOCK_IGNORED,
)
from moonpool.gateway.serving.messages import (
    TEXT_PARTS,
    ContentPart,
    check_picture_role,
    joined_text,
    message_part,
    sdk_tool_call,
    with_content,
)
from moonpool.gateway.serving.offered_tools import strict_parameters
from moonpool.gateway.serving.response_formatter import ResponseFormatter
from moonpool.gateway.serving.structured_outputs import OutputFormatBody
from moonpool.gateway.serving.thinking import Effort, ThinkingLimit
from moonpool.gateway.serving.tolerance import DEFERRED, PartOrPassedOver, ToolOrPassedOver, check_content, known
from moonpool.gateway.serving.tool_set import ToolSet, checked_tools, tool_definition

TTL_S = {"5m": 300.0, "1h": 3600.0}
"""Seconds for which a prompt's KV is worth keeping, by the TTL of a breakpoint."""
_TOOL_REFERENCE = "tool_reference"
_ERROR_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


class CacheControl(Body):
    """A cache breakpoint: the prompt up to here comes again."""

    ignored = ("scope",)

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class CacheablePart(ContentPart):
    """A part that may end with a breakpoint, or the name of a tool that a client's search found."""

    kinds = (*ContentPart.kinds, _TOOL_REFERENCE)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"transformations": ([],)}

    cache_control: CacheControl | None = None
    tool_name: str | None = None

    def prompt_text(self) -> str | None:
        return self.tool_name if self.type == _TOOL_REFERENCE else super().prompt_text()

    def shown_text(self) -> str:
        """The text that stands in the prompt, "" for none."""
        return self.prompt_text() or ""


class MessagesTool(Body):
    """A function that the model may call. `strict` closes the objects of the schema."""

    ignored = ("eager_input_streaming", "input_examples", *DEFERRED)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"allowed_callers": (["direct"],)}

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def definition(self, field: str) -> dict[str, Any]:
        """The function as chat templates take functions.

        Raises:
            InvalidRequest: the name is wrong; names `field`.
        """
        parameters = strict_parameters(self.input_schema, self.strict)
        return tool_definition(field, self.name, self.description, parameters, strict=bool(self.strict))


class MessagesToolChange(Body):
    """The tool of a `tool_addition` or a `tool_removal`: a name, or a whole definition."""

    ignored = ("mcp_server_name", "server_name")

    type: Literal["tool_reference", "tool_definition", "mcp_tool_reference", "mcp_toolset_reference"]
    name: str | None = None
    definition: ToolOrPassedOver[MessagesTool] | None = None


class MessagesContentBlock(CacheablePart):
    """A message block: text, a tool call or thinking (assistant), or a tool call's result (user)."""

    ignored = (*BLOCK_IGNORED, "signature", "tool_changes")
    kinds = (
        "text",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "compaction",
        "tool_addition",
        "tool_removal",
        "image",
    )

    id: str | None = None
    name: str | None = None
    input: Any = None
    thinking: str | None = None
    tool_use_id: str | None = None
    content: str | FailFastList[CacheablePart] | None = None
    tool: MessagesToolChange | None = None

    def shown_text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return self.content[-1].shown_text() if self.content else super().shown_text()

    def breakpoint(self) -> CacheControl | None:
        """The breakpoint of the block, or of a part within."""
        parts = self.content if isinstance(self.content, list) else ()
        return self.cache_control or next((part.cache_control for part in reversed(parts) if part.cache_control), None)

    def ignored_fields(self, place: str = "") -> Iterator[str]:
        return iter(()) if self.type == "thinking" else super().ignored_fields(place)

    def change_tools(self, tools: dict[str, tuple[str, MessagesTool]], place: str) -> None:
        """Add a tool to those that the model sees, or take one away, as the block says.

        Args:
            tools: by name, each with the place of the definition.
            place: this block's.

        Raises:
            InvalidRequest: the block has no tool; names `tool`.
        """
        if self.type not in ("tool_addition", "tool_removal"):
            return
        if self.tool is None:
            raise InvalidRequest(f"{place}.tool", "is missing")
        if self.type == "tool_removal":
            tools.pop(self.tool.name or "", None)
        elif isinstance(added := self.tool.definition, MessagesTool):
            tools[added.name] = f"{place}.tool.definition", added


class MessagesMessage(Body):
    """One message."""

    ignored = ANTHROPIC_MESSAGE_IGNORED
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"output_config": ({},)}

    role: Literal["system", "user", "assistant"]
    content: str | FailFastList[PartOrPassedOver[MessagesContentBlock]] | None = None

    def blocks(self) -> list[tuple[int, MessagesContentBlock]]:
        """The blocks that the model sees, each with its index."""
        return known(self.content) if isinstance(self.content, list) else []

    def to_messages(self, field: str) -> Iterator[Message]:
        """The message for the SDK. Each tool result becomes a message, before the message with the user's text.

        Raises:
            InvalidRequest: the role cannot have a block; names the block.
        """
        check_content(self.content, self.role, f"{field}.content")
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        texts: list[MessagePart] = []
        calls: list[ToolCall] = []
        thinking: list[str] = []
        for index, block in self.blocks():
            match self.role, block.type:
                case "user", "tool_result":
                    yield _tool_result(block, f"{field}.content.{index}")
                case "assistant", "thinking" | "redacted_thinking":
                    thinking.append(block.thinking or "")
                case "assistant", "tool_use":
                    calls.append(_tool_use(block, f"{field}.content.{index}"))
                case _, "tool_addition" | "tool_removal":
                    pass  # `MessagesPrompt.tool_set`
                case "assistant", "compaction":
                    texts.append({"text": block.content if isinstance(block.content, str) else ""})
                case _:
                    texts.append(message_part(block, f"{field}.content.{index}"))
        message: Message = {"role": self.role, "content": ""}
        if any("picture" in part for part in texts):
            check_picture_role(self.role, f"{field}.content")
            message["parts"] = texts
        else:
            message["content"] = "\n".join(part["text"] for part in texts)
        if calls:
            message["tool_calls"] = calls
        if any(thinking):
            message["reasoning_content"] = "\n".join(filter(None, thinking))
        if texts or self.role == "assistant" or not self.content:
            yield message


class MessagesToolChoice(Body):
    """Whether the model may or must call functions."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesOutputConfig(Body):
    """Options of the answer."""

    ignored = ("task_budget",)

    effort: Effort | None = None
    format: OutputFormatBody | None = None


class MessagesThinking(Body):
    """Whether the model may think before answering, and for how many tokens."""

    ignored = ("block_binding", "display")

    budget_tokens: Annotated[Integer, Field(ge=0)] | None = None
    type: Literal["enabled", "disabled", "adaptive"]


class MessagesPrompt(Body):
    """The conversation: what both endpoints read. The text of `system` becomes the first message."""

    ignored = ANTHROPIC_IGNORED
    refused = ANTHROPIC_REFUSED
    unknown_ignored = True

    model: str | None = None
    messages: FailFastList[MessagesMessage]
    system: str | FailFastList[CacheablePart] | None = None
    tools: FailFastList[ToolOrPassedOver[MessagesTool]] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: MessagesOutputConfig | None = None
    thinking: MessagesThinking | None = None
    cache_control: CacheControl | None = None

    def check(self) -> None:
        if not self.messages:
            raise InvalidRequest("messages", "must not be empty")

    def chat_options(self) -> ChatOptions:
        """How the messages become a prompt. The answer continues a last message of the assistant."""
        thinks: dict[str, object] = self.thinking_limit().template_kwargs()
        if self.thinking is not None:
            thinks["enable_thinking"] = self.thinking.type != "disabled"
        return ChatOptions(continue_final_message=self.messages[-1].role == "assistant", template_kwargs=thinks)

    def thinking_limit(self) -> ThinkingLimit:
        """How long the answer may think."""
        tokens = self.thinking.budget_tokens if self.thinking is not None else None
        return ThinkingLimit(tokens, self.output_config.effort if self.output_config is not None else None)

    def cache_marks(self) -> list[tuple[str, CacheControl | None]]:
        """The texts of the prompt in order, each with the breakpoint at the text's end.

        Chat templates write the tools into the system prompt: a tool's breakpoint counts as the system prompt's.
        """
        tools = next((tool.cache_control for _, tool in reversed(known(self.tools)) if tool.cache_control), None)
        system = [CacheablePart(type="text", text=self.system)] if isinstance(self.system, str) else self.system or []
        marks = [(part.shown_text(), part.cache_control) for part in system] or [("", None)]
        marks[-1] = marks[-1][0], marks[-1][1] or tools
        for message in self.messages:
            if isinstance(message.content, str):
                marks.append((message.content, None))
            else:
                marks += [(block.shown_text(), block.breakpoint()) for _, block in message.blocks()]
        marks[-1] = marks[-1][0], marks[-1][1] or self.cache_control
        return marks

    def to_messages(self) -> list[Message]:
        """The messages for the SDK.

        Raises:
            InvalidRequest: a block is not supported; names the block.
        """
        system = joined_text(self.system or "", "system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for index, message in enumerate(self.messages):
            messages += message.to_messages(f"messages.{index}")
        return messages

    def tool_set(self) -> ToolSet | None:
        """Functions that the model may call; None without tools, or if `tool_choice` is "none".

        Raises:
            InvalidRequest: a tool is wrong or not supported; names the field.
        """
        choice = self.tool_choice or MessagesToolChoice(type="auto")
        forced = {"any": "", "tool": choice.name or "?"}.get(choice.type)
        if choice.type == "none":
            return checked_tools([], forced, parallel=True)
        given = [(f"tools.{index}", tool) for index, tool in known(self.tools)]
        if len({tool.name for _, tool in given}) < len(given):
            raise InvalidRequest("tools", "two functions have the same name")
        tools = {tool.name: (place, tool) for place, tool in given}
        for place, message in enumerate(self.messages):
            for index, block in message.blocks():
                block.change_tools(tools, f"messages.{place}.content.{index}")
        definitions = [tool.definition(place) for place, tool in tools.values()]
        return checked_tools(definitions, forced, parallel=not choice.disable_parallel_tool_use)


class MessagesBody(MessagesPrompt, GenerateBody):
    """Body of `/v1/messages`."""

    max_tokens: Integer
    stop_sequences: FailFastList[str] | None = Field(None, max_length=ITEM_LIMITS["stop"])
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None

    def keep_s(self) -> float | None:
        return max((TTL_S[mark.ttl] for _, mark in self.cache_marks() if mark is not None), default=None)

    def to_sampling_params(self, max_tokens: int) -> SamplingParams:
        fields: dict[str, Any] = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        if self.output_config is not None and self.output_config.format is not None:
            self._format_field = "output_config.format"
            fields["response_format"], fields["grammar"] = self.output_config.format.format_and_grammar(
                self._format_field
            )
        return SamplingParams(max_tokens=max_tokens, stop=self.stop_sequences or (), **fields)


class CountTokensBody(MessagesPrompt):
    """Body of `/v1/messages/count_tokens`."""


def _tool_result(block: MessagesContentBlock, field: str) -> Message:
    if not block.tool_use_id:
        raise InvalidRequest(f"{field}.tool_use_id", "is missing")
    message: Message = {"role": "tool", "content": "", "tool_call_id": block.tool_use_id}
    return with_content(message, block.content or "", f"{field}.content", (*TEXT_PARTS, _TOOL_REFERENCE))


def _tool_use(block: MessagesContentBlock, field: str) -> Any:
    for name in ("id", "name"):
        if not getattr(block, name):
            raise InvalidRequest(f"{field}.{name}", "is missing")
    return sdk_tool_call(block.id or "", block.name or "", block.input)


async def messages(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Answer a conversation."""
    checked = await gateway.auth.read_body(request, MessagesBody)
    body, state = checked.body, await gateway.cluster.state()
    job = gateway.builder.prepare(checked, state, body.max_tokens)
    sent, tools = await checked.work(body.to_messages), await checked.work(body.tool_set)
    job.prompts = [{"messages": sent}]
    job.set_chat_options(body.chat_options())
    parser = await while_connected(request.receive, gateway.builder.offer_tools(job, tools))
    marks = await checked.work(body.cache_marks)
    marked = _cache_breakpoints(gateway, checked, sent, marks, tools)
    cache = await while_connected(request.receive, marked)
    decode = partial(gateway.tokenizer.decode_now, skip_special=job.sampling.skip_special_tokens)
    return gateway.generate(job, MessagesFormatter(job.model_name, parser, body.stop_sequences or (), decode, cache))


@dataclass(frozen=True, slots=True)
class CacheBreakpoints:
    """Prompt tokens behind the last breakpoint, and behind the last with a TTL of an hour; None: there is none."""

    behind: int | None = None
    behind_hour: int | None = None

    def created_tokens(self, usage: Usage) -> tuple[int, int]:
        """Tokens up to the breakpoints whose KV was computed anew: for five minutes, and for an hour."""
        hour = 0 if self.behind_hour is None else max(0, usage.prompt_tokens - self.behind_hour - usage.cached_tokens)
        known = usage.cached_tokens + hour
        return 0 if self.behind is None else max(0, usage.prompt_tokens - self.behind - known), hour


async def _cache_breakpoints(
    gateway: GatewayContext,
    checked: CheckedRequest[MessagesBody],
    sent: Sequence[Message],
    marks: Sequence[tuple[str, CacheControl | None]],
    tools: ToolSet | None,
) -> CacheBreakpoints:
    ends = [index for index, (_, mark) in enumerate(marks) if mark is not None]
    if not ends or any("parts" in message for message in sent):
        return CacheBreakpoints()  # tokens of pictures are not known here
    hours = [index for index in ends if (mark := marks[index][1]) is not None and mark.ttl == "1h"]
    wanted, texts = [ends[-1], *hours[-1:]], [text for text, _ in marks]
    if min(wanted) == len(marks) - 1:
        behind = [0] * len(wanted)  # the prompt's end: nothing is counted
    else:
        definitions = tools.definitions if tools else ()
        behind = await gateway.tokenizer.tokens_behind(
            checked.caller.tenant, sent, definitions, checked.body.chat_options(), texts, wanted
        )
    return CacheBreakpoints(*behind)


async def count_tokens(gateway: GatewayContext, request: Request) -> Response:
    """Number of tokens in a conversation."""
    checked = await gateway.auth.read_body(request, CountTokensBody)
    max_tokens, tools = await gateway.max_model_len(), await checked.work(checked.body.tool_set)
    sent = await checked.work(checked.body.to_messages)

    async def encoded() -> list[int]:
        tenant = checked.caller.tenant
        messages = await gateway.pictures.read(tenant, sent)
        definitions, options = tools.definitions if tools else (), checked.body.chat_options()
        return await gateway.tokenizer.encode_chat(tenant, messages, definitions, max_tokens, options)

    tokens = await while_connected(request.receive, encoded())
    checked.caller.budget.charge_work(len(tokens))
    return json_response({"input_tokens": len(tokens)}, checked.warning_headers)


class MessagesFormatter(ResponseFormatter):
    """Writes a message, or the events of a message."""

    def __init__(
        self,
        model: str,
        parser: AnswerParser,
        stops: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        cache: CacheBreakpoints,
    ) -> None:
        """Write answers of `model`.

        Args:
            model: name of the model in the response.
            parser: finds the tool calls in the answer.
            stops: stop texts of the request.
            decode: returns the text of tokens, to find the stop text that ended the answer.
            cache: the prompt's breakpoints.
        """
        self._cache = cache
        self._model = model
        self._parser = parser
        self._stops = stops
        self._decode = decode
        self._head: dict[str, Any] = {}
        self._blocks = 0  # content blocks that have started
        self._open = ""  # kind of the open block: "text", "thinking", "call", or "" for none

    def start(self, request_id: str, *, emulated: bool) -> None:
        self._parser.start(request_id)
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": self._model}
        if emulated:
            self._head["emulated"] = True

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        parts = self._parser.parse_full(result.text, 0, is_cut=result.finish_reason == "length")
        content = [_content_block(part) for part in parts]
        return {**self._head, "content": content, **self._end(result), "usage": self._usage(result)}

    def first_events(self) -> Iterator[bytes]:
        # The usage is known at the end only.
        empty: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": messages_usage(Usage(), 0, self._cache),
        }
        yield _messages_event("message_start", {"message": {**self._head, **empty}})

    def text_event(self, text: str, choice: int) -> bytes:
        return b"".join(map(self._block, self._parser.push(text, choice)))

    def add_tokens(self, event: TokenEvent) -> None:
        """Anthropic's API has no log probabilities and no token ids."""

    def last_events(self, result: GenerateResult) -> Iterator[bytes]:
        yield from map(self._block, self._parser.end(0, is_cut=result.finish_reason == "length"))
        yield self._close_block()
        yield _messages_event("message_delta", {"delta": self._end(result), "usage": self._usage(result)})
        yield _messages_event("message_stop", {})

    def error_event(self, error: ErrorResponse) -> bytes:
        return _messages_event("error", anthropic_error_body(error))

    def error_body(self, error: ErrorResponse) -> dict[str, Any]:
        return anthropic_error_body(error)

    def _block(self, part: AnswerPart) -> bytes:
        """Events for a part of the answer. Consecutive texts share a block, and so do the parts of a tool call."""
        match part:
            case str():
                before = b"" if self._open == "text" else self._open_block("text", {"type": "text", "text": ""})
                return before + self._delta({"type": "text_delta", "text": part})
            case ReasoningText(text):
                start = b"" if self._open == "thinking" else self._open_block("thinking", _thinking_block(""))
                return start + self._delta({"type": "thinking_delta", "thinking": text})
            case AnswerArgumentsDelta():
                return self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        start = self._open_block("call", {"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
        whole = {"type": "input_json_delta", "partial_json": part.arguments}
        return start + (self._delta(whole) if part.arguments else b"")

    def _open_block(self, kind: str, block: dict[str, Any]) -> bytes:
        """Events that close the open block, if any, and open the next."""
        before = self._close_block()
        self._open = kind
        self._blocks += 1
        return before + _messages_event("content_block_start", {"index": self._blocks - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _messages_event("content_block_delta", {"index": self._blocks - 1, "delta": delta})

    def _close_block(self) -> bytes:
        """The event that closes the open block, if any."""
        if not self._open:
            return b""
        self._open = ""
        return _messages_event("content_block_stop", {"index": self._blocks - 1})

    def _usage(self, result: GenerateResult) -> dict[str, Any]:
        return messages_usage(result.usage, self._parser.reasoning_tokens(result.choices), self._cache)

    def _end(self, result: GenerateResult) -> dict[str, str | None]:
        stop = self._stopped_by(result)
        ended = "stop_sequence" if stop is not None else "tool_use" if self._parser.has_tool_calls(0) else "end_turn"
        return {"stop_reason": "max_tokens" if result.finish_reason == "length" else ended, "stop_sequence": stop}

    def _stopped_by(self, result: GenerateResult) -> str | None:
        """The stop text that ended the answer: the tokens continue beyond the answer's text."""
        if result.finish_reason != "stop" or not self._stops:
            return None
        # Without the prompt before them, some tokenizers drop the first token's leading space.
        rest = self._decode(result.token_ids)[max(0, len(result.text) - 1) :]
        found = {rest.find(stop): stop for stop in self._stops if stop in rest}
        return found[min(found)] if found else None


def _content_block(part: WholePart) -> dict[str, Any]:
    match part:
        case str():
            return {"type": "text", "text": part}
        case ReasoningText(text):
            return _thinking_block(text)
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": call_arguments(part.arguments)}


def _thinking_block(text: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def anthropic_error_body(error: ErrorResponse) -> dict[str, Any]:
    """Anthropic's error body, with the details of the error."""
    default = "api_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    fields = {"type": _ERROR_TYPES.get(error.status, default), "message": error.message}
    return {"type": "error", "error": fields | error.detail}


def messages_usage(usage: Usage, thinking_tokens: int, cache: CacheBreakpoints) -> dict[str, Any]:
    """Anthropic's usage: `input_tokens` has neither cached tokens nor those computed up to a breakpoint."""
    minutes, hour = cache.created_tokens(usage)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - minutes - hour,
        "cache_creation_input_tokens": minutes + hour,
        "cache_creation": {"ephemeral_5m_input_tokens": minutes, "ephemeral_1h_input_tokens": hour},
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }


def _messages_event(kind: str, content: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), to_json_bytes({"type": kind, **content}))
