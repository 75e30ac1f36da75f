"""The peer of KV streams: address, first message, and how streams open."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Generic

from moonpool.base.kv.layout import KVLayout
from moonpool.base.rpc.channels import Channels, StreamCall
from moonpool.base.transport.client_stream import Req, Res
from moonpool.base.transport.flow_control import TO_DECODE
from moonpool.base.transport.grpc import payload_stream
from moonpool.base.transport.stream_spec import DEFAULT_OPTIONS, StreamSettings, StreamSpec
from moonpool.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class StreamMethod(Generic[Req, Res]):
    """A bidirectional method of a service.

    Attributes:
        service: the service's name in `moonpool.v1`.
        name: the method's name.
        request: class for messages to the peer.
        response: class for the peer's messages.
    """

    service: str
    name: str
    request: type[Req]
    response: type[Res]


@dataclass(frozen=True, slots=True)
class KVEndpoint:
    """A peer of KV streams, and how streams to the peer open.

    Attributes:
        channels: gives the channel.
        address: "host:port" of the peer.
        hello: first message: this side, and this side's KV.
        layout: arrangement of that KV.
        settings: how streams open.
    """

    channels: Channels
    address: str
    hello: kv_pb2.StreamHello
    layout: KVLayout
    settings: StreamSettings = DEFAULT_OPTIONS

    def connect(self, method: StreamMethod[Req, Res]) -> StreamCall:
        """Start a call of the method."""
        service = f"moonpool.v1.{method.service}"
        opener = payload_stream(self.channels.get(self.address), service, method.name, method.request, method.response)
        return opener(metadata=self.settings.metadata)

    def spec(
        self,
        name: str,
        method: StreamMethod[Req, Res],
        transfer_of: Callable[[Res], Hashable],
        *,
        window_bytes: int = 0,
        credit: Callable[[kv_pb2.Credit], Req] | None = None,
        priority: int = TO_DECODE,
    ) -> StreamSpec[Req, Res]:
        """The `StreamSpec` for a stream with this method; arguments as the spec's attributes."""
        hello = method.request(hello=self.hello)
        return StreamSpec(
            name,
            partial(self.connect, method),
            hello,
            transfer_of,
            method.response,
            window_bytes,
            credit,
            priority,
            self.settings,
        )
