"""Endpoints that only tokenise: they answer with the tokens that the engines would get."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.cluster import Cluster
from services.gateway.door import Door, json_response
from services.gateway.fields import DetokenizeBody
from services.gateway.messages import CountTokensBody
from services.gateway.text import Texts
from services.gateway.turns import TokenizeBody


class Tokenizing:
    """`/tokenize`, `/detokenize` and `/v1/messages/count_tokens`."""

    def __init__(self, door: Door, cluster: Cluster, texts: Texts) -> None:
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
