"""What the store's two KV streams have in common: the KV that the hello names, and the welcome."""

import asyncio
from typing import Any, TypeVar

from google.protobuf.message import Message

from moonpool.kv.blocks import BlockFormat
from moonpool.streams.credits import Traffic
from moonpool.streams.receiving import check_hello
from moonpool.streams.serving import ServerStream

Req = TypeVar("Req", bound=Message)


class KVStream(ServerStream[Req]):
    """One stream of one peer.

    Args:
        closing: set when the service ends its streams.
    """

    def __init__(self, closing: asyncio.Event) -> None:
        super().__init__(closing)
        self.format: BlockFormat

    @property
    def traffic(self) -> Traffic:
        """What is under way on the stream."""
        return Traffic(unsent=len(self.outbox))

    def welcome(self) -> Message:
        """The answer to the peer's hello."""
        raise NotImplementedError

    async def on_hello(self, message: Any) -> None:
        """Takes any KV whose layout can be kept.

        Raises:
            Mismatch: the hello's layout is none that can be kept.
        """
        self.format = BlockFormat(message.hello.namespace, check_hello(message.hello))
        self.outbox.post(self.welcome())
