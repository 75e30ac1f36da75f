"""Streams that peers have open, and what the two kinds that carry KV have in common."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.message import Message

from moonpool.kv.blocks import BlockFormat
from moonpool.rpc.roles import own_tenant
from moonpool.streams.credits import Traffic
from moonpool.streams.receiving import check_hello
from moonpool.streams.serving import ServerStream

Req = TypeVar("Req", bound=Message)


class KVStream(ServerStream[Req]):
    """One Put or Get stream of a peer that speaks for one `tenant`, or for any. `format` is as its hello says."""

    format: BlockFormat
    tenant: str | None
    briefs = True

    @property
    def traffic(self) -> Traffic:
        return Traffic(unsent=len(self.outbox))

    def welcome(self) -> Message:
        raise NotImplementedError

    async def on_hello(self, message: Any) -> None:
        """Takes any KV whose layout can be kept; raises Mismatch for others."""
        self.tenant = own_tenant()  # noted here: what comes on a lane comes outside of the call
        self.format = BlockFormat(message.hello.namespace, check_hello(message.hello))
        answer: Any = self.welcome()
        lane = self.offer_lane(message)
        if lane is not None:
            answer.welcome.lane.CopyFrom(lane)
        self.outbox.post(answer)


class OpenStreams:
    """All open Put, Get and Watch streams of a store; `quiet` is set while there are none."""

    def __init__(self) -> None:
        self._open: set[object] = set()
        self.quiet = asyncio.Event()
        self.quiet.set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def kv(self) -> list[KVStream[Any]]:
        return [stream for stream in self._open if isinstance(stream, KVStream)]

    @property
    def traffic(self) -> Traffic:
        return sum((stream.traffic for stream in self.kv), Traffic())

    @contextmanager
    def running(self, stream: object) -> Iterator[None]:
        self._open.add(stream)
        self.quiet.clear()
        try:
            yield
        finally:
            self._open.remove(stream)
            if not self._open:
                self.quiet.set()
