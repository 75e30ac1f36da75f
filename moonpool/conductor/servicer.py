"""ConductorService: the conductor's RPCs for clients and instances."""

# ruff: noqa: N802

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

import grpc

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import selection_from_proto
from moonpool.base.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MoonpoolError,
    Overloaded,
    PermissionDenied,
    Unavailable,
)
from moonpool.base.rpc.roles import is_client, tenant_of
from moonpool.base.rpc.stream_writes import write_all
from moonpool.base.scheduling.fair_share import may_admit
from moonpool.base.scheduling.sessions import MAX_SESSION_S
from moonpool.base.telemetry.metrics import PROCESS_METRICS, Metric, MetricSet, counter
from moonpool.base.telemetry.spans import Recorder
from moonpool.base.telemetry.trace_context import TRACEPARENT, traceparent
from moonpool.conductor.cluster_members import ClusterMembers
from moonpool.conductor.config import ConductorConfig
from moonpool.conductor.core.conductor_core import ConductorCore
from moonpool.conductor.core.scaling import PoolDemand, demands
from moonpool.conductor.deletion import KVDeletions
from moonpool.conductor.dispatcher import Dispatcher
from moonpool.conductor.generate_stream import GenerateStream
from moonpool.conductor.join_server import JoinServer
from moonpool.conductor.loras import LoraAdapters
from moonpool.conductor.proto_conversion import failure_of, kind_to_proto
from moonpool.conductor.queue_state import queue_state
from moonpool.conductor.request_reports import RequestReports
from moonpool.conductor.request_validator import session_from_proto, weight_of
from moonpool.v1 import conductor_pb2, kv_pb2

_GenerateContext = grpc.aio.ServicerContext[conductor_pb2.GenerateRequest, conductor_pb2.GenerateResponse]
QUEUE_FULL_RETRY_S = 1.0
MAX_ANNOUNCED = 1024
"""Most prompts that a call announces."""
TELL_MARGIN_S = 0.2
"""Seconds before the client's own time limit at which a request fails, so that the client hears what was waited for."""
TELL_MARGIN = 0.1
"""The same as a share of short time limits."""
REPLACED_CALL_S = 1.0
"""Seconds until a call ends, after another call of the same client has taken the request over."""
DEMANDS_S = 0.1
"""Seconds for which what the pools have to do is not computed again: a scrape asks six times."""


class ConductorServicer:
    """The server of clients and instances."""

    def __init__(self, parts: ConductorParts) -> None:
        """`set_instance` must be called before the first request."""
        self.cluster = parts.cluster
        self.core = parts.core
        self.deletions = parts.deletions
        self.loras = parts.loras
        self._config = parts.config
        self._dispatcher = parts.dispatcher
        self._reports = parts.reports
        self._contexts = parts.contexts
        self._spans = parts.spans
        self._clock = parts.clock
        self._joins = JoinServer(parts.cluster, parts.config.heartbeat_s, self._admit)
        self._instance = kv_pb2.Instance(kind=kv_pb2.INSTANCE_KIND_CONDUCTOR)
        self._calls: dict[str, _OpenCall] = {}  # by request id
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._demands: tuple[PoolDemand, PoolDemand] | None = None
        self._demands_at = 0.0
        self.picker_address = ""
        """Where proxies ask for engines; "" = nowhere."""
        self.served = 0
        self.resumed = 0
        self.endpoints_as_picked = self.endpoints_elsewhere = 0
        self.gauges = MetricSet().add(CONDUCTOR_METRICS, self).add(PROCESS_METRICS, None)

    def set_instance(self, instance: kv_pb2.Instance) -> None:
        """Set this conductor's address, once the port is known."""
        self._instance.CopyFrom(instance)
        self._joins.conductor.CopyFrom(instance)
        self.cluster.steps.conductor.CopyFrom(instance)

    def endpoint_served(self, as_picked: bool) -> None:
        """A proxy has told which engine served a request that it asked about."""
        self.endpoints_as_picked += as_picked
        self.endpoints_elsewhere += not as_picked

    async def drain(self, limit_s: float) -> None:
        """Take no new requests. Requests that do not end within `limit_s` seconds end as cancelled."""
        self._draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            self._dispatcher.stop()
        self._joins.stop()
        self.cluster.watchers.stop()

    async def _admit(self, instance: kv_pb2.Instance) -> None:
        """An instance is about to join; raises as `KVDeletions.admit`."""
        await self.deletions.admit(instance)
        self.loras.announce(instance)

    # --- Generate -----------------------------------------------------------------------------------------------------

    async def Generate(self, request: conductor_pb2.GenerateRequest, context: _GenerateContext) -> None:
        arrived = self._clock()
        request.tenant = tenant_of(request.tenant)
        request_id = request.request_id or world.random_hex(8)
        if self._draining:
            raise Unavailable("this conductor is draining")
        limit_s = min(self._config.request_timeout_s, context.time_remaining() or float("inf"))
        deadline = arrived + limit_s
        core_deadline = deadline - min(TELL_MARGIN_S, TELL_MARGIN * limit_s)
        try:
            call = self._enter(request, request_id)
        except Overloaded as error:
            self._reports.refused(request_id, request.tenant, error.reason, str(error))
            raise
        try:
            parent = _traceparent(context)
            told = {TRACEPARENT: parent} if parent else {}
            with self._spans.span("generate", parent, starts=True, request=request_id, **told) as span:
                traceparent.set(span.traceparent or parent)
                if call.stream is not None:
                    await self._send(call, call.stream, deadline, context)
                else:
                    stream, used = await self._open(request, request_id, arrived, core_deadline)
                    call.stream = stream
                    self.resumed += stream.request.resume is not None
                    self._tell_watchers(stream)
                    await self._send(call, stream, deadline, context)
                    self._tell_watchers(stream)
                    if used is not None and stream.number:
                        used(stream.history.cached_tokens)
            self.served += self._calls.get(request_id) is call
        finally:
            self._leave(request_id, call)

    async def _open(
        self, request: conductor_pb2.GenerateRequest, request_id: str, arrived: float, deadline: float
    ) -> tuple[GenerateStream, Callable[[int], None] | None]:
        """Hand a request to the core; return also what to call with the request's cached tokens at the end."""
        try:
            message, used = await self._contexts.expand(request, deadline - self._clock())
            return await self._dispatcher.open(message, request_id, arrived, deadline), used
        except MoonpoolError as error:
            self._reports.refused(request_id, request.tenant, failure_of(error).kind.name.lower(), str(error))
            raise

    def _enter(self, message: conductor_pb2.GenerateRequest, request_id: str) -> _OpenCall:
        """Add a call to the open ones. A call that resumes an open request gets that request's stream."""
        earlier = self._calls.get(request_id)
        call = _OpenCall(message)
        if earlier is None:
            self._check_queue(message.tenant)
        elif call.repeats(earlier):
            raise Unavailable(f"{request_id!r} is being resumed already")
        elif earlier.stream is None or not _resumes(message, earlier.stream):
            raise InvalidRequest("request_id", f"{request_id!r} is running already")
        elif self._dispatcher.rejoin(message, earlier.stream):
            self.resumed += 1
            call.stream = earlier.stream
            earlier.replaced()
        self._calls[request_id] = call
        self._idle.clear()
        return call

    def _leave(self, request_id: str, call: _OpenCall) -> None:
        """A call has ended. A call that has replaced the ended call continues."""
        if self._calls.get(request_id) is call:
            del self._calls[request_id]
        if not self._calls:
            self._idle.set()

    async def _send(self, call: _OpenCall, stream: GenerateStream, deadline: float, context: _GenerateContext) -> None:
        """Send a client all messages for the request, or until another call replaces this call."""
        outgoing = stream.outgoing
        try:
            async with asyncio.timeout(deadline - self._clock()) as call.limit:
                await write_all(context, outgoing)
        except TimeoutError:
            raise DeadlineExceeded("the request's time is over; the client was slow to take the answer") from None
        finally:
            self._dispatcher.client_left(stream, outgoing)

    def _tell_watchers(self, stream: GenerateStream) -> None:
        """Tell those who watch the cluster's KV what the request's blocks stand for."""
        if self.cluster.watchers:
            request = stream.request
            for choice in stream.choices:
                tokens = request.prompt + choice.tokens
                self.cluster.watchers.named(
                    request.spec.tenant, request.cache_salt, tokens, request.lora, request.media
                )

    def _tenants(self) -> Counter[str]:
        return Counter([call.message.tenant for call in self._calls.values()])

    def _weight_of(self, tenant: str) -> float:
        return weight_of(tenant, self._config.tenant_weights)

    def _check_queue(self, tenant: str) -> None:
        limit = self._config.max_queue
        if len(self._calls) >= limit and not may_admit(self._tenants(), tenant, limit, self._weight_of):
            raise Overloaded(
                f"{len(self._calls)} requests are running, as many as this conductor takes",
                reason="queue_full",
                retry_after_s=QUEUE_FULL_RETRY_S,
            )

    # --- the cluster, explanations, contexts and deletions ------------------------------------------------------------

    async def Join(self, requests: AsyncIterator[conductor_pb2.JoinRequest], context: object) -> None:
        await self._joins.serve(requests, context)

    async def Explain(self, request: conductor_pb2.ExplainRequest, context: object) -> conductor_pb2.ExplainResponse:
        """Return how a request was placed, and the request's course so far."""
        decisions = self._reports.decisions
        request_id = decisions.full_id(request.request_id)
        call = self._calls.get(request_id)
        if call is None or call.stream is None or decisions.has_ended(request_id):
            return decisions.get(request_id)
        stream = call.stream
        response = conductor_pb2.ExplainResponse(timeline=stream.timeline(over=False), attempts=stream.history.attempts)
        if stream.history.attempts:
            response.MergeFrom(decisions.get(request_id))
        return response

    async def ChangeRole(
        self, request: conductor_pb2.ChangeRoleRequest, context: object
    ) -> conductor_pb2.ChangeRoleResponse:
        """Order an instance to change roles."""
        self.cluster.change_role(request.instance_id, request.kind)
        return conductor_pb2.ChangeRoleResponse()

    async def DrainInstance(
        self, request: conductor_pb2.DrainInstanceRequest, context: object
    ) -> conductor_pb2.DrainInstanceResponse:
        """Order an instance to take nothing new."""
        self.cluster.drain(request.instance_id)
        return conductor_pb2.DrainInstanceResponse()

    async def ClusterState(
        self, request: conductor_pb2.ClusterStateRequest, context: object
    ) -> conductor_pb2.ClusterStateResponse:
        registry = self.cluster.registry
        instances = [
            conductor_pb2.InstanceState(
                instance=member.instance,
                load=member.load,
                indexed_blocks=self.core.cluster.index.held(member.id),
                total_blocks=member.total_blocks,
                computes_prompts=member.computes_prompts,
                version=member.version,
                commit=member.commit,
            )
            for member in registry
        ]
        return conductor_pb2.ClusterStateResponse(
            conductor=self._instance,
            instances=instances,
            model=registry.model,
            ready=registry.ready and not self._draining,
            queue=queue_state(self.core.scheduler, self._tenants(), self._weight_of),
            recent=self._reports.recent.state(),
            loras=self.loras.known(),
            pools=[
                conductor_pb2.PoolDemand(
                    kind=kind_to_proto(pool.kind),
                    instances=pool.instances,
                    pressure=pool.pressure,
                    backlog_s=pool.backlog_s,
                    free_share=pool.free_share,
                    wanted=pool.wanted,
                )
                for pool in self.demands()
            ],
        )

    async def CreateContext(
        self, request: conductor_pb2.CreateContextRequest, context: object
    ) -> conductor_pb2.CreateContextResponse:
        request.tenant = tenant_of(request.tenant)
        return conductor_pb2.CreateContextResponse(context=await self._contexts.create(request))

    async def UpdateContext(
        self, request: conductor_pb2.UpdateContextRequest, context: object
    ) -> conductor_pb2.UpdateContextResponse:
        request.tenant = tenant_of(request.tenant)
        return conductor_pb2.UpdateContextResponse(context=await self._contexts.update(request))

    async def ListContexts(
        self, request: conductor_pb2.ListContextsRequest, context: object
    ) -> conductor_pb2.ListContextsResponse:
        request.tenant = tenant_of(request.tenant)
        return conductor_pb2.ListContextsResponse(contexts=await self._contexts.list(request))

    async def DeleteContext(
        self, request: conductor_pb2.DeleteContextRequest, context: object
    ) -> conductor_pb2.DeleteContextResponse:
        request.tenant = tenant_of(request.tenant)
        return await self._contexts.delete(request)

    async def UpdateSession(
        self, request: conductor_pb2.UpdateSessionRequest, context: object
    ) -> conductor_pb2.UpdateSessionResponse:
        """Take what a client knows of a session between two turns."""
        tenant, turn = tenant_of(request.tenant), session_from_proto(request.session)
        if not turn.id:
            raise InvalidRequest("session.id", "is missing")
        found = self.core.scheduler.sessions.get(tenant, turn.id) is not None
        if found:
            self._dispatcher.session_updated(tenant, turn)
        return conductor_pb2.UpdateSessionResponse(found=found)

    async def AnnouncePrompts(
        self, request: conductor_pb2.AnnouncePromptsRequest, context: object
    ) -> conductor_pb2.AnnouncePromptsResponse:
        """Take which prompts will come."""
        tenant, within_s = tenant_of(request.tenant), request.within_s if request.HasField("within_s") else None
        if len(request.requests) > MAX_ANNOUNCED:
            raise InvalidRequest("requests", f"at most {MAX_ANNOUNCED} at once")
        if within_s is not None and not 0.0 <= within_s <= MAX_SESSION_S:
            raise InvalidRequest("within_s", f"must be in [0, {MAX_SESSION_S:g}] seconds, is {within_s:g}")
        for message in request.requests:
            message.tenant = tenant
        prompts = await self._dispatcher.announce(tenant, request.requests, within_s)
        return conductor_pb2.AnnouncePromptsResponse(prompts=prompts)

    async def DeleteKV(self, request: conductor_pb2.DeleteKVRequest, context: object) -> conductor_pb2.DeleteKVResponse:
        selection = selection_from_proto(request.selection)
        if is_client() and (selection.keys or selection.namespaces):
            raise PermissionDenied("a client deletes its own tenant's KV, by the tenant's name")
        own = frozenset(map(tenant_of, selection.tenants))  # a client may call the client's own tenant ""
        return await self.deletions.delete(replace(selection, tenants=own), request.id)

    async def WatchKV(
        self, request: conductor_pb2.WatchKVRequest, context: object
    ) -> AsyncIterator[conductor_pb2.WatchKVResponse]:
        """Return what the instances hold, and each change."""
        members = [(member.instance, member.model) for member in self.cluster.registry]
        async with aclosing(self.cluster.watchers.watch(members, self.core.cluster.index)) as messages:
            async for message in messages:
                yield message

    async def LoadLoraAdapter(
        self, request: conductor_pb2.LoadLoraAdapterRequest, context: object
    ) -> conductor_pb2.LoadLoraAdapterResponse:
        """Load a LoRA adapter at all engines."""
        lora, instances = await self.loras.load(request.lora_name, request.lora_path, in_place=request.load_inplace)
        return conductor_pb2.LoadLoraAdapterResponse(lora=lora, instances=instances)

    async def UnloadLoraAdapter(
        self, request: conductor_pb2.UnloadLoraAdapterRequest, context: object
    ) -> conductor_pb2.UnloadLoraAdapterResponse:
        await self.loras.unload(request.lora_name)
        return conductor_pb2.UnloadLoraAdapterResponse()

    async def ConductorStats(
        self, request: conductor_pb2.ConductorStatsRequest, context: object
    ) -> conductor_pb2.ConductorStatsResponse:
        return conductor_pb2.ConductorStatsResponse(instance=self._instance, gauges=self.gauges.read())

    def demands(self) -> tuple[PoolDemand, PoolDemand]:
        """What prefill and decode have to do now; one answer for all metrics of a scrape."""
        now = self._clock()
        if self._demands is None or now - self._demands_at >= DEMANDS_S:
            self._demands, self._demands_at = demands(self.core, now), now
        return self._demands

    @property
    def dispatcher(self) -> Dispatcher:
        return self._dispatcher

    @property
    def running(self) -> int:
        """Calls of `Generate` that have not ended."""
        return len(self._calls)

    @property
    def contexts(self) -> NamedContexts:
        return self._contexts

    @property
    def decisions(self) -> int:
        """Requests that `Explain` can explain."""
        return len(self._reports.decisions)


@dataclass(frozen=True, slots=True)
class ConductorParts:
    """What a conductor is made of.

    Attributes:
        config: the settings.
        cluster: the members.
        core: decides where requests go.
        dispatcher: has the open requests.
        reports: on requests, for `Explain` and `ClusterState`.
        contexts: the hook for named contexts.
        deletions: deletes KV everywhere.
        loras: the LoRA adapters.
        spans: recorder of traces.
        clock: the core's clock, seconds.
    """

    config: ConductorConfig
    cluster: ClusterMembers
    core: ConductorCore
    dispatcher: Dispatcher
    reports: RequestReports
    contexts: NamedContexts
    deletions: KVDeletions
    loras: LoraAdapters
    spans: Recorder
    clock: Callable[[], float]


class NamedContexts(Protocol):
    """The hook for named contexts: expands requests that begin with a context, and serves the calls about contexts."""

    async def expand(
        self, message: conductor_pb2.GenerateRequest, within_s: float
    ) -> tuple[conductor_pb2.GenerateRequest, Callable[[int], None] | None]:
        """Return the request with the whole prompt, and a function to call with the request's cached tokens at the end.

        A request without a context is returned unchanged, with None. `within_s`: seconds that reading records may take.

        Raises:
            NotFound: there is no such context, or the context has expired.
            InvalidRequest: the context does not fit the prompt.
        """

    async def create(self, request: conductor_pb2.CreateContextRequest) -> conductor_pb2.Context:
        """Create a context."""

    async def update(self, request: conductor_pb2.UpdateContextRequest) -> conductor_pb2.Context:
        """Change a context."""

    async def list(self, request: conductor_pb2.ListContextsRequest) -> list[conductor_pb2.Context]:
        """Return a tenant's contexts."""

    async def delete(self, request: conductor_pb2.DeleteContextRequest) -> conductor_pb2.DeleteContextResponse:
        """Delete a context and the context's KV."""

    def __len__(self) -> int:
        """Return the number of contexts."""

    @property
    def tasks(self) -> int:
        """Number of background tasks."""


@dataclass(slots=True, eq=False)
class _OpenCall:
    """A `Generate` call that has not ended.

    Attributes:
        message: the client's.
        stream: the request, once read.
        limit: time limit for sending everything.
    """

    message: conductor_pb2.GenerateRequest
    stream: GenerateStream | None = None
    limit: asyncio.Timeout | None = None

    def repeats(self, earlier: _OpenCall) -> bool:
        """Return whether the client resumes once more while the earlier call is still being read."""
        if earlier.stream is not None or not (self.message.HasField("resume") and earlier.message.HasField("resume")):
            return False
        this, before = self.message.resume, earlier.message.resume
        return hmac.compare_digest(this.point.secret, before.point.secret) and this.count > before.count

    def replaced(self) -> None:
        """Another call has the request: end soon."""
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time() + REPLACED_CALL_S)


def _resumes(message: conductor_pb2.GenerateRequest, stream: GenerateStream) -> bool:
    """Return whether the request's own client resumes the request, before the lost connection was noticed here."""
    if not message.HasField("resume"):
        return False
    same = hmac.compare_digest(message.resume.point.secret, stream.secret)
    return same and message.resume.count > stream.resumes


def _traceparent(context: _GenerateContext) -> str:
    """Return the client's trace context, in OpenTelemetry's form; "" for none."""
    return next((str(value) for key, value in context.invocation_metadata() or () if key == TRACEPARENT), "")


CONDUCTOR_METRICS: tuple[Metric[ConductorServicer], ...] = (
    Metric("requests_running", "Calls of clients that have not ended.", lambda conductor: conductor.running, 0),
    Metric(
        "steps_sequences",
        "Sequences on the streams to decode instances.",
        lambda conductor: conductor.cluster.steps.sequences,
        0,
    ),
    Metric(
        "prefill_pressure",
        "Offered prompts as a share of what the prefill instances can do; 1 = full, more = a queue.",
        lambda conductor: conductor.demands()[0].pressure,
    ),
    Metric(
        "prefill_backlog_seconds",
        "Mean predicted seconds until the prompts that wait at prefill are computed.",
        lambda conductor: conductor.demands()[0].backlog_s,
    ),
    Metric(
        "prefill_wanted",
        "Prefill instances at which the pressure would be 0.8 (1 if requests have TTFT limits above 10 s), at least 1; "
        "average over a minute, and round up.",
        lambda conductor: conductor.demands()[0].wanted,
    ),
    Metric(
        "decode_pressure",
        "Offered answers as a share of what the decode instances can do within the TBT limit, or have memory for.",
        lambda conductor: conductor.demands()[1].pressure,
    ),
    Metric(
        "decode_free_ratio",
        "Share of the decode instances' KV blocks that hold nothing that a request needs.",
        lambda conductor: conductor.demands()[1].free_share,
    ),
    Metric(
        "decode_wanted",
        "Decode instances at which the pressure would be 0.8, at least 1; average over a minute, and round up.",
        lambda conductor: conductor.demands()[1].wanted,
    ),
    Metric(
        "requests_followed", "Requests from arrival to last token.", lambda conductor: len(conductor.core.scheduler), 0
    ),
    Metric(
        "calls_out",
        "Calls to prefill and decode that have not ended.",
        lambda conductor: conductor.core.scheduler.calls,
        0,
    ),
    Metric(
        "waiting_for_room",
        "Requests that wait for decode memory.",
        lambda conductor: len(conductor.core.scheduler.memory_queue),
        0,
    ),
    Metric(
        "waiting_for_limits",
        "Requests that wait because they would miss their SLO now.",
        lambda conductor: len(conductor.core.scheduler.slo_queue),
        0,
    ),
    Metric(
        "waiting_for_limits_bytes",
        "Bytes of the requests that wait because of their SLO.",
        lambda conductor: conductor.core.scheduler.slo_queue.nbytes,
        0,
    ),
    Metric(
        "prefills_in_flight",
        "Prompts placed at prefill instances.",
        lambda conductor: conductor.core.cluster.prompts_in_flight,
        0,
    ),
    Metric(
        "decodes_in_flight",
        "Answers placed at decode instances.",
        lambda conductor: conductor.core.cluster.answers_in_flight,
        0,
    ),
    Metric(
        "loads_in_flight",
        "Prefixes that are being loaded.",
        lambda conductor: conductor.core.cluster.reads_in_flight,
        0,
    ),
    Metric("claims", "Placements that count as load.", lambda conductor: len(conductor.core.cluster.claims), 0),
    Metric(
        "decode_blocks_unreported",
        "Decode blocks of own answers that no load report includes.",
        lambda conductor: conductor.core.cluster.blocks_unreported,
        0,
    ),
    Metric(
        "steps_messages_unsent",
        "Messages to decode instances that wait to be written.",
        lambda conductor: conductor.cluster.steps.unsent,
        0,
    ),
    Metric("sessions", "Sessions that the conductor knows.", lambda conductor: len(conductor.core.scheduler.sessions)),
    Metric("lora_adapters", "LoRA adapters that requests may ask for.", lambda conductor: len(conductor.loras)),
    Metric("contexts", "Named contexts.", lambda conductor: len(conductor.contexts)),
    Metric("context_tasks", "Background tasks for named contexts.", lambda conductor: conductor.contexts.tasks, 0),
    Metric(
        "deletions",
        "Deletions of KV that are repeated to joining instances.",
        lambda conductor: conductor.deletions.deletions,
    ),
    Metric(
        "deletions_owed",
        "Deletions that members have not carried out, over all members.",
        lambda conductor: conductor.deletions.owed,
        0,
    ),
    Metric(
        "emulated", "1 if a member emulates compute, else 0.", lambda conductor: conductor.cluster.registry.emulated
    ),
    Metric("instances", "Members of the cluster.", lambda conductor: len(conductor.cluster.registry)),
    Metric("index_keys", "Block keys in the prefix index.", lambda conductor: len(conductor.core.cluster.index)),
    Metric("decisions", "Recent requests that can be explained.", lambda conductor: conductor.decisions),
    Metric("kv_watchers", "Programs that follow the cluster's KV.", lambda conductor: len(conductor.cluster.watchers)),
    counter(
        "endpoints_as_picked_total",
        "Responses of proxies by the engine that was picked first.",
        lambda conductor: conductor.endpoints_as_picked,
    ),
    counter(
        "endpoints_elsewhere_total",
        "Responses of proxies by another engine: the one picked first did not answer the proxy.",
        lambda conductor: conductor.endpoints_elsewhere,
    ),
    counter("requests_served_total", "Calls of clients that ended.", lambda conductor: conductor.served),
    counter(
        "requests_resumed_total",
        "Streams that clients continued after a lost connection.",
        lambda conductor: conductor.resumed,
    ),
    counter(
        "stale_answers_total",
        "Prompts that prefill instances refused because their queue was longer than predicted.",
        lambda conductor: conductor.core.scheduler.stale,
    ),
    counter(
        "placements_measured_total",
        "Prompts with a measured time to first token compared with the alternatives.",
        lambda conductor: conductor.core.cluster.hindsight.prefill.totals.placements,
    ),
    counter(
        "placements_regretted_total",
        "Of these, those that another instance would have computed sooner, by what is known since.",
        lambda conductor: conductor.core.cluster.hindsight.prefill.totals.regretted,
    ),
    counter(
        "placement_regret_seconds_total",
        "Seconds to first token that these have lost together.",
        lambda conductor: conductor.core.cluster.hindsight.prefill.totals.lost_s,
    ),
    counter(
        "decode_placements_measured_total",
        "Answers with a measured time per token compared with the alternatives.",
        lambda conductor: conductor.core.cluster.hindsight.decode.totals.placements,
    ),
    counter(
        "decode_placements_regretted_total",
        "Of these, those that another instance would have ended sooner, by what is known since.",
        lambda conductor: conductor.core.cluster.hindsight.decode.totals.regretted,
    ),
    counter(
        "decode_placement_regret_seconds_total",
        "Seconds from first to last token that these have lost together.",
        lambda conductor: conductor.core.cluster.hindsight.decode.totals.lost_s,
    ),
    counter(
        "shadow_decisions_total",
        "Placements for which the shadow policy was asked, too.",
        lambda conductor: conductor.core.cluster.prefills.shadow.decisions,
    ),
    counter(
        "shadow_agreed_total",
        "Of these, those with the same instance.",
        lambda conductor: conductor.core.cluster.prefills.shadow.agreed,
    ),
    Metric(
        "shadow_sooner_seconds",
        "Predicted seconds to first token that the shadow policy's choices would have saved; negative = cost.",
        lambda conductor: conductor.core.cluster.prefills.shadow.sooner_s,
    ),
    counter(
        "prefetches_total",
        "Prompts whose blocks kvstores were told to bring from SSD into memory before the blocks were needed.",
        lambda conductor: conductor.core.scheduler.prefetch.to_memory,
    ),
    counter(
        "instance_prefetches_total",
        "Prompts whose blocks prefill instances were told to fetch before the prompts came.",
        lambda conductor: conductor.core.scheduler.prefetch.to_instances,
    ),
    counter(
        "instance_prefetches_cancelled_total",
        "Of these, those that were called off: the prompt went elsewhere, or did not come.",
        lambda conductor: conductor.core.scheduler.prefetch.cancelled,
    ),
    counter(
        "copies_ordered_total",
        "Copies of hot prefixes that were ordered.",
        lambda conductor: conductor.core.cluster.replication.ordered,
    ),
)
