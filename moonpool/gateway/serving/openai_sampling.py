"""OpenAI's fields for sampling, with those of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, create_model

from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import HTTP_FIELDS, ITEM_LIMITS, SamplingParams
from moonpool.gateway.serving.body import Body, FailFastList, Integer, SmallObject, TextOr
from moonpool.gateway.serving.generate_body import GenerateBody, PromptCacheBody
from moonpool.gateway.serving.known_fields import (
    COMPLETION_IGNORED,
    COMPLETION_REFUSED,
)
from moonpool.gateway.serving.structural_tags import STRUCTURAL_TAG, tag_text
from moonpool.gateway.serving.structured_outputs import (
    FormatAndGrammar,
    ResponseFormatBody,
    StructuredOutputsBody,
    only_format,
    schema_format,
)
from moonpool.gateway.serving.thinking import Effort, ThinkingLimit, budget_field


class StreamOptions(Body):
    """Options of a streamed response."""

    ignored = ("include_obfuscation",)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


if TYPE_CHECKING:
    SamplingFieldsBody = GenerateBody
else:
    SamplingFieldsBody = create_model(
        "SamplingFieldsBody",
        __base__=GenerateBody,
        __module__=__name__,
        **{name: ((Integer if kind is int else kind) | None, None) for name, kind in HTTP_FIELDS.items()},
    )
    """Sampling fields that need no conversion; `moonpool.base.sampling_params` declares them."""


class OpenAISamplingBody(PromptCacheBody, SamplingFieldsBody):
    """Sampling fields of `/v1/chat/completions` and `/v1/completions`."""

    ignored: ClassVar[Collection[str]] = COMPLETION_IGNORED
    refused = COMPLETION_REFUSED

    session_id: str | None = None
    prompt_token_ids: FailFastList[int] | None = None
    max_tokens: Integer | None = None
    top_k: Integer | None = None
    stop: str | Annotated[FailFastList[str], Field(max_length=ITEM_LIMITS["stop"])] | None = None
    stop_token_ids: FailFastList[int] | None = Field(None, max_length=ITEM_LIMITS["stop_token_ids"])
    logit_bias: SmallObject[float] | None = None
    bad_words: FailFastList[str] | None = Field(None, max_length=ITEM_LIMITS["bad_words"])
    n: Integer | None = None  # these three are read here, too
    prompt_logprobs: Integer | None = None
    seed: Integer | None = None
    response_format: ResponseFormatBody | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: TextOr[dict[str, Any]] | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_choice: FailFastList[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = Field(None, min_length=1)
    guided_whitespace_pattern: str | None = None
    json_schema: TextOr[dict[str, Any]] | None = None
    regex: str | None = Field(None, min_length=1)
    ebnf: str | None = Field(None, min_length=1)
    structural_tag: TextOr[dict[str, Any]] | None = None
    grammar: str | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[Integer, Field(ge=-1)] | None = None
    reasoning_budget: Annotated[Integer, Field(ge=-1)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "is allowed only if stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs", "is not allowed if stream is true")

    def session_name(self, header: str) -> str:
        return self.session_id or super().session_name(header)

    def thinking_limit(self) -> ThinkingLimit:
        asked = self.reasoning_budget if self.thinking_token_budget is None else self.thinking_token_budget
        return ThinkingLimit(budget_field(asked), self.reasoning_effort)

    def wants_logprobs(self) -> bool:
        return super().wants_logprobs() or self.prompt_logprobs is not None

    def include_usage(self) -> bool:
        """Whether the stream ends with an event that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def continuous_usage(self) -> bool:
        """Whether every event of the stream has the usage so far. As in vLLM, only together with `include_usage`."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def to_sampling_params(self, max_tokens: int) -> SamplingParams:
        names = (*HTTP_FIELDS, "stop", "stop_token_ids", "bad_words")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        self._format_field, fields["response_format"], fields["grammar"] = only_format(self._formats())
        fields["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's -1 = all
        fields["seed"] = drawn_seed(self.seed)
        return SamplingParams(
            max_tokens=max_tokens, logit_bias=token_biases(self.logit_bias), logprobs=self.num_logprobs(), **fields
        )

    def _formats(self) -> Iterator[tuple[str, FormatAndGrammar]]:
        """The formats that the fields ask for, with the names of the fields."""
        if self.response_format is not None:
            yield "response_format", self.response_format.format_and_grammar("response_format")
        if self.structured_outputs is not None:
            yield from self.structured_outputs.formats("structured_outputs.")
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
            "whitespace_pattern": self.guided_whitespace_pattern,
        }
        yield from StructuredOutputsBody.model_validate(guided).formats("guided_")
        if self.json_schema is not None:
            yield "json_schema", schema_format("json_schema", self.json_schema)
        if self.regex is not None:
            yield "regex", ("regex", self.regex)
        if self.structural_tag is not None:
            yield STRUCTURAL_TAG, (STRUCTURAL_TAG, tag_text(STRUCTURAL_TAG, self.structural_tag))
        for name, grammar in (("ebnf", self.ebnf), ("grammar", self.grammar)):
            if grammar:
                yield name, ("lark", grammar)


def drawn_seed(seed: int | None) -> int | None:
    """The seed of a request. llama.cpp's -1 stands for a seed that the server draws."""
    return None if seed == -1 else seed


def token_biases(given: Mapping[str, float] | None) -> dict[int, float]:
    """`logit_bias` for the SDK, with token ids as names.

    Raises:
        InvalidRequest: a name is no number.
    """
    try:
        return {int(token): bias for token, bias in (given or {}).items()}
    except ValueError:
        raise InvalidRequest("logit_bias", "the names of the members must be token ids") from None
