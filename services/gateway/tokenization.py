"""`/tokenize`, `/detokenize` and `/v1/messages/count_tokens`, with the conductor's tokenizer and chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from moonpool.checkpoint import Tokenizer
from moonpool.client import Message
from moonpool.errors import InvalidRequest, Mismatch
from services.gateway.anthropic_messages import CountTokensBody
from services.gateway.auth import Authenticator
from services.gateway.cluster_state import ClusterStateCache
from services.gateway.json_body import Body, FailFastList, json_response
from services.gateway.openai_completions import ConversationBody
from services.gateway.tool_calls import TOOL_CALL_FORMATS, tool_call_format_of

T = TypeVar("T")


class GatewayTokenizer:
    """A checkpoint's tokenizer, worked on threads."""

    def __init__(self, name: str, tokenizer: Tokenizer, threads: ThreadPoolExecutor, family: str = "auto") -> None:
        """Take the checkpoint's tokenizer.

        Args:
            name: the checkpoint's, which must be the model that is served.
            tokenizer: the checkpoint's.
            threads: where it works.
            family: how the model writes calls, a key of `FAMILIES`; "auto" = as its chat template shows.
        """
        self._family = tool_call_format_of(tokenizer.chat_template) if family == "auto" else family
        self._name = name
        self._tokenizer = tokenizer
        self._threads = threads

    async def encode(self, text: str, max_tokens: int, *, special: bool) -> list[int]:
        """Tokens of a text.

        Raises:
            InvalidRequest: the text has more than `max_tokens`.
        """
        return await self._run(lambda: self._encode("prompt", text, max_tokens, special=special))

    async def encode_chat(
        self,
        turns: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        special: bool,
        answer: bool,
    ) -> list[int]:
        """Tokens of a conversation; with `answer` also what begins the next answer.

        Raises:
            InvalidRequest: the chat template refuses it, or it has more than `max_tokens`.
        """

        def run() -> list[int]:
            self._check_chars("messages", sum(len(turn["content"]) for turn in turns), max_tokens)
            text = self._tokenizer.render_chat(turns, answer, tools)
            return self._encode("messages", text, max_tokens, special=special)

        return await self._run(run)

    async def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones included.

        Raises:
            InvalidRequest: a token is not known.
        """
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._tokenizer.vocab_size):
            raise InvalidRequest("tokens", f"must be in [0, {self._tokenizer.vocab_size})")
        return await self._run(lambda: self._tokenizer.decode(tokens, skip_special=False))

    def decode_now(self, tokens: Sequence[int], skip_special: bool) -> str:
        """Text of an answer's tokens, on the caller's thread."""
        return self._tokenizer.decode(tokens, skip_special)

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Text of each token alone."""
        return await self._run(lambda: [self._tokenizer.decode([token], skip_special=False) for token in tokens])

    def calls_family(self, served: str) -> str:
        """How this model writes calls of functions, a key of `FAMILIES`.

        Raises:
            Mismatch: another model is served.
            InvalidRequest: naming `tools`: it is not known.
        """
        self.check_model(served)
        if not self._family:
            known = ", ".join(TOOL_CALL_FORMATS)
            raise InvalidRequest("tools", f"how this model writes calls is not known; --tool-parser has {known}")
        return self._family

    def check_model(self, served: str) -> None:
        """Refuse to answer for another model than the one that is served.

        Raises:
            Mismatch: naming `model`.
        """
        if served != self._name:
            raise Mismatch("model", f"this gateway has the tokenizer of {self._name!r}, served is {served!r}")

    def _encode(self, field: str, text: str, max_tokens: int, *, special: bool) -> list[int]:
        self._check_chars(field, len(text), max_tokens)
        if self._tokenizer.is_longer(text, max_tokens):
            raise InvalidRequest(field, f"has more than {max_tokens} tokens, the model's length")
        return self._tokenizer.encode(text, add_special=special)

    def _check_chars(self, field: str, chars: int, max_tokens: int) -> None:
        """Refuse text that is too long whatever its tokens are, before it is looked at."""
        if chars > max_tokens * self._tokenizer.longest_token_chars:
            raise InvalidRequest(field, f"{chars} characters make more than {max_tokens} tokens, the model's length")

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class TokenizationEndpoints:
    """`/tokenize`, `/detokenize` and `/v1/messages/count_tokens`."""

    def __init__(self, door: Authenticator, cluster: ClusterStateCache, texts: GatewayTokenizer) -> None:
        self._door = door
        self._cluster = cluster
        self._texts = texts

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`, as vLLM's."""
        _, body, ignored = await self._door.read(request, TokenizeBody)
        longest = await self._longest()
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            tokens = await self._texts.encode(body.prompt, longest, special=special)
        else:
            offered = body.tools_offered()
            tokens = await self._texts.encode_chat(
                body.turns(),
                offered.definitions if offered else (),
                longest,
                special=bool(body.add_special_tokens),
                answer=body.add_generation_prompt,
            )
        pieces = await self._texts.pieces(tokens) if body.return_token_strs else None
        answer = {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": pieces}
        return json_response(answer, ignored)

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`, as vLLM's."""
        _, body, ignored = await self._door.read(request, DetokenizeBody)
        await self._longest()
        return json_response({"prompt": await self._texts.decode(body.tokens)}, ignored)

    async def count_tokens(self, request: Request) -> Response:
        """`/v1/messages/count_tokens`, as Anthropic's."""
        _, body, ignored = await self._door.read(request, CountTokensBody)
        longest, offered = await self._longest(), body.tools_offered()
        definitions = offered.definitions if offered else ()
        tokens = await self._texts.encode_chat(body.turns(), definitions, longest, special=False, answer=True)
        return json_response({"input_tokens": len(tokens)}, ignored)

    async def _longest(self) -> int:
        """Tokens of the longest sequence of the model, which must be the tokenizer's.

        Raises:
            Mismatch: another model is served.
        """
        state = await self._cluster.state()
        self._texts.check_model(state.model)
        return state.max_tokens


class DetokenizeBody(Body):
    """`/detokenize`."""

    model: str | None = None
    tokens: FailFastList[int]


class TokenizeBody(ConversationBody):
    """`/tokenize`: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "either prompt or messages must be given")
