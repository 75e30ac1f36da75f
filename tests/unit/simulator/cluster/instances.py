"""Instances as the conductor's shell reaches them: its calls are answered as the simulator's were, at the same times.

They take the place of the network: channels that open no connection, and streams that are queues.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from grpc_health.v1 import health_pb2

from moonpool.cluster.proto_conversion import speeds_to_proto
from moonpool.kv.keys import pack_keys
from moonpool.rpc.channels import Channels
from moonpool.rpc.messages import END_OF_STREAM
from moonpool.scheduling.state_machine import IoEnded
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, kvstore_pb2, prefill_pb2
from services.conductor.core.events import (
    CallPrefill,
    CallReserve,
    Failure,
    FailureKind,
    FirstToken,
    InstanceJoined,
    InstanceLeft,
    KeysChanged,
    KVDelivered,
    LoadReported,
    PrefillAccepted,
    Rehashed,
    ReserveGranted,
    StalePlacement,
    StartDecode,
    TakeOverSequence,
    TokensArrived,
)
from services.conductor.core.instances import InstanceFacts, LoadFacts
from services.conductor.proto_conversion import error_of, kind_to_proto, reservation_proto
from services.conductor.servicer import ConductorServicer
from tests.unit.simulator.cluster.asked import Coming
from tests.unit.simulator.cluster.scripts import Noted


class Call:
    """A call, for its caller. What is put into it comes there; an error ends it."""

    def __init__(self) -> None:
        answers: asyncio.Queue[Any] = asyncio.Queue()
        self.put, self._next = answers.put_nowait, answers.get

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> Any:
        answer = await self.read()
        if answer is END_OF_STREAM:
            raise StopAsyncIteration
        return answer

    async def read(self) -> Any:
        answer = await self._next()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def write(self, message: Any) -> None:
        """What follows from an order is known."""

    def cancel(self) -> None:
        """Nothing that is put into it from now on is read."""


class Channel:
    """To one instance: `begin` gets the methods' names and the requests of calls that answer with a stream or late."""

    def __init__(self, begin: Callable[[str, Any], Call]) -> None:
        self._begin = begin

    def unary_unary(self, method: str, **codecs: Any) -> Any:
        async def call(request: Any, timeout: float | None = None) -> Any:
            match method.rpartition("/")[2]:
                case "Check":
                    return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
                case "SyncRecords":
                    return kvstore_pb2.SyncRecordsResponse()
                case "Reserve":
                    return await self._begin("Reserve", request).read()
            raise AssertionError(f"nobody answers {method}")

        return call

    def unary_stream(self, method: str, **codecs: Any) -> Any:
        return lambda request, timeout=None: self._begin(method.rpartition("/")[2], request)

    def stream_stream(self, method: str, **codecs: Any) -> Any:
        return lambda: self._begin(method.rpartition("/")[2], None)

    stream_unary = stream_stream


class InProcess(Channels):
    """Channels to the instances of a script; they are called as in the simulator, and live at "NAME:1"."""

    def __init__(self, script: Sequence[Noted]) -> None:
        super().__init__()
        self.calls: dict[int, Call] = {}
        """Those that wait for their end, by their number in the core."""
        self.streams: dict[str, Call] = {}
        """The last one to each decode instance."""
        self._numbers: dict[tuple[str, str], deque[int]] = defaultdict(deque)
        results = {noted.event.io: noted.event.result for noted in script if isinstance(noted.event, IoEnded)}
        for action in [action for noted in script for action in noted.actions]:
            if isinstance(action, CallReserve | CallPrefill) and not _has_left(results[action.io]):
                self._numbers[type(action).__name__.removeprefix("Call"), action.sequence].append(action.io)

    def get(self, address: str) -> Any:
        return Channel(partial(self._begin, address.partition(":")[0]))

    async def probe(self, address: str, timeout_s: float) -> None:
        """All are there, or it is known that they are not."""

    def answer(self, io: int, message: Any) -> None:
        """Answers a call; where the shell has not made it, what it did instead is in its journal."""
        if io in self.calls:
            self.calls[io].put(message)

    def tell(self, decode: str, message: Any) -> None:
        """The same on the stream to a decode instance."""
        if decode in self.streams:
            self.streams[decode].put(message)

    def _begin(self, instance: str, method: str, request: Any) -> Call:
        call = Call()
        if method == "Steps":
            self.streams[instance] = call
        else:
            sequence = request.sequence.request_id
            assert self._numbers[method, sequence], f"{method} of {sequence} at {instance} was not called there"
            self.calls[self._numbers[method, sequence].popleft()] = call
        return call


def _has_left(result: Any) -> bool:
    """Whether a call was not made, as nobody was there."""
    return isinstance(result, Failure) and result.message.endswith(" has left")


class Instances:
    """Tells the conductor's shell what comes from outside.

    Args:
        servicer: the shell's.
        script: what the simulator's conductor heard, and what it did.
        channels: on which the shell calls.
        wanted: the requests by their numbers.
        model: what engines serve.
    """

    def __init__(
        self,
        servicer: ConductorServicer,
        script: Sequence[Noted],
        channels: InProcess,
        wanted: Mapping[int, Coming],
        model: conductor_pb2.ModelInfo,
    ) -> None:
        self._servicer, self._channels, self._wanted, self._model = servicer, channels, wanted, model
        actions = [action for noted in script for action in noted.actions]
        self._prompts = {it.io: it for it in actions if isinstance(it, CallPrefill)}
        self._starts = {it.io: it for it in actions if isinstance(it, StartDecode | TakeOverSequence)}
        self._made = {number: list(one.had) for number, one in wanted.items()}  # tokens of each answer
        self._begins = {number: one.begins for number, one in wanted.items()}  # that its last placement begins behind
        self._members: dict[str, asyncio.Queue[conductor_pb2.JoinRequest | None]] = {}
        self._joins: list[asyncio.Task[None]] = []

    async def leave(self) -> None:
        """All leave."""
        for member in self._members.values():
            member.put_nowait(None)
        await asyncio.gather(*self._joins)

    def tell(self, event: Any) -> None:
        """Lets an event of the script happen, if it is not the shell's own."""
        match event:
            case InstanceJoined() | KeysChanged() | LoadReported() | InstanceLeft():
                self._tell_of(event)
            case Rehashed(request, tokens):
                self._begins[request] = tokens
            case PrefillAccepted(io, taken):
                accepted = prefill_pb2.PrefillAccepted(number=taken)
                self._channels.answer(io, prefill_pb2.PrefillResponse(accepted=accepted))
            case FirstToken():
                self._first_token(event)
            case KVDelivered(io):
                finished = prefill_pb2.PrefillFinished()
                self._channels.answer(io, prefill_pb2.PrefillResponse(finished=finished))
            case TokensArrived():
                self._tokens(event)
            case IoEnded(io, result) if io in self._channels.calls:
                self._end(self._channels.calls.pop(io), result)
            case IoEnded(io, Failure() as failure) if io in self._starts:
                self._fail(self._starts[io], failure)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _first_token(self, event: FirstToken) -> None:
        order, how = self._prompts[event.io], event.how
        asked, position = self._wanted[order.request].asked, self._begins[order.request]
        token_id, *further = [answer[position] for answer in asked.answers]
        first = prefill_pb2.FirstToken(
            token_id=token_id,
            further_token_ids=further,
            computed_tokens=how.computed_tokens,
            prefill_s=how.there_s,
            misses=[
                prefill_pb2.StoreMiss(store=kv_pb2.Instance(id=store), block=asked.chains[0].index(key))
                for store, key in how.misses
            ],
            reads=[
                prefill_pb2.LoadedPrefix(source=kv_pb2.Instance(id=source), blocks=blocks, seconds=seconds)
                for source, blocks, seconds in how.loads
            ],
        )
        made = self._made[order.request]
        made[:] = [max(count, position + 1) for count in made]
        self._channels.answer(event.io, prefill_pb2.PrefillResponse(first_token=first))

    def _tokens(self, event: TokensArrived) -> None:
        """Of several answers, which are equally long and told in turn, those have come that the shortest one lacks."""
        order = self._starts[event.io]
        asked, made = self._wanted[order.request].asked, self._made[order.request]
        choice = made.index(min(made))
        position = made[choice]
        made[choice] += event.count
        whole = made[choice] == len(asked.answers[choice])
        tokens = decode_pb2.SequenceTokens(
            request_id=order.sequence,
            position=position,
            token_ids=asked.answers[choice][position : position + event.count],
            finish_reason=kv_pb2.FINISH_REASON_STOP if whole else kv_pb2.FINISH_REASON_UNSPECIFIED,
            choice=choice,
        )
        self._channels.tell(order.target.decode, decode_pb2.StepsResponse(tokens=[tokens]))

    def _fail(self, order: StartDecode | TakeOverSequence, failure: Failure) -> None:
        """A sequence cannot go on; the shell knows by itself when its instance is lost."""
        if failure.message == "its stream broke":
            stream = self._channels.streams.pop(order.target.decode, None)
            if stream is not None:  # else this was its sequence too
                stream.put(END_OF_STREAM)
        elif failure.message != "its instance is lost":
            failed = decode_pb2.SequenceFailed(
                request_id=order.sequence, reason=failure.message, transfer=failure.kind is FailureKind.TRANSFER
            )
            self._channels.tell(order.target.decode, decode_pb2.StepsResponse(failed=[failed]))

    def _end(self, call: Call, result: Any) -> None:
        match result:
            case ReserveGranted(target, lease_s, taken, tbt_s):
                call.put(
                    decode_pb2.ReserveResponse(
                        target=reservation_proto(target), lease_s=lease_s, number=taken, predicted_tbt_s=tbt_s
                    )
                )
            case StalePlacement(drain_s, taken):
                stale = prefill_pb2.PrefillStale(drain_s=drain_s, taken=taken)
                call.put(prefill_pb2.PrefillResponse(stale=stale))
            case Failure():
                call.put(error_of(result))
            case _:
                call.put(END_OF_STREAM)

    # --- members ----------------------------------------------------------------------------------------------------

    def _tell_of(self, event: InstanceJoined | KeysChanged | LoadReported | InstanceLeft) -> None:
        match event:
            case InstanceJoined(facts):
                self._join(facts)
            case KeysChanged(name, sequence, stored, removed, begin, end, cooled):
                events = kv_pb2.KVEvents(
                    sequence=sequence, stored_keys=pack_keys(stored), removed_keys=pack_keys(removed),
                    cooled_keys=pack_keys(cooled), snapshot_begin=begin, snapshot_end=end,
                )  # fmt: skip
                self._members[name].put_nowait(conductor_pb2.JoinRequest(events=events))
            case LoadReported(name, load):
                self._members[name].put_nowait(conductor_pb2.JoinRequest(load=load_proto(load)))
            case InstanceLeft(name, _, "is lost"):
                member = self._servicer.cluster.registry.get(name)
                assert member is not None
                self._servicer.cluster.leave(member, lost=True)

    def _join(self, facts: InstanceFacts) -> None:
        earlier = self._members.get(facts.id)
        if earlier is not None:
            earlier.put_nowait(None)
        messages = self._members[facts.id] = asyncio.Queue()
        hello = hello_proto(facts, self._model)
        messages.put_nowait(conductor_pb2.JoinRequest(hello=hello))

        async def told() -> AsyncIterator[conductor_pb2.JoinRequest]:
            while (message := await messages.get()) is not None:
                yield message

        self._joins.append(asyncio.create_task(self._servicer.Join(told(), Heard())))


class Heard:
    """The context of a call which may take so many seconds.

    Attributes:
        point: by which its client may resume it, as it was told last.
    """

    def __init__(self, remaining_s: float | None = None, point: conductor_pb2.ResumePoint | None = None) -> None:
        self._remaining_s, self.point = remaining_s, point

    async def bare_write(self, message: Any) -> None:
        """Takes it."""
        if isinstance(message, conductor_pb2.GenerateResponse) and message.HasField("placed"):
            self.point = message.placed.resume

    def time_remaining(self) -> float | None:
        """As its client has said; None = any time."""
        return self._remaining_s

    def invocation_metadata(self) -> None:
        """Nothing came with the call."""


def hello_proto(facts: InstanceFacts, model: conductor_pb2.ModelInfo) -> conductor_pb2.JoinHello:
    """How an instance says who it is."""
    instance = kv_pb2.Instance(
        id=facts.id, incarnation=facts.incarnation, kind=kind_to_proto(facts.kind), address=f"{facts.id}:1"
    )
    return conductor_pb2.JoinHello(
        instance=instance, model=model if facts.shape is not None else None, total_blocks=facts.total_blocks,
        speed=speeds_to_proto(facts.speeds), stages=facts.stages, step_tokens=facts.step_tokens,
        capacity_bytes=facts.capacity_bytes, either_role=facts.switches_role, tells_cold=facts.reports_ssd,
    )  # fmt: skip


def load_proto(load: LoadFacts) -> conductor_pb2.LoadReport:
    """How an instance says what it has to do."""
    return conductor_pb2.LoadReport(
        running=load.running, waiting=load.waiting, free_blocks=load.free_blocks, cached_blocks=load.cached_blocks,
        promised_blocks=load.promised_blocks, context_tokens=load.context_tokens, drain_s=load.drain_s,
        speed=None if load.speeds is None else speeds_to_proto(load.speeds), draining=load.draining, taken=load.taken,
        expected_answer_tokens=load.answer_tokens,
    )  # fmt: skip
