"""`/v1/prefetch`: prompts that will come, such as those of a batch; their KV is brought nearer before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from pydantic import Discriminator, Tag
from starlette.requests import Request
from starlette.responses import Response

from moonpool.client import ClusterState, GenerateArguments
from moonpool.errors import InvalidRequest
from moonpool.sampling_params import SamplingParams
from services.gateway.endpoints.base import GatewayContext
from services.gateway.endpoints.openai_chat import ChatBody
from services.gateway.endpoints.openai_completions import MAX_PROMPTS, CompletionBody
from services.gateway.serving.auth import AuthenticatedCaller, CheckedRequest
from services.gateway.serving.json_body import Body, FailFastList, json_response

_CHAT, _COMPLETION = "[chat]", "[completion]"
ComingBody = Annotated[
    Annotated[ChatBody, Tag(_CHAT)] | Annotated[CompletionBody, Tag(_COMPLETION)],
    Discriminator(lambda value: _CHAT if isinstance(value, dict) and "messages" in value else _COMPLETION),
]
"""The body of a request that will come: with `messages` a chat's, else a completion's."""


class PrefetchBody(Body):
    """Body of `/v1/prefetch`."""

    unknown_ignored = True

    requests: FailFastList[ComingBody]
    within_s: float | None = None
    cancel: bool | None = None

    def check(self) -> None:
        if (self.within_s is None) != bool(self.cancel):
            raise InvalidRequest("within_s", "either within_s or cancel must be given")
        for index, body in enumerate(self.requests):
            with _named(index):
                body.check()
                if isinstance(body, ChatBody) and body.cache is not None:
                    raise InvalidRequest("messages.0", "a chat that begins with a cache cannot be announced")
        prompts = sum(len(it.prompts()) if isinstance(it, CompletionBody) else 1 for it in self.requests)
        if not 1 <= prompts <= MAX_PROMPTS:
            raise InvalidRequest("requests", f"must have 1 to {MAX_PROMPTS} prompts")


async def prefetch(gateway: GatewayContext, request: Request) -> Response:
    """Say within how many seconds prompts will come, or that they will not come after all.

    Raises:
        InvalidRequest: a request could not be served when it comes; names the field.
    """
    checked = await gateway.auth.read_body(request, PrefetchBody)
    body, state = checked.body, await gateway.cluster.state()
    coming: list[GenerateArguments] = []
    for index, one in enumerate(body.requests):
        with _named(index):
            coming += await _prompts(gateway, checked.caller, one, state)
    checked.caller.budget.charge_answers(len(coming))
    within_s = None if body.cancel else body.within_s
    accepted = await gateway.client.announce(coming, within_s, tenant=checked.caller.tenant)
    answer = {"object": "prefetch", "prompts": len(coming), "accepted": accepted}
    return json_response(answer, checked.warning_headers)


async def _prompts(
    gateway: GatewayContext, caller: AuthenticatedCaller, body: ChatBody | CompletionBody, state: ClusterState
) -> list[GenerateArguments]:
    """A request's prompts, with what their KV depends on besides."""
    job = gateway.builder.prepare(CheckedRequest(caller, body, {}, "", "", "", ""), state, max_tokens=1)
    if isinstance(body, ChatBody):
        job.prompts, special, usual = [body.prompt()], body.add_special_tokens is True, False
        if body.messages is not None:
            job.set_chat_options(body.chat_options())
            if (tools := body.tool_set()) is not None:
                job.arguments["tools"] = tools.definitions
    else:
        job.prompts, special, usual = body.sdk_prompts(), body.add_special_tokens is not False, True
    if special != usual:
        job.replace_prompts(await gateway.builder.prompt_token_ids(job, special=special))
    # An answer's form matters to no prompt, and its grammar would be compiled.
    shared = job.arguments | {"sampling": SamplingParams(max_tokens=1), "session": None, "slo": None}
    return [shared | prompt for prompt in job.prompts]


@contextmanager
def _named(index: int) -> Iterator[None]:
    """Errors name their field within a request."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"requests.{index}.{error.field}".removesuffix("."), error.message) from None
