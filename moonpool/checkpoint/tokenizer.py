"""Text to tokens and back, and incremental detokenising."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from moonpool.checkpoint.chat import ChatTemplate
from moonpool.checkpoint.folder import folder_tokenizer
from moonpool.checkpoint.gguf_file import is_gguf
from moonpool.checkpoint.gguf_tokenizer import gguf_tokenizer
from moonpool.errors import InvalidRequest

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
