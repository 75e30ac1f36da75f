"""OpenAI's `/v1/chat/completions`: body, handler and response objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import ModelWrapValidatorHandler, PrivateAttr, model_validator
from starlette.requests import Request

from moonpool.base.checkpoint import ChatOptions
from moonpool.base.errors import InvalidRequest
from moonpool.base.logprobs import TokenLogprobs
from moonpool.client import GenerateArguments, GenerateResult, Message
from moonpool.gateway.endpoints.context_caching import (
    CacheReference,
    apply_cache,
    cache_reference_of_headers,
    parse_cache_reference,
)
from moonpool.gateway.endpoints.openai_formatter import CompletionOptions, OpenAIFormatter, sse_event
from moonpool.gateway.reasoning_parsers.base import ReasoningText
from moonpool.gateway.serving.answer_parser import AnswerParser, AnswerPart, AnswerToolCall
from moonpool.gateway.serving.body import Integer
from moonpool.gateway.serving.client_watch import while_connected
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.generation_response import GenerationResponse
from moonpool.gateway.serving.logprobs import LogprobsFormatter
from moonpool.gateway.serving.messages import ChatOptionsBody, ConversationBody
from moonpool.gateway.serving.openai_sampling import OpenAISamplingBody


class ChatBody(ChatOptionsBody, ConversationBody, OpenAISamplingBody):
    """Body of `/v1/chat/completions`. The first message may name a cache instead of repeating the cache's messages."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"prompt": ()}

    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None

    _cache: CacheReference | None = PrivateAttr(None)

    @property
    def cache(self) -> CacheReference | None:
        """The cache that the first message named."""
        return self._cache

    @model_validator(mode="wrap")
    @classmethod
    def _take_cache_reference(cls, value: Any, handler: ModelWrapValidatorHandler[ChatBody]) -> ChatBody:
        messages = value.get("messages") if isinstance(value, dict) else None
        if not isinstance(messages, list) or not messages:
            return handler(value)
        first = messages[0]
        if not isinstance(first, dict) or first.get("role") != "cache":
            return handler(value)
        body = handler({**value, "messages": messages[1:]})
        body._cache = parse_cache_reference(first.get("content"))
        return body

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "is allowed only if logprobs is true")
        if (self.messages is None) == (self.prompt_token_ids is None):
            raise InvalidRequest("messages", "either messages or prompt_token_ids must be given")
        if self.messages is None and self.tools:
            raise InvalidRequest("tools", "are allowed only with messages: the chat template shows tools to the model")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_completion_tokens", "differs from max_tokens, its older name")
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise InvalidRequest("add_generation_prompt", "can be false only together with continue_final_message")
        if self.cache is not None and self.tools is not None:
            raise InvalidRequest("tools", "must be null beside a cache, which has its own")

    def chat_options(self) -> ChatOptions:
        options = super().chat_options()
        return replace(options, template_kwargs=self.thinking_limit().template_kwargs() | dict(options.template_kwargs))

    def prompt(self) -> GenerateArguments:
        """The prompt for the SDK.

        Raises:
            InvalidRequest: a message is wrong; names the field.
        """
        return {"token_ids": self.prompt_token_ids} if self.messages is None else {"messages": self.to_messages()}


async def chat_completions(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Answer a conversation, or a prompt of token ids."""
    checked = await gateway.auth.read_body(request, ChatBody)
    body, state = checked.body, await gateway.cluster.state()
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    job = gateway.builder.prepare(checked, state, state.max_tokens if limit is None else limit)
    tools, known_tools = await checked.work(body.tool_set), None
    job.prompts = [await checked.work(body.prompt)]
    if body.messages is not None:
        job.set_chat_options(body.chat_options())
    if reference := body.cache or cache_reference_of_headers(request.headers):
        known_tools = await apply_cache(gateway, job, reference, tools, repeated=body.cache is None)
    parser = await while_connected(request.receive, gateway.builder.offer_tools(job, tools, known_tools))
    logprobs = LogprobsFormatter.of(gateway.tokenizer, body, state)
    options = CompletionOptions.of(body)
    for name in ("return_token_ids", "add_special_tokens"):
        if getattr(body, name) and "context" in job.prompts[0]:
            raise InvalidRequest(name, "is not allowed for a chat that begins with a cache")
    if body.return_token_ids or body.add_special_tokens:
        token_ids = await gateway.builder.prompt_token_ids(job, special=bool(body.add_special_tokens))
        options = replace(options, prompt_token_ids=token_ids if body.return_token_ids else None)
        if body.add_special_tokens:
            job.replace_prompts(token_ids)
    formatter = ChatFormatter(job.model_name, logprobs, options, parser)
    if "messages" in job.prompts[0] and job.sampling.width == 1:
        asked = body.agent_hints.speculative_prefill
        begin = gateway.next_turns.begin
        job.on_finished = lambda own, result: begin(own, formatter.message, result, asked=asked)
    return gateway.generate(job, formatter)


class ChatFormatter(OpenAIFormatter):
    """Writes `chat.completion` objects and `chat.completion.chunk` events."""

    id_prefix = "chatcmpl"
    object_names = ("chat.completion", "chat.completion.chunk")
    empty_choice: ClassVar[dict[str, Any]] = {"delta": {}}

    def __init__(
        self, model: str, logprobs: LogprobsFormatter, options: CompletionOptions, parser: AnswerParser
    ) -> None:
        """As the base class; `parser` finds the tool calls in the answers."""
        super().__init__(model, logprobs, options)
        self._parser = parser
        self._begun: set[int] = set()  # choices that have had an event

    def logprobs(self, logprobs: Sequence[TokenLogprobs], choice: int) -> dict[str, Any]:
        return self._logprobs_formatter.chat(logprobs)

    def with_prompt_logprobs(self, response: dict[str, Any], result: GenerateResult) -> dict[str, Any]:
        return {**response, "prompt_logprobs": self._logprobs_formatter.prompt(result.prompt_logprobs)}

    def with_prompt_token_ids(self, response: dict[str, Any], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        return {**response, "prompt_token_ids": list(prompts[0])}

    def start(self, request_id: str, *, emulated: bool) -> None:
        super().start(request_id, emulated=emulated)
        self._parser.start(request_id)

    def choice_fields(self, text: str, choice: int, finish_reason: str) -> dict[str, Any]:
        return {"message": self._message(self._parser, text, choice, finish_reason)}

    def message(self, result: GenerateResult) -> Message:
        """The answer as a client sends it back in the next turn."""
        parser, answer = self._parser.afresh(), result.choices[0]
        parser.start(result.request_id)
        message = self._message(parser, answer.text, 0, answer.finish_reason)
        return ConversationBody.model_validate({"messages": [message]}).to_messages()[0]

    def _message(self, parser: AnswerParser, text: str, choice: int, finish_reason: str) -> dict[str, Any]:
        parts = parser.parse_full(text, choice, is_cut=finish_reason == "length")
        calls = [tool_call_object(part) for part in parts if isinstance(part, AnswerToolCall)]
        content = "".join(part for part in parts if isinstance(part, str))
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningText))
        message = {"role": "assistant", "content": (content or None) if calls or reasoning else content}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        return {**message, "tool_calls": calls} if calls else message

    def usage(self, result: GenerateResult) -> dict[str, Any]:
        details = {"reasoning_tokens": self._parser.reasoning_tokens(result.choices)}
        return {**super().usage(result), "completion_tokens_details": details}

    def first_events(self) -> Iterator[bytes]:
        """The event with the tokens of the prompt, if the response has token ids."""
        if (prompts := self._options.prompt_token_ids) is not None:
            start = self._with_role({"delta": {}}, 0)
            choice = {"index": 0, **start, "logprobs": None, "finish_reason": None, "token_ids": []}
            yield sse_event(self.with_prompt_token_ids(self._event_object(choice), prompts))

    def text_fields(self, text: str, choice: int) -> list[dict[str, Any]]:
        return [{"delta": _chat_delta(part)} for part in self._parser.push(text, choice)]

    def held_back_fields(self, choice: int, finish_reason: str) -> list[dict[str, Any]]:
        return [{"delta": _chat_delta(part)} for part in self._parser.end(choice, is_cut=finish_reason == "length")]

    def _event(
        self, fields: dict[str, Any], index: int, finish_reason: str | None = None, *, with_tokens: bool = True
    ) -> bytes:
        return super()._event(self._with_role(fields, index), index, finish_reason, with_tokens=with_tokens)

    def _with_role(self, fields: dict[str, Any], index: int) -> dict[str, Any]:
        """The fields in a choice's event. The choice's first event has the role."""
        if index in self._begun:
            return fields
        self._begun.add(index)
        delta = fields["delta"]
        return {"delta": {"role": "assistant", **({} if "tool_calls" in delta else {"content": ""}), **delta}}

    def finish_reason(self, reason: str, choice: int) -> str:
        return "tool_calls" if reason == "stop" and self._parser.has_tool_calls(choice) else reason


def tool_call_object(call: AnswerToolCall) -> dict[str, Any]:
    """OpenAI's object of a tool call."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_delta(part: AnswerPart) -> dict[str, Any]:
    match part:
        case str():
            return {"content": part}
        case ReasoningText(text):
            return {"reasoning_content": text}
        case AnswerToolCall():
            return {"tool_calls": [{"index": part.number, **tool_call_object(part)}]}
    return {"tool_calls": [{"index": part.number, "function": {"arguments": part.arguments}}]}
