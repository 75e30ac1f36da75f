"""Body of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moonpool.base.checkpoint import ChatOptions
from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import Message
from moonpool.gateway.responses.items import ResponsesItem
from moonpool.gateway.responses.tools import ResponsesTool
from moonpool.gateway.serving.body import Body, FailFastList, Integer, SmallObject, TextOr
from moonpool.gateway.serving.generate_body import PromptCacheBody
from moonpool.gateway.serving.known_fields import RESPONSES_IGNORED, RESPONSES_REFUSED
from moonpool.gateway.serving.offered_tools import ToolChoice, chosen_tools
from moonpool.gateway.serving.openai_sampling import drawn_seed, token_biases
from moonpool.gateway.serving.structured_outputs import (
    FormatAndGrammar,
    StructuredOutputsBody,
    TextFormatBody,
    only_format,
)
from moonpool.gateway.serving.thinking import Effort, ThinkingLimit
from moonpool.gateway.serving.tolerance import ItemOrPassedOver, PassedOver, ToolOrPassedOver, known
from moonpool.gateway.serving.tool_set import ToolSet

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


class ResponsesText(Body):
    """Options of the answer's text."""

    ignored = ("verbosity",)

    format: TextFormatBody | None = None


class ResponsesStreamOptions(Body):
    """Options for a streamed response, all without effect: the last event has the usage anyway."""

    ignored = ("include_obfuscation", "include_usage")


class ResponsesReasoning(Body):
    """How hard the model is to think. The thinking comes whole, with no summary of it."""

    ignored = ("context", "generate_summary", "mode", "summary")

    effort: Effort | None = None


class ConversationReference(Body):
    """The conversation that a request continues."""

    id: str


class ResponsesBody(PromptCacheBody):
    """Body of `/v1/responses`."""

    ignored = RESPONSES_IGNORED
    refused = RESPONSES_REFUSED

    input: str | FailFastList[ItemOrPassedOver[ResponsesItem]]
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
    tools: FailFastList[ToolOrPassedOver[ResponsesTool]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    reasoning: ResponsesReasoning | None = None

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

    def items(self) -> list[ResponsesItem | PassedOver]:
        if isinstance(self.input, str):
            return [ResponsesItem(role="user", content=self.input)]
        return list(self.input)

    def thinking_limit(self) -> ThinkingLimit:
        return ThinkingLimit(effort=self.reasoning.effort if self.reasoning is not None else None)

    def chat_options(self) -> ChatOptions:
        """How the messages become a prompt."""
        return ChatOptions(template_kwargs=self.thinking_limit().template_kwargs())

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.top_logprobs or INCLUDE_LOGPROBS in (self.include or ()) else None

    def to_messages(self, past: Sequence[ResponsesItem], given: Sequence[ResponsesItem | PassedOver]) -> list[Message]:
        """The messages for the SDK, from the items before the request and the request's own.

        Raises:
            InvalidRequest: an item is wrong; names the field.
        """
        messages: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in past:
            item.add_to(messages, "previous_response_id")
        for index, item in known(given):
            item.add_to(messages, f"input.{index}")
        return messages

    def tool_set(self) -> ToolSet | None:
        tools = known(self.tools)
        definitions = [definition for index, tool in tools for definition in tool.definitions(f"tools.{index}")]
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
            "reasoning": {"effort": self.thinking_limit().effort, "summary": None},
            "store": stored,
            "text": {"format": _dumped(self._text_format()) or {"type": "text"}},
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "background": bool(self.background),
        }


def _dumped(value: Body | str | None) -> Any:
    """The value as sent by the client, for the response to repeat."""
    return value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, Body) else value
