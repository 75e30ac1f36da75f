"""Does what the core orders at instances: `Reserve` and `Prefill` calls, and sequences on `Steps`.

Each call that is started posts exactly one `Ended`.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from moonpool.cluster.speeds import sane
from moonpool.core.kernel import Ended
from moonpool.errors import MoonpoolError
from moonpool.kv.keys import KEY_BYTES, tokens_digest
from moonpool.rpc.channels import Channels
from moonpool.rpc.errors import from_rpc_error
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import decode_pb2, kv_pb2, prefill_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub
from services.conductor.core.failures import Failure, Kind, Stale
from services.conductor.core.messages import (
    Accepted,
    Adopt,
    Delivered,
    Event,
    FirstToken,
    Prefill,
    Prefilled,
    Renew,
    Reserve,
    Result,
    Start,
    Undo,
)
from services.conductor.core.reads import Source
from services.conductor.core.stores import StoreView
from services.conductor.following import Following, end_untold
from services.conductor.serving import Serving
from services.conductor.steps import StepsPool, StepsStream
from services.conductor.translate import decode_proto, failure_of, finish_of, promised_of, target_proto

log = get_logger(__name__)

T = TypeVar("T")
Find = Callable[[str], kv_pb2.Instance | None]
_CANCELLED = Failure(Kind.UNAVAILABLE, "cancelled")


class Calls:
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
        find: Find,
        post: Callable[[Event], None],
        over: Callable[[Ended[Result]], None],
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
        self._followed: dict[int, tuple[Start | Adopt, StepsStream]] = {}
        self._tasks: set[asyncio.Task[Result]] = set()

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

    def reserve(self, order: Reserve, serving: Serving) -> None:
        """Asks for room."""
        self._run(order.io, lambda: self._reserve_request(order, serving), partial(self._reserve, order, serving))

    def _reserve_request(self, order: Reserve, serving: Serving) -> decode_pb2.ReserveRequest:
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

    async def _reserve(self, order: Reserve, serving: Serving, request: decode_pb2.ReserveRequest) -> Result:
        decode = self._find(order.decode)
        if decode is None or decode.incarnation != order.incarnation:
            return Failure(Kind.UNAVAILABLE, f"{order.decode} has left")
        stub = DecodeServiceStub(self._channels.get(decode.address))
        response = await stub.Reserve(request, timeout=self._reserve_limit_s)
        return promised_of(response)

    def prefill(self, order: Prefill, serving: Serving) -> None:
        """Calls prefill."""
        self._run(order.io, lambda: self._prefill_request(order, serving), partial(self._prefill, order, serving))

    async def _prefill(self, order: Prefill, serving: Serving, request: prefill_pb2.PrefillRequest) -> Result:
        prefill = self._find(order.plan.prefill.id)
        if prefill is None or prefill.incarnation != order.incarnation:
            return Failure(Kind.UNAVAILABLE, f"{order.plan.prefill.id} has left")
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
                    self._post(Accepted(order.io, response.accepted.number))
                elif response.HasField("stale"):
                    return Stale(sane(response.stale.drain_s), response.stale.taken)
                elif response.HasField("finished"):
                    serving.delivered(response.finished)
                    self._post(Delivered(order.io))
        finally:
            call.cancel()
        return None

    def _opened(
        self,
        io: int,
        serving: Serving,
        request: prefill_pb2.PrefillRequest,
        first: prefill_pb2.FirstToken,
        lasted_s: float,
    ) -> None:
        """The prompt is computed, after so many seconds."""
        how, before = _prefilled(first, request.sequence, lasted_s), serving.answer.tokens
        finish = finish_of(serving.first_token(first))
        known = 0 < before == serving.answer.tokens
        self._post(FirstToken(io, how, finish, known))

    def _prefill_request(self, order: Prefill, serving: Serving) -> prefill_pb2.PrefillRequest:
        request = prefill_pb2.PrefillRequest(sequence=serving.spec(order.sequence), max_queue_s=order.max_queue_s)
        if order.target is not None:
            request.target.CopyFrom(target_proto(order.target))
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

    def _there(self, options: Sequence[StoreView | Source]) -> list[tuple[kv_pb2.Instance, int]]:
        """Those of a plan's instances that are still members, with the leading blocks they hold."""
        return [(instance, it.blocks) for it in options if (instance := self._find(it.id)) is not None]

    def _run(self, io: int, build: Callable[[], T], call: Callable[[T], Coroutine[Any, Any, Result]]) -> None:
        """Runs a call as a task; however it ends, also before its first step, its end is posted.

        Its message is built at once: what the answer has at this moment is in it.
        """
        try:
            message = build()
        except Exception as defect:
            log.error("a message cannot be built", exc_info=defect)
            self._over(Ended(io, Failure(Kind.INTERNAL, "a call failed")))
            return
        task = asyncio.create_task(_guarded(partial(call, message)))
        self._tasks.add(task)
        self._cancels[io] = task.cancel

        def done(task: asyncio.Task[Result]) -> None:
            self._tasks.discard(task)
            del self._cancels[io]
            self._over(Ended(io, _CANCELLED if task.cancelled() else task.result()))

        task.add_done_callback(done)

    # --- sequences --------------------------------------------------------------------------------------------------

    def start(self, order: Start, serving: Serving) -> None:
        """Starts a sequence at decode with the token after those that were placed, or with those alone; follows it."""
        steps, following = self._follow(order, serving)
        request = serving.answer.request
        gather = request.whole and not request.stops  # they are watched for here
        if order.compute:
            serving.answer.computed_at_decode(order.target.held_blocks)
            steps.start(order.sequence, target_proto(order.target), (), compute=True, gather=gather)
            return
        opening = serving.answer.opening
        scores = opening.log_probabilities if opening is not None else ()
        tokens, known = serving.opening_tokens, serving.known_tokens
        logprobs = None if known else serving.opening_logprobs
        steps.start(order.sequence, target_proto(order.target), tokens, scores, logprobs, known, gather=gather)
        following.stop_complete()

    def adopt(self, order: Adopt, serving: Serving) -> None:
        """Takes a sequence over where it runs, and follows it."""
        decode = self._find(order.target.decode)
        if decode is None or decode.incarnation != order.target.incarnation:
            self._over(Ended(order.io, Failure(Kind.UNAVAILABLE, f"{order.target.decode} has left")))
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

    def _follow(self, order: Start | Adopt, serving: Serving) -> tuple[StepsStream, Following]:
        steps = self._steps.get(decode_proto(order.target))
        self._followed[order.io] = order, steps
        end = partial(self._end_sequence, order.io)
        stop = partial(steps.cancel, order.sequence, target_proto(order.target))
        following = Following(order.io, serving, self._post, end, stop)
        steps.subscribe(order.sequence, following)
        return steps, following

    def renew(self, order: Renew) -> None:
        """Keeps a promise."""
        self._steps.get(decode_proto(order.target)).open()

    def undo(self, order: Undo) -> None:
        """Gives a promise back, also one of which nothing came."""
        target = decode_proto(order.target)
        decode = target if target.address else self._find(target.id)
        if decode is not None and decode.incarnation == target.incarnation:
            self._steps.get(decode).cancel(order.sequence, target_proto(order.target))

    def _end_sequence(self, io: int, result: Result, *, tell: bool) -> None:
        """A sequence is over; `tell` when decode does not know it."""
        if io not in self._followed:
            return
        order, steps = self._followed.pop(io)
        if tell:
            steps.unsubscribe(order.sequence)
            steps.cancel(order.sequence, target_proto(order.target))
        self._over(Ended(io, result))


async def _guarded(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    try:
        return await work()
    except grpc.aio.AioRpcError as error:
        return failure_of(from_rpc_error(error))
    except MoonpoolError as error:
        return failure_of(error)
    except Exception as defect:
        log.error("a call failed", exc_info=defect)
        return Failure(Kind.INTERNAL, "a call failed")


def _prefilled(first: prefill_pb2.FirstToken, spec: kv_pb2.SequenceSpec, lasted_s: float) -> Prefilled:
    """How an instance says that it has prefilled; it cannot have taken longer than its call has."""
    misses = [
        (miss.store.id, spec.block_keys[miss.block * KEY_BYTES : (miss.block + 1) * KEY_BYTES]) for miss in first.misses
    ]
    loads = tuple([(it.source.id, it.blocks, min(sane(it.seconds), lasted_s)) for it in first.reads])
    there_s = min(sane(first.queue_s) + sane(first.prefill_s), lasted_s)
    return Prefilled(first.computed_tokens, there_s, tuple(misses), loads)
