"""Text to tokens and back: tokenizers, incremental detokenising, chat templates and stop strings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

from moonpool.base.checkpoint.chat_template import ChatOptions, ChatTemplates, ControlTokens, RenderedChat
from moonpool.base.checkpoint.folder_tokenizer import folder_tokenizer
from moonpool.base.checkpoint.gguf import is_gguf
from moonpool.base.checkpoint.gguf_tokenizer import gguf_tokenizer
from moonpool.base.checkpoint.token_bytes import most_token_bytes
from moonpool.base.errors import CheckpointError, InvalidRequest

_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 3 tokens wait for the character's end; more is text that will never be
# valid.
_MAX_WINDOW_TOKENS = 16
_MAX_HELD_TOKENS = 32
_FEW_TOKENS = 256
_PIECE_CHARS = 1 << 14
_PIECE_SLACK = 16
"""Extra tokens that a text's piece may have compared with the whole text: a cut token, tokens put in front."""


class StopWatcher:
    """Passes text on, up to the first of several stop strings, however the text is cut into pieces.

    Text that may begin a stop string is held back until decided. Among several stop strings the first complete string
    wins (among those that end together, the first to begin), so the result does not depend on how the text was cut.
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
        """Take the next piece; returns what may be shown now. No text is shown after a stop string."""
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
        """Return the text still held back: the text has ended, so no stop string follows."""
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
        """Return the length of the held text's longest end that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


# A text is tokenised only on the thread that asks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """A prompt's part.

    Attributes:
        text: the text.
        cuts: places in `text` that no control token of the vocabulary may lie across.
        first: the prompt begins with `text`.
        token: the token that `text` is; None for plain text.
    """

    text: str
    cuts: tuple[int, ...] = ()
    first: bool = False
    token: int | None = None


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None


class Tokenizer:
    """A checkpoint's tokenizer. Stateless after loading; may be used from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_templates: Mapping[str, str] | None = None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap `backend`.

        Args:
            backend: the tokenizer; not used elsewhere.
            chat_templates: sources by name, as for `ChatTemplates`.
            special: `bos_token` and the like, as templates see them.

        Raises:
            CheckpointError: a chat template is no valid template.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._most_bytes = most_token_bytes(backend)
        self.special_tokens = dict(special or {})
        """Special tokens' texts by role, for example `eos_token`."""
        added = backend.get_added_tokens_decoder()
        self._takes_spaces = [
            token.content for token in added.values() if token.content and (token.lstrip or token.rstrip)
        ]
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._templates: ChatTemplates | None = None
        if chat_templates:
            written = "".join(chat_templates.values())
            control = ControlTokens(
                [token.content for token in added.values() if token.special],
                [token.content for token in added.values() if token.content in written],
            )
            self._templates = ChatTemplates(chat_templates, self.special_tokens, control)

    @classmethod
    def load(cls, path: Path | str, chat_template: Path | None = None) -> Tokenizer:
        """Load from a Hugging Face folder or a GGUF file.

        Args:
            path: the checkpoint.
            chat_template: file with a template that replaces the checkpoint's.

        Raises:
            CheckpointError: the tokenizer is missing or damaged, or the chat template is missing or not valid.
        """
        parts = (gguf_tokenizer if is_gguf(path) else folder_tokenizer)(Path(path))
        templates = parts.chat_templates if chat_template is None else {"default": _read_template(chat_template)}
        return cls(parts.backend, templates, parts.special)

    @property
    def vocab_size(self) -> int:
        """Number of tokens the tokenizer knows, including added tokens."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def definition(self) -> str:
        """Return the tokenizer without the chat template, as the library `tokenizers` writes the definition."""
        return str(self._backend.to_str())

    @property
    def chat_template(self) -> str:
        """Source of the chat template for conversations with tools; "" = there is none."""
        return self._templates.tool_use.source if self._templates is not None else ""

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return self._templates is not None and self._templates.tool_use.takes_tools

    def special_id(self, text: str) -> int | None:
        """Id of the special token `text`; None if the text is no special token."""
        token: int | None = self._backend.token_to_id(text)
        return token if token in self._special_ids else None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the tokens of `text`; with `add_special` also the model's tokens around the text (often one BOS)."""
        # Unlike `encode`, this releases the interpreter lock: a megabyte takes most of a second.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoding.ids)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the tokens of two texts, with the model's tokens around and between them, as cross-encoders take them.

        If the chat template has turns of the roles `query` and `document`, as vLLM's templates for rerankers have,
        the template writes the prompt. A model whose tokenizer puts nothing between gets one text behind the other.
        """
        template = self._templates.default.source if self._templates is not None else ""
        if all(re.search(f"""['"]{role}['"]""", template) for role in ("query", "document")):
            turns = [{"role": "query", "content": first}, {"role": "document", "content": second}]
            return self.encode_chat(self.render_chat(turns))
        (encoding,) = self._backend.encode_batch([(first, second)])
        return list(encoding.ids)

    def is_too_large(self, num_bytes: int, max_tokens: int) -> bool:
        """Tell whether each text of so many bytes has more than `max_tokens` tokens."""
        return 0 < self._most_bytes * max_tokens < num_bytes

    def is_longer(self, text: str, max_tokens: int) -> bool:
        """Tell whether `text` certainly has more than `max_tokens` tokens.

        Takes memory and time for `max_tokens` tokens, however long `text` is: the text is tokenised piece by piece,
        unless its bytes say enough.
        """
        num_bytes = len(text.encode())
        if num_bytes <= max_tokens or self.is_too_large(num_bytes, max_tokens):
            return num_bytes > max_tokens
        tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            for token in self._takes_spaces:  # spaces beside such a token, here or in the next piece, are no tokens
                piece = token.join([part.strip() for part in piece.split(token)])
            tokens += len(self.encode(piece, add_special=False)) - _PIECE_SLACK
            if tokens > max_tokens:
                return True
        return False

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        if len(ids) > _FEW_TOKENS:  # unlike `decode`, this releases the interpreter lock
            (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special)
            return str(text)
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def with_text(self, ids: Iterable[int], skip_special: bool = True) -> list[int]:
        """Return the tokens in `ids` that `decode` spells: neither skipped nor missing in the vocabulary."""
        skipped = self._special_ids if skip_special else frozenset()
        return [token for token in ids if token not in skipped and self._backend.id_to_token(token) is not None]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: ChatOptions = ChatOptions(),  # noqa: B008  # frozen
    ) -> RenderedChat:
        """Return the chat template's text for `messages`; see `ChatTemplates.render`.

        Raises:
            InvalidRequest: the checkpoint has no chat template, or the template refuses these messages.
        """
        if self._templates is None:
            raise InvalidRequest("messages", "this model has no chat template")
        return self._templates.render(messages, tools, options)

    def encode_chat(self, chat: RenderedChat, add_special: bool = False) -> list[int]:
        """Return a prompt's tokens; the template writes the control tokens.

        Control tokens that the conversation brought become tokens of plain text.

        Raises:
            InvalidRequest: the tokenizer makes a control token out of plain text.
        """
        if not chat.literals or self._backend.encode_special_tokens:
            return self.encode(chat.text, add_special)
        ids = [token for segment in self._segments(chat) for token in self._encode_segment(segment)]
        if not add_special:
            return ids
        plain, around = self.encode("a", False), self.encode("a", True)
        begins = next(at for at in range(len(around)) if around[at : at + len(plain)] == plain)
        return [*around[:begins], *ids, *around[begins + len(plain) :]]

    def _segments(self, chat: RenderedChat) -> Iterator[PromptSegment]:
        """Cut a prompt at the control tokens written by the template."""
        added = self._backend.get_added_tokens_decoder().values()
        tokens = {token.content: token for token in added if token.content}
        any_token = re.compile("|".join(re.escape(text) for text in sorted(tokens, key=len, reverse=True)))
        begin, cuts, at = 0, list[int](), 0
        for literal, behind in (*chat.literals, (len(chat.text), len(chat.text))):
            for match in any_token.finditer(chat.text, at, literal):
                token = tokens[match[0]]
                text = chat.text[begin : match.start()]
                yield PromptSegment(text.rstrip() if token.lstrip else text, tuple(cuts), first=begin == 0)
                yield PromptSegment(match[0], token=self._backend.token_to_id(match[0]))
                begin, cuts = match.end(), []
                if token.rstrip:
                    begin += len(chat.text[begin:]) - len(chat.text[begin:].lstrip())
            at = behind
            cuts.append(max(0, min(literal + 1, behind) - begin))
        yield PromptSegment(chat.text[begin:], tuple(cuts[:-1]), first=begin == 0)

    def _encode_segment(self, segment: PromptSegment) -> list[int]:
        if segment.token is not None:
            return [segment.token]
        ids = self._encode_plain(segment.text, first=segment.first)
        if self._special_ids.isdisjoint(ids):
            return ids
        # The vocabulary has the control token as a word; cut the word.
        cuts = [0, *segment.cuts, len(segment.text)]
        pieces = [segment.text[begin:end] for begin, end in pairwise(cuts)]
        ids = [token for at, piece in enumerate(pieces) for token in self._encode_plain(piece, first=not at)]
        if not self._special_ids.isdisjoint(ids):
            raise InvalidRequest("messages", "have a control token, which this tokenizer cannot write as text")
        return ids

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        """Return the tokens for a text part without added tokens; `first`: the text begins with `text`."""
        if not text:
            return []
        if first or not self._plain_marks_first:
            return list(self._plain.encode(text, add_special_tokens=False).ids)
        # Behind a line break the part is not the first of a text, and gets no space in front.
        line, ids = (self._plain.encode(piece, add_special_tokens=False).ids for piece in ("\n", f"\n{text}"))
        if ids[: len(line)] == line:
            return list(ids[len(line) :])
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer without added tokens."""
        content = json.loads(self.definition())
        return tokenizers.Tokenizer.from_str(json.dumps({**content, "added_tokens": [], "post_processor": None}))

    @cached_property
    def _plain_marks_first(self) -> bool:
        """Whether the first part of a text gets a space in front, and no other part."""
        return '"prepend_scheme":"first"' in self.definition().replace(" ", "")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: ChatOptions = ChatOptions(),  # noqa: B008  # frozen
    ) -> list[int]:
        """Return the tokens of `render_chat`."""
        return self.encode_chat(self.render_chat(messages, tools, options))

    def stream(self, prompt: Sequence[int] = (), skip_special: bool = True) -> Detokenizer:
        """Return a detokenizer for tokens that come singly, after `prompt`; the prompt's text is not returned."""
        return Detokenizer(self, prompt, skip_special)


class Detokenizer:
    """Text of a growing token sequence. What all `push` and the last `flush` return is `decode` of all tokens.

    Decoding a window that begins some tokens before the new tokens gives spaces and merged characters as in the whole
    text (the method in Hugging Face's text-generation-inference). Tokens without text are not in the window: after such
    tokens alone, some decoders would treat the next token as the text's first and drop the token's space. A character
    with missing bytes is held back. Exceptions: a byte sequence that stays invalid longer than 32 tokens is cut there;
    decoders like SentencePiece's spell valid bytes before invalid bytes as invalid, too.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window = tokenizer.with_text(prompt[-16:], skip_special)[-8:]  # tokens decoded anew at each push
        self._read = len(self._window)  # leading window tokens with final text
        # Characters of the window's text already returned. A character that the prompt has begun is not among them.
        prompt_text = self._decode(self._window)
        self._shown = len(prompt_text.rstrip(_REPLACEMENT))
        self._begun = len(prompt_text) - self._shown  # characters that the prompt has begun, and may never end

    def push(self, ids: Iterable[int]) -> str:
        """Take further tokens; returns the text that is final now, the same however the tokens are cut into calls."""
        tokens = self._tokenizer.with_text(ids, self._skip_special)
        text = self._decode(self._window + tokens)
        if (
            len(tokens) > 1 and _REPLACEMENT in text[self._shown :]
        ):  # where a broken character ends depends on each token
            return "".join([self._take([token], self._decode([*self._window, token])) for token in tokens])
        return self._take(tokens, text)

    def _take(self, tokens: list[int], text: str) -> str:
        """Take tokens, which make `text` of the window; returns the text that is final now."""
        self._window += tokens
        held = text.endswith(_REPLACEMENT) and len(self._window) - self._read < _MAX_HELD_TOKENS
        final = text.rstrip(_REPLACEMENT) if held else text
        new = self._unseen(final)
        if not held:
            self._shift()
        return new

    def flush(self) -> str:
        """Return what is still held back; the sequence has ended."""
        return self._unseen(self._decode(self._window))

    def _unseen(self, text: str) -> str:
        """Return the unreturned part of the window's `text`, without the prompt's broken end."""
        if self._begun and len(text) > self._shown:
            broken = text[self._shown : self._shown + self._begun]
            self._shown += len(broken) - len(broken.lstrip(_REPLACEMENT))
            self._begun = 0
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new

    def _shift(self) -> None:
        """All tokens are final. Drop from a long window all but the newest of them."""
        kept = self._window[self._read :]
        if kept and len(self._window) >= _MAX_WINDOW_TOKENS:
            self._window = kept
            self._shown = len(self._decode(kept))
        self._read = len(self._window)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)
