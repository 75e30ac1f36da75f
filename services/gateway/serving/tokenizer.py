"""The tokenizer and chat template of the served model, run on threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from moonpool.checkpoint import Tokenizer
from moonpool.client import Message
from moonpool.errors import InvalidRequest, Mismatch
from services.gateway.serving.tool_calls import TOOL_CALL_FORMATS, tool_call_format_of

T = TypeVar("T")


class GatewayTokenizer:
    """Tokenizer and chat template of a checkpoint. Long work runs on threads."""

    def __init__(self, name: str, tokenizer: Tokenizer, threads: Executor, tool_parser: str = "auto") -> None:
        """Wrap the tokenizer of a checkpoint.

        Args:
            name: name of the checkpoint; the cluster must serve the model of this name.
            tokenizer: the tokenizer of the checkpoint.
            threads: threads that tokenise.
            tool_parser: key of `TOOL_CALL_FORMATS`; "auto" derives the format from the chat template.
        """
        self._tool_parser = tool_call_format_of(tokenizer.chat_template) if tool_parser == "auto" else tool_parser
        self._name = name
        self._tokenizer = tokenizer
        self._threads = threads

    async def encode(self, text: str, max_tokens: int, *, special: bool) -> list[int]:
        """Tokens of a text; `special`: with the special tokens that begin a prompt.

        Raises:
            InvalidRequest: the text has more than `max_tokens` tokens.
        """
        return await self._run(lambda: self._encode("prompt", text, max_tokens, special=special))

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        special: bool,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Tokens of messages after the chat template.

        `add_generation_prompt`: with the tokens that begin the next answer.

        Raises:
            InvalidRequest: the chat template refuses the messages, or there are more than `max_tokens` tokens.
        """

        def run() -> list[int]:
            self._check_chars("messages", sum(len(message["content"]) for message in messages), max_tokens)
            text = self._tokenizer.render_chat(messages, add_generation_prompt, tools)
            return self._encode("messages", text, max_tokens, special=special)

        return await self._run(run)

    async def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special tokens included.

        Raises:
            InvalidRequest: a token is outside the vocabulary.
        """
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._tokenizer.vocab_size):
            raise InvalidRequest("tokens", f"must be in [0, {self._tokenizer.vocab_size})")
        return await self._run(lambda: self._tokenizer.decode(tokens, skip_special=False))

    def decode_now(self, tokens: Sequence[int], skip_special: bool) -> str:
        """Text of a few tokens, decoded on the calling thread."""
        return self._tokenizer.decode(tokens, skip_special)

    async def token_strings(self, tokens: Sequence[int]) -> list[str]:
        """Text of each token by itself."""
        return await self._run(lambda: [self._tokenizer.decode([token], skip_special=False) for token in tokens])

    def info(self) -> dict[str, Any]:
        """VLLM's description of the tokenizer: special tokens by name, size of the vocabulary, chat template."""
        return {
            "tokenizer_class": type(self._tokenizer).__name__,
            **self._tokenizer.special_tokens,
            "vocab_size": self._tokenizer.vocab_size,
            "chat_template": self._tokenizer.chat_template or None,
        }

    def tool_call_format(self, served: str) -> str:
        """The format in which the model writes tool calls, a key of `TOOL_CALL_FORMATS`.

        Raises:
            Mismatch: the cluster serves another model.
            InvalidRequest: the format is unknown; names `tools`.
        """
        self.check_model(served)
        if not self._tool_parser:
            known = ", ".join(TOOL_CALL_FORMATS)
            raise InvalidRequest(
                "tools", f"the format of this model's tool calls is unknown; --tool-call-parser has {known}"
            )
        return self._tool_parser

    def check_model(self, served: str) -> None:
        """Check that the cluster serves the model of this tokenizer.

        Raises:
            Mismatch: the cluster serves another model; names `model`.
        """
        if served != self._name:
            raise Mismatch("model", f"this gateway has the tokenizer of {self._name!r}, the cluster serves {served!r}")

    def _encode(self, field: str, text: str, max_tokens: int, *, special: bool) -> list[int]:
        self._check_chars(field, len(text), max_tokens)
        if self._tokenizer.is_longer(text, max_tokens):
            raise InvalidRequest(field, f"has more than {max_tokens} tokens, the model's length")
        return self._tokenizer.encode(text, add_special=special)

    def _check_chars(self, field: str, chars: int, max_tokens: int) -> None:
        """Refuse text that is too long for any tokenization, before tokenising."""
        if chars > max_tokens * self._tokenizer.longest_token_chars:
            raise InvalidRequest(field, f"{chars} characters make more than {max_tokens} tokens, the model's length")

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
