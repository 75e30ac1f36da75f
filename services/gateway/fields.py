"""Request bodies as pydantic models: strict about what is known; what is not known is told, not refused.

A field that would change the answer and is not built is refused by its name (`UNSUPPORTED`), unless its value asks for
what happens anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from moonpool.client import Message, SamplingParams, Slo
from moonpool.errors import InvalidRequest

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
}
"""Fields of OpenAI and vLLM that are not built, with the values that ask for nothing."""

_TOOL_FIELDS = ("tool_calls", "function_call", "tool_call_id", "audio")
"""Fields of a turn that are refused; without a value they say nothing."""

MAX_OBJECTS = 1 << 14
MAX_ITEMS = 1 << 20
"""JSON objects in a body, such as turns; members and list items in all, such as token ids."""
_TOO_MANY = f"a body has at most {MAX_OBJECTS} objects and {MAX_ITEMS} items"

BodyT = TypeVar("BodyT", bound="Body")


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

    def sampling(self, max_tokens: int) -> SamplingParams:
        """How tokens are chosen, at most `max_tokens` of them. Values are checked by the conductor.

        Raises:
            InvalidRequest: names a field that cannot be passed on.
        """
        raise NotImplementedError


class GenerationBody(AnsweredBody):
    """What chat and plain completions have in common."""

    prompt_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield from super().parts()
        if self.stream_options is not None:
            yield "stream_options", self.stream_options

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "is only for stream: true")

    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, max_tokens: int) -> SamplingParams:
        names = (
            "min_tokens", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "seed", "n",
        )  # fmt: skip
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        top_k = 0 if self.top_k == -1 else self.top_k  # vLLM's -1 = all
        return SamplingParams(max_tokens=max_tokens, top_k=top_k, logit_bias=self._logit_bias(), **given)  # type: ignore[arg-type]

    def _logit_bias(self) -> dict[int, float]:
        try:
            return {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError:
            raise InvalidRequest("logit_bias", "its names must be token ids") from None


class ContentPart(Body):
    """A piece of a turn."""

    type: str
    text: str | None = None


class Turn(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None

    def ignored(self) -> Iterator[str]:
        return (name for name in super().ignored() if name not in _TOOL_FIELDS)

    def parts(self) -> Iterator[tuple[str, Body]]:
        if isinstance(self.content, list):
            yield from ((f"content.{index}", part) for index, part in enumerate(self.content))

    def message(self, place: str) -> Message:
        """The turn as the SDK takes it; a developer's turn is a system's.

        Args:
            place: name of the turn in errors, as "messages.0".

        Raises:
            InvalidRequest: names the part that is not text.
        """
        for name, value in (self.model_extra or {}).items():
            if name in _TOOL_FIELDS and value not in (None, []):
                raise InvalidRequest(f"{place}.{name}", "is not supported yet")
        return {"role": "system" if self.role == "developer" else self.role, "content": self._text(place)}

    def _text(self, place: str) -> str:
        if self.content is None and self.role == "assistant":
            return ""
        if self.content is None:
            raise InvalidRequest(f"{place}.content", "must be text")
        return joined(self.content, f"{place}.content")


def joined(content: str | list[ContentPart], place: str) -> str:
    """The text of a content: parts become lines.

    Raises:
        InvalidRequest: names the part that is not text, below `place`.
    """
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(f"{place}.{index}", f"must be a text, not {part.type!r}")
    return "\n".join(part.text or "" for part in content)


class Conversation(Body):
    """A body with turns."""

    messages: list[Turn] | None = None

    def parts(self) -> Iterator[tuple[str, Body]]:
        yield from super().parts()
        yield from ((f"messages.{index}", turn) for index, turn in enumerate(self.messages or ()))

    def turns(self) -> list[Message]:
        """The conversation as the SDK takes it.

        Raises:
            InvalidRequest: names what is not text.
        """
        return [turn.message(f"messages.{index}") for index, turn in enumerate(self.messages or ())]


class ChatBody(Conversation, GenerationBody):
    """`/v1/chat/completions`."""

    max_completion_tokens: int | None = None

    def check(self) -> None:
        super().check()
        if (self.messages is None) == (self.prompt_token_ids is None):
            raise InvalidRequest("messages", "either messages or prompt_token_ids must be given")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_completion_tokens", "differs from max_tokens, its older name")


class CompletionBody(GenerationBody):
    """`/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]] | None = None

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise InvalidRequest("prompt", "either prompt or prompt_token_ids must be given")
        if isinstance(self.prompt, list) and len(self.prompt) > 1 and not isinstance(self.prompt[0], int):
            raise InvalidRequest("prompt", f"has {len(self.prompt)} prompts; only one is supported yet")

    def text_or_tokens(self) -> str | list[int]:
        """The prompt, in the form in which it was given."""
        match self.prompt:
            case str():
                return self.prompt
            case None:
                return self.prompt_token_ids or []
            case [str() as text]:
                return text
            case [list() as tokens]:
                return tokens
        return [token for token in self.prompt if isinstance(token, int)]


class TokenizeBody(Conversation):
    """`/tokenize`: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "either prompt or messages must be given")


class DetokenizeBody(Body):
    """`/detokenize`."""

    model: str | None = None
    tokens: list[int]


def parse(cls: type[BodyT], raw: bytes) -> BodyT:
    """Read a body.

    Raises:
        InvalidRequest: it is no JSON, has too many parts, or a field is wrong; names it.
    """
    if raw.count(b"[") + raw.count(b"{") > MAX_ITEMS:
        raise InvalidRequest("", _TOO_MANY)
    try:
        content = from_json(raw)
    except ValueError as error:
        raise InvalidRequest("", f"invalid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequest("", "a body must be a JSON object")
    _check_size(content)
    try:
        return cls.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(step) for step in first["loc"] if step != "str" and "[" not in str(step))
        raise InvalidRequest(place, first["msg"][:200]) from None


def _check_size(content: Any) -> None:
    """Refuse what would take seconds to check: other requests would wait for it.

    Raises:
        InvalidRequest: it has too many parts.
    """
    waiting, objects, items = [content], 0, 0
    while waiting:
        current = waiting.pop()
        objects += isinstance(current, dict)
        items += len(current) if isinstance(current, dict | list) else 0
        if objects > MAX_OBJECTS or items > MAX_ITEMS:
            raise InvalidRequest("", _TOO_MANY)
        if isinstance(current, dict):
            current = list(current.values())
        if isinstance(current, list):
            waiting.extend(item for item in current if isinstance(item, dict | list))
