"""OpenAI's `/v1/completions`: body, handler and response objects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from starlette.requests import Request

from moonpool.errors import InvalidRequest
from moonpool.logprobs import TokenLogprobs
from services.gateway.endpoints.base import GatewayContext
from services.gateway.endpoints.openai_protocol import (
    CompletionOptions,
    LogprobsFormatter,
    OpenAIFormatter,
    OpenAISamplingBody,
    sse_event,
)
from services.gateway.serving.generation import GenerationResponse
from services.gateway.serving.json_body import FailFastList

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. A chat completion may fill the model's length."""
MAX_PROMPTS = 64
"""Prompts of one completion."""
MAX_CHOICES = 256
"""Choices of all prompts of one completion."""


class CompletionBody(OpenAISamplingBody):
    """Body of `/v1/completions`."""

    prompt: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]] | None = None
    logprobs: int | None = None

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.prompt_logprobs is not None and len(self.prompts()) > 1:
            raise InvalidRequest("prompt_logprobs", "is allowed only for one prompt")
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


async def completions(gateway: GatewayContext, request: Request) -> GenerationResponse:
    """Continue one or more prompts."""
    checked = await gateway.auth.read_body(request, CompletionBody)
    body, state = checked.body, await gateway.cluster.state()
    job = gateway.builder.prepare(checked, state, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    job.prompts = [{"prompt": it} if isinstance(it, str) else {"token_ids": it} for it in body.prompts()]
    logprobs = LogprobsFormatter.of(gateway, body, state)
    options = CompletionOptions.of(body)
    if body.return_token_ids:
        options = replace(options, prompt_token_ids=await gateway.builder.prompt_token_ids(job))
    return gateway.generate(job, CompletionFormatter(state.model, logprobs, options))


class CompletionFormatter(OpenAIFormatter):
    """Writes `text_completion` objects, which are also the events of a stream."""

    id_prefix = "cmpl"
    object_names = ("text_completion", "text_completion")
    empty_choice: ClassVar[dict[str, Any]] = {"text": ""}

    def __init__(self, model: str, logprobs: LogprobsFormatter, options: CompletionOptions) -> None:
        super().__init__(model, logprobs, options)
        self._chars: defaultdict[int, int] = defaultdict(int)  # of the tokens that were sent, by choice

    def logprobs(self, logprobs: Sequence[TokenLogprobs], choice: int) -> dict[str, Any]:
        offset = self._chars[choice]
        self._chars[choice] += self._logprobs_formatter.chars(logprobs)
        return self._logprobs_formatter.plain(logprobs, offset)

    def with_prompt_logprobs(self, response: dict[str, Any], logprobs: list[dict[str, Any] | None]) -> dict[str, Any]:
        return {**response, "choices": [{**choice, "prompt_logprobs": logprobs} for choice in response["choices"]]}

    def with_prompt_token_ids(self, response: dict[str, Any], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        each = self._options.choices
        choices = [{**it, "prompt_token_ids": list(prompts[it["index"] // each])} for it in response["choices"]]
        return {**response, "choices": choices}

    def first_events(self) -> Iterator[bytes]:
        """Events with the tokens of the prompts, if the response has token ids."""
        prompts = self._options.prompt_token_ids
        for index in range(0 if prompts is None else len(prompts) * self._options.choices):
            choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "token_ids": []}
            yield sse_event(self.with_prompt_token_ids(self._event_object(choice), prompts or ()))

    def choice_fields(self, text: str, choice: int) -> dict[str, Any]:
        return {"text": text}

    def text_event(self, text: str, choice: int) -> bytes:
        return self._event({"text": text}, choice)
