"""Anthropic's `/v1/messages`: request bodies, message object, stream events and error bodies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, Literal

from moonpool.client import GenerateResult, Message, TokenEvent, ToolCall, Usage
from moonpool.errors import InvalidRequest
from moonpool.sampling_params import SamplingParams
from services.gateway.errors import ErrorResponse
from services.gateway.json_body import Body, FailFastList, GenerateBody, to_json_bytes
from services.gateway.openai_completions import ContentPart, joined_text, sdk_tool_call, text_of
from services.gateway.structured_outputs import messages_output_format
from services.gateway.tool_calls import (
    AnswerArgumentsDelta,
    AnswerParser,
    AnswerPiece,
    AnswerToolCall,
    ToolSet,
    checked_tools,
    tool_definition,
)

MESSAGES_PATH = "/v1/messages"


COUNT_TOKENS_PATH = "/v1/messages/count_tokens"


_UNSUPPORTED = {
    "thinking": (None, {"type": "disabled"}),
    "mcp_servers": (None, []),
    "container": (None,),
    "context_management": (None,),
    "output_format": (None,),
}
"""Fields that are not built, with the values that ask for nothing."""


class MessagesContentBlock(ContentPart):
    """A block of a turn: a text, a call (an assistant's), or the result of a call (a user's)."""

    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | FailFastList[ContentPart] | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        if isinstance(self.content, list):
            yield from ((f"content.{index}", part) for index, part in enumerate(self.content))


class MessagesMessage(Body):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: str | FailFastList[MessagesContentBlock]

    def parts(self) -> Iterator[tuple[str, Body]]:
        if isinstance(self.content, list):
            yield from ((f"content.{index}", part) for index, part in enumerate(self.content))

    def messages(self, place: str) -> Iterator[Message]:
        """The turn as the SDK takes it: results of calls are turns of their own, before the user's text.

        Raises:
            InvalidRequest: names the block that has no place here.
        """
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        texts: list[str] = []
        calls: list[ToolCall] = []
        for index, block in enumerate(self.content):
            match self.role, block.type:
                case "user", "tool_result":
                    yield _tool_result(block, f"{place}.content.{index}")
                case "assistant", "tool_use":
                    calls.append(_tool_use(block, f"{place}.content.{index}"))
                case _:
                    texts.append(text_of(block, f"{place}.content.{index}"))
        message: Message = {"role": self.role, "content": "\n".join(texts)}
        if calls:
            message["tool_calls"] = calls
        if texts or self.role != "user":
            yield message


class MessagesTool(Body):
    """A function that may be called."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class MessagesToolChoice(Body):
    """Whether the model may call functions."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesOutputConfig(Body):
    """What an answer is to be."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"effort": (None,)}

    format: dict[str, Any] | None = None


class MessagesPrompt(Body):
    """What a conversation and its count have in common. A system's text is a turn before the others."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED

    model: str | None = None
    messages: FailFastList[MessagesMessage]
    system: str | FailFastList[ContentPart] | None = None
    tools: FailFastList[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield from super().parts()
        yield from ((f"messages.{index}", turn) for index, turn in enumerate(self.messages))
        yield from ((f"tools.{index}", tool) for index, tool in enumerate(self.tools or ()))
        if isinstance(self.system, list):
            yield from ((f"system.{index}", part) for index, part in enumerate(self.system))

    def check(self) -> None:
        if not self.messages or self.messages[-1].role != "user":
            raise InvalidRequest(
                "messages", "the last turn must be a user's; continuing an answer is not supported yet"
            )

    def turns(self) -> list[Message]:
        """The conversation as the SDK takes it.

        Raises:
            InvalidRequest: names what is not text, nor a call or its result.
        """
        system = joined_text(self.system or "", "system")
        turns: list[Message] = [{"role": "system", "content": system}] if system else []
        for index, turn in enumerate(self.messages):
            turns += turn.messages(f"messages.{index}")
        return turns

    def tools_offered(self) -> ToolSet | None:
        """Functions that the model may call; none with the choice "none".

        Raises:
            InvalidRequest: names what is wrong about them, or not built.
        """
        choice = self.tool_choice or MessagesToolChoice(type="auto")
        forced = {"any": "", "tool": choice.name or "?"}.get(choice.type)
        given = [] if choice.type == "none" else self.tools or []
        definitions = [
            tool_definition(f"tools.{index}", tool.name, tool.description, tool.input_schema)
            for index, tool in enumerate(given)
        ]
        return checked_tools(definitions, forced, several=not choice.disable_parallel_tool_use)


class MessagesBody(MessagesPrompt, GenerateBody):
    """The body."""

    unsupported = _UNSUPPORTED

    max_tokens: int
    stop_sequences: FailFastList[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: MessagesOutputConfig | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield from super().parts()
        if self.output_config is not None:
            yield "output_config", self.output_config

    def sampling(self, max_tokens: int) -> SamplingParams:
        given: dict[str, Any] = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        if self.output_config is not None and self.output_config.format is not None:
            given["response_format"], given["grammar"] = messages_output_format(self.output_config.format)
        return SamplingParams(max_tokens=max_tokens, stop=self.stop_sequences or (), **given)


class CountTokensBody(MessagesPrompt):
    """`/v1/messages/count_tokens`."""


def _tool_result(block: MessagesContentBlock, place: str) -> Message:
    if not block.tool_use_id:
        raise InvalidRequest(f"{place}.tool_use_id", "is missing")
    content = joined_text(block.content or "", f"{place}.content")
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}


def _tool_use(block: MessagesContentBlock, place: str) -> Any:
    for name in ("id", "name", "input"):
        if getattr(block, name) is None:
            raise InvalidRequest(f"{place}.{name}", "is missing")
    return sdk_tool_call(block.id or "", block.name or "", json.dumps(block.input, ensure_ascii=False))


_ERROR_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


class MessagesFormatter:
    """A message, or the events that make one."""

    def __init__(
        self, model: str, reading: AnswerParser, stops: Sequence[str], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """`reading` finds the calls in the answer.

        `decode` gives the text of tokens: it tells which of the texts `stops` has ended an answer.
        """
        self._model = model
        self._reading = reading
        self._stops = stops
        self._decode = decode
        self._head: dict[str, Any] = {}
        self._blocks = 0  # of the stream, that have begun
        self._open = ""  # what the last of them is that goes on: "text" or "call"

    def begin(self, request_id: str, *, emulated: bool) -> None:
        self._reading.begin(request_id)
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": self._model}
        if emulated:
            self._head["emulated"] = True

    def whole(self, result: GenerateResult) -> dict[str, Any]:
        content = [_content_block(piece) for piece in self._reading.whole(result.text, 0)]
        return {**self._head, "content": content, **self._end(result), "usage": messages_usage(result.usage)}

    def opening(self) -> Iterator[bytes]:
        # Tokens are counted at the end: Moonpool's stream tells of the prompt's with the answer's.
        empty: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": messages_usage(Usage()),
        }
        yield _messages_event("message_start", {"message": {**self._head, **empty}})

    def piece(self, text: str, choice: int) -> bytes:
        return b"".join(map(self._block, self._reading.push(text, choice)))

    def note(self, event: TokenEvent) -> None:
        """This form has no place for log probabilities and tokens, and no field of its bodies asks for them."""

    def closing(self, result: GenerateResult) -> Iterator[bytes]:
        yield from map(self._block, self._reading.end(0))
        yield self._stop()
        yield _messages_event("message_delta", {"delta": self._end(result), "usage": messages_usage(result.usage)})
        yield _messages_event("message_stop", {})

    def failure(self, refused: ErrorResponse) -> bytes:
        return _messages_event("error", messages_error_body(refused))

    def refused(self, refused: ErrorResponse) -> dict[str, Any]:
        return messages_error_body(refused)

    def _block(self, piece: AnswerPiece) -> bytes:
        """The events of a piece: a text goes on with the next one, a call with its next part."""
        match piece:
            case str():
                before = b"" if self._open == "text" else self._start("text", {"type": "text", "text": ""})
                return before + self._delta({"type": "text_delta", "text": piece})
            case AnswerArgumentsDelta():
                return self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
        start = self._start("call", {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
        whole = {"type": "input_json_delta", "partial_json": piece.arguments}
        return start + (self._delta(whole) if piece.arguments else b"")

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        """A block begins; the one before it ends."""
        before = self._stop()
        self._open = kind
        self._blocks += 1
        return before + _messages_event("content_block_start", {"index": self._blocks - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _messages_event("content_block_delta", {"index": self._blocks - 1, "delta": delta})

    def _stop(self) -> bytes:
        """The block that goes on, if any, ends."""
        if not self._open:
            return b""
        self._open = ""
        return _messages_event("content_block_stop", {"index": self._blocks - 1})

    def _end(self, result: GenerateResult) -> dict[str, str | None]:
        stop = self._stopped_by(result)
        ended = "stop_sequence" if stop is not None else "tool_use" if self._reading.called(0) else "end_turn"
        return {"stop_reason": "max_tokens" if result.finish_reason == "length" else ended, "stop_sequence": stop}

    def _stopped_by(self, result: GenerateResult) -> str | None:
        """The stop text that ended the answer, which is where the answer's text ends and its tokens go on."""
        if result.finish_reason != "stop" or not self._stops:
            return None
        # Without the prompt before them, some tokenizers drop the first token's leading space.
        rest = self._decode(result.token_ids)[max(0, len(result.text) - 1) :]
        found = {rest.find(stop): stop for stop in self._stops if stop in rest}
        return found[min(found)] if found else None


def _content_block(piece: str | AnswerToolCall) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": json.loads(piece.arguments)}


def messages_error_body(refused: ErrorResponse) -> dict[str, Any]:
    """Anthropic's error body, with what else is known of a refusal."""
    defect = "api_error" if refused.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    error = {"type": _ERROR_TYPES.get(refused.status, defect), "message": refused.message}
    return {"type": "error", "error": error | refused.detail}


def messages_usage(counted: Usage) -> dict[str, int]:
    """Anthropic's usage, where prompt tokens from the cache are counted apart from the others."""
    return {
        "input_tokens": counted.prompt_tokens - counted.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached_tokens,
        "output_tokens": counted.completion_tokens,
    }


def _messages_event(kind: str, content: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), to_json_bytes({"type": kind, **content}))
