"""What to open: one kind of stream to one peer, and how a process opens streams."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic

from moonpool.base.rpc.channels import Metadata, StreamCall
from moonpool.base.transport.client_stream import CONNECT_TIMEOUT_S, Req, Res
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.flow_control import TO_DECODE, EgressLink
from moonpool.base.transport.send_queue import STALL_S
from moonpool.v1 import kv_pb2

SILENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How a process opens KV streams to other processes.

    Attributes:
        dialer: opens the connection that the peer offers; None: streams stay on gRPC.
        link: the process's way out, on which frames wait for their slots; None: frames do not wait.
        connect_timeout_s: longest time from the call's start to the peer's welcome.
        stall_s: longest write, before the stream counts as broken.
        silence_s: longest silence from a peer that owes an answer, before the stream counts as broken.
        metadata: metadata for the call, such as an API key.
    """

    dialer: TransportDialer | None = None
    link: EgressLink | None = None
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    stall_s: float = STALL_S
    silence_s: float = SILENCE_S
    metadata: Metadata = ()


DEFAULT_OPTIONS = StreamSettings()


@dataclass(frozen=True, slots=True)
class StreamSpec(Generic[Req, Res]):
    """One kind of stream to one peer.

    Attributes:
        name: the peer and the purpose; begins error messages.
        connect: starts the call.
        hello: first message sent.
        channel_of: key of the channel that a message belongs to; None: no channel.
        answers: class for the peer's messages. window_bytes: payload bytes that the peer may be ahead in sending; 0:
            the peer sends no payloads.
        credit: wraps a Credit for the peer; needed with a window.
        priority: the frames' priority on the link.
        options: how the stream opens.
    """

    name: str
    connect: Callable[[], StreamCall]
    hello: Req
    channel_of: Callable[[Res], Hashable]
    answers: type[Res]
    window_bytes: int = 0
    credit: Callable[[kv_pb2.Credit], Req] | None = None
    priority: int = TO_DECODE
    options: StreamSettings = DEFAULT_OPTIONS
