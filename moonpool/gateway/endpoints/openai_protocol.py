"""What OpenAI's APIs share: messages, tools, sampling fields, log probabilities, and the base of the formatters."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, create_model

from moonpool.base import world
from moonpool.base.checkpoint import ChatOptions
from moonpool.base.errors import InvalidRequest
from moonpool.base.json_schema import close_objects
from moonpool.base.logprobs import TokenLogprobs
from moonpool.base.sampling_params import HTTP_FIELDS, ITEM_LIMITS, SamplingParams
from moonpool.client import ClusterState, GenerateResult, Message, TokenEvent, ToolCall, Usage
from moonpool.gateway.endpoints.base import GatewayContext
from moonpool.gateway.serving.body import Body, FailFastList, Integer, SmallObject, TextOr
from moonpool.gateway.serving.errors import ErrorResponse
from moonpool.gateway.serving.generate_body import GenerateBody, PromptCacheBody
from moonpool.gateway.serving.generation import ResponseFormatter
from moonpool.gateway.serving.json_response import to_json_bytes
from moonpool.gateway.serving.known_fields import (
    CALL_IGNORED,
    COMPLETION_IGNORED,
    COMPLETION_REFUSED,
    MESSAGE_IGNORED,
    MESSAGE_REFUSED,
    PART_IGNORED,
)
from moonpool.gateway.serving.structured_outputs import (
    FormatAndGrammar,
    ResponseFormatBody,
    StructuredOutputsBody,
    only_format,
    schema_format,
)
from moonpool.gateway.serving.tool_calls import ToolSet, checked_tools, tool_definition

TEXT_PARTS = ("text", "refusal")
"""Types of parts that are message text."""
DROPPED_PARTS = ("thinking", "reasoning", "redacted_thinking")
"""Types of parts in an assistant's message that are left out of the prompt, because they do not belong to the
answer.
"""


class ContentPart(Body):
    """A part of a message's content."""

    ignored: ClassVar[Collection[str]] = PART_IGNORED
    kinds: ClassVar[Collection[str]] = (*TEXT_PARTS, *DROPPED_PARTS)
    """Values of `type` that are accepted; others are refused when the text of the part is read."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def ignored_fields(self, place: str = "") -> Iterator[str]:
        if self.type in DROPPED_PARTS:
            return iter((place.removesuffix("."),))
        return super().ignored_fields(place) if self.type in self.kinds else iter(())  # others are refused as a whole


class FunctionCallBody(Body):
    """A called function. `arguments` is a JSON object as text; models and clients also write something else."""

    ignored = CALL_IGNORED

    name: str
    arguments: Any = None


class ToolCallBody(Body):
    """A tool call in an assistant's message."""

    ignored = CALL_IGNORED

    id: str
    type: Literal["function"] = "function"
    function: FunctionCallBody

    def to_tool_call(self) -> ToolCall:
        """The call for the SDK."""
        return sdk_tool_call(self.id, self.function.name, self.function.arguments)


class ChatMessageBody(Body):
    """One message in a conversation."""

    ignored = MESSAGE_IGNORED
    refused = MESSAGE_REFUSED

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | FailFastList[ContentPart] | None = None
    refusal: str | None = None
    tool_calls: FailFastList[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def to_message(self, field: str) -> Message:
        """The message for the SDK. A developer's message becomes a system's.

        Args:
            field: name of the message in errors, for example "messages.0".

        Raises:
            InvalidRequest: a part is not text, or the role cannot have tool calls; names the field.
        """
        self._check_fields(field)
        role = "system" if self.role == "developer" else self.role
        message: Message = {"role": role, "content": self._text(field)}
        if self.tool_calls:
            message["tool_calls"] = [call.to_tool_call() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.role == "assistant" and (reasoning := self.reasoning_content or self.reasoning):
            message["reasoning_content"] = reasoning
        return message

    def _check_fields(self, field: str) -> None:
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"{field}.tool_calls", "only an assistant's message may have tool calls")
        if bool(self.tool_call_id) != (self.role == "tool"):
            raise InvalidRequest(f"{field}.tool_call_id", "must be in each message of a tool, and in no other")

    def _text(self, field: str) -> str:
        if self.content is None and self.role == "assistant":
            return self.refusal or ""
        if self.content is None:
            raise InvalidRequest(f"{field}.content", "must be text")
        dropped = DROPPED_PARTS if self.role == "assistant" else ()
        return joined_text(self.content, f"{field}.content", dropped=dropped)


def sdk_tool_call(id: str, name: str, arguments: Any) -> ToolCall:  # noqa: A002
    """A past tool call for the SDK.

    A conversation must continue whatever the call's arguments are; the conductor reads them.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


PartT = TypeVar("PartT", bound=ContentPart)


def joined_text(
    content: str | list[PartT], field: str, types: Collection[str] = TEXT_PARTS, dropped: Collection[str] = ()
) -> str:
    """Text of a message's content. Line breaks join the parts; parts of the types `dropped` are left out.

    Raises:
        InvalidRequest: a part is not text; names the part below `field`.
    """
    if isinstance(content, str):
        return content
    return "\n".join(
        part_text(part, f"{field}.{index}", types) for index, part in enumerate(content) if part.type not in dropped
    )


def part_text(part: ContentPart, field: str, types: Collection[str] = TEXT_PARTS) -> str:
    """A part's text if the part's type is in `types`.

    Raises:
        InvalidRequest: the part has another type; names `field`.
    """
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in types or text is None:
        raise InvalidRequest(field, f"must be a text, not {part.type!r}")
    return text


class FunctionBody(Body):
    """A function that the model may call; `parameters` is a JSON schema. `strict` closes the objects of the schema."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"defer_loading": (False,)}

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def definition(self, field: str) -> dict[str, Any]:
        """The function as chat templates take functions.

        Raises:
            InvalidRequest: the name is wrong; names `field`.
        """
        return tool_definition(
            field,
            self.name,
            self.description,
            strict_parameters(self.parameters, self.strict),
            strict=bool(self.strict),
        )


def strict_parameters(parameters: dict[str, Any] | None, strict: bool | None) -> Mapping[str, Any] | None:
    """Parameters of a function. If the function is strict, objects have only the members that are named."""
    return close_objects(parameters) if strict and parameters is not None else parameters


class ToolBody(Body):
    """A tool. Only functions are supported."""

    ignored = ("cache_control",)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"defer_loading": (False,)}

    type: Literal["function"]
    function: FunctionBody


class FunctionNameBody(Body):
    """A function that `tool_choice` names."""

    name: str


class AllowedToolBody(Body):
    """A function of `allowed_tools`: chat names the function in an object, responses beside the type."""

    type: Literal["function"] = "function"
    function: FunctionNameBody | None = None
    name: str | None = None


class AllowedToolsBody(Body):
    """The functions that an answer may call, and whether the answer must call one."""

    mode: Literal["auto", "required"] | None = None
    tools: FailFastList[AllowedToolBody] | None = None


class ToolChoiceBody(AllowedToolsBody):
    """`tool_choice` as an object: one function, or several. The members of `allowed_tools` may stand in the object."""

    type: Literal["function", "allowed_tools"]
    function: FunctionNameBody | None = None
    name: str | None = None
    allowed_tools: AllowedToolsBody | None = None

    def forced(self) -> str | None:
        """The function that an answer must call; "" for any of the allowed functions, None for no obligation.

        Raises:
            InvalidRequest: the choice names no function; names `tool_choice.function.name`.
        """
        if self.type == "allowed_tools":
            return "" if (self.allowed_tools or self).mode == "required" else None
        name = self.function.name if self.function is not None else self.name
        if not name:
            raise InvalidRequest("tool_choice.function.name", "is missing")
        return name

    def allowed(self) -> Collection[str] | None:
        """Names of the functions that an answer may call; None for all.

        Raises:
            InvalidRequest: a tool has no name; names `tool_choice.allowed_tools`.
        """
        if self.type == "function":
            return None
        tools = (self.allowed_tools or self).tools or []
        names = [tool.function.name if tool.function is not None else tool.name for tool in tools]
        if not names or not all(names):
            raise InvalidRequest("tool_choice.allowed_tools.tools", "must name functions")
        return frozenset(name for name in names if name)


ToolChoice = TextOr[ToolChoiceBody]


def chosen_tools(
    definitions: Sequence[dict[str, Any]], choice: str | ToolChoiceBody | None, *, parallel: bool
) -> ToolSet | None:
    """The functions that the model may call; None without functions, or if `choice` is "none".

    Raises:
        InvalidRequest: the choice is unknown or names no function of `definitions`; names `tool_choice`.
    """
    if isinstance(choice, ToolChoiceBody):
        allowed, forced = choice.allowed(), choice.forced()
        if allowed is not None:
            known = {it["function"]["name"] for it in definitions}
            if not known.issuperset(allowed):
                raise InvalidRequest("tool_choice.allowed_tools.tools", "must name functions of tools")
            definitions = [it for it in definitions if it["function"]["name"] in allowed]
        return checked_tools(definitions, forced, parallel=parallel)
    if choice not in (None, "none", "auto", "required"):
        raise InvalidRequest("tool_choice", "must be 'auto', 'none', 'required' or name a function")
    offered = [] if choice == "none" else definitions
    return checked_tools(offered, "" if choice == "required" else None, parallel=parallel)


class ChatOptionsBody(Body):
    """How messages become a prompt."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def chat_options(self) -> ChatOptions:
        """How the messages become a prompt.

        Raises:
            InvalidRequest: two fields contradict each other.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest("continue_final_message", "conflicts with add_generation_prompt")
        return ChatOptions(
            self.add_generation_prompt is not False,
            bool(self.continue_final_message),
            self.chat_template_kwargs or {},
        )


class ConversationBody(Body):
    """A body with messages for the chat template, and tools."""

    unknown_ignored = True

    messages: FailFastList[ChatMessageBody] | None = None
    tools: FailFastList[ToolBody] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def to_messages(self) -> list[Message]:
        """The messages for the SDK.

        Raises:
            InvalidRequest: a message is wrong; names the field.
        """
        return [message.to_message(f"messages.{index}") for index, message in enumerate(self.messages or ())]

    def tool_set(self) -> ToolSet | None:
        """Functions that the model may call; None without tools, or if `tool_choice` is "none".

        Raises:
            InvalidRequest: a tool is wrong or not supported; names the field.
        """
        definitions = [
            tool.function.definition(f"tools.{index}.function") for index, tool in enumerate(self.tools or ())
        ]
        return chosen_tools(definitions, self.tool_choice, parallel=self.parallel_tool_calls is not False)


class StreamOptions(Body):
    """Options of a streamed response."""

    ignored = ("include_obfuscation",)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


if TYPE_CHECKING:
    SamplingFieldsBody = GenerateBody
else:
    SamplingFieldsBody = create_model(
        "SamplingFieldsBody",
        __base__=GenerateBody,
        __module__=__name__,
        **{name: ((Integer if kind is int else kind) | None, None) for name, kind in HTTP_FIELDS.items()},
    )
    """Sampling fields that need no conversion; `moonpool.base.sampling_params` declares them."""


class OpenAISamplingBody(PromptCacheBody, SamplingFieldsBody):
    """Sampling fields of `/v1/chat/completions` and `/v1/completions`."""

    ignored: ClassVar[Collection[str]] = COMPLETION_IGNORED
    refused = COMPLETION_REFUSED

    session_id: str | None = None
    prompt_token_ids: FailFastList[int] | None = None
    max_tokens: Integer | None = None
    top_k: Integer | None = None
    stop: str | Annotated[FailFastList[str], Field(max_length=ITEM_LIMITS["stop"])] | None = None
    stop_token_ids: FailFastList[int] | None = Field(None, max_length=ITEM_LIMITS["stop_token_ids"])
    logit_bias: SmallObject[float] | None = None
    bad_words: FailFastList[str] | None = Field(None, max_length=ITEM_LIMITS["bad_words"])
    n: Integer | None = None  # these three are read here, too
    prompt_logprobs: Integer | None = None
    seed: Integer | None = None
    response_format: ResponseFormatBody | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: TextOr[dict[str, Any]] | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_choice: FailFastList[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = Field(None, min_length=1)
    guided_whitespace_pattern: str | None = None
    json_schema: TextOr[dict[str, Any]] | None = None
    regex: str | None = Field(None, min_length=1)
    ebnf: str | None = Field(None, min_length=1)
    grammar: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "is allowed only if stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs", "is not allowed if stream is true")

    def session_name(self, header: str) -> str:
        return self.session_id or super().session_name(header)

    def wants_logprobs(self) -> bool:
        return super().wants_logprobs() or self.prompt_logprobs is not None

    def include_usage(self) -> bool:
        """Whether the stream ends with an event that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def continuous_usage(self) -> bool:
        """Whether every event of the stream has the usage so far. As in vLLM, only together with `include_usage`."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def to_sampling_params(self, max_tokens: int) -> SamplingParams:
        names = (*HTTP_FIELDS, "stop", "stop_token_ids", "bad_words")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        self._format_field, fields["response_format"], fields["grammar"] = only_format(self._formats())
        fields["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's -1 = all
        fields["seed"] = drawn_seed(self.seed)
        return SamplingParams(
            max_tokens=max_tokens, logit_bias=token_biases(self.logit_bias), logprobs=self.num_logprobs(), **fields
        )

    def _formats(self) -> Iterator[tuple[str, FormatAndGrammar]]:
        """The formats that the fields ask for, with the names of the fields."""
        if self.response_format is not None:
            yield "response_format", self.response_format.format_and_grammar("response_format")
        if self.structured_outputs is not None:
            yield from self.structured_outputs.formats("structured_outputs.")
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
            "whitespace_pattern": self.guided_whitespace_pattern,
        }
        yield from StructuredOutputsBody.model_validate(guided).formats("guided_")
        if self.json_schema is not None:
            yield "json_schema", schema_format("json_schema", self.json_schema)
        if self.regex is not None:
            yield "regex", ("regex", self.regex)
        for name, grammar in (("ebnf", self.ebnf), ("grammar", self.grammar)):
            if grammar:
                yield name, ("lark", grammar)


def drawn_seed(seed: int | None) -> int | None:
    """The seed of a request. llama.cpp's -1 stands for a seed that the server draws."""
    return None if seed == -1 else seed


def token_biases(given: Mapping[str, float] | None) -> dict[int, float]:
    """`logit_bias` for the SDK, with token ids as names.

    Raises:
        InvalidRequest: a name is no number.
    """
    try:
        return {int(token): bias for token, bias in (given or {}).items()}
    except ValueError:
        raise InvalidRequest("logit_bias", "the names of the members must be token ids") from None


MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have. vLLM uses the same value."""
_REPLACEMENT = "\ufffd"


class LogprobsFormatter:
    """Writes log probabilities in the formats of OpenAI and vLLM.

    Args:
        decode: returns the text of a token.
    """

    def __init__(self, decode: Callable[[int], str]) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}  # by token id

    @classmethod
    def of(cls, gateway: GatewayContext, body: GenerateBody, state: ClusterState) -> LogprobsFormatter:
        """A formatter with the gateway's tokenizer.

        Raises:
            Mismatch: `body` asks for log probabilities of another model than the tokenizer's.
        """
        if body.wants_logprobs():
            gateway.tokenizer.check_model(state.model)
        return cls(lambda token: gateway.tokenizer.decode_now([token], skip_special=False))

    def chat(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`logprobs` for a chat completion's choice."""
        content = [
            {**self._token(it.token_id, it.logprob), "top_logprobs": [self._token(*pair) for pair in it.top]}
            for it in logprobs
        ]
        return {"content": content, "refusal": None}

    def plain(self, logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """`logprobs` for a completion's choice. `offset` is the number of characters before the first token."""
        texts, offsets = [self._text(it.token_id) for it in logprobs], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite_logprob(it.logprob) for it in logprobs],
            "top_logprobs": [
                {self._text(token): _finite_logprob(value) for token, value in _top_logprobs(it)} for it in logprobs
            ],
            "text_offset": offsets,
        }

    def echoed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """`logprobs` of a prompt that a completion repeats. The first token has none."""
        scored = self.plain([it for it in logprobs[1:] if it is not None], len(first := self._text(token_ids[0])))
        return {
            "tokens": [first, *scored["tokens"]],
            "token_logprobs": [None, *scored["token_logprobs"]],
            "top_logprobs": [None, *scored["top_logprobs"]],
            "text_offset": [0, *scored["text_offset"]],
        }

    def chars(self, logprobs: Sequence[TokenLogprobs]) -> int:
        """Number of characters in tokens."""
        return sum(len(self._text(it.token_id)) for it in logprobs)

    def prompt(self, logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """VLLM's `prompt_logprobs`: for each token, the token and the top ones by id. The first token has None."""
        return [None if it is None else self._position(it) for it in logprobs]

    def _position(self, it: TokenLogprobs) -> dict[str, Any]:
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(it.top, 1)}
        ranked.setdefault(it.token_id, (it.logprob, it.rank))
        return {
            str(token): {"logprob": _finite_logprob(value), "rank": rank, "decoded_token": self._text(token)}
            for token, (value, rank) in ranked.items()
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        encoded = None if _REPLACEMENT in text else list(text.encode())  # the token is a part of a character
        return {"token": text, "logprob": _finite_logprob(logprob), "bytes": encoded}

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode(token)
        return self._texts[token]


def _top_logprobs(it: TokenLogprobs) -> list[tuple[int, float]]:
    """The top tokens and the chosen one; empty if no top tokens were asked for."""
    return [*it.top, (it.token_id, it.logprob)] if it.top else []


def _finite_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


SSE_DONE = b"data: [DONE]\n\n"


def sse_event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event with a JSON object."""
    return b"data: " + to_json_bytes(content) + b"\n\n"


def _counts(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Request options that change the response's form.

    Attributes:
        stream: send the answer as server-sent events.
        include_usage: end the stream with an event that has the usage.
        continuous_usage: every event has the usage so far.
        choices: choices for each prompt (`n`).
        logprobs: the response has log probabilities of the answers.
        prompt_logprobs: the response has log probabilities of the prompts in vLLM's form.
        prompt_token_ids: tokens of each prompt, if the response has token ids; else None.
    """

    stream: bool
    include_usage: bool
    continuous_usage: bool
    choices: int
    logprobs: bool = False
    prompt_logprobs: bool = False
    prompt_token_ids: Sequence[Sequence[int]] | None = None

    @classmethod
    def of(cls, body: OpenAISamplingBody) -> CompletionOptions:
        """The options of a body, without token ids."""
        return cls(
            stream=bool(body.stream),
            include_usage=body.include_usage(),
            continuous_usage=body.include_usage() and body.continuous_usage(),
            choices=body.n or 1,
            logprobs=body.num_logprobs() is not None,
            prompt_logprobs=body.prompt_logprobs is not None,
        )


class OpenAIFormatter(ResponseFormatter):
    """Base class for chat completion and completion formatters."""

    id_prefix: ClassVar[str]
    """What the response's id begins with."""
    object_names: ClassVar[tuple[str, str]]
    """Value of `object` in a full response, and in a stream's events."""
    empty_choice: ClassVar[dict[str, Any]]
    """A choice without text, in an event."""

    def __init__(self, model: str, logprobs: LogprobsFormatter, options: CompletionOptions) -> None:
        """`model` is the name in the response; `logprobs` writes log probabilities."""
        self._model = model
        self._options = options
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)  # not sent yet, by choice
        self._logprobs_formatter = logprobs
        self._logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)  # not sent yet, by choice
        self._object_name = self.object_names[options.stream]
        self._head: dict[str, Any] = {}
        self._around = b"", b""  # text before and after every event's choice
        self._usage = Usage()  # so far
        self._ended: set[int] = set()  # choices whose finish reason was sent

    def start(self, request_id: str, *, emulated: bool) -> None:
        self._head = {
            "id": f"{self.id_prefix}-{request_id}",
            "object": self._object_name,
            "created": int(world.unix_time()),
            "model": self._model,
            "system_fingerprint": "emulated" if emulated else None,
        }
        usage_member = b',"usage":null' if self._options.include_usage else b""
        self._around = b"data: " + to_json_bytes(self._head)[:-1] + b',"choices":[', b"]" + usage_member + b"}\n\n"

    def first_events(self) -> Iterator[bytes]:
        return iter(())

    def error_event(self, error: ErrorResponse) -> bytes:
        return sse_event(error.body())

    def error_body(self, error: ErrorResponse) -> dict[str, Any]:
        return error.body()

    def last_events(self, result: GenerateResult) -> Iterator[bytes]:
        for index, choice in enumerate(result.choices):
            if index not in self._ended:
                yield self.last_text_event("", index, choice.finish_reason)
        if self._options.include_usage:
            yield sse_event({**self._head, "choices": [], "usage": self.usage(result)})
        yield SSE_DONE

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self.choice_fields(choice.text, index),
                "logprobs": self.logprobs(choice.logprobs, index) if choice.logprobs else None,
                "finish_reason": self.finish_reason(choice.finish_reason, index),
                **self._tokens(choice.token_ids),
            }
            for index, choice in enumerate(result.choices)
        ]
        response = {**self._head, "choices": choices, "usage": self.usage(result)}
        if self._options.prompt_token_ids is not None:
            response = self.with_prompt_token_ids(response, self._options.prompt_token_ids)
        if self._options.prompt_logprobs and result.prompt_logprobs:
            response = self.with_prompt_logprobs(response, result)
        return response

    def usage(self, result: GenerateResult) -> dict[str, Any]:
        """`usage` for a response after all choices were written."""
        return {**_counts(result.usage), "prompt_tokens_details": {"cached_tokens": result.usage.cached_tokens}}

    def count_tokens(self, prompt_tokens: int, new_tokens: int) -> None:
        self._usage = Usage(prompt_tokens, 0, self._usage.completion_tokens + new_tokens)

    def add_tokens(self, event: TokenEvent) -> None:
        self._logprobs[event.choice] += event.logprobs
        if self._options.prompt_token_ids is not None:
            self._token_ids[event.choice] += event.token_ids

    def _tokens(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """VLLM's `token_ids`, if the response has token ids."""
        return {} if self._options.prompt_token_ids is None else {"token_ids": list(token_ids)}

    def with_prompt_token_ids(self, response: dict[str, Any], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """A full response or the first event, with the tokens of the prompts where vLLM has them."""
        raise NotImplementedError

    def _event_object(self, choice: dict[str, Any]) -> dict[str, Any]:
        """An event with one choice, as an object."""
        return {**self._head, "choices": [choice], **({"usage": None} if self._options.include_usage else {})}

    def logprobs(self, logprobs: Sequence[TokenLogprobs], choice: int) -> dict[str, Any]:
        """`logprobs` for a choice's next tokens."""
        raise NotImplementedError

    def with_prompt_logprobs(self, response: dict[str, Any], result: GenerateResult) -> dict[str, Any]:
        """A full response, with the log probabilities of the prompt where vLLM has them."""
        raise NotImplementedError

    def choice_fields(self, text: str, choice: int) -> dict[str, Any]:
        """The fields of a choice in a full response that have the text."""
        raise NotImplementedError

    def text_event(self, text: str, choice: int) -> bytes:
        return b"".join(self._event(fields, choice) for fields in self.text_fields(text, choice))

    def last_text_event(self, text: str, choice: int, finish_reason: str) -> bytes:
        self._ended.add(choice)
        fields = [*(self.text_fields(text, choice) if text else ()), *self.held_back_fields(choice)]
        *others, last = fields or [self.empty_choice]
        reason = self.finish_reason(finish_reason, choice)
        # The last event has all log probabilities and tokens: vLLM's clients take one event for one token.
        before = b"".join(self._event(each, choice, with_tokens=False) for each in others)
        return before + self._event(last, choice, reason)

    def text_fields(self, text: str, choice: int) -> list[dict[str, Any]]:
        """A choice's fields in the events with the next text, one for each event."""
        raise NotImplementedError

    def held_back_fields(self, choice: int) -> list[dict[str, Any]]:
        """The same for the text that was held back until the choice ended."""
        return []

    def finish_reason(self, reason: str, choice: int) -> str:
        """`finish_reason` in the response."""
        return reason

    def _event(
        self, fields: dict[str, Any], index: int, finish_reason: str | None = None, *, with_tokens: bool = True
    ) -> bytes:
        """One choice's event; `with_tokens`: with the log probabilities and tokens that were not sent yet."""
        found = self._logprobs.pop(index, None) if with_tokens else None
        logprobs = self.logprobs(found, index) if found else None
        choice = {"index": index, **fields, "logprobs": logprobs, "finish_reason": finish_reason}
        choice |= self._tokens(self._token_ids.pop(index, ()) if with_tokens else ())
        before, behind = self._around
        if self._options.continuous_usage:
            behind = b'],"usage":' + to_json_bytes(_counts(self._usage)) + b"}\n\n"
        return before + to_json_bytes(choice) + behind
