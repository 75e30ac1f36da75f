"""OpenAI's `/v1/chat/completions` and `/v1/completions`: request bodies, chat messages, response objects, logprobs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from moonpool.client import GenerateResult, Message, TokenEvent, ToolCall, Usage
from moonpool.errors import InvalidRequest
from moonpool.logprobs import TokenLogprobs
from moonpool.sampling_params import SamplingParams
from services.gateway.errors import ErrorResponse
from services.gateway.json_body import Body, FailFastList, GenerateBody, SmallObject, to_json_bytes
from services.gateway.structured_outputs import openai_response_format
from services.gateway.tool_calls import (
    AnswerParser,
    AnswerPiece,
    AnswerToolCall,
    ToolSet,
    checked_tools,
    tool_definition,
)

_REFUSED_MESSAGE_FIELDS = ("function_call", "audio")
"""Fields of a turn that are refused; without a value they say nothing."""


class ContentPart(Body):
    """A piece of a turn."""

    type: str
    text: str | None = None


class FunctionCallBody(Body):
    """What was called, and with which arguments: a JSON object as text."""

    name: str
    arguments: str


class ToolCallBody(Body):
    """A call in an assistant's turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCallBody

    def call(self) -> ToolCall:
        """As the SDK takes it."""
        return sdk_tool_call(self.id, self.function.name, self.function.arguments)


class ChatMessageBody(Body):
    """One turn of a conversation."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | FailFastList[ContentPart] | None = None
    tool_calls: FailFastList[ToolCallBody] | None = None
    tool_call_id: str | None = None

    def ignored(self) -> Iterator[str]:
        return (name for name in super().ignored() if name not in _REFUSED_MESSAGE_FIELDS)

    def parts(self) -> Iterator[tuple[str, Body]]:
        if isinstance(self.content, list):
            yield from ((f"content.{index}", part) for index, part in enumerate(self.content))

    def message(self, place: str) -> Message:
        """The turn as the SDK takes it; a developer's turn is a system's.

        Args:
            place: name of the turn in errors, as "messages.0".

        Raises:
            InvalidRequest: names the part that is not text, or a call where there can be none.
        """
        self._check(place)
        role = "system" if self.role == "developer" else self.role
        message: Message = {"role": role, "content": self._text(place)}
        if self.tool_calls:
            message["tool_calls"] = [call.call() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _check(self, place: str) -> None:
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED_MESSAGE_FIELDS and value is not None:
                raise InvalidRequest(f"{place}.{name}", "is not supported yet")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"{place}.tool_calls", "are in an assistant's turn only")
        if bool(self.tool_call_id) != (self.role == "tool"):
            raise InvalidRequest(f"{place}.tool_call_id", "is in each turn of a tool, and in no other")

    def _text(self, place: str) -> str:
        if self.content is None and self.role == "assistant":
            return ""
        if self.content is None:
            raise InvalidRequest(f"{place}.content", "must be text")
        return joined_text(self.content, f"{place}.content")


def sdk_tool_call(id: str, name: str, arguments: str) -> ToolCall:  # noqa: A002
    """A call as the SDK takes it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def joined_text(content: str | list[ContentPart], place: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a content: parts become lines.

    Raises:
        InvalidRequest: names the part that is not text, below `place`.
    """
    if isinstance(content, str):
        return content
    return "\n".join(text_of(part, f"{place}.{index}", kinds) for index, part in enumerate(content))


def text_of(part: ContentPart, place: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a part.

    Raises:
        InvalidRequest: it is of another kind; names `place`.
    """
    if part.type not in kinds or part.text is None:
        raise InvalidRequest(place, f"must be a text, not {part.type!r}")
    return part.text


class FunctionBody(Body):
    """A function that may be called; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def definition(self, place: str) -> dict[str, Any]:
        """As chat templates take it.

        Raises:
            InvalidRequest: its name is wrong; names `place`.
        """
        return tool_definition(place, self.name, self.description, self.parameters)


class ToolBody(Body):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: FunctionBody

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield "function", self.function


class ConversationBody(Body):
    """A body with turns."""

    messages: FailFastList[ChatMessageBody] | None = None
    tools: FailFastList[ToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield from super().parts()
        yield from ((f"messages.{index}", turn) for index, turn in enumerate(self.messages or ()))
        yield from ((f"tools.{index}", tool) for index, tool in enumerate(self.tools or ()))

    def turns(self) -> list[Message]:
        """The conversation as the SDK takes it.

        Raises:
            InvalidRequest: names what is not text.
        """
        return [turn.message(f"messages.{index}") for index, turn in enumerate(self.messages or ())]

    def tools_offered(self) -> ToolSet | None:
        """Functions that the model may call; none with the choice "none".

        Raises:
            InvalidRequest: names what is wrong about them, or not built.
        """
        forced = forced_tool(self.tool_choice)
        given = [] if self.tool_choice == "none" else self.tools or []
        definitions = [tool.function.definition(f"tools.{index}.function") for index, tool in enumerate(given)]
        return checked_tools(definitions, forced, several=self.parallel_tool_calls is not False)


def forced_tool(choice: str | dict[str, Any] | None) -> str | None:
    """What an answer has to call: a function by its name, "" = any, None = it need not.

    Raises:
        InvalidRequest: names `tool_choice`: it is of no known form.
    """
    match choice:
        case None | "none" | "auto":
            return None
        case "required":
            return ""
        case {"type": "function", "function": {"name": str() as name}} | {"type": "function", "name": str() as name}:
            return name
    raise InvalidRequest("tool_choice", "must be 'auto', 'none', 'required' or name a function")


class OpenAISamplingBody(GenerateBody):
    """What chat and plain completions have in common."""

    prompt_token_ids: FailFastList[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | FailFastList[str] | None = None
    stop_token_ids: FailFastList[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    logit_bias: SmallObject[float] | None = None
    bad_words: FailFastList[str] | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: FailFastList[str] | None = None
    guided_grammar: str | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield from super().parts()
        if self.stream_options is not None:
            yield "stream_options", self.stream_options

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "is only for stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs", "is not for stream: true")

    def wants_scores(self) -> bool:
        return super().wants_scores() or self.prompt_logprobs is not None

    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, max_tokens: int) -> SamplingParams:
        names = (
            "min_tokens", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "seed", "n",
            "bad_words", "prompt_logprobs",
        )  # fmt: skip
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        given["response_format"], given["grammar"] = self._format()
        given["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's -1 = all
        return SamplingParams(max_tokens=max_tokens, logit_bias=self._logit_bias(), logprobs=self.scored(), **given)

    def _format(self) -> tuple[str, str]:
        kinds = ("json", "regex", "choice", "grammar")
        guided = {kind: getattr(self, f"guided_{kind}") for kind in kinds}
        return openai_response_format(self.response_format, self.structured_outputs, guided)

    def _logit_bias(self) -> dict[int, float]:
        try:
            return {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError:
            raise InvalidRequest("logit_bias", "its names must be token ids") from None


class ChatBody(ConversationBody, OpenAISamplingBody):
    """`/v1/chat/completions`."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def scored(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "is only for logprobs: true")
        if (self.messages is None) == (self.prompt_token_ids is None):
            raise InvalidRequest("messages", "either messages or prompt_token_ids must be given")
        if self.messages is None and self.tools:
            raise InvalidRequest("tools", "are for messages only: the chat template shows them to the model")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_completion_tokens", "differs from max_tokens, its older name")


MIN_LOGPROB = -9999.0
"""Stands for log probabilities that JSON has no number for, as vLLM does it."""


_REPLACEMENT = "\ufffd"


class LogprobsFormatter:
    """Spells tokens and their log probabilities.

    Args:
        spell: gives a token's text.
    """

    def __init__(self, spell: Callable[[int], str]) -> None:
        self._spell = spell
        self._texts: dict[int, str] = {}

    def chat(self, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The `logprobs` of a chat's choice."""
        content = [
            {**self._token(it.token_id, it.logprob), "top_logprobs": [self._token(*pair) for pair in it.top]}
            for it in found
        ]
        return {"content": content, "refusal": None}

    def plain(self, found: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """The `logprobs` of a plain completion's choice; `offset`: characters of the tokens before them."""
        texts, offsets = [self._text(it.token_id) for it in found], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite_logprob(it.logprob) for it in found],
            "top_logprobs": [
                {self._text(token): _finite_logprob(value) for token, value in _top_logprobs(it)} for it in found
            ],
            "text_offset": offsets,
        }

    def chars(self, found: Sequence[TokenLogprobs]) -> int:
        """Characters of some tokens."""
        return sum(len(self._text(it.token_id)) for it in found)

    def prompt(self, found: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """VLLM's `prompt_logprobs`: for each token itself and the likely ones by id; None for the first."""
        return [None if it is None else self._position(it) for it in found]

    def _position(self, it: TokenLogprobs) -> dict[str, Any]:
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(it.top, 1)}
        ranked.setdefault(it.token_id, (it.logprob, it.rank))
        return {
            str(token): {"logprob": _finite_logprob(value), "rank": rank, "decoded_token": self._text(token)}
            for token, (value, rank) in ranked.items()
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        spelled = None if _REPLACEMENT in text else list(text.encode())  # a part of a character has no text of its own
        return {"token": text, "logprob": _finite_logprob(logprob), "bytes": spelled}

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._spell(token)
        return self._texts[token]


def _top_logprobs(it: TokenLogprobs) -> list[tuple[int, float]]:
    """The likely tokens, and the chosen one; none where none are wanted."""
    return [*it.top, (it.token_id, it.logprob)] if it.top else []


def _finite_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


SSE_DONE = b"data: [DONE]\n\n"


def sse_event(content: Mapping[str, Any]) -> bytes:
    """An event with a JSON object."""
    return b"data: " + to_json_bytes(content) + b"\n\n"


def usage_object(counted: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counted.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """What an answer's form depends on.

    Attributes:
        stream: it is sent as it grows.
        include_usage: a stream ends with the usage.
        choices: answers to each prompt.
        prompt_ids: tokens of each prompt, where they and the answers' tokens are wanted.
    """

    stream: bool
    include_usage: bool
    choices: int
    prompt_ids: Sequence[Sequence[int]] | None = None


class OpenAIFormatter:
    """What chat and plain completions have in common."""

    prefix: ClassVar[str]
    """What the answer's id begins with."""
    kinds: ClassVar[tuple[str, str]]
    """The answer's `object`: whole, and of a stream."""
    nothing: ClassVar[dict[str, Any]]
    """A choice without text."""

    def __init__(self, model: str, scores: LogprobsFormatter, shape: CompletionOptions) -> None:
        """Take the model's name as answers have it; `scores` spells log probabilities, if there are any."""
        self._model = model
        self._shape = shape
        self._ids: defaultdict[int, list[int]] = defaultdict(list)  # not told yet, by choice
        self._scores = scores
        self._scored: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)  # not told yet, by choice
        self._kind = self.kinds[shape.stream]
        self._head: dict[str, Any] = {}
        self._around = b"", b""  # what is the same in each chunk, before its choice and behind it

    def begin(self, request_id: str, *, emulated: bool) -> None:
        self._head = {
            "id": f"{self.prefix}-{request_id}",
            "object": self._kind,
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": "emulated" if emulated else None,
        }
        usage_member = b',"usage":null' if self._shape.include_usage else b""
        self._around = b"data: " + to_json_bytes(self._head)[:-1] + b',"choices":[', b"]" + usage_member + b"}\n\n"

    def opening(self) -> Iterator[bytes]:
        return iter(())

    def failure(self, refused: ErrorResponse) -> bytes:
        return sse_event(refused.body())

    def refused(self, refused: ErrorResponse) -> dict[str, Any]:
        return refused.body()

    def closing(self, result: GenerateResult) -> Iterator[bytes]:
        for index, choice in enumerate(result.choices):
            yield self.rest(index) + self._chunk(self.nothing, index, self.reason(choice.finish_reason, index))
        if self._shape.include_usage:
            yield sse_event({**self._head, "choices": [], "usage": usage_object(result.usage)})
        yield SSE_DONE

    def whole(self, result: GenerateResult) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self.filled(choice.text, index),
                "logprobs": self.logprobs(choice.logprobs, index) if choice.logprobs else None,
                "finish_reason": self.reason(choice.finish_reason, index),
                **self._tokens(choice.token_ids),
            }
            for index, choice in enumerate(result.choices)
        ]
        whole = {**self._head, "choices": choices, "usage": usage_object(result.usage)}
        if self._shape.prompt_ids is not None:
            whole = self.with_prompt_ids(whole, self._shape.prompt_ids)
        return self.with_prompt(whole, self._scores.prompt(result.prompt_logprobs)) if result.prompt_logprobs else whole

    def note(self, event: TokenEvent) -> None:
        self._scored[event.choice] += event.logprobs
        if self._shape.prompt_ids is not None:
            self._ids[event.choice] += event.token_ids

    def _tokens(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """VLLM's field, where it is wanted."""
        return {} if self._shape.prompt_ids is None else {"token_ids": list(token_ids)}

    def with_prompt_ids(self, answer: dict[str, Any], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The answer, or a stream's first chunk, with the tokens of its prompts, where vLLM has them."""
        raise NotImplementedError

    def _first(self, filled: dict[str, Any]) -> dict[str, Any]:
        """A chunk as an object."""
        return {**self._head, "choices": [filled], **({"usage": None} if self._shape.include_usage else {})}

    def logprobs(self, found: Sequence[TokenLogprobs], choice: int) -> dict[str, Any]:
        """The form of log probabilities of an answer's next tokens."""
        raise NotImplementedError

    def with_prompt(self, whole: dict[str, Any], scores: list[dict[str, Any] | None]) -> dict[str, Any]:
        """The answer with the prompt's log probabilities, where vLLM has them."""
        raise NotImplementedError

    def filled(self, text: str, choice: int) -> dict[str, Any]:
        """What a whole choice has its text in."""
        raise NotImplementedError

    def rest(self, choice: int) -> bytes:
        """The events of what was held back of an answer that has ended."""
        return b""

    def reason(self, reason: str, choice: int) -> str:
        """Why an answer ended, in the form's words."""
        return reason

    def _chunk(
        self, choice: dict[str, Any], index: int, finish_reason: str | None = None, *, scored: bool = True
    ) -> bytes:
        found = self._scored.pop(index, None) if scored else None
        logprobs = self.logprobs(found, index) if found else None
        filled = {"index": index, **choice, "logprobs": logprobs, "finish_reason": finish_reason}
        filled |= self._tokens(self._ids.pop(index, ()) if scored else ())
        before, behind = self._around
        return before + to_json_bytes(filled) + behind


class ChatFormatter(OpenAIFormatter):
    """`chat.completion`, or `chat.completion.chunk` of a stream."""

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")
    nothing: ClassVar[dict[str, Any]] = {"delta": {}}

    def __init__(self, model: str, scores: LogprobsFormatter, shape: CompletionOptions, reading: AnswerParser) -> None:
        """As the others; `reading` finds the calls in the answers."""
        super().__init__(model, scores, shape)
        self._reading = reading

    def logprobs(self, found: Sequence[TokenLogprobs], choice: int) -> dict[str, Any]:
        return self._scores.chat(found)

    def with_prompt(self, whole: dict[str, Any], scores: list[dict[str, Any] | None]) -> dict[str, Any]:
        return {**whole, "prompt_logprobs": scores}

    def with_prompt_ids(self, answer: dict[str, Any], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        return {**answer, "prompt_token_ids": list(prompts[0])}

    def begin(self, request_id: str, *, emulated: bool) -> None:
        super().begin(request_id, emulated=emulated)
        self._reading.begin(request_id)

    def filled(self, text: str, choice: int) -> dict[str, Any]:
        pieces = self._reading.whole(text, choice)
        calls = [tool_call_object(piece) for piece in pieces if isinstance(piece, AnswerToolCall)]
        if not calls:
            return {"message": {"role": "assistant", "content": text}}
        said = "".join(piece for piece in pieces if isinstance(piece, str))
        return {"message": {"role": "assistant", "content": said or None, "tool_calls": calls}}

    def opening(self) -> Iterator[bytes]:
        start: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
        if (prompts := self._shape.prompt_ids) is not None:
            filled = {"index": 0, **start, "logprobs": None, "finish_reason": None, "token_ids": []}
            yield sse_event(self.with_prompt_ids(self._first(filled), prompts))
        for index in range(int(prompts is not None), self._shape.choices):
            yield self._chunk(start, index, scored=False)

    def piece(self, text: str, choice: int) -> bytes:
        return self._chunks(self._reading.push(text, choice), choice)

    def rest(self, choice: int) -> bytes:
        return self._chunks(self._reading.end(choice), choice)

    def reason(self, reason: str, choice: int) -> str:
        return "tool_calls" if reason == "stop" and self._reading.called(choice) else reason

    def _chunks(self, pieces: list[AnswerPiece], choice: int) -> bytes:
        return b"".join(self._chunk({"delta": _chat_delta(piece)}, choice) for piece in pieces)


def tool_call_object(call: AnswerToolCall) -> dict[str, Any]:
    """OpenAI's object of a call."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_delta(piece: AnswerPiece) -> dict[str, Any]:
    match piece:
        case str():
            return {"content": piece}
        case AnswerToolCall():
            return {"tool_calls": [{"index": piece.number, **tool_call_object(piece)}]}
    return {"tool_calls": [{"index": piece.number, "function": {"arguments": piece.arguments}}]}


class CompletionFormatter(OpenAIFormatter):
    """`text_completion`, the same object whole and in a stream."""

    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")
    nothing: ClassVar[dict[str, Any]] = {"text": ""}

    def __init__(self, model: str, scores: LogprobsFormatter, shape: CompletionOptions) -> None:
        super().__init__(model, scores, shape)
        self._chars: defaultdict[int, int] = defaultdict(int)  # of the tokens that were told, by choice

    def logprobs(self, found: Sequence[TokenLogprobs], choice: int) -> dict[str, Any]:
        offset = self._chars[choice]
        self._chars[choice] += self._scores.chars(found)
        return self._scores.plain(found, offset)

    def with_prompt(self, whole: dict[str, Any], scores: list[dict[str, Any] | None]) -> dict[str, Any]:
        return {**whole, "choices": [{**choice, "prompt_logprobs": scores} for choice in whole["choices"]]}

    def with_prompt_ids(self, answer: dict[str, Any], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        each = self._shape.choices
        choices = [{**it, "prompt_token_ids": list(prompts[it["index"] // each])} for it in answer["choices"]]
        return {**answer, "choices": choices}

    def opening(self) -> Iterator[bytes]:
        """Nothing, but for a client that wants the tokens of its prompts."""
        prompts = self._shape.prompt_ids
        for index in range(0 if prompts is None else len(prompts) * self._shape.choices):
            filled = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "token_ids": []}
            yield sse_event(self.with_prompt_ids(self._first(filled), prompts or ()))

    def filled(self, text: str, choice: int) -> dict[str, Any]:
        return {"text": text}

    def piece(self, text: str, choice: int) -> bytes:
        return self._chunk({"text": text}, choice)


MAX_PROMPTS = 64
"""Prompts of one plain completion."""


MAX_ANSWERS = 256


class StreamOptions(Body):
    """What a stream has besides text."""

    include_usage: bool | None = None


class CompletionBody(OpenAISamplingBody):
    """`/v1/completions`."""

    prompt: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]] | None = None
    logprobs: int | None = None

    def scored(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.prompt_logprobs is not None and len(self.prompts()) > 1:
            raise InvalidRequest("prompt_logprobs", "is for one prompt only")
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise InvalidRequest("prompt", "either prompt or prompt_token_ids must be given")
        if not 1 <= len(self.prompts()) <= MAX_PROMPTS:
            raise InvalidRequest("prompt", f"must be 1 to {MAX_PROMPTS} prompts")
        if len(self.prompts()) * (self.n or 1) > MAX_ANSWERS:
            raise InvalidRequest("n", f"{len(self.prompts())} prompts may have {MAX_ANSWERS} answers together")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each in the form in which it was given."""
        match self.prompt:
            case None:
                return [self.prompt_token_ids or []]
            case [str() | list(), *_]:
                return list(self.prompt)  # type: ignore[arg-type]
            case str() | [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
        return []
