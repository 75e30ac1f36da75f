"""Chat templates: from a conversation to a prompt's text, in a sandbox.

Control tokens come from templates only. Before a template runs, control tokens within a conversation's texts are
marked, so that the prompt can be tokenised with those texts as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from jinja2 import Template, meta

from moonpool.base.answer_formats import found_format
from moonpool.base.checkpoint.generic_tools import with_generic_tools
from moonpool.base.checkpoint.past_calls import CALL_SHAPES, CallShape, past_arguments, with_text_of_calls
from moonpool.base.checkpoint.past_ids import with_names, with_own_ids
from moonpool.base.checkpoint.past_thinking import names_thinking, with_thinking
from moonpool.base.checkpoint.template_sandbox import TemplateSandbox, begin_rendering, bounded_text
from moonpool.base.errors import CheckpointError, InvalidRequest

_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Template variables that `template_kwargs` cannot set."""
_PRIVATE = re.compile("[\\ue000-\\uf8ff]")
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

    def choose_marks(self, texts: str) -> tuple[str, str, str]:
        """Return three characters that are not in `texts`.

        Raises:
            InvalidRequest: `texts` have nearly all characters for private use.
        """
        used = set(_PRIVATE.findall(texts))
        unused = list(islice((char for char in map(chr, range(0xE000, 0xF900)) if char not in used), 3))
        if len(unused) < 3:
            raise InvalidRequest("messages", "have all characters for private use (U+E000 to U+F8FF); leave some out")
        begin, end, stop = unused
        return begin, end, stop

    def mark(self, value: Any, begin: str, end: str, *, assistant: bool = False) -> Any:
        """Return plain JSON data with `begin` and `end` around every control token within strings and keys.

        `begin` alone stands where a string ends with a part of a token, `end` alone where a string begins so: a
        template may write the rest beside the string.
        """
        tokens = self._special if assistant else self._all
        if isinstance(value, str):
            return tokens.mark(value, begin, end)
        if isinstance(value, dict):
            return {
                tokens.mark(key, begin, end): self.mark(item, begin, end, assistant=assistant)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.mark(item, begin, end, assistant=assistant) for item in value]
        return value

    def within(self, text: str) -> bool:
        """Tell whether `text` is a part of a control token, without its first and last characters."""
        return self._all.within(text)

    def unmark(self, text: str, begin: str, end: str) -> RenderedChat:
        """Return `text` without marks. A mark without its token is a place where two texts meet."""
        parts: list[str] = []
        literals, length, last = list[tuple[int, int]](), 0, 0
        for match in re.finditer(f"{begin}({self._all.pattern.pattern}){end}|[{begin}{end}]", text):
            token = match[1] or ""
            parts += [text[last : match.start()], token]
            length += match.start() - last + len(token)
            literals.append((length - len(token), length))
            last = match.end()
        plain = "".join((*parts, text[last:]))
        kept = (
            (first, last) for first, last in dict.fromkeys(literals) if first < last or self._all.across(plain, first)
        )
        return RenderedChat(plain, tuple(kept))


class _Tokens:
    """Some control tokens, to be found in texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
        self._texts = longest_first
        self._longest = len(longest_first[0]) if longest_first else 0
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        begins = {text[:size] for text in longest_first for size in range(1, len(text))}
        ends = {text[size:] for text in longest_first for size in range(1, len(text))}
        # No parts of tokens that are words: templates compare texts with words.
        self._begins = frozenset(part for part in begins if not part[0].isalnum())
        self._ends = frozenset(part for part in ends if not part[-1].isalnum())

    def mark(self, text: str, begin: str, end: str) -> str:
        """Return `text` with marks; see `ControlTokens.mark`."""
        inner = text.strip()  # as templates strip texts
        sizes = range(1, min(len(inner) + 1, self._longest))
        opens = any(inner[-size:] in self._begins for size in sizes)
        closes = any(inner[:size] in self._ends for size in sizes)
        marked = self.pattern.sub(lambda match: f"{begin}{match[0]}{end}", text)
        if opens:
            inner = marked.rstrip()
            marked = f"{inner}{begin}{marked[len(inner) :]}"
        if closes:
            inner = marked.lstrip()
            marked = f"{marked[: len(marked) - len(inner)]}{end}{inner}"
        return marked

    def within(self, text: str) -> bool:
        """See `ControlTokens.within`."""
        return bool(text) and any(text in token[1:-1] for token in self._texts)

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
        # Arguments are read before marks are chosen: as JSON they may hide any character.
        turns = [self._with_arguments(turn, f"messages.{index}") for index, turn in enumerate(turns)]
        offered = _plain_json(tools)
        kwargs = _plain_json(options.template_kwargs)
        begin, end, stop = self._control.choose_marks(json.dumps([turns, offered, kwargs], ensure_ascii=False))
        turns = [self._marked_turn(turn, begin, end) for turn in turns]
        if options.continue_final_message:
            _mark_final(turns, stop)
        offered = self._control.mark(offered, begin, end)
        marked = ChatOptions(
            options.add_generation_prompt, options.continue_final_message, self._control.mark(kwargs, begin, end)
        )
        text = self._text(turns, offered, marked)
        if options.continue_final_message:
            text = _cut_behind(text, stop)
        return self._control.unmark(text, begin, end)

    def _with_arguments(self, turn: dict[str, Any], field: str) -> dict[str, Any]:
        """Return a turn as the template takes turns: call arguments are objects for most, and text in OpenAI's form."""
        for index, call in enumerate(turn.get("tool_calls", ())):
            place = f"{field}.tool_calls.{index}.function.arguments"
            call["function"]["arguments"] = past_arguments(call["function"].get("arguments"), place)
        return self._shape.shaped(turn) if turn.get("tool_calls") and self._unshown is None else turn

    def _marked_turn(self, turn: dict[str, Any], begin: str, end: str) -> dict[str, Any]:
        """Return a turn with marks, and with its calls as text if the template leaves calls out."""
        role = turn.get("role")
        marked: dict[str, Any] = self._control.mark(turn, begin, end, assistant=role == "assistant")
        if role in _ROLES:  # templates ask for these, which may be tokens
            marked["role"] = role
        elif isinstance(role, str) and self._control.within(role) and not self._asks_for(role):
            # Templates such as Phi 3's write the rest of a token on both sides.
            marked["role"] = f"{begin}{role}{end}"
        if self._unshown is not None:  # the marks of calls are the model's own, what is within them is not
            marked = with_text_of_calls(marked, marked.get("tool_calls", ()), self._unshown)
        return marked

    def _asks_for(self, role: str) -> bool:
        """Tell whether a template compares roles with this one."""
        return any(f"{quote}{role}{quote}" in self.tool_use.source + self.default.source for quote in "'\"")

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
    turns[-1]["content"] = f"{turns[-1]['content']}{stop}"


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
