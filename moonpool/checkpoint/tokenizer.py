"""Text to tokens and back: tokenizers, incremental detokenising, chat templates and stop strings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from pydantic_core import from_json

from moonpool.checkpoint.gguf import gguf_tokenizer, is_gguf
from moonpool.checkpoint.huggingface import folder_tokenizer
from moonpool.errors import CheckpointError, InvalidRequest


class ChatTemplate:
    """A checkpoint's chat template, in a sandbox. Stateless; may be used from several threads."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Compile `source`; `special` are `bos_token` and the like, as the template sees them.

        Raises:
            CheckpointError: it is no valid template.
        """
        self.source = source
        self._special = dict(special)
        environment = _environment()
        try:
            self._template: Template = environment.from_string(source)
            self._takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise CheckpointError(f"chat template: {error}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: each with `role` and `content`; an assistant's turn may have `tool_calls` in OpenAI's form, a
                tool's turn has its `tool_call_id`.
            tools: functions that the model may call: OpenAI's definitions.
            add_generation_prompt: the text ends with what begins an answer.

        Raises:
            InvalidRequest: the template refuses the messages or takes no tools; names what is wrong.
        """
        if tools and not self._takes_tools:
            raise InvalidRequest("tools", "this model's chat template takes no tools")
        turns = [_template_turn(index, _plain_json(message)) for index, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=turns,
                tools=_plain_json(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequest("messages", f"the chat template refuses them: {error}") from None


def _template_turn(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A turn as templates take it: arguments of calls are objects there, and text in OpenAI's form."""
    for number, call in enumerate(message.get("tool_calls", ())):
        function, place = call["function"], f"messages.{index}.tool_calls.{number}.function.arguments"
        function["arguments"] = _json_object(function["arguments"], place)
    return message


def _json_object(text: str, place: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        InvalidRequest: it is none; names `place`.
    """
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(place, f"invalid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(place, "must be a JSON object")
    return found


class _Generation(Extension):
    """Lets `{% generation %}` through, with which some templates mark the assistant's part for training."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> SandboxedEnvironment:
    """A sandbox with the filters and functions that transformers gives to templates.

    Source: `transformers/utils/chat_template_utils.py`. The sandbox refuses access to Python's internals and changes
    of its arguments; a template can compute text and nothing else.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON; jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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


class StopWatcher:
    """Passes text on, up to the first of several stop strings, however the text is cut into pieces.

    Text that may be the beginning of a stop string is held back until it is decided. Of several stop strings the one
    that is complete first wins (of those that end together, the one that begins first), so the result does not depend
    on how the text was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in dict.fromkeys(stops) if stop)
        self._held = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """Take the next piece; returns what may be shown now. Nothing is shown after a stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = self._first_match()
        if found is not None:
            begin, self.matched = found
            shown, self._held = self._held[:begin], ""
            return shown
        keep = max(self._prefix_length(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Return what is still held back: the text has ended, so it is no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self) -> tuple[int, str] | None:
        found = [(self._held.find(stop), stop) for stop in self._stops]
        matches = [(begin + len(stop), begin, stop) for begin, stop in found if begin >= 0]
        if not matches:
            return None
        _, begin, stop = min(matches)
        return begin, stop

    def _prefix_length(self, stop: str) -> int:
        """Return the length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


_REPLACEMENT = "\ufffd"


# A character has at most 4 bytes, so at most 3 tokens wait for its end; more is text that will never be valid.
_MAX_HELD_TOKENS = 32
_PIECE_CHARS = 1 << 14
_PIECE_SLACK = 16
"""Tokens by which a piece of a text may have more than it has within the text: a cut token, tokens put in front."""


# A text is tokenised on the thread that asks for it and on no other.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """A checkpoint's tokenizer. Stateless after loading; may be used from several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, chat_template: str | None, special: Mapping[str, str] | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self._template = ChatTemplate(chat_template, special or {}) if chat_template is not None else None
        self.special_tokens = dict(special or {})
        """Texts of special tokens by the name of their role, for example `eos_token`."""

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Load from a Hugging Face folder or a GGUF file.

        Raises:
            CheckpointError: the tokenizer is missing or damaged, or the chat template is no valid template.
        """
        return cls(*(gguf_tokenizer if is_gguf(path) else folder_tokenizer)(Path(path)))

    @property
    def vocab_size(self) -> int:
        """Number of tokens the tokenizer knows, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def definition(self) -> str:
        """All of it but the chat template, as the library `tokenizers` writes it down."""
        return str(self._backend.to_str())

    @property
    def longest_token_chars(self) -> int:
        """Characters of the longest token as the vocabulary spells it; no token stands for more characters of text."""
        return self._longest

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return self._template is not None

    @property
    def chat_template(self) -> str:
        """The chat template's source; "" = there is none."""
        return self._template.source if self._template is not None else ""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the tokens of `text`; with `add_special` also those the model expects around it (often one BOS)."""
        # Unlike `encode`, this releases the interpreter lock: a megabyte takes most of a second.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoding.ids)

    def is_longer(self, text: str, max_tokens: int) -> bool:
        """Tell whether `text` certainly has more than `max_tokens` tokens.

        Memory and time are those of `max_tokens` tokens however long `text` is: it is tokenised piece by piece.
        """
        if len(text.encode()) <= max_tokens:
            return False
        tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            tokens += len(self.encode(text[start : start + _PIECE_CHARS], add_special=False)) - _PIECE_SLACK
            if tokens > max_tokens:
                return True
        return False

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the text that the chat template makes of `messages`; see `ChatTemplate.render`.

        Raises:
            InvalidRequest: the checkpoint has no chat template, or the template refuses these messages or tools.
        """
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template")
        return self._template.render(messages, tools, add_generation_prompt=add_generation_prompt)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the tokens of `render_chat`; the template itself writes special tokens."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special=False)

    def stream(self, prompt: Sequence[int] = (), skip_special: bool = True) -> Detokenizer:
        """Return a detokenizer for tokens that come one by one, after `prompt` (whose text is not returned)."""
        return Detokenizer(self, prompt, skip_special)


class Detokenizer:
    """Text of a growing token sequence. What all `push` and the last `flush` return is `decode` of all tokens.

    Decoding a window that begins some tokens before the new ones gives spaces and merged characters as in the whole
    text (the method of Hugging Face's text-generation-inference). A character whose bytes have not all come is held
    back. Exception: a byte sequence that stays invalid longer than 32 tokens is cut there.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window = list(prompt[-8:])  # tokens decoded anew at each push
        self._read = len(self._window)  # leading tokens of the window whose text is final
        # Characters of the window's text already returned. A character that the prompt has begun is not among them.
        self._shown = len(self._decode(self._window).rstrip(_REPLACEMENT))

    def push(self, ids: Iterable[int]) -> str:
        """Take further tokens; returns the text that is final now."""
        self._window.extend(ids)
        text = self._decode(self._window)
        held = text.endswith(_REPLACEMENT) and len(self._window) - self._read < _MAX_HELD_TOKENS
        final = text.rstrip(_REPLACEMENT) if held else text
        new = final[self._shown :]
        self._shown = max(self._shown, len(final))
        if not held:
            self._shift()
        return new

    def flush(self) -> str:
        """Return what is still held back; the sequence has ended."""
        text = self._decode(self._window)
        new = text[self._shown :]
        self._shown = len(text)
        return new

    def _shift(self) -> None:
        """Drop from the window all but the newest final tokens."""
        kept = self._window[self._read :]
        if kept:
            self._window = kept
            self._read = len(kept)
            self._shown = len(self._decode(kept))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)
