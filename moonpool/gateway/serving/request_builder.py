"""From the body of a request to a `GenerationJob`: the steps that every API shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from moonpool.base.checkpoint import ChatOptions
from moonpool.base.errors import InvalidRequest
from moonpool.base.grammar import AnswerGrammar, Thinking
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import (
    ClusterState,
    GenerateArguments,
    Message,
)
from moonpool.gateway.serving.answer_parser import AnswerParser, AnswerReading
from moonpool.gateway.serving.auth import CheckedRequest
from moonpool.gateway.serving.generate_body import GenerateBody
from moonpool.gateway.serving.generation_job import GenerationJob
from moonpool.gateway.serving.json_response import to_json_bytes
from moonpool.gateway.serving.pictures import pictures_of
from moonpool.gateway.serving.structural_tags import STRUCTURAL_TAG, tag_grammar
from moonpool.gateway.serving.tokenizer import GatewayTokenizer
from moonpool.gateway.serving.tool_set import ToolSet


@dataclass(frozen=True, slots=True)
class ServedNames:
    """Names by which clients know the model.

    Attributes:
        names: the first is in responses; none = the checkpoint's name.
        any_name: each other name stands for the model, too.
    """

    names: Sequence[str] = ()
    any_name: bool = False

    def model_of(self, given: str, state: ClusterState) -> tuple[str, str]:
        """The model or LoRA adapter that the conductor knows, and the name in the response; "" for the served model.

        Raises:
            InvalidRequest: clients know the model under other names; names `model`.
        """
        shown = self.names[0] if self.names else state.model
        if any(given == lora.name for lora in state.loras):
            return given, given
        if self.any_name or given in self.names:
            return "", shown
        if not self.names or not given:
            return given, shown
        names = [*self.names, *(lora.name for lora in state.loras)]
        raise InvalidRequest("model", f"only {', '.join(map(repr, names))} is served, not {given!r}")


class RequestBuilder:
    """Builds generation jobs: the steps between body and SDK that every API shares."""

    def __init__(self, timeout_s: float, tokenizer: GatewayTokenizer, names: ServedNames = ServedNames()) -> None:
        """Build jobs.

        Args:
            timeout_s: time limit of each request.
            tokenizer: tokenizer and chat template of the served model.
            names: names by which clients know the model.
        """
        self._timeout_s = timeout_s
        self._tokenizer = tokenizer
        self._names = names

    def prepare(self, checked: CheckedRequest[GenerateBody], state: ClusterState, max_tokens: int) -> GenerationJob:
        """A job without prompts, from the fields that every body has.

        Raises:
            InvalidRequest: a sampling parameter cannot be translated; names the field.
        """
        body = checked.body
        model, shown = self._names.model_of(body.model or "", state)
        arguments: GenerateArguments = {
            "sampling": self._sampling(body, max_tokens),
            "slo": body.to_slo(),
            "priority": body.priority or 0,
            "expected_output_tokens": body.expected_output_tokens or body.agent_hints.osl or 0,
            "tenant": checked.caller.tenant,
            "model": model,
            "cache_salt": body.cache_salt or "",
            "session": body.to_session(checked.session_id),
            "timeout_s": self._timeout_s,
        }
        headers = dict(checked.warning_headers)
        return GenerationJob(
            state,
            shown,
            arguments,
            bool(body.stream),
            checked.caller.budget,
            headers,
            checked.traceparent,
            request_id=checked.request_id,
            client_id=checked.client_id,
            format_field=body.format_field,
            thinking=body.thinking_limit(),
        )

    def _sampling(self, body: GenerateBody, max_tokens: int) -> SamplingParams:
        """Sampling parameters; structural tags become a grammar with the model's tokens."""
        sampling = body.to_sampling_params(max_tokens)
        if str(sampling.response_format) != STRUCTURAL_TAG:
            return sampling
        grammar = tag_grammar(body.format_field, sampling.grammar, self._tokenizer.special_id)
        return replace(sampling, response_format="lark", grammar=grammar, skip_special_tokens=False)

    def limit_thinking(self, job: GenerationJob) -> None:
        """Bound the thinking of the answers, if the request asks for that, the model thinks, and no format forbids."""
        reasoning = None if job.sampling.response_format else self._tokenizer.reasoning(job.state.model)
        budget = job.thinking.budget(template_has_effort=self._tokenizer.template_has("reasoning_effort"))
        if reasoning is not None and budget is not None and not job.sampling.embedding:
            marks = reasoning.begin, reasoning.end
            job.arguments["sampling"] = replace(job.sampling, thinking_budget=budget, thinking_marks=marks)

    async def offer_tools(
        self, job: GenerationJob, tools: ToolSet | None, known: ToolSet | None = None
    ) -> AnswerParser:
        """Let the model call `tools`. Returns the parser that finds thinking and calls in the answers.

        `known` are tools that the prompt has already; they count if `tools` is None.

        Raises:
            InvalidRequest: the format of tool calls is unknown, or a forced call conflicts with a response format.
            Mismatch: the cluster serves another model than the gateway's tokenizer is for.
        """
        self.limit_thinking(job)
        offered = tools or known
        if tools is not None:
            job.arguments["tools"] = tools.definitions
        is_forced = offered is not None and offered.tool_choice is not None
        if is_forced and job.sampling.response_format:
            raise InvalidRequest("tool_choice", "a forced call has a format of its own; omit the response format")
        row = self._tokenizer.answer_format(job.state.model)
        if offered is not None and row is None:
            return self._force_by_schema(job, offered)
        # An answer that is held to a format has no place for thinking.
        reasoning = None if job.sampling.response_format else self._tokenizer.reasoning(job.state.model)
        special_id = self._tokenizer.special_id
        reads_calls = row is not None and (offered is not None or row.always)
        if reads_calls or (reasoning is not None and special_id(reasoning.end) is not None):
            # Some models mark calls and thinking with special tokens.
            job.arguments["sampling"] = replace(job.sampling, skip_special_tokens=False)
        if offered is not None and row is not None and not job.sampling.response_format:
            thinking = None
            if reasoning is not None:
                thinking = Thinking(reasoning.begin, reasoning.end, await self._is_thinking(job))
            if grammar := offered.grammar(row, AnswerGrammar(special_id, thinking)):
                job.arguments["sampling"] = replace(job.sampling, response_format="lark", grammar=grammar)
                job.format_field = "tools"
        reading = AnswerReading(offered, row, calls_before=_num_calls(job))
        if reasoning is not None:
            count = partial(self._tokenizer.tokens_through, reasoning.end)
            is_thinking = await self._is_thinking(job)
            reading = replace(reading, reasoning=reasoning, thinks_at_once=is_thinking, count_reasoning=count)
        return AnswerParser(reading)

    def _force_by_schema(self, job: GenerationJob, offered: ToolSet) -> AnswerParser:
        """Let a model call whose own form of calls is not known: an answer that has to call follows a schema.

        Raises:
            Mismatch: the cluster serves another model than the gateway's tokenizer is for.
            InvalidRequest: the model may answer with text, so that the form of its calls must be known; names `tools`.
        """
        if offered.tool_choice is None:
            self._tokenizer.check_model(job.state.model)
            raise InvalidRequest("tools", self._tokenizer.unknown_format())
        schema = to_json_bytes(offered.schema()).decode()
        unbound = replace(job.sampling, thinking_budget=None, thinking_marks=())  # the format has no thinking
        job.arguments["sampling"] = replace(unbound, response_format="json_schema", grammar=schema)
        job.format_field = "tools"
        return AnswerParser(AnswerReading(offered))

    async def _is_thinking(self, job: GenerationJob) -> bool:
        """Whether the prompts begin the thinking. Prompts of token ids and continued answers do not."""
        arguments = job.arguments
        if arguments.get("continue_final_message") or "messages" not in job.prompts[0]:
            return False
        kwargs = arguments.get("chat_template_kwargs") or {}
        return await self._tokenizer.thinks_at_once(arguments.get("tenant", ""), kwargs)

    async def prompt_token_ids(self, job: GenerationJob, *, special: bool) -> list[Sequence[int]]:
        """Tokens of each prompt.

        `special`: with the tokenizer's special tokens. The conductor adds special tokens to a text and adds none to
        messages, because the chat template writes them.

        Raises:
            Mismatch: the cluster serves another model than the gateway's tokenizer is for.
            InvalidRequest: a prompt is too long, or the chat template refuses the messages.
        """
        return [await self._encode(job.arguments | prompt, job.state, special=special) for prompt in job.prompts]

    async def chat_token_ids(self, job: GenerationJob, messages: Sequence[Message]) -> Sequence[int]:
        """Tokens of other messages with the job's tools and options.

        Raises:
            Mismatch: the cluster serves another model than the gateway's tokenizer is for.
            InvalidRequest: a prompt is too long, or the chat template refuses the messages.
        """
        return await self._encode(job.arguments | {"messages": messages}, job.state, special=False)

    async def _encode(self, arguments: GenerateArguments, state: ClusterState, *, special: bool) -> Sequence[int]:
        if (token_ids := arguments.get("token_ids")) is not None:
            return token_ids
        self._tokenizer.check_model(state.model)
        tenant = arguments.get("tenant", "")
        if (prompt := arguments.get("prompt")) is not None:
            return await self._tokenizer.encode(tenant, prompt, state.max_tokens, special=special)
        messages, tools = arguments.get("messages") or (), arguments.get("tools") or ()
        if pictures_of(messages):  # tokens alone do not say what they show
            raise InvalidRequest("messages", "prompts with pictures cannot be sent as tokens")
        options = ChatOptions(
            continue_final_message=arguments.get("continue_final_message", False),
            template_kwargs=arguments.get("chat_template_kwargs") or {},
        )
        return await self._tokenizer.encode_chat(tenant, messages, tools, state.max_tokens, options, special=special)


def _num_calls(job: GenerationJob) -> int:
    """Calls in the conversation before the answer."""
    messages = job.prompts[0].get("messages") or () if job.prompts else ()
    return sum(len(message.get("tool_calls") or ()) for message in messages)
