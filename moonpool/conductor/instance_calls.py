"""Calls at instances that are running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from moonpool.base import world
from moonpool.base.cluster.proto_conversion import finite_or_zero
from moonpool.base.errors import MoonpoolError
from moonpool.base.kv.keys import tokens_digest
from moonpool.base.rpc.channels import Channels
from moonpool.base.scheduling.state_machine import IoEnded
from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.core.actions import (
    CallPrefill,
    CallReserve,
    CancelReservation,
    RenewReservation,
    StartDecode,
    TakeOverSequence,
)
from moonpool.conductor.core.events import (
    CallResult,
    Event,
    FirstToken,
    KVDelivered,
    PrefillAccepted,
    StalePlacement,
)
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.prefix_holder import PrefixHolder
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.conductor.core.store_pool import RowsPlace, StoreView
from moonpool.conductor.decode_streams import PromptOrder, StepsPool, StepsStream
from moonpool.conductor.generate_stream import GenerateStream
from moonpool.conductor.proto_conversion import (
    failure_of,
    finish_of,
    prefill_measurements,
    reservation_proto,
    reserve_granted,
    reserved_instance_proto,
)
from moonpool.conductor.sequence_subscription import SequenceSubscription, end_after_defect
from moonpool.v1 import decode_pb2, kv_pb2, prefill_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub

log = get_logger(__name__)
FindInstance = Callable[[str], kv_pb2.Instance | None]
T = TypeVar("T")
_CANCELLED = Failure(FailureKind.UNAVAILABLE, "cancelled")


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

    def reserve(self, order: CallReserve, stream: GenerateStream) -> None:
        """Reserve blocks at a decode instance."""
        self._run(order.io, lambda: self._reserve_request(order, stream), partial(self._reserve, order, stream))

    def _reserve_request(self, order: CallReserve, stream: GenerateStream) -> decode_pb2.ReserveRequest:
        request = decode_pb2.ReserveRequest(
            sequence=stream.sequence_spec(order.sequence),
            tbt_slo_s=order.tbt_slo_s,
            starts_in_s=order.starts_in_s,
            computes_prompt=order.computes_prompt,
            max_queue_s=order.max_queue_s,
        )
        request.conductor.CopyFrom(self._steps.conductor)
        request.resume_secret, resumed = stream.secret, stream.spec.resumed
        request.fence = resumed.fence if resumed is not None else 0
        stores = [instance for store in order.stores if (instance := self._find(store)) is not None]
        stream.write_back = tuple([store.id for store in stores])
        if stores:
            request.write_back.CopyFrom(stores[0])
            request.replicas.extend(stores[1:])
        self._name_rows(request.sequence, order.rows)
        return request

    async def _reserve(
        self, order: CallReserve, stream: GenerateStream, request: decode_pb2.ReserveRequest
    ) -> CallResult:
        decode = self._find(order.decode)
        if decode is None or decode.epoch != order.epoch:
            return Failure(FailureKind.UNAVAILABLE, f"{order.decode} has left")
        stub = self._channels.stub(decode.address, DecodeServiceStub)
        response = await stub.Reserve(request, timeout=self._reserve_limit_s)
        return reserve_granted(response)

    def prefill(self, order: CallPrefill, stream: GenerateStream) -> None:
        """Compute a prompt at a prefill instance."""
        self._run(order.io, lambda: self._prefill_request(order, stream), partial(self._prefill, order, stream))

    async def _prefill(
        self, order: CallPrefill, stream: GenerateStream, request: prefill_pb2.PrefillRequest
    ) -> CallResult:
        prefill = self._find(order.plan.prefill.id)
        if prefill is None or prefill.epoch != order.epoch:
            return Failure(FailureKind.UNAVAILABLE, f"{order.plan.prefill.id} has left")
        stub, began = self._channels.stub(prefill.address, PrefillServiceStub), self._clock()
        call = stub.Prefill(request, timeout=stream.remaining_s())
        try:
            first = True
            async for response in call:
                if response.HasField("first_token") and first:
                    first = False
                    try:
                        self._first_tokens(order.io, stream, request, response.first_token, self._clock() - began)
                    except MoonpoolError:
                        raise
                    except Exception:
                        end_after_defect(stream, self._post)
                        return None
                elif response.HasField("accepted"):
                    self._post(PrefillAccepted(order.io, response.accepted.number))
                elif response.HasField("stale"):
                    return StalePlacement(finite_or_zero(response.stale.drain_s), response.stale.taken)
                elif response.HasField("finished"):
                    stream.kv_delivered(response.finished, order.sequence)
                    self._post(KVDelivered(order.io))
        finally:
            call.cancel()
        return None

    def _first_tokens(
        self,
        io: int,
        stream: GenerateStream,
        request: prefill_pb2.PrefillRequest,
        first: prefill_pb2.FirstToken,
        lasted_s: float,
    ) -> None:
        """The prompt is computed, `lasted_s` seconds after the call began."""
        how, before = prefill_measurements(first, request.sequence.block_keys, lasted_s), stream.tokens
        finish = finish_of(stream.add_first_tokens(first, request.sequence.request_id))
        known = 0 < before == stream.tokens
        self._post(FirstToken(io, how, finish, known))

    def _prefill_request(self, order: CallPrefill, stream: GenerateStream) -> prefill_pb2.PrefillRequest:
        request = prefill_pb2.PrefillRequest(
            sequence=stream.sequence_spec(order.sequence),
            max_queue_s=order.max_queue_s,
            delay_s=order.plan.prefill.delay_s or 0.0,
        )
        if order.target is not None:
            request.target.CopyFrom(reservation_proto(order.target))
        sources = self._prefix_sources(order.plan)
        if sources:
            request.source.CopyFrom(sources[0])
            request.other_sources.extend(sources[1:])
        targets = self._members(order.plan.write_back)
        if targets:
            instance, request.write_back_held = targets[0]
            request.write_back.CopyFrom(instance)
            request.replicas.extend(
                prefill_pb2.StoreReplica(instance=target, held_blocks=held) for target, held in targets[1:]
            )
        self._name_rows(request.sequence, order.plan.rows)
        return request

    def _name_rows(self, sequence: kv_pb2.SequenceSpec, rows: Sequence[RowsPlace | None]) -> None:
        """Say where the encoded rows of a sequence's pictures are kept."""
        for item, place in zip(sequence.media, rows, strict=False):
            if place is not None and (store := self._find(place.store)) is not None:
                item.rows_store.CopyFrom(store)
                item.rows_held = place.held

    def _prefix_sources(self, plan: RoutingDecision) -> list[prefill_pb2.PrefixSource]:
        return [prefill_pb2.PrefixSource(instance=member, blocks=held) for member, held in self._members(plan.sources)]

    def _members(self, options: Sequence[StoreView | PrefixHolder]) -> list[tuple[kv_pb2.Instance, int]]:
        """Return a plan's instances that are still members, each with the number of leading blocks there."""
        return [(instance, option.blocks) for option in options if (instance := self._find(option.id)) is not None]

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

    def start(self, order: StartDecode, stream: GenerateStream) -> None:
        """Start a sequence at decode and subscribe to the sequence."""
        steps, subscription = self._subscribe(order, stream)
        gather = stream.request.whole and not stream.request.stops  # stop strings are found here, token by token
        target = reservation_proto(order.target)
        if order.plan is not None:
            known, prompt = stream.known_tokens, self._prompt_order(order.plan, stream)
            steps.start(order.sequence, target, (), known=known, compute=True, order=prompt, gather=gather)
            subscription.stop_complete()
            return
        if order.compute:
            stream.computed_at_decode(order.target.held_blocks)
            steps.start(order.sequence, target, (), compute=True, gather=gather)
            return
        candidates = stream.candidates
        scores = candidates.log_probabilities if candidates is not None else ()
        tokens, known = stream.opening_tokens, stream.known_tokens
        logprobs = None if known else stream.opening_logprobs
        steps.start(order.sequence, target, tokens, scores, logprobs, known, gather=gather)
        subscription.stop_complete()

    def _prompt_order(self, plan: RoutingDecision, stream: GenerateStream) -> PromptOrder:
        """Return how an instance in the role both computes a prompt, with the members of this moment."""
        held = {store.id: store.blocks for store in plan.write_back}
        return PromptOrder(
            self._prefix_sources(plan),
            [held[store] for store in stream.write_back if store in held],
            plan.prefill.delay_s or 0.0,
        )

    def take_over(self, order: TakeOverSequence, stream: GenerateStream) -> None:
        """Take another conductor's sequence over at decode, and subscribe to the sequence."""
        decode = self._find(order.target.decode)
        if decode is None or decode.epoch != order.target.epoch:
            self._tell(IoEnded(order.io, Failure(FailureKind.UNAVAILABLE, f"{order.target.decode} has left")))
            return
        order = replace(order, target=replace(order.target, address=decode.address))
        steps, subscription = self._subscribe(order, stream)
        root = stream.request.chain_root
        first, *further = [
            decode_pb2.ResumedAnswer(from_position=len(choice.tokens), digest=tokens_digest(root, choice.tokens))
            for choice in stream.choices
        ]
        steps.resume(
            decode_pb2.ResumeSequence(
                request_id=order.sequence,
                from_position=first.from_position,
                transfer_id=order.target.transfer_id,
                generation=order.target.generation,
                fence=order.fence,
                secret=stream.secret,
                digest=first.digest,
                further=further,
            )
        )
        subscription.stop_complete()

    def _subscribe(
        self, order: StartDecode | TakeOverSequence, stream: GenerateStream
    ) -> tuple[StepsStream, SequenceSubscription]:
        steps = self._steps.get(reserved_instance_proto(order.target))
        self._sequences[order.io] = order, steps
        end = partial(self._end_sequence, order.io)
        target = reservation_proto(order.target)
        stop = partial(steps.cancel, order.sequence, target)
        subscription = SequenceSubscription(order.io, order.sequence, stream, self._post, end, stop, self._clock)
        steps.subscribe(order.sequence, subscription, target)
        return steps, subscription

    def renew(self, order: RenewReservation) -> None:
        """Keep the stream with decode open, and thereby this conductor's reservations there."""
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
