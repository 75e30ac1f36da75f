"""Request bodies as pydantic models: strict about what is known; what is not known is told, not refused.

A field that would change the answer and is not built is refused by its name (`UNSUPPORTED`), unless its value asks for
what happens anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from moonpool.client import SamplingParams, Slo
from moonpool.errors import InvalidRequest
from moonpool.sampling import MAX_LOGIT_BIASES
from services.gateway.formats import wanted_format
from services.gateway.tools import Tools

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "include_stop_str_in_output": (None, False),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "return_tokens_as_token_ids": (None, False),
}
"""Fields of OpenAI and vLLM that are not built, with the values that ask for nothing."""

MAX_PROMPTS = 64
"""Prompts of one plain completion."""
MAX_ANSWERS = 256

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound="Body")


class _FirstFault:
    """As pydantic's `FailFast`, which cannot be part of a union here: it has no hash."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Mapping[str, Any]:
        return {**handler(source), "fail_fast": True}


Many = Annotated[list[T], _FirstFault()]
"""A list of which the first fault is told, not all of them: there may be a million."""


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MAX_LOGIT_BIASES:
        raise PydanticCustomError("too_many", "at most {most} members", {"most": MAX_LOGIT_BIASES})
    return given


Few = Annotated[dict[str, T], BeforeValidator(_few)]
"""An object of not many members: all of its faults are told."""


class Body(BaseModel):
    """A body or a part of one."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED
    """Fields that are refused, with the values that ask for nothing."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    def ignored(self) -> Iterator[str]:
        """Names of fields, also of its parts, that nothing is done with; fields that are null count as absent.

        Raises:
            InvalidRequest: names a field that is known and not built.
        """
        for name, value in (self.model_extra or {}).items():
            if name in self.unsupported:
                _refuse_unless_harmless(name, value, self.unsupported[name])
            elif value is not None:
                yield name
        for name, part in self.parts():
            yield from (f"{name}.{inner}" for inner in part.ignored())

    def parts(self) -> Iterator[tuple[str, Body]]:
        """Parts that have fields of their own, by name."""
        return iter(())

    def check(self) -> None:
        """Check what the types do not say.

        Raises:
            InvalidRequest: names the field that is wrong.
        """


def _refuse_unless_harmless(name: str, value: object, harmless: tuple[Any, ...]) -> None:
    if not any(type(value) is type(one) and value == one for one in harmless):
        raise InvalidRequest(name, "is not supported yet")


class StreamOptions(Body):
    """What a stream has besides text."""

    include_usage: bool | None = None


class SloField(Body):
    """Moonpool's own: latency limits, seconds; a request that would miss one is answered with 429.

    It waits for up to `queue_s` before that.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    queue_s: float | None = None


class AnsweredBody(Body):
    """A body that asks for an answer."""

    model: str | None = None
    stream: bool | None = None
    slo: SloField | None = None
    priority: int | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        if self.slo is not None:
            yield "slo", self.slo

    def limits(self) -> Slo | None:
        """The latency limits."""
        slo = self.slo
        return None if slo is None else Slo(ttft_s=slo.ttft_s, tbt_s=slo.tbt_s, queue_s=slo.queue_s)

    def tools_offered(self) -> Tools | None:
        """Functions that the model may call.

        Raises:
            InvalidRequest: names what is wrong about them, or not built.
        """
        return None

    def scored(self) -> int | None:
        """Likely tokens that are told beside each token of the answer; None = no log probabilities."""
        return None

    def wants_scores(self) -> bool:
        """Whether log probabilities are told, of the answer or of the prompt."""
        return self.scored() is not None

    def sampling(self, max_tokens: int) -> SamplingParams:
        """How tokens are chosen, at most `max_tokens` of them. Values are checked by the conductor.

        Raises:
            InvalidRequest: names a field that cannot be passed on.
        """
        raise NotImplementedError


class GenerationBody(AnsweredBody):
    """What chat and plain completions have in common."""

    prompt_token_ids: Many[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    logit_bias: Few[float] | None = None
    bad_words: Many[str] | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
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
        return wanted_format(self.response_format, self.structured_outputs, guided)

    def _logit_bias(self) -> dict[int, float]:
        try:
            return {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError:
            raise InvalidRequest("logit_bias", "its names must be token ids") from None


class CompletionBody(GenerationBody):
    """`/v1/completions`."""

    prompt: str | Many[str] | Many[int] | Many[Many[int]] | None = None
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


class DetokenizeBody(Body):
    """`/detokenize`."""

    model: str | None = None
    tokens: Many[int]


def validated(cls: type[BodyT], content: object) -> BodyT:
    """Check a body that was read.

    Raises:
        InvalidRequest: it is no object, or a field is wrong; names it.
    """
    if not isinstance(content, dict):
        raise InvalidRequest("", "a body must be a JSON object")
    try:
        return cls.model_validate(content)
    except ValidationError as error:
        fault = _clearest(error.errors(include_url=False, include_context=False, include_input=False))
        place = ".".join(str(step) for step in fault["loc"] if step != "str" and "[" not in str(step))
        raise InvalidRequest(place, fault["msg"][:200]) from None


def _clearest(faults: Sequence[ErrorDetails]) -> ErrorDetails:
    """The first fault; of a field that is a text or one kind of list, what is wrong within the list."""
    first = faults[0]["loc"]
    if first[-1] != "str":
        return faults[0]
    branch = len(first) - 1
    within = [fault for fault in faults if len(fault["loc"]) > len(first) and fault["loc"][:branch] == first[:branch]]
    return _clearest(within) if len({fault["loc"][branch] for fault in within}) == 1 else faults[0]
