"""Ollama's API: `/api/chat`, `/api/generate`, `/api/embed`, `/api/tags`, `/api/show`, `/api/version`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from moonpool.base import world
from moonpool.base.checkpoint import ChatOptions
from moonpool.base.errors import InvalidRequest, NotFound
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.version import installed_version
from moonpool.client import ClusterState, GenerateResult, Message, MessagePart, TokenEvent
from moonpool.gateway.endpoints.embeddings import EmbeddingBody, EmbeddingFormatter
from moonpool.gateway.endpoints.models import served_model_names
from moonpool.gateway.reasoning_parsers.base import ReasoningText
from moonpool.gateway.serving.answer_parser import AnswerArgumentsDelta, AnswerParser, AnswerPart, AnswerToolCall
from moonpool.gateway.serving.auth import CheckedRequest
from moonpool.gateway.serving.body import Body, FailFastList, Integer
from moonpool.gateway.serving.client_watch import while_connected
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.errors import ErrorResponse
from moonpool.gateway.serving.generate_body import GenerateBody
from moonpool.gateway.serving.generation_job import GenerationJob
from moonpool.gateway.serving.generation_response import GenerationResponse
from moonpool.gateway.serving.json_response import json_response, to_json_bytes
from moonpool.gateway.serving.merged_stream import results_of
from moonpool.gateway.serving.messages import check_picture_role, sdk_tool_call
from moonpool.gateway.serving.offered_tools import ToolBody, chosen_tools
from moonpool.gateway.serving.pictures import sent_base64
from moonpool.gateway.serving.response_formatter import ResponseFormatter
from moonpool.gateway.serving.tolerance import ToolOrPassedOver, known
from moonpool.gateway.serving.tool_set import ToolSet

ServedModel = Annotated[str, AfterValidator(lambda name: name.removesuffix(":latest"))]
"""A model's name, without the tag that Ollama's clients add."""
NDJSON_TYPE = "application/x-ndjson"
"""Media type of a stream: a JSON object a line."""


class OllamaOptions(Body):
    """How tokens are chosen, by llama.cpp's names. Options of its memory and threads are ignored."""

    unknown_ignored = True

    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    seed: Integer | None = None
    stop: str | FailFastList[str] | None = None
    num_predict: Integer | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def to_sampling(self) -> dict[str, Any]:
        """Arguments of `SamplingParams`."""
        names = "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.repeat_penalty is not None:
            found["repetition_penalty"] = self.repeat_penalty
        if self.stop is not None:
            found["stop"] = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        return found


class OllamaBody(GenerateBody):
    """What `/api/chat` and `/api/generate` have in common. A stream is the default."""

    ignored: ClassVar[Collection[str]] = ("keep_alive", "truncate", "shift")
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"logprobs": (False,), "top_logprobs": (0,)}

    model: ServedModel
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None

    def to_sampling_params(self, max_tokens: int) -> SamplingParams:
        given: dict[str, Any] = {} if self.options is None else self.options.to_sampling()
        if self.format == "json":
            given["response_format"] = "json_object"
        elif isinstance(self.format, dict):
            given |= {"response_format": "json_schema", "grammar": json.dumps(self.format)}
        self._format_field = "format"
        return SamplingParams(max_tokens=max_tokens, **given)

    def most_tokens(self, state: ClusterState) -> int:
        """Tokens of the answer at most; all that the model's length leaves unless `num_predict` is positive."""
        asked = None if self.options is None else self.options.num_predict
        return asked if asked is not None and asked > 0 else state.max_tokens

    def chat_options(self) -> ChatOptions:
        """How messages become a prompt."""
        return ChatOptions(template_kwargs={} if self.think is None else {"enable_thinking": bool(self.think)})


class OllamaFunction(Body):
    """A called function, with arguments as an object."""

    ignored: ClassVar[Collection[str]] = ("index",)

    name: str
    arguments: Any = None


class OllamaToolCall(Body):
    """A tool call in an assistant's message."""

    ignored: ClassVar[Collection[str]] = ("id", "type")

    function: OllamaFunction


class OllamaMessage(Body):
    """A message of a conversation."""

    unknown_ignored = True

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: FailFastList[OllamaToolCall] | None = None
    tool_name: str | None = None
    images: FailFastList[str] | None = None

    def to_message(self, field: str) -> Message:
        """The message without calls, pictures first.

        Raises:
            InvalidRequest: a picture is no base64, or of a role that has none; names the field.
        """
        if not self.images:
            return {"role": self.role, "content": self.content}
        check_picture_role(self.role, f"{field}.images")
        parts: list[MessagePart] = [
            {"picture": sent_base64(f"{field}.images.{index}", data)} for index, data in enumerate(self.images)
        ]
        return {"role": self.role, "content": "", "parts": [*parts, {"text": self.content}]}


class OllamaChatBody(OllamaBody):
    """Body of `/api/chat`."""

    messages: FailFastList[OllamaMessage]
    tools: FailFastList[ToolOrPassedOver[ToolBody]] | None = None

    def to_messages(self) -> list[Message]:
        """The messages for the SDK. Calls have no ids in Ollama's form: a tool's message answers the next open call."""
        messages: list[Message] = []
        open_calls: list[str] = []
        for index, given in enumerate(self.messages):
            message = given.to_message(f"messages.{index}")
            if given.role == "assistant":
                if given.thinking:
                    message["reasoning_content"] = given.thinking
                if given.tool_calls:
                    open_calls = [f"call_{len(messages)}_{number}" for number in range(len(given.tool_calls))]
                    message["tool_calls"] = [
                        sdk_tool_call(name, call.function.name, call.function.arguments)
                        for name, call in zip(open_calls, given.tool_calls, strict=True)
                    ]
            elif given.role == "tool":
                message["tool_call_id"] = open_calls.pop(0) if open_calls else f"call_{len(messages)}"
            messages.append(message)
        return messages

    def tool_set(self) -> ToolSet | None:
        definitions = [tool.function.definition(f"tools.{index}.function") for index, tool in known(self.tools)]
        return chosen_tools(definitions, None, parallel=True)


class OllamaGenerateBody(OllamaBody):
    """Body of `/api/generate`: a user's turn, or with `raw` a text that the model continues."""

    ignored: ClassVar[Collection[str]] = ("context",)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": ("",), "template": ("",), "images": ([],)}

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None


class OllamaEmbedBody(EmbeddingBody):
    """Body of `/api/embed`."""

    ignored: ClassVar[Collection[str]] = ("keep_alive",)

    model: ServedModel
    options: dict[str, Any] | None = None
    truncate: bool | None = None
    input: str | FailFastList[str] = Field(min_length=1)


class OllamaShowBody(Body):
    """Body of `/api/show`."""

    ignored: ClassVar[Collection[str]] = ("verbose", "name")
    unknown_ignored = True

    model: ServedModel


async def chat(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Answer a conversation."""
    checked = await gateway.auth.read_body(request, OllamaChatBody)
    state = await gateway.cluster.state()
    job = gateway.builder.prepare(checked, state, checked.body.most_tokens(state))
    job.prompts = [{"messages": await checked.work(checked.body.to_messages)}]
    return await _answer(gateway, request, job, checked, is_chat=True)


async def generate(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Answer a prompt."""
    checked = await gateway.auth.read_body(request, OllamaGenerateBody)
    body, state = checked.body, await gateway.cluster.state()
    job = gateway.builder.prepare(checked, state, body.most_tokens(state))
    if body.raw or not gateway.tokenizer.chats:
        job.prompts = [{"prompt": f"{body.system}\n\n{body.prompt}" if body.system else body.prompt}]
    else:
        system: list[Message] = [{"role": "system", "content": body.system}] if body.system else []
        job.prompts = [{"messages": [*system, {"role": "user", "content": body.prompt}]}]
    return await _answer(gateway, request, job, checked, is_chat=False)


async def _answer(
    gateway: GatewayContext, request: Request, job: GenerationJob, checked: CheckedRequest[OllamaBody], *, is_chat: bool
) -> GenerationResponse:
    body = checked.body
    if "messages" in job.prompts[0]:
        job.set_chat_options(body.chat_options())
    tools = await checked.work(body.tool_set)
    parser = await while_connected(request.receive, gateway.builder.offer_tools(job, tools))
    job.stream = body.stream is not False
    return gateway.generate(job, OllamaFormatter(body.model, parser, is_chat=is_chat))


class OllamaFormatter(ResponseFormatter):
    """Writes Ollama's objects: for a stream one for each text, a line each, and a last one with the figures."""

    stream_type = NDJSON_TYPE

    def __init__(self, model: str, parser: AnswerParser, *, is_chat: bool) -> None:
        """Write answers of `model`; `parser` finds thinking and calls, `is_chat`: as messages, not as texts."""
        self._model = model
        self._parser = parser
        self._is_chat = is_chat
        self._calls: dict[int, list[str]] = {}  # of a stream, by number: name, then parts of the arguments

    def start(self, request_id: str, *, emulated: bool) -> None:
        del emulated
        self._parser.start(request_id)

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        answer = result.choices[0]
        parts = self._parser.parse_full(answer.text, 0, is_cut=answer.finish_reason == "length")
        calls = [_tool_call(part.name, part.arguments) for part in parts if isinstance(part, AnswerToolCall)]
        return self._object(parts, calls) | self._end(result)

    def first_events(self) -> Iterator[bytes]:
        return iter(())

    def add_tokens(self, event: TokenEvent) -> None:
        del event

    def text_event(self, text: str, choice: int) -> bytes:
        return self._lines(self._parser.push(text, choice))

    def last_text_event(self, text: str, choice: int, finish_reason: str) -> bytes:
        parts = [*self._parser.push(text, choice), *self._parser.end(choice, is_cut=finish_reason == "length")]
        return self._lines(parts)

    def last_events(self, result: GenerateResult) -> Iterator[bytes]:
        if self._calls:
            calls = [_tool_call(name, "".join(parts)) for name, *parts in self._calls.values()]
            yield _line(self._object([], calls) | {"done": False})
        yield _line(self._object([]) | self._end(result))

    def error_event(self, error: ErrorResponse) -> bytes:
        return _line(ollama_error_body(error))

    def error_body(self, error: ErrorResponse) -> dict[str, Any]:
        return ollama_error_body(error)

    def _lines(self, parts: Collection[AnswerPart]) -> bytes:
        told = []
        for part in parts:
            match part:
                case AnswerToolCall():
                    self._calls[part.number] = [part.name, part.arguments]
                case AnswerArgumentsDelta():
                    self._calls[part.number].append(part.arguments)
                case _:
                    told.append(part)
        return _line(self._object(told) | {"done": False}) if told else b""

    def _object(self, parts: Collection[Any], calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        text = "".join(part for part in parts if isinstance(part, str))
        thinking = "".join(part.text for part in parts if isinstance(part, ReasoningText))
        extra: dict[str, Any] = {"thinking": thinking} if thinking else {}
        head = {"model": self._model, "created_at": _now()}
        if not self._is_chat:
            return {**head, "response": text, **extra}
        message = {"role": "assistant", "content": text, **extra, **({"tool_calls": list(calls)} if calls else {})}
        return {**head, "message": message}

    def _end(self, result: GenerateResult) -> dict[str, Any]:
        usage, timing = result.usage, result.timing
        return {
            "done": True,
            "done_reason": "length" if result.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(timing.e2e_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(timing.ttft_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(max(0.0, timing.e2e_s - timing.ttft_s)),
        }


def _tool_call(name: str, text: str) -> dict[str, Any]:
    """Ollama's object of a call; arguments that are no JSON object stay a text under "text"."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        arguments = None
    return {"function": {"name": name, "arguments": arguments if isinstance(arguments, dict) else {"text": text}}}


def _line(content: dict[str, Any]) -> bytes:
    return to_json_bytes(content) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


def _now() -> str:
    return datetime.fromtimestamp(world.unix_time(), UTC).isoformat().replace("+00:00", "Z")


async def embed(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Embed one or more texts."""
    checked = await gateway.auth.read_body(request, OllamaEmbedBody)
    given = checked.body.input
    if gateway.classifier is not None:
        raise InvalidRequest("input", "the served model classifies texts and has no embeddings")
    job = gateway.builder.prepare(checked, await gateway.cluster.state(), max_tokens=1)
    job.prompts = [{"prompt": text} for text in ([given] if isinstance(given, str) else given)]
    job.prompt_field, job.stream = "input", False
    return gateway.generate(job, OllamaEmbedFormatter(checked.body.model))


class OllamaEmbedFormatter(EmbeddingFormatter):
    """Writes embeddings."""

    def __init__(self, model: str) -> None:
        self._model = model

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        return {
            "model": self._model,
            "embeddings": [list(each.embedding) for each in results_of(result)],
            "total_duration": _nanoseconds(result.timing.e2e_s),
            "load_duration": 0,
            "prompt_eval_count": result.usage.prompt_tokens,
        }

    def error_body(self, error: ErrorResponse) -> dict[str, Any]:
        return ollama_error_body(error)


async def tags(gateway: GatewayContext, request: Request) -> Response:
    """The served model, under each name, and the LoRA adapters."""
    gateway.auth.tenant(request)
    state = await gateway.cluster.state()
    when = datetime.fromtimestamp(gateway.started_at, UTC).isoformat().replace("+00:00", "Z")
    models = [
        {"name": name, "model": name, "modified_at": when, "size": 0, "digest": "", "details": _details()}
        for name in served_model_names(gateway, state)
    ]
    return json_response({"models": models})


async def show(gateway: GatewayContext, request: Request) -> Response:
    """What is known of a served model.

    Raises:
        NotFound: another model is served.
    """
    checked = await gateway.auth.read_body(request, OllamaShowBody, uses_budget=False)
    state = await gateway.cluster.state()
    names = served_model_names(gateway, state)
    if checked.body.model not in names:
        raise NotFound(f"only {', '.join(map(repr, names))} is served")
    tools = ["tools"] if gateway.tokenizer.takes_tools else []
    vision = ["vision"] if gateway.tokenizer.takes_pictures else []
    shown: dict[str, object] = {
        "details": _details(),
        "model_info": {"general.architecture": "", "context_length": state.max_tokens},
        "capabilities": ["completion", *tools, *vision],
    }
    return json_response(shown, checked.warning_headers)


def _details() -> dict[str, object]:
    return {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}


async def version(gateway: GatewayContext, request: Request) -> Response:
    """Moonpool's version: clients ask whether anybody is there."""
    return json_response({"version": installed_version()})


def ollama_error_body(error: ErrorResponse) -> dict[str, Any]:
    """Ollama's error body."""
    return {"error": error.message}
