"""Text to tokens and back: the tokenizer, the chat template in its sandbox, and incremental detokenising."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moonpool.checkpoint.folder import folder_tokenizer
from moonpool.checkpoint.gguf_file import is_gguf
from moonpool.checkpoint.gguf_tokenizer import gguf_tokenizer
from moonpool.errors import CheckpointError, InvalidRequest

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
        self._template = _compile(chat_template) if chat_template is not None else None
        self._special = dict(special or {})

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

    @property
    def longest_token_chars(self) -> int:
        """Characters of the longest token as the vocabulary spells it; no token stands for more characters of text."""
        return self._longest

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return self._template is not None

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

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Return the text that the chat template makes of `messages` (each with `role` and `content`).

        Raises:
            InvalidRequest: the checkpoint has no chat template, or the template refuses these messages.
        """
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template")
        try:
            return self._template.render(
                messages=_plain(messages), add_generation_prompt=add_generation_prompt, tools=None, **self._special
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequest("messages", f"the chat template refuses them: {error}") from None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the tokens of `render_chat`; the template itself writes special tokens."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special=False)

    def stream(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for tokens that come one by one, after `prompt` (whose text is not returned)."""
        return Detokenizer(self, prompt)


class Detokenizer:
    """Text of a growing token sequence. What all `push` and the last `flush` return is `decode` of all tokens.

    Decoding a window that begins some tokens before the new ones gives spaces and merged characters as in the whole
    text (the method of Hugging Face's text-generation-inference). A character whose bytes have not all come is held
    back. Exception: a byte sequence that stays invalid longer than 32 tokens is cut there.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-8:])  # tokens decoded anew at each push
        self._read = len(self._window)  # leading tokens of the window whose text is final
        # Characters of the window's text already returned. A character that the prompt has begun is not among them.
        self._shown = len(tokenizer.decode(self._window).rstrip(_REPLACEMENT))

    def push(self, ids: Iterable[int]) -> str:
        """Take further tokens; returns the text that is final now."""
        self._window.extend(ids)
        text = self._tokenizer.decode(self._window)
        held = text.endswith(_REPLACEMENT) and len(self._window) - self._read < _MAX_HELD_TOKENS
        final = text.rstrip(_REPLACEMENT) if held else text
        new = final[self._shown :]
        self._shown = max(self._shown, len(final))
        if not held:
            self._shift()
        return new

    def flush(self) -> str:
        """Return what is still held back; the sequence has ended."""
        text = self._tokenizer.decode(self._window)
        new = text[self._shown :]
        self._shown = len(text)
        return new

    def _shift(self) -> None:
        """Drop from the window all but the newest final tokens."""
        kept = self._window[self._read :]
        if kept:
            self._window = kept
            self._read = len(kept)
            self._shown = len(self._tokenizer.decode(kept))


class _Generation(Extension):
    """Lets `{% generation %}` through, with which some templates mark the assistant's part for training."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> Template:
    """Compile a chat template in a sandbox, with the filters and functions that transformers gives to templates.

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
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise CheckpointError(f"chat template: {error}") from None


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON; jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain(value: Any) -> Any:
    """Rebuild `value` out of plain JSON types: objects with methods have no place in a sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise InvalidRequest("messages", f"must be plain JSON data, not {type(value).__name__}")
