"""What the two kinds of streams that carry KV have in common."""

from typing import Any, TypeVar

from google.protobuf.message import Message

from moonpool.kv.blocks import BlockFormat, block_format
from moonpool.rpc.roles import own_tenant
from moonpool.streams.receiving import check_hello
from moonpool.streams.serving import ServerStream

Req = TypeVar("Req", bound=Message)


class KVStream(ServerStream[Req]):
    """One Put or Get stream of a peer that speaks for one `tenant`, or for any. `format` is as its hello says."""

    format: BlockFormat
    tenant: str | None

    def welcome(self) -> Message:
        raise NotImplementedError

    async def on_hello(self, message: Any) -> None:
        """Takes any KV whose layout can be kept; raises Mismatch for others."""
        self.tenant = own_tenant()  # noted here: what comes on a lane comes outside of the call
        self.format = block_format(message.hello.namespace, check_hello(message.hello))
        answer: Any = self.welcome()
        lane = self.offer_lane(message)
        if lane is not None:
            answer.welcome.lane.CopyFrom(lane)
        self.outbox.post(answer)
