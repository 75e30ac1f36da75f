"""ConductorService: translates between the contract's messages and the domain."""

# ruff: noqa: N802

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import grpc

from moonpool.cluster.proto_conversion import selection_from_proto
from moonpool.errors import DeadlineExceeded, InvalidRequest, Overloaded, PermissionDenied, Unavailable
from moonpool.rpc.auth import is_client, tenant_of
from moonpool.rpc.stream_writes import bare_write, write_each
from moonpool.scheduling.fair_share import may_admit
from moonpool.telemetry.gauges import Gauges, process_entries
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.config import ConductorConfig
from services.conductor.contexts import NamedContextManager
from services.conductor.core.scheduler import ConductorCore
from services.conductor.deletion import KVDeletions
from services.conductor.dispatcher import Dispatcher, RequestReader
from services.conductor.explain import DecisionLog, RecentRequests, queue_state
from services.conductor.registry import ClusterMembers, JoinServer
from services.conductor.request import weight_of
from services.conductor.session import OutputQueue, OutputState, ResumeRequest, Session, read_resume

_GenerateContext = grpc.aio.ServicerContext[conductor_pb2.GenerateRequest, conductor_pb2.GenerateResponse]

QUEUE_FULL_RETRY_S = 1.0
TAKE_OVER_S = 1.0
"""How long an earlier call of a request that its client resumes may take to end: nobody may be reading it."""
TRACEPARENT = "traceparent"


@dataclass(slots=True, eq=False)
class _Running:
    """A request whose call has not ended; `serving` once it was read, `limit` while its client is told.

    `resume` is what the client has said, where it resumes the request.
    """

    tenant: str
    resume: conductor_pb2.Resume | None
    serving: Session | None = None
    limit: asyncio.Timeout | None = None

    def again(self, earlier: _Running) -> bool:
        """Whether a client resumes once more while what it has said before is being read."""
        this, before = self.resume, earlier.resume
        if earlier.serving is not None or this is None or before is None:
            return False
        return secrets.compare_digest(this.point.secret, before.point.secret) and this.count > before.count

    def taken_over(self) -> None:
        """Another call has the request: this one ends soon."""
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time() + TAKE_OVER_S)


class ConductorServicer:
    """Serves clients and instances."""

    def __init__(
        self,
        config: ConductorConfig,
        cluster: ClusterMembers,
        core: ConductorCore,
        desk: Dispatcher,
        intake: RequestReader,
        decisions: DecisionLog,
        recent: RecentRequests,
        keeper: NamedContextManager,
        forgetting: KVDeletions,
        tokenizing: ThreadPoolExecutor,
        spans: Recorder,
        clock: Callable[[], float],
    ) -> None:
        """`set_instance` must be called before the first request; `clock` gives seconds, the core's."""
        self._config = config
        self.cluster = cluster
        self.core = core
        self._desk = desk
        self._intake = intake
        self._keeper = keeper
        self.forgetting = forgetting
        self._decisions = decisions
        self._recent = recent
        self._tokenizing = tokenizing
        self._spans = spans
        self._clock = clock
        self._joins = JoinServer(cluster, config.heartbeat_s, forgetting.admit)
        self._instance = kv_pb2.Instance(kind=kv_pb2.INSTANCE_KIND_CONDUCTOR)
        self._running: dict[str, _Running] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._served = 0
        self._resumed = 0
        self.gauges = self._make_gauges()

    def set_instance(self, instance: kv_pb2.Instance) -> None:
        """Fill in this conductor's address, once the port is known."""
        self._instance.CopyFrom(instance)
        self._joins.conductor.CopyFrom(instance)
        self.cluster.steps.conductor.CopyFrom(instance)

    async def drain(self, limit_s: float) -> None:
        """Take no new requests, let those that run end within `limit_s`, then end them as cancelled."""
        self._draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            self._desk.stop()
        self._joins.stop()

    async def Generate(self, request: conductor_pb2.GenerateRequest, context: _GenerateContext) -> None:
        arrived = self._clock()
        request.tenant = tenant_of(request.tenant)
        request_id = request.request_id or secrets.token_hex(8)
        if self._draining:
            raise Unavailable("this conductor is draining")
        deadline = arrived + min(self._config.request_timeout_s, context.time_remaining() or float("inf"))
        running = self._enter(request, request_id)
        try:
            with self._spans.span("generate", request=request_id, **_trace(context)):
                if running.serving is not None:
                    await self._tell(running, running.serving, deadline, context)
                else:
                    await self._generate(request, request_id, running, arrived, deadline, context)
            self._served += self._running.get(request_id) is running
        finally:
            self._leave(request_id, running)

    def _enter(self, message: conductor_pb2.GenerateRequest, request_id: str) -> _Running:
        """Gives a call its place among those that run. A request that its own client resumes keeps the one it has."""
        earlier = self._running.get(request_id)
        running = _Running(message.tenant, message.resume if message.HasField("resume") else None)
        if earlier is None:
            self._check_queue(message.tenant)
        elif running.again(earlier):
            raise Unavailable(f"{request_id!r} is being resumed already")
        elif not self._resumes(message, earlier):
            raise InvalidRequest("request_id", f"{request_id!r} is running already")
        elif earlier.serving is not None:
            running.serving = self._rejoined(message, earlier.serving)
            if running.serving is not None:
                earlier.taken_over()
        self._running[request_id] = running
        self._idle.clear()
        return running

    def _leave(self, request_id: str, running: _Running) -> None:
        """A call has ended; one that has taken its place goes on."""
        if self._running.get(request_id) is running:
            del self._running[request_id]
        if not self._running:
            self._idle.set()

    async def _generate(
        self,
        message: conductor_pb2.GenerateRequest,
        request_id: str,
        running: _Running,
        arrived: float,
        deadline: float,
        context: _GenerateContext,
    ) -> None:
        served, use = self._intake.served(), await self._keeper.use(message, deadline - self._clock())
        message = use.request if use is not None else message
        request = await self._intake.read(message, request_id)
        resume, answer = read_resume(message, request, served), OutputState.begin(request, served, arrived)
        if resume is not None:
            self._resumed += 1
            await asyncio.get_running_loop().run_in_executor(self._tokenizing, answer.resume, resume.answers)
            if answer.finish and not request.has_beams:  # their scores are not known here
                await _tell_end(answer, resume, context)
                return
        running.serving = self._desk.open(answer, deadline, resume)
        await self._tell(running, running.serving, deadline, context)
        if use is not None:
            self._keeper.used(use, answer.cached_tokens)

    async def _tell(self, running: _Running, serving: Session, deadline: float, context: _GenerateContext) -> None:
        """Tells a client everything of its request, or as long as no other call takes its place."""
        outgoing = serving.outgoing
        try:
            async with asyncio.timeout(deadline - self._clock()) as running.limit:
                await write_each(bare_write(context), outgoing.next)
        except TimeoutError:
            raise DeadlineExceeded("the request took longer than it may") from None
        finally:
            self._desk.client_left(serving, outgoing)

    @staticmethod
    def _resumes(message: conductor_pb2.GenerateRequest, earlier: _Running) -> bool:
        """Whether a request is resumed by its own client: its connection was lost, and that was not seen here yet."""
        serving = earlier.serving
        if serving is None or not message.HasField("resume"):
            return False
        same = secrets.compare_digest(message.resume.point.secret, serving.secret)
        return same and message.resume.count > serving.resumes

    def _rejoined(self, message: conductor_pb2.GenerateRequest, serving: Session) -> Session | None:
        """Lets a call take the place of an earlier one, of which the request is there still; None when it is not."""
        resume = read_resume(message, serving.answer.request, self._intake.served())
        if resume is None or not self._desk.rejoin(serving, resume):
            return None
        self._resumed += 1
        return serving

    def _tenants(self) -> Counter[str]:
        return Counter([running.tenant for running in self._running.values()])

    def _weight_of(self, tenant: str) -> float:
        return weight_of(tenant, self._config.tenant_weights)

    def _check_queue(self, tenant: str) -> None:
        limit = self._config.max_queue
        if len(self._running) >= limit and not may_admit(self._tenants(), tenant, limit, self._weight_of):
            raise Overloaded(
                f"{len(self._running)} requests are running, as many as this conductor takes",
                reason="queue_full",
                retry_after_s=QUEUE_FULL_RETRY_S,
            )

    async def Join(self, requests: AsyncIterator[conductor_pb2.JoinRequest], context: object) -> None:
        """Follow one instance."""
        await self._joins.serve(requests, context)

    async def Explain(self, request: conductor_pb2.ExplainRequest, context: object) -> conductor_pb2.ExplainResponse:
        """Return how a request was placed, and what it has gone through so far."""
        found = self._decisions.get(request.request_id)
        running = self._running.get(request.request_id)
        if running is not None and running.serving is not None and not found.HasField("timeline"):
            answer = conductor_pb2.ExplainResponse(timeline=running.serving.timeline(over=False))
            answer.MergeFrom(found)
            return answer
        return found

    async def ChangeRole(
        self, request: conductor_pb2.ChangeRoleRequest, context: object
    ) -> conductor_pb2.ChangeRoleResponse:
        """Order an instance to change its role."""
        self.cluster.change_role(request.instance_id, request.kind)
        return conductor_pb2.ChangeRoleResponse()

    async def ClusterState(
        self, request: conductor_pb2.ClusterStateRequest, context: object
    ) -> conductor_pb2.ClusterStateResponse:
        """List the instances."""
        registry = self.cluster.registry
        instances = [
            conductor_pb2.InstanceState(
                instance=member.instance,
                load=member.load,
                indexed_blocks=self.core.picture.index.held(member.id),
                total_blocks=member.total_blocks,
            )
            for member in registry
        ]
        return conductor_pb2.ClusterStateResponse(
            conductor=self._instance,
            instances=instances,
            model=registry.model,
            ready=registry.ready and not self._draining,
            queue=queue_state(self.core.requests, self._tenants(), self._weight_of),
            recent=self._recent.state(),
        )

    async def CreateContext(
        self, request: conductor_pb2.CreateContextRequest, context: object
    ) -> conductor_pb2.CreateContextResponse:
        request.tenant = tenant_of(request.tenant)
        return conductor_pb2.CreateContextResponse(context=await self._keeper.create(request))

    async def UpdateContext(
        self, request: conductor_pb2.UpdateContextRequest, context: object
    ) -> conductor_pb2.UpdateContextResponse:
        request.tenant = tenant_of(request.tenant)
        return conductor_pb2.UpdateContextResponse(context=await self._keeper.update(request))

    async def ListContexts(
        self, request: conductor_pb2.ListContextsRequest, context: object
    ) -> conductor_pb2.ListContextsResponse:
        request.tenant = tenant_of(request.tenant)
        return conductor_pb2.ListContextsResponse(contexts=await self._keeper.list(request))

    async def DeleteContext(
        self, request: conductor_pb2.DeleteContextRequest, context: object
    ) -> conductor_pb2.DeleteContextResponse:
        request.tenant = tenant_of(request.tenant)
        return await self._keeper.delete(request)

    async def DeleteKV(self, request: conductor_pb2.DeleteKVRequest, context: object) -> conductor_pb2.DeleteKVResponse:
        selection = selection_from_proto(request.selection)
        if is_client() and (selection.keys or selection.namespaces):
            raise PermissionDenied("a client deletes its own tenant's KV, by the tenant's name")
        own = frozenset(map(tenant_of, selection.tenants))  # "" is a client's own tenant too
        return await self.forgetting.delete(replace(selection, tenants=own), request.id)

    async def ConductorStats(
        self, request: conductor_pb2.ConductorStatsRequest, context: object
    ) -> conductor_pb2.ConductorStatsResponse:
        return conductor_pb2.ConductorStatsResponse(instance=self._instance, gauges=self.gauges.read())

    def _make_gauges(self) -> Gauges:
        cluster, requests, picture = self.cluster, self.core.requests, self.core.picture
        return Gauges(
            [
                ("requests_running", lambda: len(self._running), 0),
                ("requests_served", lambda: self._served, None),
                ("requests_resumed", lambda: self._resumed, None),
                ("steps_sequences", lambda: cluster.steps.sequences, 0),
                ("requests_followed", lambda: len(requests), 0),
                ("calls_out", lambda: requests.calls, 0),
                ("waiting_for_room", lambda: len(requests.rooms), 0),
                ("waiting_for_limits", lambda: len(requests.line), 0),
                ("waiting_for_limits_bytes", lambda: requests.line.nbytes, 0),
                ("prefills_in_flight", lambda: picture.prompts_in_flight, 0),
                ("decodes_in_flight", lambda: picture.answers_in_flight, 0),
                ("loads_in_flight", lambda: picture.reads_in_flight, 0),
                ("stale_answers", lambda: requests.stale, None),
                ("copies_ordered", lambda: picture.hot.ordered, None),
                ("claims", lambda: len(picture.claims), 0),
                ("decode_blocks_unreported", lambda: picture.blocks_unreported, 0),
                ("steps_messages_unsent", lambda: cluster.steps.unsent, 0),
                ("contexts", lambda: len(self._keeper.contexts), None),
                ("context_tasks", lambda: self._keeper.tasks, 0),
                ("deletions", lambda: self.forgetting.deletions, None),
                ("deletions_owed", lambda: self.forgetting.owed, 0),
                ("emulated", lambda: cluster.registry.emulated, None),
                ("instances", lambda: len(cluster.registry), None),
                ("index_keys", lambda: len(picture.index), None),
                ("decisions", lambda: len(self._decisions), None),
                *process_entries(),
            ]
        )


async def _tell_end(answer: OutputState, resume: ResumeRequest, context: _GenerateContext) -> None:
    """A client has all tokens, and lacks only the end."""
    outgoing = OutputQueue()
    for choice in answer.choices:
        outgoing.delta(choice.rest())
    outgoing.finished(answer.finished(resume.point.placement, answer.arrived))
    await write_each(bare_write(context), outgoing.next)


def _trace(context: _GenerateContext) -> dict[str, object]:
    """The client's trace, as OpenTelemetry passes it."""
    return {key: value for key, value in context.invocation_metadata() or () if key == TRACEPARENT}
