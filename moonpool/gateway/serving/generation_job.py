"""One generating HTTP request: the SDK's arguments, and what the response needs beside the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.base.checkpoint import ChatOptions
from moonpool.base.errors import InvalidRequest, MoonpoolError
from moonpool.base.sampling_params import SCORED_TOKEN_COST, SamplingParams
from moonpool.client import (
    ClusterState,
    GenerateArguments,
    GenerateResult,
)
from moonpool.gateway.serving.budgets import BudgetCharge
from moonpool.gateway.serving.metrics import AskedFor
from moonpool.gateway.serving.thinking import ThinkingLimit

GRAMMAR_CHARS = 4
"""Characters in a schema or grammar that count as one token."""
ResultHeaders = Callable[[GenerateResult], Mapping[str, str]]
"""Response headers that depend on the result; a streamed response has none of these."""


@dataclass(slots=True)
class GenerationJob:
    """One generating HTTP request: the SDK's arguments, and what the response needs beside the answer.

    Attributes:
        state: the cluster when the request arrived.
        model_name: name of the model in the response and in metrics.
        arguments: arguments of `AsyncClient.stream` that all prompts share.
        stream: send the answer as server-sent events.
        budget: where the tokens are charged.
        headers: headers of the response.
        traceparent: W3C trace context of the client; "" for none.
        request_id: id of the first prompt's request; further prompts have a number behind the id.
        client_id: the client's own `x-request-id`, which the response has; "" for none.
        prompts: arguments that name one prompt each. Several prompts run at the same time, each with `n` choices.
        result_headers: further headers of a response that is not streamed.
        format_field: field of the body that says what the answer looks like; errors name the field.
        prompt_field: field of the body that has the prompts, if errors name the field; "" for the SDK's names.
        thinking: how long the answers may think.
        on_finished: called with the job and the result of an answer that was sent whole; must not refer to the job.
        on_placed: called when an instance has taken the request, for each prompt.
    """

    state: ClusterState
    model_name: str
    arguments: GenerateArguments
    stream: bool
    budget: BudgetCharge
    headers: dict[str, str]
    traceparent: str
    request_id: str = ""
    client_id: str = ""
    prompts: Sequence[GenerateArguments] = ()
    result_headers: ResultHeaders = lambda result: {}
    format_field: str = ""
    prompt_field: str = ""
    thinking: ThinkingLimit = field(default_factory=ThinkingLimit)
    on_placed: Callable[[], None] = lambda: None
    on_finished: Callable[[GenerationJob, GenerateResult], None] = lambda job, result: None

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of all prompts."""
        return self.arguments.get("sampling") or SamplingParams()

    def asked_for(self) -> AskedFor:
        """What the request asks for, for the metrics."""
        lora = self.arguments.get("model") or ""
        return AskedFor(
            self.model_name,
            lora if any(lora == known.name for known in self.state.loras) else "",
            self.sampling.n,
            self.sampling.max_tokens,
        )

    def span_attributes(self) -> dict[str, object]:
        """What the request asks for, under OpenTelemetry's names for generative AI."""
        sampling, chat = self.sampling, any("messages" in prompt for prompt in self.prompts)
        return {
            "gen_ai.operation.name": "chat" if chat else "text_completion",
            "gen_ai.provider.name": "moonpool",
            "gen_ai.request.model": self.model_name,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.request.stream": self.stream,
            "moonpool.request_id": self.request_id,
        }

    def charge_request(self) -> None:
        """Charge a request's costs beside tokens: further answers, a format, prompts' log probabilities."""
        sampling, budget = self.sampling, self.budget
        budget.charge_answers(len(self.prompts) * sampling.width)
        budget.charge_work(len(sampling.grammar) // GRAMMAR_CHARS)
        if sampling.prompt_logprobs is not None:
            budget.prompt_weight = SCORED_TOKEN_COST

    def request_id_of(self, index: int) -> str:
        """Request id for a prompt."""
        return f"{self.request_id}-{index}" if index and self.request_id else self.request_id

    def named_error(self, error: MoonpoolError) -> MoonpoolError:
        """An error of the conductor under the name that the field has in the body."""
        if isinstance(error, InvalidRequest) and error.field == "sampling.grammar" and self.format_field:
            return InvalidRequest(self.format_field, error.message)
        if isinstance(error, InvalidRequest) and error.field in ("prompt", "token_ids") and self.prompt_field:
            return InvalidRequest(self.prompt_field, error.message)
        return error

    def replace_prompts(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Give the prompts as tokens, in place of texts or messages."""
        self.prompts = [{"token_ids": tokens} for tokens in token_ids]
        self.arguments.pop("tools", None)

    def set_chat_options(self, options: ChatOptions) -> None:
        """Say how the messages of the prompts become tokens."""
        self.arguments["chat_template_kwargs"] = options.template_kwargs
        self.arguments["continue_final_message"] = options.continue_final_message
