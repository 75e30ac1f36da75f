"""What answers look like: OpenAI's objects, whole and as server-sent events."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from pydantic_core import to_json

from moonpool.client import GenerateResult, TokenLogprobs, Usage
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

    def score(self, logprobs: Sequence[TokenLogprobs], choice: int) -> None:
        """Log probabilities of the tokens of the next piece; only of a request that wants them."""
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


class OpenAIForm:
    """What chat and plain completions have in common."""

    prefix: ClassVar[str]
    """What the answer's id begins with."""
    kinds: ClassVar[tuple[str, str]]
    """The answer's `object`: whole, and of a stream."""
    nothing: ClassVar[dict[str, Any]]
    """A choice without text."""

    def __init__(self, model: str, scores: Scores, *, stream: bool, include_usage: bool, choices: int) -> None:
        """Take the model's name as answers have it, whether a stream ends with the usage, and how many answers come.

        `scores` spells log probabilities, if there are any.
        """
        self._model = model
        self._scores = scores
        self._scored: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)  # not told yet, by choice
        self._choices = choices
        self._kind = self.kinds[stream]
        self._include_usage = include_usage
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
        usage_member = b',"usage":null' if self._include_usage else b""
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
        if self._include_usage:
            yield event({**self._head, "choices": [], "usage": usage(result.usage)})
        yield DONE

    def whole(self, result: GenerateResult) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self.filled(choice.text, index),
                "logprobs": self.logprobs(choice.logprobs, index) if choice.logprobs else None,
                "finish_reason": self.reason(choice.finish_reason, index),
            }
            for index, choice in enumerate(result.choices)
        ]
        whole = {**self._head, "choices": choices, "usage": usage(result.usage)}
        return self.with_prompt(whole, self._scores.prompt(result.prompt_logprobs)) if result.prompt_logprobs else whole

    def score(self, logprobs: Sequence[TokenLogprobs], choice: int) -> None:
        self._scored[choice] += logprobs

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
        before, behind = self._around
        return before + compact(filled) + behind


class ChatForm(OpenAIForm):
    """`chat.completion`, or `chat.completion.chunk` of a stream."""

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")
    nothing: ClassVar[dict[str, Any]] = {"delta": {}}

    def __init__(
        self, model: str, scores: Scores, reading: Reading, *, stream: bool, include_usage: bool, choices: int
    ) -> None:
        """As the others; `reading` finds the calls in the answers."""
        super().__init__(model, scores, stream=stream, include_usage=include_usage, choices=choices)
        self._reading = reading

    def logprobs(self, found: Sequence[TokenLogprobs], choice: int) -> dict[str, Any]:
        return self._scores.chat(found)

    def with_prompt(self, whole: dict[str, Any], scores: list[dict[str, Any] | None]) -> dict[str, Any]:
        return {**whole, "prompt_logprobs": scores}

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
        for index in range(self._choices):
            yield self._chunk({"delta": {"role": "assistant", "content": ""}}, index, scored=False)

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

    def __init__(self, model: str, scores: Scores, *, stream: bool, include_usage: bool, choices: int) -> None:
        super().__init__(model, scores, stream=stream, include_usage=include_usage, choices=choices)
        self._chars: defaultdict[int, int] = defaultdict(int)  # of the tokens that were told, by choice

    def logprobs(self, found: Sequence[TokenLogprobs], choice: int) -> dict[str, Any]:
        offset = self._chars[choice]
        self._chars[choice] += self._scores.chars(found)
        return self._scores.plain(found, offset)

    def with_prompt(self, whole: dict[str, Any], scores: list[dict[str, Any] | None]) -> dict[str, Any]:
        return {**whole, "choices": [{**choice, "prompt_logprobs": scores} for choice in whole["choices"]]}

    def filled(self, text: str, choice: int) -> dict[str, Any]:
        return {"text": text}

    def piece(self, text: str, choice: int) -> bytes:
        return self._chunk({"text": text}, choice)
