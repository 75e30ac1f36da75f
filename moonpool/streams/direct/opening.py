"""How a direct lane is opened: a stream as any other, whose lane is then used by the threads of those who call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from moonpool.errors import MoonpoolError, StreamBroken
from moonpool.streams.calling import ClientStream, Req, Res
from moonpool.streams.direct.lane import DirectLane
from moonpool.streams.lanes.dialing import LaneDialer
from moonpool.streams.lanes.regions import Shared
from moonpool.streams.lanes.settings import lane_name
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2

log = get_logger(__name__)


class DirectStream(ClientStream[Req, Res]):
    """One call and its direct lane. When either ends, both have.

    Attributes:
        direct: the lane, once it is open.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], grpc.aio.StreamStreamCall[Any, Any]],
        hello: Req,
        lanes: LaneDialer,
        *,
        lend_bytes: int = 0,
        share: Sequence[Shared] = (),
    ) -> None:
        """Starts nothing yet.

        Args:
            name: Who is at the other end and what for.
            connect: Starts the call.
            hello: First message sent; says which lanes this side can use.
            lanes: Opens the lane.
            lend_bytes: Of memory to which the store may write what it sends; 0 on a stream of puts.
            share: Memory besides that of `lanes` that the store may read.
        """
        super().__init__(name, connect, hello)
        self.direct: DirectLane | None = None
        self._lanes = lanes
        self._lend_bytes = lend_bytes
        self._share = share
        self._welcome: kv_pb2.StreamWelcome | None = None

    async def open(self) -> DirectLane | None:
        """Opens call and lane; None where that is not to be had."""
        try:
            await self.start()
            self.direct = await self._join()
        except MoonpoolError as error:
            log.warning("no direct lane", stream=self.name, error=str(error))
        except BaseException:
            self.break_(StreamBroken("given up"))
            raise
        if self.direct is None or self.error is not None:
            await self.aclose()
            if self.direct is not None and self.error is not None:
                self.direct.close(self.error)  # the call has ended meanwhile
            return None
        log.info("lane opened", stream=self.name, lane=self.direct.name)
        return self.direct

    async def _join(self) -> DirectLane | None:
        welcome = self._welcome
        assert welcome is not None, "the handshake is over"
        incarnation, loop = welcome.receiver.incarnation, asyncio.get_running_loop()
        if not welcome.lane.brief or loop.time() < self._lanes.retry_at(incarnation):
            return None
        try:
            return DirectLane(await self._lanes.join(welcome.lane, incarnation, self._lend_bytes, self._share))
        except (MoonpoolError, OSError, TimeoutError) as error:
            self._lanes.failed(self.name, lane_name(welcome.lane.kind), incarnation, error)
            return None

    def on_message(self, message: Res, payload: Any) -> None:
        """The welcome; nothing else comes on the call."""
        received: Any = message
        if self._welcome is not None or received.WhichOneof("message") != "welcome":
            raise StreamBroken("something came that is not the welcome")
        self._welcome = received.welcome
        self.ready()

    def on_broken(self, error: Exception) -> None:
        """The lane ends with its call."""
        if self.direct is not None:
            self.direct.close(error)
