"""What answers look like: OpenAI's objects, whole and as server-sent events."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic_core import to_json

from moonpool.client import GenerateResult, TokenEvent, TokenLogprobs, Usage
from services.gateway.errors import Refusal
from services.gateway.scores import Scores
from services.gateway.tools import Call, Piece, Reading

DONE = b"data: [DONE]\n\n"


class Form(Protocol):
    """The shape of one answer; `begin` is called before the others."""

    def begin(self, request_id: str, *, emulated: bool) -> None:
        """The request was placed, and its first tokens are there."""
        ...

    def whole(self, result: GenerateResult) -> dict[str, Any]:
        """The answer as one object."""
        ...

    def opening(self) -> Iterator[bytes]:
        """Events before the first text."""
        ...

    def piece(self, text: str, choice: int) -> bytes:
        """The event of a piece of text of one of the request's answers."""
        ...

    def note(self, event: TokenEvent) -> None:
        """Tokens of the next piece have come."""
        ...

    def closing(self, result: GenerateResult) -> Iterator[bytes]:
        """Events after the last text."""
        ...

    def failure(self, refused: Refusal) -> bytes:
        """The last event of a stream that broke."""
        ...

    def refused(self, refused: Refusal) -> dict[str, Any]:
        """The body of a refusal."""
        ...


def event(content: Mapping[str, Any]) -> bytes:
    """An event with a JSON object."""
    return b"data: " + compact(content) + b"\n\n"


def compact(content: Mapping[str, Any]) -> bytes:
    """JSON without spaces; numbers that JSON does not have become null."""
    return to_json(content, inf_nan_mode="null")  # a third of the time of `json`, once per token


def usage(counted: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counted.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class Shape:
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


class OpenAIForm:
    """What chat and plain completions have in common."""

    prefix: ClassVar[str]
    """What the answer's id begins with."""
    kinds: ClassVar[tuple[str, str]]
    """The answer's `object`: whole, and of a stream."""
    nothing: ClassVar[dict[str, Any]]
    """A choice without text."""

    def __init__(self, model: str, scores: Scores, shape: Shape) -> None:
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
        self._around = b"data: " + compact(self._head)[:-1] + b',"choices":[', b"]" + usage_member + b"}\n\n"

    def opening(self) -> Iterator[bytes]:
        return iter(())

    def failure(self, refused: Refusal) -> bytes:
        return event(refused.body())

    def refused(self, refused: Refusal) -> dict[str, Any]:
        return refused.body()

    def closing(self, result: GenerateResult) -> Iterator[bytes]:
        for index, choice in enumerate(result.choices):
            yield self.rest(index) + self._chunk(self.nothing, index, self.reason(choice.finish_reason, index))
        if self._shape.include_usage:
            yield event({**self._head, "choices": [], "usage": usage(result.usage)})
        yield DONE

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
        whole = {**self._head, "choices": choices, "usage": usage(result.usage)}
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
        return before + compact(filled) + behind


class ChatForm(OpenAIForm):
    """`chat.completion`, or `chat.completion.chunk` of a stream."""

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")
    nothing: ClassVar[dict[str, Any]] = {"delta": {}}

    def __init__(self, model: str, scores: Scores, shape: Shape, reading: Reading) -> None:
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
        calls = [called(piece) for piece in pieces if isinstance(piece, Call)]
        if not calls:
            return {"message": {"role": "assistant", "content": text}}
        said = "".join(piece for piece in pieces if isinstance(piece, str))
        return {"message": {"role": "assistant", "content": said or None, "tool_calls": calls}}

    def opening(self) -> Iterator[bytes]:
        start: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
        if (prompts := self._shape.prompt_ids) is not None:
            filled = {"index": 0, **start, "logprobs": None, "finish_reason": None, "token_ids": []}
            yield event(self.with_prompt_ids(self._first(filled), prompts))
        for index in range(int(prompts is not None), self._shape.choices):
            yield self._chunk(start, index, scored=False)

    def piece(self, text: str, choice: int) -> bytes:
        return self._chunks(self._reading.push(text, choice), choice)

    def rest(self, choice: int) -> bytes:
        return self._chunks(self._reading.end(choice), choice)

    def reason(self, reason: str, choice: int) -> str:
        return "tool_calls" if reason == "stop" and self._reading.called(choice) else reason

    def _chunks(self, pieces: list[Piece], choice: int) -> bytes:
        return b"".join(self._chunk({"delta": _delta(piece)}, choice) for piece in pieces)


def called(call: Call) -> dict[str, Any]:
    """OpenAI's object of a call."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case str():
            return {"content": piece}
        case Call():
            return {"tool_calls": [{"index": piece.number, **called(piece)}]}
    return {"tool_calls": [{"index": piece.number, "function": {"arguments": piece.arguments}}]}


class CompletionForm(OpenAIForm):
    """`text_completion`, the same object whole and in a stream."""

    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")
    nothing: ClassVar[dict[str, Any]] = {"text": ""}

    def __init__(self, model: str, scores: Scores, shape: Shape) -> None:
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
            yield event(self.with_prompt_ids(self._first(filled), prompts or ()))

    def filled(self, text: str, choice: int) -> dict[str, Any]:
        return {"text": text}

    def piece(self, text: str, choice: int) -> bytes:
        return self._chunk({"text": text}, choice)
