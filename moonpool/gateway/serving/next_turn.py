"""Computes what the next turn of a conversation begins with, while its client is away.

An answer's full blocks are kept as they are. Where the chat template writes past turns in another way, for example
without their thinking, the next prompt has other tokens from there on. These are computed behind the answer, if no
other request waits for a place: for requests that ask, or by a setting behind every answer with thinking.

What a next prompt has before the client's own text is found by two prompts with different texts: their common prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Literal

from moonpool.base.errors import MoonpoolError
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.fair_share import MOST_PRIORITY
from moonpool.base.telemetry.logs import get_logger
from moonpool.client import AsyncClient, GenerateArguments, GenerateResult, Message
from moonpool.gateway.serving.cluster_state import ClusterStateCache
from moonpool.gateway.serving.generation_job import GenerationJob
from moonpool.gateway.serving.request_builder import RequestBuilder

LEAST_NEW = 128
"""Tokens that are computed ahead, at least. Fewer are about a block, and computed with the next prompt at once."""
MAX_WAITING = 256
"""Turns that are computed ahead at a time; further ones are left out."""
PROBES = "1", "Two"
"""Two texts of a client that have no common beginning."""

When = Literal["asked", "auto", "none"]

PROMPT_ARGUMENTS: Sequence[Literal["tools", "chat_template_kwargs", "continue_final_message", "session", "slo"]] = (
    "tools",
    "chat_template_kwargs",
    "continue_final_message",
    "session",
    "slo",
)
"""Arguments that have no meaning for tokens that are computed ahead."""

log = get_logger(__name__)


class NextTurns:
    """The next turns that this gateway computes ahead. A failure is no error: the next prompt computes its tokens.

    Args:
        client: the conductor's.
        builder: writes messages as tokens.
        cluster: says whether requests wait.
        when: for requests that ask, also for others that have an answer with thinking, or never.
    """

    def __init__(self, client: AsyncClient, builder: RequestBuilder, cluster: ClusterStateCache, when: When) -> None:
        self._client, self._builder, self._cluster, self._when = client, builder, cluster, when
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order of their begin
        self.tokens = 0
        """Tokens that were computed ahead so far, and would not have been there."""

    def begin(
        self,
        job: GenerationJob,
        message: Callable[[GenerateResult], Message],
        result: GenerateResult,
        *,
        asked: bool | None,
    ) -> None:
        """Compute behind an answer what the next turn begins with, if the request asked for it or the setting says so.

        Args:
            job: one conversation that was answered once.
            message: returns the assistant's message, as the client will send it back.
            result: what was generated.
            asked: what the request says; None = nothing.
        """
        if self._when == "none" or (not asked and (self._when == "asked" or asked is False)):
            return
        if len(self._tasks) >= MAX_WAITING:
            return
        answer = message(result)
        if asked or answer.get("reasoning_content"):  # else the template has nothing to leave out
            task = asyncio.create_task(self._compute(job, answer, result, charged=bool(asked)))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    async def settle(self) -> None:
        """Wait until all that has begun is over."""
        await asyncio.gather(*list(self._tasks))

    async def close(self) -> None:
        """Stop computing ahead."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _compute(self, job: GenerationJob, answer: Message, result: GenerateResult, *, charged: bool) -> None:
        try:
            queue = (await self._cluster.state()).queue
            if queue.for_limits + queue.for_room:
                return
            messages = list(job.prompts[0].get("messages") or ())
            prompts = [await self._tokens(job, [*messages, answer, _next_message(answer, text)]) for text in PROBES]
            prefix = prompts[0][: _agreeing(*prompts)]
            had = [*await self._tokens(job, messages), *result.choices[0].token_ids]
            new = len(prefix) - _agreeing(prefix, had)
            if new < LEAST_NEW:
                return
            asked: GenerateArguments = {**job.arguments, "token_ids": prefix, "priority": MOST_PRIORITY}
            for name in PROMPT_ARGUMENTS:
                asked.pop(name, None)
            asked["sampling"] = SamplingParams(max_tokens=1, temperature=0.0)
            if charged:
                job.budget.charge_work(new)
            await self._client.generate(**asked)
            self.tokens += new
        except MoonpoolError as error:
            log.info("a next turn is not computed ahead", error=str(error))

    async def _tokens(self, job: GenerationJob, messages: Sequence[Message]) -> Sequence[int]:
        return await self._builder.chat_token_ids(job, messages)


def _next_message(answer: Message, text: str) -> Message:
    """A message of the client behind an answer: a tool's result where the answer has a call, else the user's."""
    calls: Sequence[Any] = answer.get("tool_calls") or ()
    if calls:
        return {"role": "tool", "content": text, "tool_call_id": calls[0].get("id", "")}
    return {"role": "user", "content": text}


def _agreeing(first: Sequence[int], second: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
