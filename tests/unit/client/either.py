"""Both clients behind one shape, so that each test of a call runs over both."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moonpool.client import AsyncClient, AsyncContexts, AsyncTokenStream, Client, TokenEvent


class DrivenStream:
    """An asyncio stream, iterated by an `asyncio.Runner`."""

    def __init__(self, stream: AsyncTokenStream, runner: asyncio.Runner) -> None:
        self.stream, self.runner = stream, runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __iter__(self) -> Iterator[TokenEvent]:
        return self._events(aiter(self.stream))

    def _events(self, events: Any) -> Iterator[TokenEvent]:
        async def following() -> TokenEvent | None:
            return await anext(events, None)

        try:
            while (event := self.runner.run(following())) is not None:
                yield event
        finally:
            self.runner.run(events.aclose())

    def __enter__(self) -> "DrivenStream":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.runner.run(self.stream.aclose())


class Driven:
    """An asyncio client with blocking calls."""

    def __init__(self, client: AsyncClient | AsyncContexts, runner: asyncio.Runner) -> None:
        self.client, self.runner = client, runner

    @property
    def contexts(self) -> "Driven":
        assert isinstance(self.client, AsyncClient)
        return Driven(self.client.contexts, self.runner)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.client, name)
        return lambda *args, **kwargs: self.runner.run(call(*args, **kwargs))

    def stream(self, **request: Any) -> DrivenStream:
        assert isinstance(self.client, AsyncClient)
        return DrivenStream(self.client.stream(**request), self.runner)


@contextmanager
def driven(client: Client | AsyncClient) -> Iterator[Any]:
    """A client of either kind with blocking calls, closed at the end."""
    if isinstance(client, Client):
        with client:
            yield client
        return
    with asyncio.Runner() as runner:
        try:
            yield Driven(client, runner)
        finally:
            runner.run(client.aclose())
