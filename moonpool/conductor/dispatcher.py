"""The dispatcher: hands requests to the core, and carries out the core's actions at instances and clients.

Each call at an instance that is started posts exactly one `IoEnded`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from moonpool.base import world
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.runtime.tenant_turns import LoopTurns
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.base.scheduling.state_machine import CancelIo
from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.core.actions import (
    Action,
    AnnouncePlacement,
    CallPrefill,
    CallReserve,
    CancelReservation,
    ChangeRole,
    CompleteRequest,
    DropRequest,
    EndpointPicked,
    FailRequest,
    InstanceOrder,
    LeaveSequence,
    Rehash,
    RenewReservation,
    Resync,
    StartDecode,
    TakeOverSequence,
)
from moonpool.conductor.core.events import (
    ClientGone,
    EndpointAsked,
    EndpointDone,
    Event,
    PromptsAnnounced,
    Rehashed,
    RequestArrived,
    SessionUpdated,
    StopRequested,
)
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.replication import ReplicatePrefix, StopReplication
from moonpool.conductor.core.retention import TellSession
from moonpool.conductor.core.tenant_activity import TellActivity
from moonpool.conductor.generate_stream import GenerateStream
from moonpool.conductor.instance_calls import InstanceCalls
from moonpool.conductor.output_queue import OutputQueue
from moonpool.conductor.proto_conversion import candidate_proto, error_of, placement_proto
from moonpool.conductor.request_metrics import refusal_reason
from moonpool.conductor.request_reports import RequestReports
from moonpool.conductor.request_validator import RequestValidator, is_short
from moonpool.conductor.resume import read_resume
from moonpool.conductor.valid_request import ValidRequest
from moonpool.v1 import conductor_pb2

log = get_logger(__name__)
T = TypeVar("T")
TOKENS_OF_A_TURN = 4096
"""Prompt tokens that cost the event loop about as much as a request without any."""
SECRET_BYTES = 16
"""Bytes of the secrets that are drawn for new requests."""
DEADLINE_MARGIN_S = 0.1
"""A client whose request has this much time left, or less, leaves because the time has run out."""


class Dispatcher:
    """All requests that the core has not ended.

    Args:
        reader: checks and tokenises requests.
        calls: carries out actions at instances.
        reports: gets the events of each request's life.
        order: sends an instance an order about keys, sessions, tenants or role.
        post: hands an event to the core.
        clock: the core's clock, seconds.
        wall_clock: gives seconds since 1970.
    """

    def __init__(
        self,
        reader: RequestValidator,
        calls: InstanceCalls,
        reports: RequestReports,
        order: Callable[[InstanceOrder], None],
        post: Callable[[Event], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = world.unix_time,
    ) -> None:
        self._reader = reader
        self._calls = calls
        self._reports = reports
        self._order = order
        self._post = post
        self._clock = clock
        self._wall_clock = wall_clock
        self._streams: dict[int, GenerateStream] = {}  # by the request's number at the core
        self._numbers = itertools.count(1)
        self._picks: dict[int, asyncio.Future[EndpointPicked]] = {}
        self._turns = LoopTurns()

    def __len__(self) -> int:
        return len(self._streams)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def open(
        self, message: conductor_pb2.GenerateRequest, request_id: str, arrived: float, deadline: float
    ) -> GenerateStream:
        """Read a request, new or resumed, and hand the request to the core.

        If a resumed request's client has all tokens, the request does not go to the core: the stream has the end.

        Args:
            message: from the client.
            request_id: the request's id; "" draws one.
            arrived: when the message came, seconds of the core's clock.
            deadline: when the request fails.

        Raises:
            InvalidRequest: names the first field that is wrong.
            Unavailable: no engine has joined.
        """
        served = self._reader.served()
        if is_short(message):
            await self._turns.begin(message.tenant)
            request = self._reader.read_now(message, served, request_id, arrived, deadline)
        else:
            request = await self._reader.read(message, served, request_id, arrived, deadline)
            await self._turns.begin(message.tenant, _cost(request))
        resume, reports = request.resume, self._reports
        secret = world.random_bytes(SECRET_BYTES) if resume is None else resume.point.secret
        stream = GenerateStream(
            request, served, secret, self._clock, self._wall_clock, reports.first_token, reports.delivered
        )
        if resume is not None:
            await self._reader.run(message.tenant, stream.restore)
            if stream.finish and not request.spec.deferred:  # the scores of deferred answers are not known here
                stream.finish_restored()
                return stream
        spec = stream.admit(next(self._numbers))
        self._streams[spec.number] = stream
        reports.opened(stream)
        self._post(RequestArrived(spec, stream.reusable_keys))
        return stream

    async def compute(self, message: conductor_pb2.GenerateRequest, timeout_s: float) -> None:
        """Serve a request from the conductor itself, and drop the output.

        Raises:
            MoonpoolError: the request failed, or was refused.
        """
        arrived = self._clock()
        stream = await self.open(message, "", arrived, arrived + timeout_s)
        try:
            while await stream.outgoing.next() is not None:
                pass
        finally:
            self.client_left(stream, stream.outgoing)

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Run work for a tenant's request on a worker thread, in the tenant's turn."""
        return await self._reader.run(tenant, work)

    async def pick_endpoint(
        self, message: conductor_pb2.GenerateRequest, others: Sequence[str], within_s: float
    ) -> EndpointPicked:
        """Ask the core which engine shall serve a request that a proxy sends by itself.

        The prompt counts at the engine until `endpoint_done`. `others` must not be chosen; the proxy waits `within_s`.

        Raises:
            MoonpoolError: the request is wrong, or is refused.
        """
        now = self._clock()
        request = await self._reader.read(message, arrived=now, deadline=now + within_s)
        await self._turns.begin(message.tenant, _cost(request))
        spec = replace(request.spec, number=next(self._numbers))
        picked: asyncio.Future[EndpointPicked] = asyncio.get_running_loop().create_future()
        self._picks[spec.number] = picked
        try:
            self._post(EndpointAsked(spec, tuple(request.prompt_keys), tuple(others)))
            found = await picked
        except BaseException:
            self.endpoint_done(spec.number)
            raise
        finally:
            del self._picks[spec.number]
        if found.failure is not None:
            raise error_of(found.failure)
        return found

    def _endpoint_picked(self, action: EndpointPicked) -> None:
        picked = self._picks.get(action.request)
        if picked is not None and not picked.done():  # else the proxy has left
            picked.set_result(action)

    def endpoint_done(self, number: int) -> None:
        """The engine has begun to answer a proxy's request, or never will."""
        self._post(EndpointDone(number))

    def client_left(self, stream: GenerateStream, outgoing: OutputQueue) -> None:
        """The reader of these messages has left, or has all messages. Another call may have the request by now."""
        if stream.spec.number in self._streams and stream.outgoing is outgoing:
            self._post(ClientGone(stream.spec.number, stream.untold))

    def rejoin(self, message: conductor_pb2.GenerateRequest, stream: GenerateStream) -> bool:
        """Send a request's output to a client that has lost the connection and resumes; the earlier call ends.

        Returns:
            False if the request has ended.

        Raises:
            InvalidRequest: the message is wrong, or the client's tokens are not this request's.
            Unavailable: the client has more tokens than are known here yet.
        """
        resume = read_resume(message, stream.request.sampling, self._reader.served().config.vocab_size)
        if resume is None or stream.spec.number not in self._streams:
            return False
        stream.rejoin(resume)
        return True

    def kv_deleted(self, selection: KVSelection) -> None:
        """KV was deleted: engines keep no KV from open requests that match."""
        namespace = self._reader.namespace
        for stream in self._streams.values():
            stream.kv_deleted(selection, namespace)

    def session_updated(self, tenant: str, turn: SessionTurn) -> None:
        """A client says between two turns what is known of a session."""
        self._post(SessionUpdated(tenant, turn))

    async def announce(
        self, tenant: str, messages: Sequence[conductor_pb2.GenerateRequest], within_s: float | None
    ) -> int:
        """Take prompts that will come within so many seconds; None: that will not come. Return how many have blocks.

        Raises:
            InvalidRequest: a request cannot be served; names the field.
            Unavailable: no engine has joined.
        """
        chains = [tuple((await self._reader.read(message)).prompt_keys) for message in messages]
        await self._turns.begin(tenant, float(len(messages)))
        known = tuple([chain for chain in chains if chain])
        self._post(PromptsAnnounced(tenant, known, within_s))
        return len(known)

    def stop(self) -> None:
        """End all requests here with the tokens so far; their sequences stay at decode, for another conductor."""
        for number in list(self._streams):
            self._post(StopRequested(number))

    # --- actions ------------------------------------------------------------------------------------------------------

    def perform(self, action: Action) -> None:
        """Carry out an action of the core, without blocking. A defect in doing so ends the action's request."""
        stream = self._streams.get(getattr(action, "request", 0))
        try:
            if isinstance(action, EndpointPicked):
                self._endpoint_picked(action)
            else:
                self._perform(action)
        except Exception:
            if stream is None:
                raise
            name = type(action).__name__
            log.exception(
                "an action cannot be carried out: the action's request ends", action=name, request=stream.spec.id
            )
            self._end_after_defect(action, stream)

    def _perform(self, action: Action) -> None:
        match action:
            case AnnouncePlacement() | Rehash() | CompleteRequest() | FailRequest() | DropRequest():
                self._update(action, self._streams[action.request])
            case CallReserve():
                self._calls.reserve(action, self._streams[action.request])
            case CallPrefill():
                self._calls.prefill(action, self._streams[action.request])
            case StartDecode():
                stream = self._streams[action.request]
                stream.started = True
                self._calls.start(action, stream)
            case TakeOverSequence():
                stream = self._streams[action.request]
                stream.started = True
                stream.taken_over(action.sequence)
                self._reports.decisions.placed(stream.spec.id, stream.history.attempts[-1])
                self._calls.take_over(action, stream)
            case RenewReservation():
                self._calls.renew(action)
            case CancelReservation():
                self._calls.cancel_reservation(action)
            case Resync() | ReplicatePrefix() | StopReplication() | TellSession() | TellActivity() | ChangeRole():
                self._order(action)
            case CancelIo(io):
                self._calls.cancel(io)
            case LeaveSequence(io):
                self._calls.leave(io)

    def _update(
        self, action: AnnouncePlacement | Rehash | CompleteRequest | FailRequest | DropRequest, stream: GenerateStream
    ) -> None:
        """The core has placed, rehashed or ended a request."""
        request_id = stream.spec.id
        match action:
            case AnnouncePlacement(_, plan, sequence, target):
                attempt = conductor_pb2.Attempt(
                    placement=placement_proto(action),
                    candidates=map(candidate_proto, plan.candidates),
                    waited_s=action.queued_s,
                )
                stream.placed(attempt, sequence, target)
                self._reports.decisions.placed(request_id, attempt)
                return
            case Rehash(request, failures, failure):
                log.warning("placing anew", request=request_id, failures=failures, error=str(failure))
                stream.history.given_up(str(failure))
                tokens = stream.rehash()
                self._post(Rehashed(request, tokens, stream.reusable_keys))
                return
            case CompleteRequest(_, finish):
                stream.complete(finish)
                self._reports.completed(stream)
            case FailRequest(request, failure) if failure.fenced and self._take_back(stream):
                del self._streams[request]
                return
            case FailRequest(_, failure, refused, candidates):
                if refused:
                    reason = refusal_reason(failure)
                    self._reports.refused(request_id, stream.spec.tenant, reason, str(failure), candidates)
                else:
                    self._reports.failed(stream, failure.kind, str(failure))
                stream.outgoing.end(error_of(failure))
            case DropRequest():
                if self._clock() > stream.spec.deadline - DEADLINE_MARGIN_S:
                    message = "the request's time is over; the client has left"
                    self._reports.failed(stream, FailureKind.DEADLINE, message)
                else:
                    self._reports.cancelled(stream)
                stream.outgoing.end()
        self._reports.ended(stream)
        del self._streams[action.request]

    def _take_back(self, stream: GenerateStream) -> bool:
        """Whether a sequence that another conductor has taken over is taken back; see `GenerateStream.take_back`."""
        if not stream.take_back(next(self._numbers)):
            return False
        log.warning("taking a sequence back", request=stream.spec.id, resumes=stream.resumes)
        self._streams[stream.spec.number] = stream
        self._post(RequestArrived(stream.spec, stream.reusable_keys))
        return True

    def _end_after_defect(self, action: Action, stream: GenerateStream) -> None:
        failure = Failure(FailureKind.INTERNAL, "a defect: the conductor cannot serve this request")
        if isinstance(action, CompleteRequest | FailRequest | DropRequest):  # the core has ended the request
            self._streams.pop(action.request, None)
            if not stream.outgoing.ended:
                stream.outgoing.end(error_of(failure))
        else:
            self._post(StopRequested(stream.spec.number, failure))


def _cost(request: ValidRequest) -> float:
    """What a request costs the event loop to begin; 1 = a short prompt."""
    return 1.0 + len(request.prompt) / TOKENS_OF_A_TURN
