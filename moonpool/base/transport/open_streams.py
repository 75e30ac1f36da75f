"""The streams that are open at a service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moonpool.base.transport.flow_control import StreamTraffic
from moonpool.base.transport.server_stream import ServerStream


class OpenStreams:
    """Set of streams of any kind, each while `running`.

    Attributes:
        quiet: set while there are no streams.
    """

    def __init__(self) -> None:
        self._open: dict[object, None] = {}
        self.quiet = asyncio.Event()
        self.quiet.set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def kv(self) -> list[ServerStream[Any]]:
        """Those that carry KV."""
        return [stream for stream in self._open if isinstance(stream, ServerStream)]

    @property
    def traffic(self) -> StreamTraffic:
        """Traffic under way on all KV streams."""
        return sum((stream.traffic for stream in self.kv), StreamTraffic())

    @contextmanager
    def running(self, stream: object) -> Iterator[None]:
        """Context manager around a stream's run."""
        self._open[stream] = None
        self.quiet.clear()
        try:
            yield
        finally:
            del self._open[stream]
            if not self._open:
                self.quiet.set()
