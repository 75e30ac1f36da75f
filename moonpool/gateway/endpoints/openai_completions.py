"""OpenAI's `/v1/completions`: body, handler and response objects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from starlette.requests import Request

from moonpool.base.errors import InvalidRequest
from moonpool.base.logprobs import TokenLogprobs
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import GenerateArguments, GenerateResult, TokenEvent
from moonpool.gateway.endpoints.openai_formatter import CompletionOptions, OpenAIFormatter, sse_event
from moonpool.gateway.serving.body import FailFastList, Integer
from moonpool.gateway.serving.client_watch import while_connected
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.generation_response import GenerationResponse
from moonpool.gateway.serving.logprobs import LogprobsFormatter
from moonpool.gateway.serving.merged_stream import results_of
from moonpool.gateway.serving.openai_sampling import OpenAISamplingBody

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. A chat completion may fill the model's length."""
MAX_PROMPTS = 2048
"""Prompts per completion."""
MAX_CHOICES = 2048
"""Choices over all a completion's prompts."""


class CompletionBody(OpenAISamplingBody):
    """Body of `/v1/completions`."""

    ignored = ("parallel_tool_calls",)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "max_completion_tokens": (),
        "messages": (),
        "top_logprobs": (0,),
    }

    echo: bool | None = None
    prompt: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]] | None = None
    logprobs: Integer | None = None

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise InvalidRequest("prompt", "either prompt or prompt_token_ids must be given")
        if not 1 <= len(self.prompts()) <= MAX_PROMPTS:
            raise InvalidRequest("prompt", f"must be 1 to {MAX_PROMPTS} prompts")
        if len(self.prompts()) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequest("n", f"{len(self.prompts())} prompts may have {MAX_CHOICES} choices together")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as token ids."""
        match self.prompt:
            case None:
                return [self.prompt_token_ids or []]
            case [str() | list(), *_]:
                return list(self.prompt)  # type: ignore[arg-type]
            case str() | [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
        return []

    def sdk_prompts(self) -> list[GenerateArguments]:
        return [{"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt} for prompt in self.prompts()]

    def to_sampling_params(self, max_tokens: int) -> SamplingParams:
        """As the base class. A prompt that is repeated with log probabilities needs those of the prompt, too."""
        sampling = super().to_sampling_params(max_tokens)
        if not self.echo or self.logprobs is None:
            return sampling
        return replace(sampling, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))


async def completions(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Continue one or more prompts."""
    checked = await gateway.auth.read_body(request, CompletionBody)
    body, state = checked.body, await gateway.cluster.state()
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    job = gateway.builder.prepare(checked, state, limit or 1)  # engines compute at least one token
    job.prompts = body.sdk_prompts()
    gateway.builder.limit_thinking(job)
    logprobs = LogprobsFormatter.of(gateway.tokenizer, body, state)
    options = CompletionOptions.of(body)
    echo: list[EchoedPrompt] | None = None
    if body.return_token_ids or body.echo or body.add_special_tokens is False:
        encoded = gateway.builder.prompt_token_ids(job, special=body.add_special_tokens is not False)
        token_ids = await while_connected(request.receive, encoded)
        options = replace(options, prompt_token_ids=token_ids if body.return_token_ids else None)
        if body.echo:
            echoed = echoed_prompts(gateway, checked.caller.tenant, body.prompts(), token_ids)
            echo = await while_connected(request.receive, echoed)
        if body.echo or body.add_special_tokens is False:
            job.replace_prompts(token_ids)
    return gateway.generate(job, CompletionFormatter(job.model_name, logprobs, options, echo, answers=limit > 0))


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that is repeated before each answer."""

    text: str
    token_ids: Sequence[int]


async def echoed_prompts(
    gateway: GatewayContext, tenant: str, prompts: Sequence[str | list[int]], token_ids: Sequence[Sequence[int]]
) -> list[EchoedPrompt]:
    """The prompts as text, with their tokens.

    Raises:
        InvalidRequest: a token is outside the vocabulary.
    """
    texts = [
        prompt if isinstance(prompt, str) else await gateway.tokenizer.decode(tenant, prompt) for prompt in prompts
    ]
    return [EchoedPrompt(text, tokens) for text, tokens in zip(texts, token_ids, strict=True)]


class CompletionFormatter(OpenAIFormatter):
    """Writes `text_completion` objects, which are also the events of a stream."""

    id_prefix = "cmpl"
    object_names = ("text_completion", "text_completion")
    empty_choice: ClassVar[dict[str, Any]] = {"text": ""}

    def __init__(
        self,
        model: str,
        logprobs: LogprobsFormatter,
        options: CompletionOptions,
        echo: Sequence[EchoedPrompt] | None = None,
        *,
        answers: bool = True,
    ) -> None:
        """As the base class.

        Args:
            model: the name in the response.
            logprobs: writes log probabilities.
            options: options of the response.
            echo: the prompts, if the choices repeat them; else None.
            answers: whether the choices have an answer. If `max_tokens` is 0, the token that was computed is left out.
        """
        super().__init__(model, logprobs, options)
        self._echo = echo
        self._answers = answers
        self._chars: defaultdict[int, int] = defaultdict(int)  # of the tokens that were sent, by choice
        self._echoed: dict[int, dict[str, Any]] = {}  # by choice, the prompt's log probabilities that were not sent

    def full_response(self, result: GenerateResult) -> dict[str, Any]:
        shown = result if self._answers else _without_answers(result)
        response = super().full_response(shown)
        if self._echo is not None:
            for choice in response["choices"]:
                self._repeat_prompt(choice, result)
        return response

    def _repeat_prompt(self, choice: dict[str, Any], result: GenerateResult) -> None:
        """Put the prompt before a choice's answer, and the prompt's log probabilities before the answer's."""
        assert self._echo is not None
        index = choice["index"] // self._options.choices
        prompt, scores = self._echo[index], results_of(result)[index].prompt_logprobs
        choice["text"] = prompt.text + choice["text"]
        if self._options.logprobs:
            before = self._logprobs_formatter.echoed(prompt.token_ids, scores)
            chars = _num_chars(before)
            answer = choice["logprobs"] or {name: [] for name in before}
            answer["text_offset"] = [offset + chars for offset in answer["text_offset"]]
            choice["logprobs"] = {name: before[name] + answer[name] for name in before}

    def add_tokens(self, event: TokenEvent) -> None:
        if self._echo is not None and self._options.logprobs and event.prompt_logprobs:
            index = event.choice // self._options.choices
            scores = self._logprobs_formatter.echoed(self._echo[index].token_ids, event.prompt_logprobs)
            for choice in range(index * self._options.choices, (index + 1) * self._options.choices):
                self._echoed[choice] = scores
                self._chars[choice] = _num_chars(scores)
        if self._answers:
            super().add_tokens(event)

    def text_event(self, text: str, choice: int) -> bytes:
        return self._echo_event(choice) + super().text_event(text, choice)

    def last_text_event(self, text: str, choice: int, finish_reason: str) -> bytes:
        return self._echo_event(choice) + super().last_text_event(text, choice, finish_reason)

    def _echo_event(self, choice: int) -> bytes:
        """The event with the prompt and the prompt's log probabilities, before a choice's first event."""
        if choice not in self._echoed:
            return b""
        assert self._echo is not None
        text = self._echo[choice // self._options.choices].text
        return self._prompt_event({"index": choice, "text": text, "logprobs": self._echoed.pop(choice)})

    def _prompt_event(self, fields: dict[str, Any]) -> bytes:
        """An event with a choice's prompt: text, tokens, or both."""
        prompts = self._options.prompt_token_ids
        choice = {"logprobs": None, "finish_reason": None, **fields}
        if prompts is None:
            return sse_event(self._event_object(choice))
        return sse_event(self.with_prompt_token_ids(self._event_object({**choice, "token_ids": []}), prompts))

    def finish_reason(self, reason: str, choice: int) -> str:
        return reason if self._answers else "length"

    def last_events(self, result: GenerateResult) -> Iterator[bytes]:
        return super().last_events(result if self._answers else _without_answers(result))

    def logprobs(self, logprobs: Sequence[TokenLogprobs], choice: int) -> dict[str, Any]:
        offset = self._chars[choice]
        self._chars[choice] += self._logprobs_formatter.chars(logprobs)
        return self._logprobs_formatter.plain(logprobs, offset)

    def with_prompt_logprobs(self, response: dict[str, Any], result: GenerateResult) -> dict[str, Any]:
        scores = [self._logprobs_formatter.prompt(answer.prompt_logprobs) for answer in results_of(result)]
        each = self._options.choices
        choices = [{**choice, "prompt_logprobs": scores[choice["index"] // each]} for choice in response["choices"]]
        return {**response, "choices": choices}

    def with_prompt_token_ids(self, response: dict[str, Any], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        each = self._options.choices
        choices = [
            {**choice, "prompt_token_ids": list(prompts[choice["index"] // each])} for choice in response["choices"]
        ]
        return {**response, "choices": choices}

    def first_events(self) -> Iterator[bytes]:
        """Events with the prompts: their text if the choices repeat it, their tokens if the response has token ids.

        A prompt repeated with log probabilities comes later: with the choices' first event.
        """
        echo, each = self._echo, self._options.choices
        given: Sequence[object] = echo or self._options.prompt_token_ids or ()
        if echo is not None and self._options.logprobs:
            return
        for index in range(len(given) * each):
            yield self._prompt_event({"index": index, "text": "" if echo is None else echo[index // each].text})

    def choice_fields(self, text: str, choice: int, finish_reason: str) -> dict[str, Any]:
        return {"text": text}

    def text_fields(self, text: str, choice: int) -> list[dict[str, Any]]:
        return [{"text": text}] if self._answers else []


def _without_answers(result: GenerateResult) -> GenerateResult:
    """The result for a request for no tokens, for which one token was computed."""
    choices = tuple(
        replace(choice, token_ids=[], text="", finish_reason="length", logprobs=()) for choice in result.choices
    )
    return replace(result, choices=choices, usage=replace(result.usage, completion_tokens=0))


def _num_chars(logprobs: Mapping[str, Any]) -> int:
    """Number of characters in the tokens of `logprobs`."""
    return sum(map(len, logprobs["tokens"]))
