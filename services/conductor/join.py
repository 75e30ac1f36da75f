"""The conductor's side of Join: one stream per instance, from its hello to its loss.

An instance that is silent for three heartbeats is lost, and one that is silent for part of one and does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from moonpool.errors import InvalidRequest, Mismatch, Unavailable
from moonpool.rpc.roles import require_role
from moonpool.streams.serving import ServerStream
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.cluster import Cluster
from services.conductor.registry import Member

log = get_logger(__name__)

Admit = Callable[[kv_pb2.Instance], Awaitable[None]]

HELLO_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 3.0
SILENT_HEARTBEATS = 3
QUIET, ASKED = 0.4, 0.2
"""Heartbeats; instances report four times in each. One of which nothing came for the first is asked `ASKS` times if
it is there, each time for the second. We may be late ourselves: so its answer counts, and it has two chances."""
ASKS = 2


class JoinServer:
    """Serves the Join streams of all instances."""

    def __init__(self, cluster: Cluster, heartbeat_s: float, admit: Admit) -> None:
        """Wire the server; `conductor` must be set before the first instance joins.

        `admit` raises when an instance may not join yet.
        """
        self._admit = admit
        self.conductor = kv_pb2.Instance(kind=kv_pb2.INSTANCE_KIND_CONDUCTOR)
        self._cluster = cluster
        self._heartbeat_s = heartbeat_s
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End all streams: the conductor is leaving, instances look for the next one."""
        self._stopping.set()

    async def serve(self, requests: AsyncIterator[conductor_pb2.JoinRequest], context: object) -> None:
        """Serve one instance until its stream ends.

        Raises:
            InvalidRequest: no proper hello came.
            Mismatch: it serves something else, or another process took its name.
            Unavailable: it cannot be reached at the address it tells, or the conductor is leaving.
            DeadlineExceeded: it was silent for three heartbeats, or is silent and does not answer.
        """
        welcome = conductor_pb2.JoinWelcome(conductor=self.conductor, heartbeat_s=self._heartbeat_s)
        await JoinStream(self._cluster, welcome, self._stopping, self._admit).run(requests, context)


class JoinStream(ServerStream[conductor_pb2.JoinRequest]):
    """One instance's stream."""

    def __init__(
        self, cluster: Cluster, welcome: conductor_pb2.JoinWelcome, stopping: asyncio.Event, admit: Admit
    ) -> None:
        beat_s = welcome.heartbeat_s
        super().__init__(
            stopping, hello_timeout_s=HELLO_TIMEOUT_S, silence_s=SILENT_HEARTBEATS * beat_s, quiet_s=QUIET * beat_s
        )
        self._cluster = cluster
        self._welcome = welcome
        self._admit = admit
        self._member: Member
        self._left = False

    async def on_hello(self, message: conductor_pb2.JoinRequest) -> None:
        """Takes an instance that serves what the others do and can be reached."""
        hello = message.hello
        self._cluster.registry.check(hello)
        require_role(kv_pb2.InstanceKind.Name(hello.instance.kind).removeprefix("INSTANCE_KIND_").lower())
        await self._cluster.probe(hello.instance.address, PROBE_TIMEOUT_S)
        await self._admit(hello.instance)
        self._member = self._cluster.join(hello, self.outbox.post)
        emulated = {"emulated": hello.model.emulated} if hello.model.emulated else {}
        log.info("joined", instance=self._member.id, address=hello.instance.address, **emulated)
        self.outbox.post(conductor_pb2.JoinResponse(welcome=self._welcome))

    def on_message(self, message: conductor_pb2.JoinRequest, payload: memoryview) -> None:
        """A report, or events."""
        member = self._member
        if not self._cluster.is_member(member):
            raise Mismatch("instance.id", f"another process has joined as {member.id}")
        match message.WhichOneof("message"):
            case "load":
                self._cluster.report(member, message.load)
            case "events":
                self._cluster.events(member, message.events)
            case other:
                raise InvalidRequest("message", f"{other or 'nothing'} has no place in the middle of a stream")

    async def is_there(self) -> bool:
        """Whether it answers at its address."""
        for _ in range(ASKS):
            try:
                await self._cluster.probe(self._member.instance.address, ASKED * self._welcome.heartbeat_s)
            except Unavailable:
                continue
            return True
        return False

    def end(self) -> None:
        """The instance has left, or is lost when it was silent."""
        if self._left:
            return
        self._left = True
        self._cluster.leave(self._member, lost=self.silent)
        tell = log.warning if self.silent else log.info
        tell("lost" if self.silent else "left", instance=self._member.id, address=self._member.instance.address)
