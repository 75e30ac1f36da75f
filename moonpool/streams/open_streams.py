"""The streams that peers have open at one service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moonpool.streams.credits import Traffic
from moonpool.streams.serving import ServerStream


class OpenStreams:
    """Streams of any kind, each for as long as it is `running`.

    Attributes:
        quiet: set while there are none.
    """

    def __init__(self) -> None:
        self._open: set[object] = set()
        self.quiet = asyncio.Event()
        self.quiet.set()

    def __len__(self) -> int:
        """Number of open streams."""
        return len(self._open)

    @property
    def kv(self) -> list[ServerStream[Any]]:
        """Those that carry KV."""
        return [stream for stream in self._open if isinstance(stream, ServerStream)]

    @property
    def traffic(self) -> Traffic:
        """What is under way on all of them."""
        return sum((stream.traffic for stream in self.kv), Traffic())

    @contextmanager
    def running(self, stream: object) -> Iterator[None]:
        """Around the life of a stream."""
        self._open.add(stream)
        self.quiet.clear()
        try:
            yield
        finally:
            self._open.remove(stream)
            if not self._open:
                self.quiet.set()
