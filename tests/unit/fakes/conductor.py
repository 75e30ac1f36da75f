"""A conductor that takes Join streams and remembers what was said on them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moonpool.base.errors import MoonpoolError
from moonpool.base.kv.keys import BlockKey, unpack_keys
from moonpool.v1 import conductor_pb2, kv_pb2


@dataclass
class FakeConductor:
    """Serves `Join` alone. `has_load` and `has_snapshot` are set by such messages."""

    refusal: MoonpoolError | None = None
    """Raised instead of a welcome."""
    name: str = ""
    """Its id."""
    orders: Sequence[conductor_pb2.JoinResponse] = ()
    """What it tells after the welcome."""
    hello: conductor_pb2.JoinHello | None = None
    loads: list[conductor_pb2.LoadReport] = field(default_factory=list)
    keys: set[BlockKey] = field(default_factory=set)
    has_load: asyncio.Event = field(default_factory=asyncio.Event)
    has_snapshot: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    _told: "asyncio.Queue[conductor_pb2.JoinResponse]" = field(default_factory=asyncio.Queue)

    @property
    def draining(self) -> bool:
        """Whether the last report of load says so."""
        return bool(self.loads) and self.loads[-1].draining

    @property
    def instance(self) -> kv_pb2.Instance | None:
        """The instance that has joined last."""
        return None if self.hello is None else self.hello.instance

    def send(self, message: conductor_pb2.JoinResponse) -> None:
        """Tell the instance that joins or has joined, when it reports next."""
        self._told.put_nowait(message)

    async def Join(self, requests: Any, context: Any) -> None:
        try:
            async for request in requests:
                self._take(request)
                if request.HasField("hello"):
                    conductor = kv_pb2.Instance(id=self.name, epoch=1)
                    welcome = conductor_pb2.JoinWelcome(heartbeat_s=0.5, conductor=conductor)
                    for message in (conductor_pb2.JoinResponse(welcome=welcome), *self.orders):
                        await context.write(message)
                while request.HasField("load") and not self._told.empty():
                    await context.write(self._told.get_nowait())
        finally:
            self.left.set()

    def _take(self, request: conductor_pb2.JoinRequest) -> None:
        match request.WhichOneof("message"):
            case "hello":
                if self.refusal is not None:
                    raise self.refusal
                self.hello = request.hello
            case "load":
                self.loads.append(request.load)
                self.has_load.set()
            case "events":
                if request.events.snapshot_begin:
                    self.keys.clear()
                self.keys |= set(unpack_keys(request.events.stored_keys))
                self.keys -= set(unpack_keys(request.events.removed_keys))
                if request.events.snapshot_end:
                    self.has_snapshot.set()
