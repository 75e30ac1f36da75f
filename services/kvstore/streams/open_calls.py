"""Calls and streams that peers have open, bounded per host, and what the two streams that carry KV have in common."""

import asyncio
import collections
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from moonpool.errors import Overloaded
from moonpool.kv.blocks import BlockFormat
from moonpool.streams.credits import Traffic
from moonpool.streams.receiving import check_hello
from moonpool.streams.serving import ServerStream

RETRY_AFTER_S = 1.0

Req = TypeVar("Req", bound=Message)


class KVStream(ServerStream[Req]):
    """One Put or Get stream of one peer. `format` is that of the KV which the peer's hello names."""

    format: BlockFormat

    @property
    def traffic(self) -> Traffic:
        return Traffic(unsent=len(self.outbox))

    def welcome(self) -> Message:
        """The answer to the peer's hello."""
        raise NotImplementedError

    async def on_hello(self, message: Any) -> None:
        """Takes any KV whose layout can be kept.

        Raises:
            Mismatch: the hello's layout cannot be kept.
        """
        self.format = BlockFormat(message.hello.namespace, check_hello(message.hello))
        self.outbox.post(self.welcome())


class PeerContext(Protocol):
    """The part of grpc.aio's servicer context that names the peer."""

    def peer(self) -> str:
        """The peer's address, its port last."""


class OpenCalls:
    """All open calls of a store; one host may have `max_calls` of them, streams included.

    Attributes:
        streams: number of open Put, Get and Watch streams.
        kv_streams: those of them that carry KV.
        quiet: set while there are no streams.
    """

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._by_host: collections.Counter[str] = collections.Counter()
        self.streams = 0
        self.kv_streams: set[KVStream[Any]] = set()
        self.quiet = asyncio.Event()
        self.quiet.set()

    @property
    def traffic(self) -> Traffic:
        return sum((stream.traffic for stream in self.kv_streams), Traffic())

    @contextmanager
    def call(self, context: PeerContext) -> Iterator[None]:
        """Counts one call while the body runs.

        Raises:
            Overloaded: the peer's host has as many open as it may.
        """
        host = context.peer().rpartition(":")[0]
        if self._by_host[host] >= self._max_calls:
            raise Overloaded("too many calls from one host", reason="kvstore_calls", retry_after_s=RETRY_AFTER_S)
        self._by_host[host] += 1
        try:
            yield
        finally:
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]

    @contextmanager
    def stream(self, context: PeerContext, stream: KVStream[Any] | None = None) -> Iterator[None]:
        """Counts one stream; `stream` if it carries KV.

        Raises:
            Overloaded: as for `call`.
        """
        own = set() if stream is None else {stream}
        with self.call(context):
            self.streams += 1
            self.kv_streams |= own
            self.quiet.clear()
            try:
                yield
            finally:
                self.streams -= 1
                self.kv_streams -= own
                if not self.streams:
                    self.quiet.set()
