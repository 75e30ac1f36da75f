"""Several prompts of one HTTP request as one token stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Self

from moonpool.base.runtime.tenant_turns import TenantPlaces
from moonpool.client import (
    AsyncTokenStream,
    GenerateResult,
    Placement,
    TokenEvent,
    Usage,
)

MAX_QUEUED_EVENTS = 64
"""Events that wait for the response. If the queue is full, the requests wait."""
MAX_RUNNING_PROMPTS = 64
"""Prompts in one HTTP request that run at the same time; further prompts wait."""
MIN_BEGUN_PROMPTS, MAX_BEGUN_PROMPTS = 4, 64
"""Prompts of all lists of a tenant that have no token yet; further prompts wait. As many as begin without delay."""


class MergedStream:
    """Several token streams as one. The second stream's choices are numbered after the first's.

    The first error ends every stream. A stream is made when there is a task for it: whoever sends many prompts does not
    hold the event loop with them.
    """

    def __init__(
        self, streams: Iterable[AsyncTokenStream], number: int, choices_each: int, begun: TenantPlaces, tenant: str
    ) -> None:
        """Merge streams.

        Args:
            streams: one for each prompt.
            number: of the streams.
            choices_each: choices of each stream.
            begun: places of prompts that have no token yet, those of all lists.
            tenant: whose list it is.
        """
        self._coming = enumerate(streams)  # of which each task takes the next
        self._number = number
        self._streams: list[AsyncTokenStream] = []
        self._running: dict[int, AsyncTokenStream] = {}  # by index
        self._ended_prompt_tokens = 0
        self._begun, self._tenant = begun, tenant
        self._choices_each = choices_each
        self._events: asyncio.Queue[TokenEvent | Exception | None] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._tasks: list[asyncio.Task[None]] = []
        self.result: GenerateResult | None = None
        """The result with the choices of all streams, after the iteration. The timing is the first stream's."""

    @property
    def request_id(self) -> str:
        """Id of the first request that is placed; "" before."""
        return next((stream.request_id for stream in self._streams if stream.request_id), "")

    @property
    def placement(self) -> Placement | None:
        """Placement of the first request that is placed."""
        return next((stream.placement for stream in self._streams if stream.placement), None)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the requests that are placed."""
        return self._ended_prompt_tokens + sum(stream.prompt_tokens for stream in self._running.values())

    async def __aenter__(self) -> Self:
        at_once = min(self._number, MAX_RUNNING_PROMPTS)
        self._tasks = [asyncio.ensure_future(self._forward_each()) for _ in range(at_once)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Iterate over all streams' events, in arrival order.

        Raises:
            MoonpoolError: a request failed.
        """
        running = len(self._tasks)
        while running:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                running -= 1
            else:
                yield event
        self.result = _merged_result([stream.result for stream in self._streams if stream.result is not None])

    async def _forward_each(self) -> None:
        """Run one stream after the other, until none is left."""
        try:
            for index, stream in self._coming:
                self._streams.append(stream)
                self._running[index] = stream
                await self._forward(index, stream)
                del self._running[index]
                self._ended_prompt_tokens += stream.prompt_tokens
            await self._events.put(None)
        except Exception as error:
            await self._events.put(error)

    async def _forward(self, index: int, stream: AsyncTokenStream) -> None:
        first = index * self._choices_each
        # By the place in the list, so that a list that comes later does not wait for all of an earlier one.
        place = await self._begun.take(self._tenant, rank=index)
        try:
            async with stream:
                async for event in stream:
                    place.give_back(done=True)  # before the client reads: who does not read holds no place
                    await self._events.put(replace(event, choice=first + event.choice))
        finally:
            place.give_back(done=False)


@dataclass(frozen=True, slots=True)
class BatchResult(GenerateResult):
    """Several prompts' answers as one result: all choices and usage, and each prompt's result."""

    results: tuple[GenerateResult, ...] = ()


def results_of(result: GenerateResult) -> Sequence[GenerateResult]:
    """The result of each prompt."""
    return result.results if isinstance(result, BatchResult) else (result,)


def _merged_result(results: Sequence[GenerateResult]) -> BatchResult:
    """One result with all choices and usage."""
    usages = [result.usage for result in results]
    total = Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.loaded_tokens for usage in usages),
    )
    first = {field.name: getattr(results[0], field.name) for field in fields(GenerateResult)}
    first |= {"usage": total, "choices": tuple(choice for result in results for choice in result.choices)}
    return BatchResult(**first, results=tuple(results))
