"""What the responses of `/v1/chat/completions` and `/v1/completions` have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moonpool.base import world
from moonpool.base.logprobs import TokenLogprobs
from moonpool.client import GenerateResult, TokenEvent, Usage
from moonpool.gateway.serving.errors import ErrorResponse
from moonpool.gateway.serving.json_response import to_json_bytes
from moonpool.gateway.serving.logprobs import LogprobsFormatter
from moonpool.gateway.serving.openai_sampling import OpenAISamplingBody
from moonpool.gateway.serving.response_formatter import ResponseFormatter

SSE_DONE = b"data: [DONE]\n\n"


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
                **self.choice_fields(choice.text, index, choice.finish_reason),
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

    def choice_fields(self, text: str, choice: int, finish_reason: str) -> dict[str, Any]:
        """The fields of a choice in a full response that have the text; `finish_reason` is the engine's."""
        raise NotImplementedError

    def text_event(self, text: str, choice: int) -> bytes:
        return b"".join(self._event(fields, choice) for fields in self.text_fields(text, choice))

    def last_text_event(self, text: str, choice: int, finish_reason: str) -> bytes:
        self._ended.add(choice)
        fields = [*(self.text_fields(text, choice) if text else ()), *self.held_back_fields(choice, finish_reason)]
        *others, last = fields or [self.empty_choice]
        reason = self.finish_reason(finish_reason, choice)
        # The last event has all log probabilities and tokens: vLLM's clients take one event for one token.
        before = b"".join(self._event(choice_fields, choice, with_tokens=False) for choice_fields in others)
        return before + self._event(last, choice, reason)

    def text_fields(self, text: str, choice: int) -> list[dict[str, Any]]:
        """A choice's fields in the events with the next text, one for each event."""
        raise NotImplementedError

    def held_back_fields(self, choice: int, finish_reason: str) -> list[dict[str, Any]]:
        """The same for the text that was held back until the choice ended."""
        return []

    def finish_reason(self, reason: str, choice: int) -> str:
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


def sse_event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event with a JSON object."""
    return b"data: " + to_json_bytes(content) + b"\n\n"


def _counts(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
