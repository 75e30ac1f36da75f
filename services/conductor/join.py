"""The conductor's side of Join: one stream per instance, from its hello to its loss.

Owns liveness (an instance silent for three heartbeats is lost) and orders. What a report means is `Cluster`'s business.
"""

from __future__ import annotations

import asyncio
import time

import grpc

from moonpool.errors import DeadlineExceeded, InvalidRequest, Mismatch
from moonpool.rpc.channels import probe
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.cluster import Cluster
from services.conductor.registry import Member

_log = get_logger(__name__)

_Context = grpc.aio.ServicerContext[conductor_pb2.JoinRequest, conductor_pb2.JoinResponse]

HELLO_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 3.0
SILENT_HEARTBEATS = 3


class JoinServer:
    """Serves the Join streams of all instances."""

    def __init__(self, cluster: Cluster, heartbeat_s: float) -> None:
        """Wire the server; `conductor` must be set before the first instance joins."""
        self.conductor = kv_pb2.Instance(kind=kv_pb2.INSTANCE_KIND_CONDUCTOR)
        self._cluster = cluster
        self._heartbeat_s = heartbeat_s
        self._stopping = asyncio.Event()
        self._clock = time.monotonic

    def stop(self) -> None:
        """End all streams: the conductor is leaving, instances look for the next one."""
        self._stopping.set()

    async def serve(self, context: _Context) -> None:
        """Serve one instance until its stream ends.

        Raises:
            InvalidRequest: no proper hello came.
            Mismatch: it serves something else, or another process took its name.
            Unavailable: it cannot be reached at the address it tells.
            DeadlineExceeded: it was silent for three heartbeats.
        """
        hello = await self._hello(context)
        self._cluster.registry.check(hello)
        await probe(hello.instance.address, PROBE_TIMEOUT_S)
        member = self._cluster.join(hello, self._clock())
        log = _log.bind(instance=member.id, address=member.instance.address)
        log.info("joined", **({"emulated": hello.model.emulated} if hello.model.emulated else {}))
        lost = False
        try:
            welcome = conductor_pb2.JoinWelcome(conductor=self.conductor, heartbeat_s=self._heartbeat_s)
            await context.write(conductor_pb2.JoinResponse(welcome=welcome))
            await self._follow(context, member)
        except DeadlineExceeded:
            lost = True
            raise
        finally:
            self._cluster.leave(member, lost=lost)
            log.warning("lost") if lost else log.info("left")

    async def _hello(self, context: _Context) -> conductor_pb2.JoinHello:
        first = await self._next(context, HELLO_TIMEOUT_S)
        if first is None or not first.HasField("hello"):
            raise InvalidRequest("hello", "must be the first message")
        return first.hello

    async def _follow(self, context: _Context, member: Member) -> None:
        """Take reports and events until the stream ends."""
        while (message := await self._next(context, SILENT_HEARTBEATS * self._heartbeat_s)) is not None:
            if not self._cluster.is_member(member):
                raise Mismatch("instance.id", f"another process has joined as {member.id}")
            match message.WhichOneof("message"):
                case "load":
                    self._cluster.report(member, message.load, self._clock())
                case "events":
                    if self._cluster.events(member, message.events):
                        _log.warning("resync", instance=member.id, sequence=message.events.sequence)
                        resync = conductor_pb2.JoinResponse(resync=conductor_pb2.ResyncOrder())
                        await context.write(resync)
                case other:
                    raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    async def _next(self, context: _Context, timeout_s: float) -> conductor_pb2.JoinRequest | None:
        """Return the next message, or None when the stream or the conductor has ended.

        Raises:
            DeadlineExceeded: nothing came for `timeout_s`.
        """
        read = asyncio.ensure_future(context.read())
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({read, stop}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if read.done():
                message = read.result()
                return message if isinstance(message, conductor_pb2.JoinRequest) else None
            if stop.done():
                return None
            raise DeadlineExceeded(f"nothing was heard for {timeout_s:g} s")
        finally:
            read.cancel()
            stop.cancel()
