"""The client half of a long-lived stream."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any

from moonpool.base.transport.client_stream import ClientStream
from moonpool.v1 import decode_pb2


class Call:
    """A call on which nothing comes and every write waits."""

    def __init__(self) -> None:
        self.cancelled = False

    async def read(self) -> Any:
        await asyncio.Event().wait()

    async def write(self, message: Any) -> None:
        await asyncio.Event().wait()

    def cancel(self) -> None:
        self.cancelled = True


async def test_a_stream_that_ends_before_its_tasks_have_begun_leaves_nothing_behind() -> None:
    call: Any = Call()
    stream: Any = ClientStream("steps", lambda: call, decode_pb2.StepsRequest())
    stream.on_broken = lambda error: None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stream.begin()
        await stream.aclose()
        gc.collect()
    assert call.cancelled
    assert [str(warning.message) for warning in caught] == []
