"""Several requests that run together and are answered as one, as the prompts of a plain completion are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from moonpool.client import AsyncTokenStream, GenerateResult, Placement, TokenEvent, Usage

MAX_WAITING = 64
"""Events that wait to be taken; then the requests wait, too."""


class SeveralStreams:
    """Streams as one: their answers are numbered on, those of the first request first. The first failure ends all."""

    def __init__(self, streams: Sequence[AsyncTokenStream], answers_each: int) -> None:
        self._streams = streams
        self._answers_each = answers_each
        self._news: asyncio.Queue[TokenEvent | Exception | None] = asyncio.Queue(MAX_WAITING)
        self._tasks: list[asyncio.Task[None]] = []
        self.result: GenerateResult | None = None
        """All answers, once the iteration has ended; times are the first request's."""

    @property
    def request_id(self) -> str:
        """The id of the first of the requests that are placed."""
        return next((stream.request_id for stream in self._streams if stream.request_id), "")

    @property
    def placement(self) -> Placement | None:
        """Where that one runs."""
        return next((stream.placement for stream in self._streams if stream.placement), None)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts of the requests that are placed."""
        return sum(stream.prompt_tokens for stream in self._streams)

    async def __aenter__(self) -> Self:
        follow = (self._follow(index, stream) for index, stream in enumerate(self._streams))
        self._tasks = [asyncio.ensure_future(one) for one in follow]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """All events, as they come.

        Raises:
            MoonpoolError: one of the requests failed.
        """
        running = len(self._streams)
        while running:
            news = await self._news.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                running -= 1
            else:
                yield news
        self.result = _joined([stream.result for stream in self._streams if stream.result is not None])

    async def _follow(self, index: int, stream: AsyncTokenStream) -> None:
        first = index * self._answers_each
        try:
            async with stream:
                async for event in stream:
                    await self._news.put(replace(event, choice=first + event.choice))
            await self._news.put(None)
        except Exception as error:
            await self._news.put(error)


def _joined(results: Sequence[GenerateResult]) -> GenerateResult:
    """All answers of some results as those of one."""
    used = [result.usage for result in results]
    usage = Usage(
        sum(one.prompt_tokens for one in used),
        sum(one.cached_tokens for one in used),
        sum(one.completion_tokens for one in used),
    )
    choices = tuple(choice for result in results for choice in result.choices)
    return replace(results[0], usage=usage, choices=choices)
