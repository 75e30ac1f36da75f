"""vLLM's `/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from moonpool.base.errors import InvalidRequest
from moonpool.client import Message
from moonpool.gateway.serving.auth import CheckedRequest
from moonpool.gateway.serving.body import Body, FailFastList
from moonpool.gateway.serving.client_watch import while_connected
from moonpool.gateway.serving.context import GatewayContext
from moonpool.gateway.serving.json_response import json_response
from moonpool.gateway.serving.messages import ChatOptionsBody, ConversationBody
from moonpool.gateway.serving.tool_set import ToolSet


class TokenizeBody(ChatOptionsBody, ConversationBody):
    """`/tokenize`: a prompt, or messages for the chat template."""

    ignored = ("return_token_offsets",)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "mm_processor_kwargs": ({},),
    }

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "either prompt or messages must be given")


class DetokenizeBody(Body):
    """`/detokenize`."""

    unknown_ignored = True

    model: str | None = None
    tokens: FailFastList[int]


async def tokenize(gateway: GatewayContext, request: Request) -> Response:
    """Tokens for a prompt or for messages."""
    checked = await gateway.auth.read_body(request, TokenizeBody)
    tools, messages = await checked.work(checked.body.tool_set), await checked.work(checked.body.to_messages)
    return await while_connected(request.receive, _tokenized(gateway, checked, messages, tools))


async def _tokenized(
    gateway: GatewayContext, checked: CheckedRequest[TokenizeBody], messages: Sequence[Message], tools: ToolSet | None
) -> Response:
    body, max_tokens = checked.body, await gateway.max_model_len()
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        tokens = await gateway.tokenizer.encode(checked.caller.tenant, body.prompt, max_tokens, special=special)
    else:
        tenant = checked.caller.tenant
        tokens = await gateway.tokenizer.encode_chat(
            tenant,
            await gateway.pictures.read(tenant, messages),
            tools.definitions if tools else (),
            max_tokens,
            body.chat_options(),
            special=bool(body.add_special_tokens),
        )
    checked.caller.budget.charge_work(len(tokens))
    strings = await gateway.tokenizer.token_strings(checked.caller.tenant, tokens) if body.return_token_strs else None
    answer = {"count": len(tokens), "max_model_len": max_tokens, "tokens": tokens, "token_strs": strings}
    return json_response(answer, checked.warning_headers)


async def detokenize(gateway: GatewayContext, request: Request) -> Response:
    """Text of tokens.

    Raises:
        InvalidRequest: there are more tokens than the model takes, or one is outside the vocabulary.
    """
    checked = await gateway.auth.read_body(request, DetokenizeBody)
    tokens, max_tokens = checked.body.tokens, await gateway.max_model_len()
    if len(tokens) > max_tokens:
        raise InvalidRequest("tokens", f"has more than {max_tokens} tokens, the model's length")
    checked.caller.budget.charge_work(len(tokens))
    decoded = gateway.tokenizer.decode(checked.caller.tenant, tokens)
    prompt = await while_connected(request.receive, decoded)
    return json_response({"prompt": prompt}, checked.warning_headers)


async def tokenizer_info(gateway: GatewayContext, request: Request) -> Response:
    """What evaluation harnesses read of the tokenizer, to make prompts themselves."""
    gateway.auth.tenant(request)
    return json_response({**gateway.tokenizer.info(), "model_max_length": await gateway.max_model_len()})
