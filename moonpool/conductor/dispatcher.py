"""The dispatcher: hands requests to the core, and carries out the core's actions at instances and clients.

Each call at an instance that is started posts exactly one `IoEnded`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import finite_or_zero
from moonpool.base.errors import MoonpoolError, StreamBroken
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import KEY_BYTES, tokens_digest, window_key
from moonpool.base.rpc.channels import Channels
from moonpool.base.scheduling.sessions import SessionTurn
from moonpool.base.scheduling.state_machine import CancelIo, IoEnded
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
    RenewSession,
    Resync,
    StartDecode,
    TakeOverSequence,
)
from moonpool.conductor.core.events import (
    CallResult,
    ClientGone,
    EndpointAsked,
    EndpointDone,
    Event,
    FirstToken,
    KVDelivered,
    PrefillAccepted,
    PrefillMeasurements,
    PromptsAnnounced,
    Rehashed,
    RequestArrived,
    SessionUpdated,
    StalePlacement,
    StopRequested,
    TokensArrived,
)
from moonpool.conductor.core.expected import TellSession
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.prefix_holder import PrefixHolder
from moonpool.conductor.core.replication import ReplicatePrefix, StopReplication
from moonpool.conductor.core.store_pool import StoreView
from moonpool.conductor.core.tenant_activity import TellActivity
from moonpool.conductor.decode_streams import NewTokens, StepsPool, StepsStream
from moonpool.conductor.explain import RequestReports
from moonpool.conductor.generate_stream import GenerateStream, OutputQueue
from moonpool.conductor.proto_conversion import (
    candidate_proto,
    error_of,
    failure_of,
    finish_of,
    placement_proto,
    reservation_proto,
    reserve_granted,
    reserved_instance_proto,
)
from moonpool.conductor.request import RequestValidator, read_resume
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, prefill_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub

log = get_logger(__name__)

T = TypeVar("T")

FindInstance = Callable[[str], kv_pb2.Instance | None]

SECRET_BYTES = 16
DEADLINE_MARGIN_S = 0.1
"""A client whose request has this much time left, or less, leaves because the time has run out."""
"""Bytes of the secrets that are drawn for new requests."""

_CANCELLED = Failure(FailureKind.UNAVAILABLE, "cancelled")


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
        self._sessions: dict[int, GenerateStream] = {}  # by the request's number at the core
        self._numbers = itertools.count(1)
        self._picks: dict[int, asyncio.Future[EndpointPicked]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def open(
        self, message: conductor_pb2.GenerateRequest, request_id: str, arrived: float, deadline: float
    ) -> GenerateStream:
        """Read a request, new or resumed, and hand the request to the core.

        If a resumed request's client has all tokens, the request does not go to the core: the session has the end.

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
        request = await self._reader.read(message, served, request_id, arrived, deadline)
        resume, reports = request.resume, self._reports
        secret = world.random_bytes(SECRET_BYTES) if resume is None else resume.point.secret
        session = GenerateStream(
            request, served, secret, self._clock, self._wall_clock, reports.first_token, reports.delivered
        )
        if resume is not None:
            await self._reader.run(session.restore)
            if session.finish and not request.spec.deferred:  # the scores of deferred answers are not known here
                session.finish_restored()
                return session
        spec = session.admit(next(self._numbers))
        self._sessions[spec.number] = session
        reports.opened(session)
        self._post(RequestArrived(spec, session.reusable_keys))
        return session

    async def compute(self, message: conductor_pb2.GenerateRequest, timeout_s: float) -> None:
        """Serve a request from the conductor itself, and drop the output.

        Raises:
            MoonpoolError: the request failed, or was refused.
        """
        arrived = self._clock()
        session = await self.open(message, "", arrived, arrived + timeout_s)
        try:
            while await session.outgoing.next() is not None:
                pass
        finally:
            self.client_left(session, session.outgoing)

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

    def client_left(self, session: GenerateStream, outgoing: OutputQueue) -> None:
        """The reader of these messages has left, or has all messages. Another call may have the request by now."""
        if session.spec.number in self._sessions and session.outgoing is outgoing:
            self._post(ClientGone(session.spec.number))

    def rejoin(self, message: conductor_pb2.GenerateRequest, session: GenerateStream) -> bool:
        """Send a request's output to a client that has lost the connection and resumes; the earlier call ends.

        Returns:
            False if the request has ended.

        Raises:
            InvalidRequest: the message is wrong, or the client's tokens are not this request's.
            Unavailable: the client has more tokens than are known here yet.
        """
        resume = read_resume(message, session.request.sampling, self._reader.served().config.vocab_size)
        if resume is None or session.spec.number not in self._sessions:
            return False
        session.rejoin(resume)
        return True

    def kv_deleted(self, selection: KVSelection) -> None:
        """KV was deleted: engines keep no KV from open requests that match."""
        namespace = self._reader.namespace
        for session in self._sessions.values():
            session.kv_deleted(selection, namespace)

    def session_updated(self, tenant: str, turn: SessionTurn) -> None:
        """A client says between two turns what is known of a session."""
        self._post(SessionUpdated(tenant, turn))

    async def announce(
        self, tenant: str, messages: Sequence[conductor_pb2.GenerateRequest], within_s: float | None
    ) -> int:
        """Take prompts that will come within so many seconds; None: that will not come. Returns how many have blocks.

        Raises:
            InvalidRequest: a request cannot be served; names the field.
            Unavailable: no engine has joined.
        """
        chains = [tuple((await self._reader.read(message)).prompt_keys) for message in messages]
        known = tuple([chain for chain in chains if chain])
        self._post(PromptsAnnounced(tenant, known, within_s))
        return len(known)

    def stop(self) -> None:
        """End all requests here with the tokens so far; their sequences stay at decode, for another conductor."""
        for number in list(self._sessions):
            self._post(StopRequested(number))

    # --- actions ------------------------------------------------------------------------------------------------------

    def perform(self, action: Action) -> None:
        """Carry out an action of the core, without blocking. A defect in doing so ends the action's request."""
        session = self._sessions.get(getattr(action, "request", 0))
        try:
            if isinstance(action, EndpointPicked):
                self._endpoint_picked(action)
            else:
                self._perform(action)
        except Exception:
            if session is None:
                raise
            name = type(action).__name__
            log.exception(
                "an action cannot be carried out: the action's request ends", action=name, request=session.spec.id
            )
            self._end_after_defect(action, session)

    def _perform(self, action: Action) -> None:
        match action:
            case AnnouncePlacement() | Rehash() | CompleteRequest() | FailRequest() | DropRequest():
                self._update(action, self._sessions[action.request])
            case CallReserve():
                self._calls.reserve(action, self._sessions[action.request])
            case CallPrefill():
                self._calls.prefill(action, self._sessions[action.request])
            case StartDecode():
                session = self._sessions[action.request]
                session.started = True
                self._calls.start(action, session)
            case TakeOverSequence():
                session = self._sessions[action.request]
                session.started = True
                session.taken_over(action.sequence)
                self._reports.decisions.placed(session.spec.id, session.attempts[-1])
                self._calls.take_over(action, session)
            case RenewSession():
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
        self, action: AnnouncePlacement | Rehash | CompleteRequest | FailRequest | DropRequest, session: GenerateStream
    ) -> None:
        """The core has placed, rehashed or ended a request."""
        request_id = session.spec.id
        match action:
            case AnnouncePlacement(_, plan, sequence, target):
                attempt = conductor_pb2.Attempt(
                    placement=placement_proto(action),
                    candidates=map(candidate_proto, plan.candidates),
                    waited_s=action.queued_s,
                )
                session.placed(attempt, sequence, target)
                self._reports.decisions.placed(request_id, attempt)
                return
            case Rehash(request, failures, failure):
                log.warning("placing anew", request=request_id, failures=failures, error=str(failure))
                session.given_up(str(failure))
                tokens = session.rehash()
                self._post(Rehashed(request, tokens, session.reusable_keys))
                return
            case CompleteRequest(_, finish):
                session.complete(finish)
                self._reports.completed(session)
            case FailRequest(request, failure) if failure.fenced and self._take_back(session):
                del self._sessions[request]
                return
            case FailRequest(_, failure, refused, candidates):
                if refused:
                    self._reports.refused(request_id, session.spec.tenant, str(failure), candidates)
                else:
                    self._reports.failed(session, str(failure))
                session.outgoing.end(error_of(failure))
            case DropRequest():
                if self._clock() > session.spec.deadline - DEADLINE_MARGIN_S:
                    self._reports.failed(session, "the request took longer than it may")
                else:
                    self._reports.cancelled(session)
                session.outgoing.end()
        self._reports.ended(session)
        del self._sessions[action.request]

    def _take_back(self, session: GenerateStream) -> bool:
        """Whether a sequence that another conductor has taken over is taken back; see `GenerateStream.take_back`."""
        if not session.take_back(next(self._numbers)):
            return False
        log.warning("taking a sequence back", request=session.spec.id, resumes=session.resumes)
        self._sessions[session.spec.number] = session
        self._post(RequestArrived(session.spec, session.reusable_keys))
        return True

    def _end_after_defect(self, action: Action, session: GenerateStream) -> None:
        failure = Failure(FailureKind.INTERNAL, "a defect: the conductor cannot serve this request")
        if isinstance(action, CompleteRequest | FailRequest | DropRequest):  # the core has ended the request
            self._sessions.pop(action.request, None)
            if not session.outgoing.ended:
                session.outgoing.end(error_of(failure))
        else:
            self._post(StopRequested(session.spec.number, failure))


class InstanceCalls:
    """Calls at instances that are running.

    Args:
        channels: to the instances.
        steps: streams to decode instances.
        find: a member's address and epoch; None if there is no such member.
        post: hands an event to the core, and raises the core's exceptions.
        tell: hands the end of a call to the core; exceptions end the conductor instead of being raised.
        reserve_limit_s: seconds after which a `Reserve` call ends. The core stops waiting for the call earlier.
        clock: the core's clock, seconds.
    """

    def __init__(
        self,
        channels: Channels,
        steps: StepsPool,
        find: FindInstance,
        post: Callable[[Event], None],
        tell: Callable[[IoEnded[CallResult]], None],
        reserve_limit_s: float,
        clock: Callable[[], float] = world.monotonic,
    ) -> None:
        self._channels = channels
        self._steps = steps
        self._find = find
        self._post = post
        self._tell = tell
        self._reserve_limit_s = reserve_limit_s
        self._clock = clock
        self._cancels: dict[int, Callable[[], object]] = {}
        self._sequences: dict[int, tuple[StartDecode | TakeOverSequence, StepsStream]] = {}  # by their io
        self._tasks: dict[asyncio.Task[CallResult], None] = {}

    async def aclose(self) -> None:
        """End all calls."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cancel(self, io: int) -> None:
        """Cancel a call; the call's `IoEnded` follows."""
        cancel = self._cancels.get(io)
        if cancel is not None:
            cancel()
        else:
            self._end_sequence(io, None, cancel=True)

    def leave(self, io: int) -> None:
        """Unsubscribe from a sequence, which stays at decode; the call's `IoEnded` follows."""
        if io in self._sequences:
            order, steps = self._sequences[io]
            steps.unsubscribe(order.sequence)
            self._end_sequence(io, None, cancel=False)

    # --- unary and prefill calls ------------------------------------------------------------------------------------

    def reserve(self, order: CallReserve, session: GenerateStream) -> None:
        """Reserve blocks at a decode instance."""
        self._run(order.io, lambda: self._reserve_request(order, session), partial(self._reserve, order, session))

    def _reserve_request(self, order: CallReserve, session: GenerateStream) -> decode_pb2.ReserveRequest:
        request = decode_pb2.ReserveRequest(
            sequence=session.sequence_spec(order.sequence), tbt_slo_s=order.tbt_slo_s, starts_in_s=order.starts_in_s
        )
        request.conductor.CopyFrom(self._steps.conductor)
        request.resume_secret, resumed = session.secret, session.spec.resumed
        request.fence = resumed.fence if resumed is not None else 0
        stores = [instance for store in order.stores if (instance := self._find(store)) is not None]
        if stores:
            request.write_back.CopyFrom(stores[0])
            request.replicas.extend(stores[1:])
        return request

    async def _reserve(
        self, order: CallReserve, session: GenerateStream, request: decode_pb2.ReserveRequest
    ) -> CallResult:
        decode = self._find(order.decode)
        if decode is None or decode.epoch != order.epoch:
            return Failure(FailureKind.UNAVAILABLE, f"{order.decode} has left")
        stub = DecodeServiceStub(self._channels.get(decode.address))
        response = await stub.Reserve(request, timeout=self._reserve_limit_s)
        return reserve_granted(response)

    def prefill(self, order: CallPrefill, session: GenerateStream) -> None:
        """Compute a prompt at a prefill instance."""
        self._run(order.io, lambda: self._prefill_request(order, session), partial(self._prefill, order, session))

    async def _prefill(
        self, order: CallPrefill, session: GenerateStream, request: prefill_pb2.PrefillRequest
    ) -> CallResult:
        prefill = self._find(order.plan.prefill.id)
        if prefill is None or prefill.epoch != order.epoch:
            return Failure(FailureKind.UNAVAILABLE, f"{order.plan.prefill.id} has left")
        stub, began = PrefillServiceStub(self._channels.get(prefill.address)), self._clock()
        call = stub.Prefill(request, timeout=session.remaining_s())
        try:
            first = True
            async for response in call:
                if response.HasField("first_token") and first:
                    first = False
                    try:
                        self._first_tokens(order.io, session, request, response.first_token, self._clock() - began)
                    except MoonpoolError:
                        raise
                    except Exception:
                        end_after_defect(session, self._post)
                        return None
                elif response.HasField("accepted"):
                    self._post(PrefillAccepted(order.io, response.accepted.number))
                elif response.HasField("stale"):
                    return StalePlacement(finite_or_zero(response.stale.drain_s), response.stale.taken)
                elif response.HasField("finished"):
                    session.kv_delivered(response.finished, order.sequence)
                    self._post(KVDelivered(order.io))
        finally:
            call.cancel()
        return None

    def _first_tokens(
        self,
        io: int,
        session: GenerateStream,
        request: prefill_pb2.PrefillRequest,
        first: prefill_pb2.FirstToken,
        lasted_s: float,
    ) -> None:
        """The prompt is computed, `lasted_s` seconds after the call began."""
        how, before = _prefill_measurements(first, request.sequence, lasted_s), session.tokens
        finish = finish_of(session.add_first_tokens(first, request.sequence.request_id))
        known = 0 < before == session.tokens
        self._post(FirstToken(io, how, finish, known))

    def _prefill_request(self, order: CallPrefill, session: GenerateStream) -> prefill_pb2.PrefillRequest:
        request = prefill_pb2.PrefillRequest(
            sequence=session.sequence_spec(order.sequence),
            max_queue_s=order.max_queue_s,
            delay_s=order.plan.prefill.delay_s or 0.0,
        )
        if order.target is not None:
            request.target.CopyFrom(reservation_proto(order.target))
        sources = [prefill_pb2.PrefixSource(instance=it, blocks=held) for it, held in self._members(order.plan.sources)]
        if sources:
            request.source.CopyFrom(sources[0])
            request.other_sources.extend(sources[1:])
        targets = self._members(order.plan.write_back)
        if targets:
            instance, request.write_back_held = targets[0]
            request.write_back.CopyFrom(instance)
            request.replicas.extend(prefill_pb2.StoreReplica(instance=it, held_blocks=held) for it, held in targets[1:])
        return request

    def _members(self, options: Sequence[StoreView | PrefixHolder]) -> list[tuple[kv_pb2.Instance, int]]:
        """A plan's instances that are still members, each with the number of leading blocks there."""
        return [(instance, it.blocks) for it in options if (instance := self._find(it.id)) is not None]

    def _run(self, io: int, build: Callable[[], T], call: Callable[[T], Coroutine[Any, Any, CallResult]]) -> None:
        """Run a call as a task, and post the call's end, also if the call is cancelled before the first step.

        The message is built at once, with the tokens of this moment.
        """
        try:
            message = build()
        except Exception as defect:
            log.error("a message cannot be built", exc_info=defect)
            self._tell(IoEnded(io, Failure(FailureKind.INTERNAL, "a call failed")))
            return
        task = asyncio.create_task(_result_of(partial(call, message)))
        self._tasks[task] = None
        self._cancels[io] = task.cancel

        def done(task: asyncio.Task[CallResult]) -> None:
            self._tasks.pop(task, None)
            del self._cancels[io]
            self._tell(IoEnded(io, _CANCELLED if task.cancelled() else task.result()))

        task.add_done_callback(done)

    # --- sequences --------------------------------------------------------------------------------------------------

    def start(self, order: StartDecode, session: GenerateStream) -> None:
        """Start a sequence at decode and subscribe to the sequence."""
        steps, subscription = self._subscribe(order, session)
        gather = session.request.whole and not session.request.stops  # stop strings are found here, token by token
        target = reservation_proto(order.target)
        if order.compute:
            session.computed_at_decode(order.target.held_blocks)
            steps.start(order.sequence, target, (), compute=True, gather=gather)
            return
        candidates = session.candidates
        scores = candidates.log_probabilities if candidates is not None else ()
        tokens, known = session.opening_tokens, session.known_tokens
        logprobs = None if known else session.opening_logprobs
        steps.start(order.sequence, target, tokens, scores, logprobs, known, gather=gather)
        subscription.stop_complete()

    def take_over(self, order: TakeOverSequence, session: GenerateStream) -> None:
        """Take another conductor's sequence over at decode, and subscribe to the sequence."""
        decode = self._find(order.target.decode)
        if decode is None or decode.epoch != order.target.epoch:
            self._tell(IoEnded(order.io, Failure(FailureKind.UNAVAILABLE, f"{order.target.decode} has left")))
            return
        order = replace(order, target=replace(order.target, address=decode.address))
        steps, subscription = self._subscribe(order, session)
        root = session.request.chain_root
        first, *further = [
            decode_pb2.ResumedAnswer(from_position=len(it.tokens), digest=tokens_digest(root, it.tokens))
            for it in session.choices
        ]
        steps.resume(
            decode_pb2.ResumeSequence(
                request_id=order.sequence,
                from_position=first.from_position,
                transfer_id=order.target.transfer_id,
                generation=order.target.generation,
                fence=order.fence,
                secret=session.secret,
                digest=first.digest,
                further=further,
            )
        )
        subscription.stop_complete()

    def _subscribe(
        self, order: StartDecode | TakeOverSequence, session: GenerateStream
    ) -> tuple[StepsStream, SequenceSubscription]:
        steps = self._steps.get(reserved_instance_proto(order.target))
        self._sequences[order.io] = order, steps
        end = partial(self._end_sequence, order.io)
        stop = partial(steps.cancel, order.sequence, reservation_proto(order.target))
        subscription = SequenceSubscription(order.io, order.sequence, session, self._post, end, stop)
        steps.subscribe(order.sequence, subscription)
        return steps, subscription

    def renew(self, order: RenewSession) -> None:
        """Keep the session with decode, and thereby this conductor's reservations there."""
        self._steps.get(reserved_instance_proto(order.target)).open()

    def cancel_reservation(self, order: CancelReservation) -> None:
        """Cancel a reservation, also if the reservation's answer has not come."""
        target = reserved_instance_proto(order.target)
        decode = target if target.address else self._find(target.id)
        if decode is not None and decode.epoch == target.epoch:
            self._steps.get(decode).cancel(order.sequence, reservation_proto(order.target))

    def _end_sequence(self, io: int, result: CallResult, *, cancel: bool) -> None:
        """A sequence is over here; with `cancel` decode does not know that yet."""
        if io not in self._sequences:
            return
        order, steps = self._sequences.pop(io)
        if cancel:
            steps.unsubscribe(order.sequence)
            steps.cancel(order.sequence, reservation_proto(order.target))
        self._tell(IoEnded(io, result))


async def _result_of(work: Callable[[], Coroutine[Any, Any, CallResult]]) -> CallResult:
    try:
        return await work()
    except MoonpoolError as error:
        return failure_of(error)
    except Exception as defect:
        log.error("a call failed", exc_info=defect)
        return Failure(FailureKind.INTERNAL, "a call failed")


def _prefill_measurements(
    first: prefill_pb2.FirstToken, spec: kv_pb2.SequenceSpec, lasted_s: float
) -> PrefillMeasurements:
    """An instance's measurements of a prefill. No time is longer than the call, which took `lasted_s` seconds."""
    misses = list[tuple[str, bytes]]()
    for miss in first.misses:
        key = spec.block_keys[miss.block * KEY_BYTES : (miss.block + 1) * KEY_BYTES]
        misses.append((miss.store.id, window_key(key) if miss.windowed and key else key))
    loads = tuple([(it.source.id, it.blocks, min(finite_or_zero(it.seconds), lasted_s)) for it in first.reads])
    there_s = min(finite_or_zero(first.queue_s) + finite_or_zero(first.prefill_s), lasted_s)
    return PrefillMeasurements(first.computed_tokens, there_s, tuple(misses), loads)


class SequenceSubscription:
    """Gets one sequence's tokens: they go to the session, their number to the core. No token is lost or doubled.

    Args:
        io: the call's number at the core.
        session: the request.
        post: hands an event to the core.
        end: ends the call with a result; with `cancel` decode does not know the end yet.
        stop: stops one choice at decode.
    """

    def __init__(
        self,
        io: int,
        sequence: str,
        session: GenerateStream,
        post: Callable[[Event], None],
        end: Callable[..., None],
        stop: Callable[[int], None],
    ) -> None:
        self._io = io
        self._sequence = sequence
        self._session = session
        self._post = post
        self._end = end
        self._stop = stop
        self._running = set(range(len(session.choices)))  # choices that decode has not ended
        self._posted = False

    def add_tokens(self, new: NewTokens) -> bool:
        """Take tokens; see `SequenceSubscriber`. Known tokens are dropped; a gap ends the call with a failure."""
        try:
            self._added(new.choice, self._session.add_tokens(new, self._sequence), new.reason)
        except StreamBroken as error:
            self._end(failure_of(error), cancel=True)
            return True
        except Exception:
            end_after_defect(self._session, self._post)
            return True
        return not self._running

    def _added(self, choice: int, count: int, reason: kv_pb2.FinishReason.ValueType) -> None:
        """A choice has `count` more tokens."""
        session = self._session
        if reason:
            self._running.discard(choice)
        elif count and session.choices[choice].finish and not session.finish:
            self._stop(choice)
        finish = finish_of(session.finish)
        if count or finish or not self._posted:
            self._posted = True
            self._post(TokensArrived(self._io, count, finish, known=not self._running))
        if not self._running:
            self._end(None, cancel=False)

    def stop_complete(self) -> None:
        """Stop the choices at decode that are complete from an earlier placement."""
        for choice in self._session.choices:
            if choice.finish:
                self._stop(choice.index)

    def fail(self, error: MoonpoolError) -> None:
        """The sequence cannot go on."""
        self._end(failure_of(error), cancel=False)


def end_after_defect(session: GenerateStream, post: Callable[[Event], None]) -> None:
    """End only the request whose tokens met a defect (the exception being handled).

    The request is not placed again: which of the tokens were taken is not certain.
    """
    log.exception("tokens cannot be sent: the request ends", request=session.spec.id)
    failure = Failure(FailureKind.INTERNAL, "a defect: the conductor cannot send tokens of this request")
    try:
        post(StopRequested(session.spec.number, failure))
    except Exception:
        log.exception("a request cannot be ended", request=session.spec.id)
        session.outgoing.end(error_of(failure))
