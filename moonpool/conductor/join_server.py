"""Join streams of instances: hello, heartbeats, loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from moonpool.base import world
from moonpool.base.errors import InvalidRequest, Mismatch, Unavailable
from moonpool.base.rpc.connection_monitor import ProcessorWait
from moonpool.base.rpc.roles import require_role
from moonpool.base.rpc.stream_writes import bare_write
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.server_stream import ServerStream
from moonpool.conductor.cluster_members import ClusterMembers
from moonpool.conductor.registry import ClusterMember
from moonpool.v1 import conductor_pb2, kv_pb2

log = get_logger(__name__)
Admit = Callable[[kv_pb2.Instance], Awaitable[None]]
HELLO_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 3.0
SILENT_HEARTBEATS = 3
QUIET_HEARTBEATS = 0.4
"""Silence, in heartbeats, after which an instance is probed. Instances report four times per heartbeat."""
PROBE_HEARTBEATS = 0.2
"""Timeout of a probe, in heartbeats."""
PROBES = 2
"""The conductor may be late itself, so an instance is lost only if this many probes get no answer."""


class JoinServer:
    """The server of all instances' Join streams."""

    def __init__(self, cluster: ClusterMembers, heartbeat_s: float, admit: Admit) -> None:
        """`conductor` must be filled in before the first instance joins; `admit` raises if an instance must wait."""
        self._admit = admit
        self.conductor = kv_pb2.Instance(kind=kv_pb2.INSTANCE_KIND_CONDUCTOR)
        self._cluster = cluster
        self._heartbeat_s = heartbeat_s
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End all streams: the conductor is leaving, and instances look for another one."""
        self._stopping.set()

    async def serve(self, requests: AsyncIterator[conductor_pb2.JoinRequest], context: object) -> None:
        """Serve one instance until the instance's stream ends.

        Raises:
            InvalidRequest: there was no valid hello.
            Mismatch: the instance serves another model, or another process has joined with the same id.
            Unavailable: the instance cannot be reached at the given address, or the conductor is leaving.
            DeadlineExceeded: the instance was silent for three heartbeats, or is silent and does not answer probes.
        """
        welcome = conductor_pb2.JoinWelcome(conductor=self.conductor, heartbeat_s=self._heartbeat_s)
        await JoinStream(self._cluster, welcome, self._stopping, self._admit).run(requests, bare_write(context))


class JoinStream(ServerStream[conductor_pb2.JoinRequest]):
    """One instance's stream."""

    def __init__(
        self, cluster: ClusterMembers, welcome: conductor_pb2.JoinWelcome, stopping: asyncio.Event, admit: Admit
    ) -> None:
        beat_s = welcome.heartbeat_s
        super().__init__(
            stopping,
            hello_timeout_s=HELLO_TIMEOUT_S,
            quiet_s=QUIET_HEARTBEATS * beat_s,
        )
        self._cluster = cluster
        self._welcome = welcome
        self._admit = admit
        self._member: ClusterMember
        self._left = False
        self._no_processor: ProcessorWait

    async def on_hello(self, message: conductor_pb2.JoinRequest) -> None:
        """Add an instance that serves the cluster's model and can be reached."""
        hello = message.hello
        self._cluster.registry.check(hello)
        require_role(kv_pb2.InstanceKind.Name(hello.instance.kind).removeprefix("INSTANCE_KIND_").lower())
        await self._cluster.probe(hello.instance.address, PROBE_TIMEOUT_S)
        await self._admit(hello.instance)
        self._member = self._cluster.join(hello, self.send_queue.post)
        self._no_processor = ProcessorWait(lambda: world.waited_s(self._member.process))
        self._no_processor.heard(asyncio.get_running_loop().time())
        emulated = {"emulated": hello.model.emulated} if hello.model.emulated else {}
        told = {"version": hello.version, "commit": hello.commit, **emulated}
        log.info("joined", instance=self._member.id, address=hello.instance.address, **told)
        self.send_queue.post(conductor_pb2.JoinResponse(welcome=self._welcome))

    def on_message(self, message: conductor_pb2.JoinRequest, payload: memoryview) -> None:
        """A load report, or KV events."""
        member = self._member
        self._no_processor.heard(self._heard_at)
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
        """Return whether the instance was heard lately and answers a probe. Time without a processor does not count."""
        answers = await self._answers()
        silent_s = asyncio.get_running_loop().time() - self._heard_at
        waited_s = self._no_processor.since_s()
        limit_s = (SILENT_HEARTBEATS if answers else QUIET_HEARTBEATS) * self._welcome.heartbeat_s
        if silent_s >= limit_s > silent_s - waited_s:
            log.warning("an instance gets no processor", instance=self._member.id, waited_s=round(waited_s, 2))
        return silent_s - waited_s < limit_s

    async def _answers(self) -> bool:
        for _ in range(PROBES):
            try:
                await self._cluster.probe(self._member.instance.address, PROBE_HEARTBEATS * self._welcome.heartbeat_s)
            except Unavailable:
                continue
            return True
        return False

    def end(self) -> None:
        """The instance has left, or is lost if silent."""
        if self._left:
            return
        self._left = True
        self._cluster.leave(self._member, lost=self.silent)
        write = log.warning if self.silent else log.info
        write("lost" if self.silent else "left", instance=self._member.id, address=self._member.instance.address)
