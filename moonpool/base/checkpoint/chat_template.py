"""Chat templates: from a conversation to a prompt's text, in a sandbox.

Control tokens come from templates only: of each character of a prompt it is known whether the template or the
conversation brought it (`traced_text`), and a control token with a character of the conversation is plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Template, meta

from moonpool.base.answer_formats import found_format
from moonpool.base.checkpoint.generic_tools import with_generic_tools
from moonpool.base.checkpoint.past_calls import CALL_SHAPES, CallShape, past_arguments, with_text_of_calls
from moonpool.base.checkpoint.past_ids import with_names, with_own_ids
from moonpool.base.checkpoint.past_thinking import names_thinking, with_thinking
from moonpool.base.checkpoint.template_sandbox import TemplateSandbox, begin_rendering, bounded_text
from moonpool.base.checkpoint.traced_text import ANSWERED, SAID, WRITTEN, origins_of, text_of, traced
from moonpool.base.errors import CheckpointError, InvalidRequest

_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Template variables that `template_kwargs` cannot set."""
_PRIVATE = re.compile("[\\ue000-\\uf8ff]")
_PIECE_CHARS = 1 << 14
"""Characters that are looked through at once: meanwhile the interpreter lock is held."""
_WORD = re.compile(r"[\w-]+")
_ROLES = ("assistant", "developer", "function", "ipython", "model", "system", "tool", "user")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt.

    Attributes:
        add_generation_prompt: the text ends with the beginning of an answer.
        continue_final_message: the text ends with the last message, which the answer continues; in place of
            `add_generation_prompt`.
        template_kwargs: further template variables, for example Qwen 3's `enable_thinking`.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt's text.

    Attributes:
        text: the whole text.
        literals: begin and end of control tokens in `text` that the conversation brought; these are plain text.
            Where both are the same, two texts meet: no control token lies across the place.
    """

    text: str
    literals: tuple[tuple[int, int], ...] = ()

    def with_text(self, old: str, new: str) -> RenderedChat:
        """Return the prompt with `new` wherever the template has written `old`."""
        parts: list[str] = []
        literals, begin, length = [], 0, 0
        for first, last in (*self.literals, (len(self.text), len(self.text))):
            parts += self.text[begin:first].replace(old, new), self.text[first:last]
            length += len(parts[-2]) + len(parts[-1])
            literals.append((length - len(parts[-1]), length))
            begin = last
        return RenderedChat("".join(parts), tuple(literals[:-1]))


class ControlTokens:
    """A checkpoint's control tokens: texts that stand for one token each."""

    def __init__(self, special: Sequence[str], added: Sequence[str] = ()) -> None:
        """Take the tokens.

        Args:
            special: tokens that no text of a conversation may become.
            added: further tokens that templates write. The assistant's texts may become these, as the assistant's
                answers do.
        """
        self._all = _Tokens((*special, *added))
        self._special = _Tokens(special)

    def literals(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where control tokens lie in `text` that the conversation brought, as `RenderedChat.literals` has it."""
        for run in re.finditer(rb"\x00+|\x01+|\x02+", origins_of(text)):
            begin, end = run.span()
            if begin and self._all.across(text, begin):
                yield begin, begin
            if (origin := run[0][0]) != WRITTEN:
                tokens = self._special if origin == ANSWERED else self._all
                yield from tokens.within(text, begin, end)


class _Tokens:
    """Some control tokens, to be found in texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
        self._longest = len(longest_first[0]) if longest_first else 0
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def within(self, text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield where tokens lie in `text[begin:end]`."""
        while begin < end:
            reach = begin + _PIECE_CHARS
            match = self.pattern.search(text, begin, min(end, reach + self._longest))
            if match is None or match.start() >= reach:
                begin = reach
            else:
                yield match.span()
                begin = match.end()

    def across(self, text: str, place: int) -> bool:
        """Tell whether a token in `text` begins before `place` and ends behind."""
        start, stop = max(0, place - self._longest + 1), place + self._longest
        while (found := self.pattern.search(text, start, stop)) is not None and found.start() < place:
            if found.end() > place:
                return True
            start = found.start() + 1
        return False


class ChatTemplate:
    """A chat template, in a sandbox. Stateless; may be used from several threads."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compile `source`; `special` are `bos_token` and the like, as the template sees them.

        Raises:
            CheckpointError: not a valid template.
        """
        self.source = source
        self._special = dict(special)
        environment = TemplateSandbox()
        try:
            self._template: Template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            self._takes_parts = False
            self._takes_parts = self._shows_parts_alone()
        except Exception as error:  # besides jinja2's own: nested too deeply, too many blocks for Python's compiler
            raise CheckpointError(f"chat template: {_said(error)}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> str:
        """Return a conversation's text from plain JSON data.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        begin_rendering()
        if self._takes_parts:
            messages = [_in_parts(message) for message in messages]
        variables = {
            **self._special,
            **options.template_kwargs,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
        }
        try:
            return bounded_text(self._template.generate(**variables))
        except Exception as error:  # a template may do anything wrong that Python has an error for
            raise InvalidRequest("messages", f"the chat template refuses them: {_said(error)}") from None

    def _shows_parts_alone(self) -> bool:
        """Whether texts are shown only as parts of messages, as templates of models with pictures have it."""
        shown = []
        for content in (_PROBED_VALUE, [{"type": "text", "text": _PROBED_VALUE}]):
            try:
                text = self.render([{"role": "user", "content": content}], (), ChatOptions())
            except InvalidRequest:
                text = ""
            shown.append(_PROBED_VALUE in text)
        return shown == [False, True]


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its text as a part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _said(error: Exception) -> str:
    """What an error says; its name where it says nothing, as if memory or the stack are used up."""
    said = str(error)
    if said and not isinstance(error, MemoryError | RecursionError):
        return said
    return f"{type(error).__name__} {said}".strip()


class ChatTemplates:
    """A checkpoint's chat templates. Stateless; may be used from several threads."""

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str], control: ControlTokens) -> None:
        """Compile the templates.

        Args:
            sources: by name: "default", and "tool_use" for conversations with tools.
            special: `bos_token` and the like, as templates see them.
            control: the checkpoint's control tokens.

        Raises:
            CheckpointError: a template is not valid, or none has the name "default".
        """
        if "default" not in sources:
            raise CheckpointError(f"chat template: none of {', '.join(sources)} is named default")
        self.default = ChatTemplate(sources["default"], special)
        self.tool_use = ChatTemplate(sources["tool_use"], special) if "tool_use" in sources else self.default
        self._control = control
        self._row = found_format(self.tool_use.source).row
        self._names_thinking = names_thinking(self.tool_use.source)
        self._shape, shows_calls = (CallShape(), True) if not self.tool_use.takes_tools else _call_shape(self.tool_use)
        self._unshown = None if shows_calls else self._row

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> RenderedChat:
        """Return a conversation's text.

        A template that takes no tools gets the tools in a system message, and calls and their results as text.

        Args:
            messages: each with `role` and `content`; an assistant's turn may have `tool_calls` in OpenAI's form, a
                tool's turn has a `tool_call_id`.
            tools: functions that the model may call: OpenAI's definitions.
            options: how the conversation becomes a prompt.

        Raises:
            InvalidRequest: the template refuses the messages; names what is wrong.
        """
        for name in options.template_kwargs:
            if name in _RESERVED:
                raise InvalidRequest("chat_template_kwargs", f"cannot set {name}")
        turns = with_own_ids(with_names([_plain_json(message) for message in messages]), self._row)
        if self._names_thinking:
            turns = [with_thinking(turn) for turn in turns]
        turns = [self._with_arguments(turn, f"messages.{index}") for index, turn in enumerate(turns)]
        offered = _plain_json(tools)
        kwargs = _plain_json(options.template_kwargs)
        stop = ""
        if options.continue_final_message:
            stop = _unused(json.dumps([turns, offered, kwargs], ensure_ascii=False))
        turns = [self._traced_turn(turn) for turn in turns]
        if stop:
            _mark_final(turns, stop)
        kwargs = {name: value if self._asks_for(value) else traced(value, SAID) for name, value in kwargs.items()}
        options = ChatOptions(options.add_generation_prompt, options.continue_final_message, kwargs)
        text = self._text(turns, traced(offered, SAID), options)
        if stop:
            text = _cut_behind(text, stop)
        return RenderedChat(str.__str__(text), tuple(self._control.literals(text)))

    def _with_arguments(self, turn: dict[str, Any], field: str) -> dict[str, Any]:
        """Return a turn as the template takes turns: call arguments are objects for most, and text in OpenAI's form."""
        for index, call in enumerate(turn.get("tool_calls", ())):
            place = f"{field}.tool_calls.{index}.function.arguments"
            call["function"]["arguments"] = past_arguments(call["function"].get("arguments"), place)
        return self._shape.shaped(turn) if turn.get("tool_calls") and self._unshown is None else turn

    def _traced_turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Return a turn with origins, and with its calls as text if the template leaves calls out."""
        role = turn.get("role")
        found: dict[str, Any] = traced(turn, ANSWERED if role == "assistant" else SAID)
        if role in _ROLES or self._asks_for(role):  # templates such as Phi 3's write the rest of a token around these
            found["role"] = role
        if self._unshown is not None:  # the marks of calls are the model's own, what is within them is not
            found = with_text_of_calls(found, found.get("tool_calls", ()), self._unshown)
        return found

    def _asks_for(self, value: Any) -> bool:
        """Tell whether a template compares a word of a request with this one."""
        if not isinstance(value, str) or not _WORD.fullmatch(value):
            return False
        return any(f"{quote}{value}{quote}" in self.tool_use.source + self.default.source for quote in "'\"")

    def _text(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]], options: ChatOptions) -> str:
        template = self.tool_use if tools else self.default
        if template.takes_tools:
            return template.render(turns, tools, options)
        errors = []
        for system in ("system", "user"):  # some templates take no system message
            try:
                return template.render(with_generic_tools(turns, tools, system), (), options)
            except InvalidRequest as error:
                errors.append(error)
        raise errors[0]


_PROBED_VALUE = "an argument"
_PROBED_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "d",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "d"}}},
    },
}


def _call_shape(template: ChatTemplate) -> tuple[CallShape, bool]:
    """The first shape of a turn with calls that a template does not refuse, and whether the template shows the call."""
    call = {"id": "abcDEF123", "type": "function", "function": {"name": "probe", "arguments": {"key": _PROBED_VALUE}}}
    result = {"role": "tool", "tool_call_id": "abcDEF123", "name": "probe", "content": "result"}
    for shape in CALL_SHAPES:
        turn = shape.shaped({"role": "assistant", "content": "", "tool_calls": [call]})
        try:
            text = template.render([{"role": "user", "content": "ask"}, turn, result], [_PROBED_TOOL], ChatOptions())
        except InvalidRequest:
            continue
        return shape, _PROBED_VALUE in text
    return CallShape(), True


def _mark_final(turns: list[dict[str, Any]], stop: str) -> None:
    """Put `stop` behind the last turn's text.

    Raises:
        InvalidRequest: there is no text to continue.
    """
    if not turns or turns[-1].get("tool_calls") or turns[-1].get("role") != "assistant":
        raise InvalidRequest("continue_final_message", "the last message must be an assistant's text")
    turns[-1]["content"] = text_of(turns[-1]["content"]) + stop


def _unused(texts: str) -> str:
    """Return a character that is not in `texts`.

    Raises:
        InvalidRequest: `texts` have all characters for private use.
    """
    used = set(_PRIVATE.findall(texts))
    unused = next((char for char in map(chr, range(0xE000, 0xF900)) if char not in used), None)
    if unused is None:
        raise InvalidRequest("messages", "have all characters for private use (U+E000 to U+F8FF); leave some out")
    return unused


def _cut_behind(text: str, stop: str) -> str:
    """Return `text` up to the last `stop`.

    Raises:
        InvalidRequest: the template leaves the last message out.
    """
    before, found, _ = text.rpartition(stop)
    if not found:
        raise InvalidRequest("continue_final_message", "the chat template leaves the last message out")
    return before


def _plain_json(value: Any) -> Any:
    """Rebuild `value` out of plain JSON types: objects with methods have no place in a sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain_json(item) for item in value]
    raise InvalidRequest("messages", f"must be plain JSON data, not {type(value).__name__}")
