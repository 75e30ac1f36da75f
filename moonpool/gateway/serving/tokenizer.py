"""The tokenizer and chat template of the served model, run on threads."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic_core import to_json

from moonpool.base.answer_formats import (
    FORMATS,
    REASONING_FORMATS,
    AnswerFormat,
    FoundFormat,
    ReasoningFormat,
    found_format,
)
from moonpool.base.checkpoint import ChatOptions, Tokenizer
from moonpool.base.errors import InvalidRequest, Mismatch
from moonpool.base.pictures.base import PictureRule
from moonpool.base.pictures.rule import with_pictures
from moonpool.base.runtime.tenant_turns import TenantTurns
from moonpool.client import Message
from moonpool.gateway.serving.pictures import pictures_of

T = TypeVar("T")
AUTO = "auto"
GENERIC_FORMAT = FORMATS["hermes"]
"""Format of the calls that `moonpool.base.checkpoint.generic_tools` asks for."""
NO_PICTURES = "the gateway does not know the model"
MAX_TEMPLATE_VARIANTS = 64
MAX_VARIANT_BYTES = 4096
"""Of a template's variables as JSON, by which is kept whether the template begins the thinking."""


@dataclass(frozen=True, slots=True)
class ParserNames:
    """How answers are read: keys of `FORMATS` and `REASONING_FORMATS`; "auto" = by the chat template; "none" = not."""

    tool_call: str = AUTO
    reasoning: str = AUTO


def chosen_format(tokenizer: Tokenizer, parsers: ParserNames, architecture: str = "") -> FoundFormat:
    """How a model writes answers: as the settings say, else as the chat template shows.

    Templates that take no tools get them, and the format of calls, in a system message.
    """
    found = found_format(tokenizer.chat_template, architecture)
    row, reasoning, note = found.row, found.reasoning, found.note
    if parsers.tool_call != AUTO:
        row, note = FORMATS.get(parsers.tool_call), ""
    elif not tokenizer.takes_tools and (row is None or not row.always):
        row, note = GENERIC_FORMAT, ""
    if parsers.reasoning != AUTO:
        reasoning = REASONING_FORMATS.get(parsers.reasoning)
    return FoundFormat(row, reasoning, note)


class GatewayTokenizer:
    """Tokenizer and chat template of a checkpoint. Long work runs on threads."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        threads: TenantTurns,
        parsers: ParserNames,
        architecture: str = "",
        pictures: PictureRule | str = NO_PICTURES,
    ) -> None:
        """Wrap the tokenizer of a checkpoint.

        Args:
            name: name of the checkpoint; the cluster must serve the model of this name.
            tokenizer: the tokenizer of the checkpoint.
            threads: threads that tokenise, by turns of tenants.
            parsers: how answers are read.
            architecture: the model's class, as a witness of the formats; "" = unknown.
            pictures: what the model makes of pictures; a text says why it takes none.
        """
        self._name = name
        self._tokenizer = tokenizer
        self._threads = threads
        self._pictures = pictures
        self.found = chosen_format(tokenizer, parsers, architecture)
        """How the model writes answers, and what a person should know of that."""
        self._thinks_at_once: dict[bytes, bool] = {}  # by the template's variables

    async def encode(self, tenant: str, text: str, max_tokens: int, *, special: bool) -> list[int]:
        """Tokens of a text; `special`: with the special tokens that begin a prompt.

        Raises:
            InvalidRequest: the text has more than `max_tokens` tokens.
        """
        return await self._threads.run(tenant, lambda: self._encode("prompt", text, max_tokens, special=special))

    async def encode_pairs(
        self, tenant: str, field: str, pairs: Sequence[tuple[str, str]], max_tokens: int
    ) -> list[list[int]]:
        """Tokens of each pair of texts, as cross-encoders take them.

        Raises:
            InvalidRequest: a text has more than `max_tokens` tokens; names `field`.
        """

        def check(text: str) -> Callable[[], None]:
            return lambda: self._check_longer(field, text, max_tokens)

        def encode(pair: tuple[str, str]) -> Callable[[], list[int]]:
            return lambda: self._tokenizer.encode_pair(*pair)

        for text in dict.fromkeys(text for pair in pairs for text in pair):
            await self._threads.run(tenant, check(text))
        return [await self._threads.run(tenant, encode(pair)) for pair in pairs]

    async def encode_chat(
        self,
        tenant: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        options: ChatOptions,
        *,
        special: bool = False,
    ) -> list[int]:
        """Tokens of messages after the chat template, as the conductor makes them.

        Args:
            tenant: whose conversation it is.
            messages: the conversation; sizes of its pictures are known.
            tools: functions that the template shows.
            max_tokens: most tokens.
            options: options of the template.
            special: with the special tokens that begin a text.

        Raises:
            InvalidRequest: the chat template refuses the messages, there are more than `max_tokens` tokens, or the
                model takes no pictures.
        """
        sent, rule = pictures_of(messages), self._pictures
        if sent and isinstance(rule, str):
            raise InvalidRequest("messages", f"{self._name} takes no pictures: {rule}")

        def run() -> list[int]:
            num_chars = sum(len(text) for message in messages for text in _texts(message))
            _check("messages", self._tokenizer.is_too_large(num_chars, max_tokens), max_tokens)
            chat = self._tokenizer.render_chat([*map(_shown, messages)], tools, options)
            if not isinstance(rule, str) and rule.written is not None:
                chat = chat.with_text(*rule.written)
            self._check_longer("messages", chat.text, max_tokens)
            tokens = self._tokenizer.encode_chat(chat, special)
            if sent and not isinstance(rule, str):
                tokens = with_pictures("messages", rule, tokens, sent)[0].tolist()
                _check("messages", len(tokens) > max_tokens, max_tokens)
            return tokens

        return await self._threads.run(tenant, run)

    async def tokens_behind(
        self,
        tenant: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: ChatOptions,
        texts: Sequence[str],
        ends: Sequence[int],
    ) -> list[int]:
        """For each of `ends`, a place in `texts`: tokens of the prompt behind that text.

        Args:
            tenant: whose conversation it is.
            messages: the conversation.
            tools: functions that the template shows.
            options: options of the template.
            texts: texts of the messages, in the order of the prompt.
            ends: places of texts.

        Raises:
            InvalidRequest: the chat template refuses the messages.
        """

        def run() -> list[int]:
            chat = self._tokenizer.render_chat(messages, tools, options).text
            places, at = [], 0
            for text in texts:
                found = chat.find(text, at)
                at = at if found < 0 else found + len(text)
                places.append(at)
            return [len(self._tokenizer.encode(chat[places[end] :], add_special=False)) for end in ends]

        return await self._threads.run(tenant, run)

    async def decode(self, tenant: str, tokens: Sequence[int]) -> str:
        """Text of tokens, special tokens included.

        Raises:
            InvalidRequest: a token is outside the vocabulary.
        """
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._tokenizer.vocab_size):
            raise InvalidRequest("tokens", f"must be in [0, {self._tokenizer.vocab_size})")
        return await self._threads.run(tenant, lambda: self._tokenizer.decode(tokens, skip_special=False))

    def decode_now(self, tokens: Sequence[int], skip_special: bool) -> str:
        """Text of a few tokens, decoded on the calling thread."""
        return self._tokenizer.decode(tokens, skip_special)

    def tokens_through(self, text: str, tokens: Sequence[int]) -> int:
        """Number of tokens up to the end of the first `text` in their text; all tokens if absent."""
        ends = range(1, len(tokens))
        return 1 + bisect.bisect_left(ends, True, key=lambda end: text in self.decode_now(tokens[:end], False))

    async def token_strings(self, tenant: str, tokens: Sequence[int]) -> list[str]:
        """Each token's text, separately."""
        return await self._threads.run(
            tenant, lambda: [self._tokenizer.decode([token], skip_special=False) for token in tokens]
        )

    def info(self) -> dict[str, Any]:
        """VLLM's tokenizer description: special tokens by name, vocabulary size, chat template."""
        return {
            "tokenizer_class": type(self._tokenizer).__name__,
            **self._tokenizer.special_tokens,
            "vocab_size": self._tokenizer.vocab_size,
            "chat_template": self._tokenizer.chat_template or None,
        }

    def answer_format(self, served: str) -> AnswerFormat | None:
        """How the model writes answers; None if unknown, or the cluster serves another model."""
        return self.found.row if served == self._name else None

    def unknown_format(self) -> str:
        """What to tell a client who offers functions to a model whose form of calls is not known."""
        known = ", ".join(FORMATS)
        return f"the format of this model's tool calls is unknown; --tool-call-parser has {known}"

    def reasoning(self, served: str) -> ReasoningFormat | None:
        """How the model marks thinking; None if the model does not think, or the cluster serves another model."""
        return self.found.reasoning if served == self._name else None

    async def thinks_at_once(self, tenant: str, template_kwargs: Mapping[str, Any]) -> bool:
        """Whether the chat template begins the thinking, so that answers begin within the thinking."""
        reasoning = self.found.reasoning
        if reasoning is None:
            return False
        key = to_json(template_kwargs)
        if (known := self._thinks_at_once.get(key)) is not None:
            return known

        def begins_thinking() -> bool:
            options = ChatOptions(template_kwargs=template_kwargs)
            return reasoning.is_open(self._tokenizer.render_chat([{"role": "user", "content": "x"}], (), options).text)

        try:
            is_open = await self._threads.run(tenant, begins_thinking)
        except InvalidRequest:  # the conductor says what is wrong, if the request's own messages are refused, too
            return False
        if len(key) <= MAX_VARIANT_BYTES:
            if len(self._thinks_at_once) >= MAX_TEMPLATE_VARIANTS:
                self._thinks_at_once.clear()
            self._thinks_at_once[key] = is_open
        return is_open

    @property
    def takes_pictures(self) -> bool:
        """Whether the model takes pictures."""
        return not isinstance(self._pictures, str)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return self._tokenizer.takes_tools

    def template_has(self, variable: str) -> bool:
        """Whether the chat template reads a variable."""
        return variable in self._tokenizer.chat_template

    def special_id(self, text: str) -> int | None:
        """Id of a special token, which answers lack unless requested; None if the text is none."""
        return self._tokenizer.special_id(text)

    def check_model(self, served: str) -> None:
        """Check that the cluster serves the model of this tokenizer.

        Raises:
            Mismatch: the cluster serves another model; names `model`.
        """
        if served != self._name:
            raise Mismatch("model", f"this gateway has the tokenizer of {self._name!r}, the cluster serves {served!r}")

    def _encode(self, field: str, text: str, max_tokens: int, *, special: bool) -> list[int]:
        self._check_longer(field, text, max_tokens)
        return self._tokenizer.encode(text, add_special=special)

    def _check_longer(self, field: str, text: str, max_tokens: int) -> None:
        _check(field, self._tokenizer.is_longer(text, max_tokens), max_tokens)


def _check(field: str, is_longer: bool, max_tokens: int) -> None:
    if is_longer:
        raise InvalidRequest(field, f"has more than {max_tokens} tokens, the model's length")


def _texts(message: Message) -> list[str]:
    """The texts of a message."""
    return [message["content"], *(part["text"] for part in message.get("parts", ()) if "text" in part)]


def _shown(message: Message) -> Mapping[str, Any]:
    """The message as chat templates take one with pictures."""
    if "parts" not in message:
        return message
    parts = [
        {"type": "text", "text": part["text"]} if "text" in part else {"type": "image"} for part in message["parts"]
    ]
    return {**{name: value for name, value in message.items() if name != "parts"}, "content": parts}
