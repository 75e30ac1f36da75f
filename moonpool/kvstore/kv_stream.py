"""What the store's two kinds of streams have in common."""

from typing import Any, TypeVar

from google.protobuf.message import Message

from moonpool.base.errors import PermissionDenied
from moonpool.base.kv.blocks import BlockFormat, block_format
from moonpool.base.kv_transfer.read_server import check_hello
from moonpool.base.rpc.roles import own_tenant
from moonpool.base.transport.server_stream import ServerStream

Req = TypeVar("Req", bound=Message)


class KVStream(ServerStream[Req]):
    """A Put or Get stream to a peer that speaks for one `tenant`, or for any. `format` is the hello's."""

    format: BlockFormat
    tenant: str | None

    def welcome(self) -> Message:
        raise NotImplementedError

    async def on_hello(self, message: Any) -> None:
        """Take any KV whose layout can be kept; raise Mismatch for others, PermissionDenied for a client's pictures."""
        self.tenant = own_tenant()  # noted here: what comes on a transport beside gRPC comes outside of the call
        self.format = block_format(message.hello.namespace, check_hello(message.hello))
        if self.tenant is not None and self.format.of_pictures:  # rows count to no tenant's quota
            raise PermissionDenied("the namespace of encoded pictures is engines' own")
        answer: Any = self.welcome()
        transport = self.offer_transport(message)
        if transport is not None:
            answer.welcome.transport.CopyFrom(transport)
        self.send_queue.post(answer)
