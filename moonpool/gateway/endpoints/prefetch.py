"""`/v1/prefetch`: prompts that will come, such as those of a batch; their KV is brought nearer before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Discriminator, Tag
from starlette.requests import Request
from starlette.responses import Response

from moonpool.base.errors import InvalidRequest
from moonpool.base.sampling_params import SamplingParams
from moonpool.client import ClusterState, GenerateArguments
from moonpool.gateway.endpoints.anthropic_messages import MessagesBody
from moonpool.gateway.endpoints.openai_chat import ChatBody
from moonpool.gateway.endpoints.openai_completions import MAX_PROMPTS, CompletionBody
from moonpool.gateway.responses.body import ResponsesBody
from moonpool.gateway.responses.context import ResponsesContext
from moonpool.gateway.responses.turn import ResponsesTurn
from moonpool.gateway.serving.auth import CheckedRequest
from moonpool.gateway.serving.body import Body, FailFastList
from moonpool.gateway.serving.errors import HttpError
from moonpool.gateway.serving.generate_body import GenerateBody
from moonpool.gateway.serving.json_response import json_response

BodyT = TypeVar("BodyT", bound=GenerateBody)


class BatchLine(Body, Generic[BodyT]):
    """A line of a batch file, as OpenAI's: the endpoint that a body will be sent to, and the body."""

    custom_id: str | None = None
    method: str | None = None
    url: str
    body: BodyT

    def check(self) -> None:
        self.body.check()


_CHAT, _COMPLETION = "[/v1/chat/completions]", "[/v1/completions]"
_CHAT_LINE, _COMPLETION_LINE = "[line /v1/chat/completions]", "[line /v1/completions]"
_MESSAGES_LINE, _RESPONSES_LINE = "[line /v1/messages]", "[line /v1/responses]"


def _kind(value: Any) -> str | None:
    if not isinstance(value, dict) or "url" not in value:
        return _CHAT if isinstance(value, dict) and "messages" in value else _COMPLETION
    return f"[line {value['url']}]"


ComingRequest = Annotated[
    Annotated[ChatBody, Tag(_CHAT)]
    | Annotated[CompletionBody, Tag(_COMPLETION)]
    | Annotated[BatchLine[ChatBody], Tag(_CHAT_LINE)]
    | Annotated[BatchLine[CompletionBody], Tag(_COMPLETION_LINE)]
    | Annotated[BatchLine[MessagesBody], Tag(_MESSAGES_LINE)]
    | Annotated[BatchLine[ResponsesBody], Tag(_RESPONSES_LINE)],
    Discriminator(_kind),
]
"""A request that will come: a batch file's line; else, with `messages`, a chat's body; else a completion's."""


class PrefetchBody(Body):
    """Body of `/v1/prefetch`."""

    unknown_ignored = True

    requests: FailFastList[ComingRequest]
    within_s: float | None = None
    cancel: bool | None = None

    def check(self) -> None:
        if (self.within_s is None) != bool(self.cancel):
            raise InvalidRequest("within_s", "either within_s or cancel must be given")
        for place, body in self.bodies():
            with _named(place):
                body.check()
                if isinstance(body, ChatBody) and body.cache is not None:
                    raise InvalidRequest("messages.0", "a chat that begins with a cache cannot be announced")
        prompts = sum(len(body.prompts()) if isinstance(body, CompletionBody) else 1 for _, body in self.bodies())
        if not 1 <= prompts <= MAX_PROMPTS:
            raise InvalidRequest("requests", f"must have 1 to {MAX_PROMPTS} prompts")

    def bodies(self) -> Iterator[tuple[str, GenerateBody]]:
        """The bodies that will be sent, each with its place."""
        for index, entry in enumerate(self.requests):
            place = f"requests.{index}"
            yield (f"{place}.body", entry.body) if isinstance(entry, BatchLine) else (place, entry)


async def prefetch(gateway: ResponsesContext, request: Request) -> Response:
    """Say within how many seconds prompts will come, or that they will not come after all.

    Raises:
        InvalidRequest: a request could not be served when it comes; names the field.
    """
    checked = await gateway.auth.read_body(request, PrefetchBody)
    body, state = checked.body, await gateway.cluster.state()
    coming: list[GenerateArguments] = []
    for place, prompt in body.bodies():
        with _named(place):
            coming += await _prompts(gateway, checked.of(prompt), state)
    checked.caller.budget.charge_answers(len(coming))
    within_s = None if body.cancel else body.within_s
    accepted = await gateway.client.announce(coming, within_s, tenant=checked.caller.tenant)
    answer = {"object": "prefetch", "prompts": len(coming), "accepted": accepted}
    return json_response(answer, checked.warning_headers)


async def _prompts(
    gateway: ResponsesContext, checked: CheckedRequest[GenerateBody], state: ClusterState
) -> list[GenerateArguments]:
    """A request's prompts, with what their KV depends on besides."""
    body, work = checked.body, checked.work
    job = gateway.builder.prepare(checked, state, max_tokens=1)
    special = usual = isinstance(body, CompletionBody)
    match body:
        case CompletionBody():
            job.prompts, special = body.sdk_prompts(), body.add_special_tokens is not False
        case ChatBody():
            job.prompts, special = [await work(body.prompt)], body.add_special_tokens is True
        case MessagesBody():
            job.prompts = [{"messages": await work(body.to_messages)}]
        case ResponsesBody():
            turn = await ResponsesTurn.of(gateway, checked.of(body), job.arguments.get("model", ""))
            job.prompts = [{"messages": await work(turn.messages)}]
    if isinstance(body, MessagesBody) or (isinstance(body, ChatBody) and body.messages is not None):
        job.set_chat_options(body.chat_options())
    if "messages" in job.prompts[0] and (tools := await work(body.tool_set)) is not None:
        job.arguments["tools"] = tools.definitions
    if special != usual:
        job.replace_prompts(await gateway.builder.prompt_token_ids(job, special=special))
    # An answer's form matters to no prompt, and its grammar would be compiled.
    shared = job.arguments | {"sampling": SamplingParams(max_tokens=1), "session": None, "slo": None}
    return [shared | prompt for prompt in await gateway.pictures.read_prompts(checked.caller.tenant, job.prompts)]


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Errors name their field behind the place of the request."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}.{error.field}".removesuffix("."), error.message) from None
    except HttpError as error:
        named = f"{place}.{error.parameter}"
        raise HttpError(error.status, error.code, str(error), parameter=named, close=error.close) from None
