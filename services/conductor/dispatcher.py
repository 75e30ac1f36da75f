"""The dispatcher: takes requests in, does what the core orders at instances, and tells clients.

Each call that is started posts exactly one `Ended`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from moonpool.cluster.proto_conversion import finite_or_zero
from moonpool.errors import MoonpoolError, Unavailable
from moonpool.kv.delete_kv import KVSelection
from moonpool.kv.keys import KEY_BYTES, tokens_digest
from moonpool.rpc.channels import Channels
from moonpool.rpc.errors import from_rpc_error
from moonpool.scheduling.state_machine import CancelIo, IoEnded
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, prefill_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub
from services.conductor.config import ConductorConfig
from services.conductor.core.events import (
    Action,
    AnnouncePlacement,
    CallPrefill,
    CallReserve,
    CallResult,
    CancelReservation,
    ChangeRole,
    ClientGone,
    CompleteRequest,
    CompletionReason,
    DropRequest,
    Event,
    FailRequest,
    Failure,
    FailureKind,
    FirstToken,
    KVDelivered,
    LeaveSequence,
    PrefillAccepted,
    PrefillMeasurements,
    Rehash,
    Rehashed,
    RenewSession,
    RequestArrived,
    RequestSpec,
    Resync,
    StalePlacement,
    StartDecode,
    StopRequested,
    TakeOverSequence,
)
from services.conductor.core.latency_model import PrefixHolder
from services.conductor.core.router import ReplicatePrefix, StoreView
from services.conductor.decode_streams import SequenceSubscription, StepsPool, StepsStream, end_untold
from services.conductor.explain import (
    DecisionLog,
    PredictionMetrics,
    RecentRequests,
    RecordedRequest,
    TraceRecording,
    placement,
)
from services.conductor.registry import Checkpoint, Registry
from services.conductor.request import ServedModelSpec, ValidRequest, read_request
from services.conductor.session import (
    OutputQueue,
    OutputState,
    ResumeRequest,
    Session,
    error_of,
    failure_of,
    finish_of,
    granted_of,
    reservation_proto,
    reserved_instance_proto,
    secret_for,
)

log = get_logger(__name__)


T = TypeVar("T")


FindInstance = Callable[[str], kv_pb2.Instance | None]


_CANCELLED = Failure(FailureKind.UNAVAILABLE, "cancelled")


class InstanceCalls:
    """All I/O with instances that is under way.

    Args:
        channels: to the instances.
        steps: streams to decode instances.
        find: a member's address and incarnation; None when it is not there.
        post: hands an event to the core; raises what that meets.
        over: the same for the end of I/O, from where nobody hears an exception: raises nothing.
        reserve_limit_s: a `Reserve` call ends after so long. The core gives up waiting for it earlier.
        clock: the core's, seconds.
    """

    def __init__(
        self,
        channels: Channels,
        steps: StepsPool,
        find: FindInstance,
        post: Callable[[Event], None],
        over: Callable[[IoEnded[CallResult]], None],
        reserve_limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channels = channels
        self._steps = steps
        self._find = find
        self._post = post
        self._over = over
        self._reserve_limit_s = reserve_limit_s
        self._clock = clock
        self._cancels: dict[int, Callable[[], object]] = {}
        self._followed: dict[int, tuple[StartDecode | TakeOverSequence, StepsStream]] = {}
        self._tasks: set[asyncio.Task[CallResult]] = set()

    async def aclose(self) -> None:
        """Ends all calls."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cancel(self, io: int) -> None:
        """Gives up a call; its `Ended` follows, unless it is on its way."""
        cancel = self._cancels.get(io)
        if cancel is not None:
            cancel()
        else:
            self._end_sequence(io, None, tell=True)

    def let_go(self, io: int) -> None:
        """Follows a sequence no more, which stays where it is; its `Ended` follows."""
        if io in self._followed:
            order, steps = self._followed[io]
            steps.unsubscribe(order.sequence)
            self._end_sequence(io, None, tell=False)

    # --- unary and prefill calls ------------------------------------------------------------------------------------

    def reserve(self, order: CallReserve, serving: Session) -> None:
        """Asks for room."""
        self._run(order.io, lambda: self._reserve_request(order, serving), partial(self._reserve, order, serving))

    def _reserve_request(self, order: CallReserve, serving: Session) -> decode_pb2.ReserveRequest:
        request = decode_pb2.ReserveRequest(
            sequence=serving.spec(order.sequence), tbt_slo_s=order.tbt_slo_s, starts_in_s=order.starts_in_s
        )
        request.conductor.CopyFrom(self._steps.conductor)
        request.resume_secret, resumed = serving.secret, serving.ask.resumed
        request.fence = resumed.fence if resumed is not None else 0
        stores = [instance for store in order.stores if (instance := self._find(store)) is not None]
        if stores:
            request.write_back.CopyFrom(stores[0])
            request.replicas.extend(stores[1:])
        return request

    async def _reserve(self, order: CallReserve, serving: Session, request: decode_pb2.ReserveRequest) -> CallResult:
        decode = self._find(order.decode)
        if decode is None or decode.incarnation != order.incarnation:
            return Failure(FailureKind.UNAVAILABLE, f"{order.decode} has left")
        stub = DecodeServiceStub(self._channels.get(decode.address))
        response = await stub.Reserve(request, timeout=self._reserve_limit_s)
        return granted_of(response)

    def prefill(self, order: CallPrefill, serving: Session) -> None:
        """Calls prefill."""
        self._run(order.io, lambda: self._prefill_request(order, serving), partial(self._prefill, order, serving))

    async def _prefill(self, order: CallPrefill, serving: Session, request: prefill_pb2.PrefillRequest) -> CallResult:
        prefill = self._find(order.plan.prefill.id)
        if prefill is None or prefill.incarnation != order.incarnation:
            return Failure(FailureKind.UNAVAILABLE, f"{order.plan.prefill.id} has left")
        stub, began = PrefillServiceStub(self._channels.get(prefill.address)), self._clock()
        call = stub.Prefill(request, timeout=serving.remaining_s())
        try:
            first = True
            async for response in call:
                if response.HasField("first_token") and first:
                    first = False
                    try:
                        self._opened(order.io, serving, request, response.first_token, self._clock() - began)
                    except MoonpoolError:
                        raise
                    except Exception:
                        end_untold(serving, self._post)
                        return None
                elif response.HasField("accepted"):
                    self._post(PrefillAccepted(order.io, response.accepted.number))
                elif response.HasField("stale"):
                    return StalePlacement(finite_or_zero(response.stale.drain_s), response.stale.taken)
                elif response.HasField("finished"):
                    serving.delivered(response.finished)
                    self._post(KVDelivered(order.io))
        finally:
            call.cancel()
        return None

    def _opened(
        self,
        io: int,
        serving: Session,
        request: prefill_pb2.PrefillRequest,
        first: prefill_pb2.FirstToken,
        lasted_s: float,
    ) -> None:
        """The prompt is computed, after so many seconds."""
        how, before = _prefill_measurements(first, request.sequence, lasted_s), serving.answer.tokens
        finish = finish_of(serving.first_token(first))
        known = 0 < before == serving.answer.tokens
        self._post(FirstToken(io, how, finish, known))

    def _prefill_request(self, order: CallPrefill, serving: Session) -> prefill_pb2.PrefillRequest:
        request = prefill_pb2.PrefillRequest(sequence=serving.spec(order.sequence), max_queue_s=order.max_queue_s)
        if order.target is not None:
            request.target.CopyFrom(reservation_proto(order.target))
        sources = [prefill_pb2.PrefixSource(instance=it, blocks=held) for it, held in self._there(order.plan.sources)]
        if sources:
            request.source.CopyFrom(sources[0])
            request.other_sources.extend(sources[1:])
        targets = self._there(order.plan.write_back)
        if targets:
            instance, request.write_back_held = targets[0]
            request.write_back.CopyFrom(instance)
            request.replicas.extend(prefill_pb2.StoreReplica(instance=it, held_blocks=held) for it, held in targets[1:])
        return request

    def _there(self, options: Sequence[StoreView | PrefixHolder]) -> list[tuple[kv_pb2.Instance, int]]:
        """Those of a plan's instances that are still members, with the leading blocks they hold."""
        return [(instance, it.blocks) for it in options if (instance := self._find(it.id)) is not None]

    def _run(self, io: int, build: Callable[[], T], call: Callable[[T], Coroutine[Any, Any, CallResult]]) -> None:
        """Runs a call as a task; however it ends, also before its first step, its end is posted.

        Its message is built at once: what the answer has at this moment is in it.
        """
        try:
            message = build()
        except Exception as defect:
            log.error("a message cannot be built", exc_info=defect)
            self._over(IoEnded(io, Failure(FailureKind.INTERNAL, "a call failed")))
            return
        task = asyncio.create_task(_guarded(partial(call, message)))
        self._tasks.add(task)
        self._cancels[io] = task.cancel

        def done(task: asyncio.Task[CallResult]) -> None:
            self._tasks.discard(task)
            del self._cancels[io]
            self._over(IoEnded(io, _CANCELLED if task.cancelled() else task.result()))

        task.add_done_callback(done)

    # --- sequences --------------------------------------------------------------------------------------------------

    def start(self, order: StartDecode, serving: Session) -> None:
        """Starts a sequence at decode with the token after those that were placed, or with those alone; follows it."""
        steps, following = self._follow(order, serving)
        request = serving.answer.request
        gather = request.whole and not request.stops  # they are watched for here
        if order.compute:
            serving.answer.computed_at_decode(order.target.held_blocks)
            steps.start(order.sequence, reservation_proto(order.target), (), compute=True, gather=gather)
            return
        opening = serving.answer.opening
        scores = opening.log_probabilities if opening is not None else ()
        tokens, known = serving.opening_tokens, serving.known_tokens
        logprobs = None if known else serving.opening_logprobs
        steps.start(order.sequence, reservation_proto(order.target), tokens, scores, logprobs, known, gather=gather)
        following.stop_complete()

    def adopt(self, order: TakeOverSequence, serving: Session) -> None:
        """Takes a sequence over where it runs, and follows it."""
        decode = self._find(order.target.decode)
        if decode is None or decode.incarnation != order.target.incarnation:
            self._over(IoEnded(order.io, Failure(FailureKind.UNAVAILABLE, f"{order.target.decode} has left")))
            return
        steps, following = self._follow(replace(order, target=replace(order.target, address=decode.address)), serving)
        root = serving.answer.request.chain_root
        first, *further = [
            decode_pb2.ResumedAnswer(from_position=len(it.tokens), digest=tokens_digest(root, it.tokens))
            for it in serving.answer.choices
        ]
        steps.resume(
            decode_pb2.ResumeSequence(
                request_id=order.sequence,
                from_position=first.from_position,
                transfer_id=order.target.transfer_id,
                generation=order.target.generation,
                fence=order.fence,
                secret=serving.secret,
                digest=first.digest,
                further=further,
            )
        )
        following.stop_complete()

    def _follow(
        self, order: StartDecode | TakeOverSequence, serving: Session
    ) -> tuple[StepsStream, SequenceSubscription]:
        steps = self._steps.get(reserved_instance_proto(order.target))
        self._followed[order.io] = order, steps
        end = partial(self._end_sequence, order.io)
        stop = partial(steps.cancel, order.sequence, reservation_proto(order.target))
        following = SequenceSubscription(order.io, serving, self._post, end, stop)
        steps.subscribe(order.sequence, following)
        return steps, following

    def renew(self, order: RenewSession) -> None:
        """Keeps a promise."""
        self._steps.get(reserved_instance_proto(order.target)).open()

    def undo(self, order: CancelReservation) -> None:
        """Gives a promise back, also one of which nothing came."""
        target = reserved_instance_proto(order.target)
        decode = target if target.address else self._find(target.id)
        if decode is not None and decode.incarnation == target.incarnation:
            self._steps.get(decode).cancel(order.sequence, reservation_proto(order.target))

    def _end_sequence(self, io: int, result: CallResult, *, tell: bool) -> None:
        """A sequence is over; `tell` when decode does not know it."""
        if io not in self._followed:
            return
        order, steps = self._followed.pop(io)
        if tell:
            steps.unsubscribe(order.sequence)
            steps.cancel(order.sequence, reservation_proto(order.target))
        self._over(IoEnded(io, result))


async def _guarded(work: Callable[[], Coroutine[Any, Any, CallResult]]) -> CallResult:
    try:
        return await work()
    except grpc.aio.AioRpcError as error:
        return failure_of(from_rpc_error(error))
    except MoonpoolError as error:
        return failure_of(error)
    except Exception as defect:
        log.error("a call failed", exc_info=defect)
        return Failure(FailureKind.INTERNAL, "a call failed")


def _prefill_measurements(
    first: prefill_pb2.FirstToken, spec: kv_pb2.SequenceSpec, lasted_s: float
) -> PrefillMeasurements:
    """How an instance says that it has prefilled; it cannot have taken longer than its call has."""
    misses = [
        (miss.store.id, spec.block_keys[miss.block * KEY_BYTES : (miss.block + 1) * KEY_BYTES]) for miss in first.misses
    ]
    loads = tuple([(it.source.id, it.blocks, min(finite_or_zero(it.seconds), lasted_s)) for it in first.reads])
    there_s = min(finite_or_zero(first.queue_s) + finite_or_zero(first.prefill_s), lasted_s)
    return PrefillMeasurements(first.computed_tokens, there_s, tuple(misses), loads)


class Dispatcher:
    """All requests that the core has not ended.

    Args:
        calls: does what is to be done at instances.
        decisions: remembers placements.
        predictions: compares them with what is measured.
        recent: remembers what was answered.
        recording: of the requests, if there is one.
        order: tells an instance what to do with its keys, and which role to take.
        post: hands an event to the core.
        clock: the core's, seconds.
    """

    def __init__(
        self,
        calls: InstanceCalls,
        decisions: DecisionLog,
        predictions: PredictionMetrics,
        recent: RecentRequests,
        recording: TraceRecording | None,
        order: Callable[[Resync | ReplicatePrefix | ChangeRole], None],
        post: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._calls = calls
        self._clock = clock
        self._decisions = decisions
        self._predictions = predictions
        self._recent = recent
        self._recording = recording
        self._order = order
        self._post = post
        self._serving: dict[int, Session] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._serving)

    def open(self, answer: OutputState, deadline: float, resume: ResumeRequest | None = None) -> Session:
        """Takes a request in, new or resumed; `deadline` is in the clock's seconds."""
        request = answer.request
        ask = RequestSpec(
            number=next(self._numbers),
            id=request.id,
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            choices=request.sampling.width,
            beams=request.has_beams,
            prompt_key=request.prompt_key,
            slo=request.slo,
            arrived=answer.arrived,
            deadline=deadline,
            tenant=request.tenant,
            scored=request.sampling.prompt_logprobs is not None if resume is None else resume.unscored,
            resumed=resume.resumed if resume is not None else None,
            priority=request.priority,
            weight=request.weight,
            least_tokens=request.least_tokens,
        )
        serving = Session(
            ask,
            answer,
            self._first_token,
            self._delivered,
            list(request.prompt_keys),
            secret_for(resume),
            self._clock,
        )
        self._serving[ask.number] = serving
        if resume is not None:
            serving.resumed(resume)
        elif self._recording is not None:
            self._recording.opened(recorded_request(ask, request))
        self._post(RequestArrived(ask, serving.reusable_keys))
        return serving

    def client_left(self, serving: Session, outgoing: OutputQueue) -> None:
        """Who reads these messages has left, or has everything. Another call may have the request by now."""
        if serving.ask.number in self._serving and serving.outgoing is outgoing:
            self._post(ClientGone(serving.ask.number))

    def rejoin(self, serving: Session, resume: ResumeRequest) -> bool:
        """Lets a client whose connection was lost hear its request again, behind what it has; the earlier call ends.

        Returns:
            False when it has ended.

        Raises:
            InvalidRequest: what the client says that it has is not what it was told.
            Unavailable: it has more than is known here yet.
        """
        if serving.ask.number not in self._serving:
            return False
        serving.rejoin(resume)
        return True

    def forget(self, selection: KVSelection, namespace: bytes) -> None:
        """KV was deleted: of the requests that concern it, nothing that comes from now on is kept."""
        for serving in self._serving.values():
            serving.forget(selection, namespace)

    def stop(self) -> None:
        """Ends all answers here now, with the tokens so far; their sequences stay at decode, for another conductor."""
        for number in list(self._serving):
            self._post(StopRequested(number))

    def perform(self, action: Action) -> None:
        """Does what the core orders; waits for nothing. A defect that this meets ends the request that it is for."""
        serving = self._serving.get(getattr(action, "request", 0))
        try:
            self._do(action)
        except Exception:
            if serving is None:
                raise
            order = type(action).__name__
            log.exception("an order cannot be carried out: its request ends", order=order, request=serving.ask.id)
            self._give_up(action, serving)

    def _give_up(self, action: Action, serving: Session) -> None:
        """An order for a request could not be carried out."""
        failure = Failure(FailureKind.INTERNAL, "a defect: the conductor cannot serve this request")
        if isinstance(action, CompleteRequest | FailRequest | DropRequest):  # the core has ended it
            self._serving.pop(action.request, None)
            if not serving.outgoing.ended:
                serving.outgoing.end(error_of(failure))
        else:
            self._post(StopRequested(serving.ask.number, failure))

    def _do(self, action: Action) -> None:
        match action:
            case AnnouncePlacement() | Rehash() | CompleteRequest() | FailRequest() | DropRequest():
                self._tell(action, self._serving[action.request])
            case CallReserve():
                self._calls.reserve(action, self._serving[action.request])
            case CallPrefill():
                self._calls.prefill(action, self._serving[action.request])
            case StartDecode():
                serving = self._serving[action.request]
                serving.started = True
                self._calls.start(action, serving)
            case TakeOverSequence():
                serving = self._serving[action.request]
                serving.started = True
                self._decisions.placed(serving.ask.id, serving.placement, ())
                self._calls.adopt(action, serving)
            case RenewSession():
                self._calls.renew(action)
            case CancelReservation():
                self._calls.undo(action)
            case Resync() | ReplicatePrefix() | ChangeRole():
                self._order(action)
            case CancelIo(io):
                self._calls.cancel(io)
            case LeaveSequence(io):
                self._calls.let_go(io)

    def _tell(
        self, action: AnnouncePlacement | Rehash | CompleteRequest | FailRequest | DropRequest, serving: Session
    ) -> None:
        match action:
            case AnnouncePlacement(_, plan, sequence, target):
                placed = placement(action)
                self._decisions.placed(serving.ask.id, placed, plan.candidates, action.queued_s)
                serving.placed(placed, sequence, target)
                return
            case Rehash():
                self._rehash(action, serving)
                return
            case CompleteRequest(_, finish):
                self._complete(finish, serving)
            case FailRequest(_, failure) if failure.fenced and self._taken_back(serving):
                del self._serving[action.request]
                return
            case FailRequest():
                self._fail(action, serving)
            case DropRequest():
                serving.outgoing.end()
        timeline = serving.timeline(over=True)
        self._decisions.ended(serving.ask.id, timeline)
        if isinstance(action, CompleteRequest):
            self._recent.add(serving.ask.id, timeline)
        del self._serving[action.request]
        if self._recording is not None:
            self._recording.ended(serving.number, -(-serving.answer.tokens // len(serving.answer.choices)))

    def _taken_back(self, serving: Session) -> bool:
        """Whether a sequence that another conductor has taken over is this one's again; see `Serving.fenced`."""
        if not serving.fenced(next(self._numbers)):
            return False
        log.warning("taking a sequence back", request=serving.ask.id, resumes=serving.resumes)
        self._serving[serving.ask.number] = serving
        self._post(RequestArrived(serving.ask, serving.reusable_keys))
        return True

    def _first_token(self, serving: Session) -> None:
        self._decisions.first_token(serving.ask.id, serving.answer.ttft_s, serving.answer.lane)
        if not serving.ask.beams:  # theirs come with the last ones
            self._predictions.first_token(serving)

    def _delivered(self, serving: Session) -> None:
        """An answer that was short may have ended before."""
        if serving.ask.number not in self._serving:
            self._decisions.ended(serving.ask.id, serving.timeline(over=True))

    def _complete(self, finish: CompletionReason, serving: Session) -> None:
        serving.complete(finish)
        self._decisions.complete(serving.ask.id, serving.answer.tpot_s)
        self._predictions.complete(serving)

    def _rehash(self, action: Rehash, serving: Session) -> None:
        log.warning("placing anew", request=serving.ask.id, failures=action.failures, error=str(action.failure))
        tokens = serving.rehash()
        self._post(Rehashed(action.request, tokens, serving.reusable_keys))

    def _fail(self, action: FailRequest, serving: Session) -> None:
        if action.refused:
            self._decisions.refused(serving.ask.id, str(action.failure), action.candidates)
        serving.outgoing.end(error_of(action.failure))


def recorded_request(ask: RequestSpec, request: ValidRequest) -> RecordedRequest:
    """What a recording takes of a request."""
    return RecordedRequest(
        number=ask.number,
        at=ask.arrived,
        prompt_tokens=ask.prompt_tokens,
        block_tokens=request.block_tokens,
        keys=request.prompt_keys,
        prompt_key=request.prompt_key,
        tenant=request.tenant,
        choices=ask.choices,
    )


class RequestReader:
    """Reads requests on worker threads.

    Args:
        checkpoint: the conductor's own.
        registry: what the engines serve.
        desk: serves requests.
        tokenizing: worker threads.
        config: the conductor's.
        clock: of the times of requests, seconds.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        registry: Registry,
        desk: Dispatcher,
        tokenizing: ThreadPoolExecutor,
        config: ConductorConfig,
        clock: Callable[[], float],
    ) -> None:
        self._checkpoint = checkpoint
        self._registry = registry
        self._desk = desk
        self._tokenizing = tokenizing
        self._config = config
        self._clock = clock

    def served(self) -> ServedModelSpec:
        """What requests are checked against.

        Raises:
            Unavailable: no engine has joined.
        """
        model, layout, checkpoint = self._registry.model, self._registry.layout, self._checkpoint
        if model is None or layout is None:
            raise Unavailable("no prefill and no decode instance has joined")
        return ServedModelSpec(
            checkpoint.name,
            checkpoint.config,
            checkpoint.tokenizer,
            model.namespace,
            layout,
            model.max_tokens,
            self._config.queue_deadline_s,
            checkpoint.config.default_sampling.given if self._config.generation_config == "auto" else {},
            self._config.tenant_weights,
        )

    def model(self) -> str:
        """Name of what is served; raises as `served`."""
        return self.served().name

    async def read(self, message: conductor_pb2.GenerateRequest, request_id: str = "") -> ValidRequest:
        """Checks and tokenises a message; see `read_request`."""
        served, name = self.served(), request_id or secrets.token_hex(8)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._tokenizing, read_request, message, served, name, lambda: secrets.randbits(64)
        )

    async def compute(self, message: conductor_pb2.GenerateRequest) -> None:
        """Serves a request of the conductor's own, and drops the answer.

        Raises:
            MoonpoolError: it failed, or was refused.
        """
        request, arrived = await self.read(message), self._clock()
        serving = self._desk.open(
            OutputState.begin(request, self.served(), arrived), arrived + self._config.request_timeout_s
        )
        try:
            while await serving.outgoing.next() is not None:
                pass
        finally:
            self._desk.client_left(serving, serving.outgoing)
