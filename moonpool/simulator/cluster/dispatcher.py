"""Calls that a simulated conductor makes to instances, and the conductor's token streams from decode.

Does what the conductor's core orders, as `moonpool/conductor` does for real. Each call that is started posts exactly
one `IoEnded`. An instance's sequences share one stream; if the stream breaks all of them fail, and the next order opens
a new stream.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.state_machine import IoEnded
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
    CompletionReason,
    Event,
    FirstToken,
    KVDelivered,
    PrefillAccepted,
    PrefillMeasurements,
    PromptComputed,
    StalePlacement,
    TokensArrived,
)
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.replication import ReplicatePrefix, StopReplication
from moonpool.conductor.core.request_spec import MIN_KNOWN_TOKENS
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.engine.decode.core.actions import BeginPrompt
from moonpool.engine.prefill.core.actions import ReportFirstToken
from moonpool.engine.prefill.core.events import WriteBackTarget
from moonpool.engine.scheduler.prefix_sources import KVSource
from moonpool.simulator.clock import ps
from moonpool.simulator.cluster.admission import keeps_tbt
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.cluster.decode import WHOLE_PROMPT, SimulatedDecode, WholePrompt
from moonpool.simulator.cluster.machines import Instances
from moonpool.simulator.cluster.members import Members
from moonpool.simulator.cluster.prefill import SimulatedPrefill
from moonpool.simulator.cluster.requests import (
    PlacedSequence,
    PromptReport,
    Request,
    Resume,
    SequenceReport,
    TokenTimes,
    keys_of_chain,
)
from moonpool.simulator.network import NOTICED_S, Calls, SimulatedLink

RESERVE_LIMIT = 2.0
"""A `Reserve` call ends after this multiple of the seconds that the core waits for the answer, as in the service."""


@dataclass(slots=True, eq=False)
class RequestSubscription:
    """Follows a request's sequences at decode: tokens go to the request's answers, their number to the core."""

    io: int
    request: Request
    post: Callable[[Event], None]
    ended: Callable[[int, CallResult], None]
    unfollow: Callable[[], None]
    computed: Callable[[PromptReport], None]
    """Takes how the prompt was computed where the answers run."""
    going: int
    """Answers that decode has not ended."""
    spoken: bool = False
    """Something has come."""

    def members(self, positions: Iterable[int]) -> list["AnswerSubscription"]:
        """A subscription for each answer; the next tokens start at the position."""
        return [AnswerSubscription(self, choice, position) for choice, position in enumerate(positions)]

    def tokens(self, count: int, *, over: bool) -> None:
        """An answer has so many more tokens; with `over` decode has ended the answer."""
        self.going -= over
        finish = CompletionReason.STOP if self.request.whole else None
        if count or finish or not self.spoken:
            self.spoken = True
            self.post(TokensArrived(self.io, count, finish, known=not self.going))
        if not self.going:
            self.ended(self.io, None)

    def fail(self, failure: Failure) -> None:
        """No answer can go on."""
        self.unfollow()
        self.ended(self.io, failure)


@dataclass(slots=True, eq=False)
class AnswerSubscription:
    """Follows one answer."""

    of: RequestSubscription
    choice: int
    position: int
    """Position of the next token that comes; tokens that the answer has are dropped."""

    def tokens(self, made: TokenTimes | None, *, over: bool) -> None:
        """Tokens have come; with `over` the answer has ended with them."""
        answer, count = self.of.request.answers[self.choice], 0
        if made is not None:
            new = made.after(answer.made - self.position)
            self.position += made.count
            if new is not None:
                answer.take(new)
                count = new.count
        self.of.tokens(count, over=over)

    def fail(self, failure: Failure) -> None:
        """The answer cannot go on."""
        self.of.fail(failure)


class DecodeStream:
    """The stream to a decode instance, for one epoch; opened on first use, and again after a break.

    Args:
        calls: carry messages.
        decode: the instance.
        conductor: the stream's owner.
        number: names an opening; never used twice.
    """

    def __init__(self, calls: Calls, decode: SimulatedDecode, conductor: str, number: Callable[[], int]) -> None:
        self._calls, self._decode, self._conductor, self._new_number = calls, decode, conductor, number
        self._epoch = decode.epoch
        self._number = 0
        self._wire: SimulatedLink | None = None
        self._followers: dict[int, AnswerSubscription] = {}

    def __len__(self) -> int:
        """Sequences on the stream."""
        return len(self._followers)

    def open(self) -> SimulatedLink:
        """Open the stream if there is none: while the stream is open, decode keeps what decode has promised."""
        if self._wire is None or self._wire.closed:
            number = self._number = self._new_number()
            self._wire = SimulatedLink(self._calls, self._broken)
            self._wire.send(partial(self._there, lambda: self._decode.stream_opened(number, self._conductor)))
        return self._wire

    def start(
        self,
        transfer: int,
        followers: Sequence[AnswerSubscription],
        known: tuple[int, ...],
        *,
        compute: bool,
        prompt: WholePrompt = WHOLE_PROMPT,
    ) -> None:
        """Start a sequence, or several together, and follow each; see `SimulatedDecode.start`."""
        wire, number = self.open(), self._number
        self._followers.update(enumerate(followers, transfer))
        begin = partial(self._decode.start, number, transfer, known, compute=compute, prompt=prompt)
        wire.send(partial(self._there, begin))

    def resume(self, order: Resume, followers: Sequence[AnswerSubscription]) -> None:
        """Ask for a sequence that was another conductor's, and follow the sequence."""
        wire, number = self.open(), self._number
        self._followers.update(enumerate(followers, order.transfer))
        wire.send(partial(self._there, lambda: self._decode.resume(number, order)))

    def unfollow(self, transfer: int, width: int = 1) -> None:
        """A sequence, or several that run together, are not followed any more."""
        for number in range(transfer, transfer + width):
            self._followers.pop(number, None)

    def cancel(self, transfer: int) -> None:
        """Give up a sequence, several sequences that run together, or their promise."""
        self.open().send(partial(self._there, lambda: self._decode.cancel(transfer)))

    def lost(self, why: str) -> None:
        """The instance is lost."""
        if self._wire is not None:
            self._wire.close()
        self._fail(why)

    def abandon(self) -> None:
        """The conductor is lost; the instance notices that after a while."""
        if self._wire is not None and not self._wire.closed:
            number = self._number
            self._wire.close()
            closed = partial(self._there, lambda: self._decode.stream_closed(number))
            self._calls.world.after(ps(NOTICED_S), lambda _: closed())

    # From the instance

    def tell(self, number: int, news: list[SequenceReport]) -> None:
        """The instance sends tokens."""
        if self._wire is not None and number == self._number:
            self._wire.send(lambda: self._hear(news), back=True)

    def refuse(self, number: int, transfer: int, failure: Failure) -> None:
        """The instance says that a sequence cannot go on."""
        if self._wire is not None and number == self._number:
            self._wire.send(lambda: self._failed(transfer, failure), back=True)

    def _hear(self, news: list[SequenceReport]) -> None:
        for told in news:
            follower = self._followers.get(told.number)
            if follower is not None and told.prompt is not None:
                follower.of.computed(told.prompt)
                follower = self._followers.get(told.number)  # the request may have been refused
            if follower is not None:
                if told.over:
                    del self._followers[told.number]
                follower.tokens(told.made, over=told.over)

    def _failed(self, transfer: int, failure: Failure) -> None:
        mine = [follower for number, follower in self._followers.items() if number - follower.choice == transfer]
        if mine:
            mine[0].fail(failure)

    def _there(self, deliver: Callable[[], None]) -> None:
        """At the instance, if the instance is still there."""
        if self._decode.up and self._decode.epoch == self._epoch:
            deliver()

    def _broken(self) -> None:
        number = self._number
        self._there(lambda: self._decode.stream_closed(number))
        self._fail("its stream broke")

    def _fail(self, why: str) -> None:
        followers, self._followers = self._followers, {}
        for follower in followers.values():
            follower.fail(Failure(FailureKind.STREAM, why))


class DecodeStreams:
    """One conductor's streams to all decode instances."""

    def __init__(
        self, calls: Calls, decodes: Mapping[str, SimulatedDecode], conductor: str, number: Callable[[], int]
    ) -> None:
        self._calls, self._conductor, self._number, self._decodes = calls, conductor, number, decodes
        self._streams: dict[str, DecodeStream] = {}

    def __len__(self) -> int:
        """Sequences on all streams."""
        return sum(map(len, self._streams.values()))

    def get(self, decode: str) -> DecodeStream:
        """The stream to an instance's present epoch."""
        if decode not in self._streams:
            self._streams[decode] = DecodeStream(self._calls, self._decodes[decode], self._conductor, self._number)
        return self._streams[decode]

    def lost(self, decode: str) -> None:
        """The instance is lost: all sequences there fail."""
        stream = self._streams.pop(decode, None)
        if stream is not None:
            stream.lost("its instance is lost")

    def abandon(self) -> None:
        """The conductor is lost."""
        for stream in self._streams.values():
            stream.abandon()


Token = Callable[[int, ReportFirstToken], bool]
"""Takes a request's first token; returns whether the request goes on."""
Computed = Callable[[int, BeginPrompt], bool]
"""Takes that decode has computed a request's prompt; returns whether the request goes on."""


@dataclass(slots=True, eq=False)
class PrefillCall:
    """A call to a prefill instance. Messages after the call has ended at the conductor are ignored."""

    order: CallPrefill
    sequence: PlacedSequence
    instance: SimulatedPrefill
    wire: SimulatedLink
    tell: Callable[["PrefillCall", Event], None]
    """Tells the core, unless the call has ended."""
    token_came: Callable[["PrefillCall", ReportFirstToken], None]
    ended: Callable[[int, CallResult], None]
    sources: tuple[KVSource, ...] = ()
    number: int = 0
    """The prompt's number at the instance."""

    @property
    def io(self) -> int:
        """The I/O's number."""
        return self.order.io

    def accepted(self, number: int) -> None:
        """See `Client.accepted`."""
        self.wire.send(lambda: self.tell(self, PrefillAccepted(self.io, number)), back=True)

    def token(self, told: ReportFirstToken) -> None:
        """See `Client.token`."""
        self.wire.send(lambda: self.token_came(self, told), back=True)

    def delivered(self) -> None:
        """See `Client.delivered`."""
        self.wire.send(lambda: self.tell(self, KVDelivered(self.io)), back=True)

    def over(self, result: Failure | StalePlacement | None) -> None:
        """See `Client.over`."""
        self.wire.send(lambda: self._over(result), back=True)

    def _over(self, result: Failure | StalePlacement | None) -> None:
        self.wire.close()
        self.ended(self.io, result)


class CallDispatcher:
    """All calls that are under way.

    Args:
        calls: carry messages.
        engines: the instances.
        members: joined instances.
        config: the cluster's.
        post: hands an event to the core.
        token_came: takes first tokens.
        computed: takes prompts that are computed where the answers run.
        streams: to decode instances.
        conductor: the calls' owner.
    """

    def __init__(
        self,
        calls: Calls,
        engines: Instances,
        members: Members,
        config: ClusterConfig,
        post: Callable[[Event], None],
        token_came: Token,
        computed: Computed,
        streams: DecodeStreams,
        conductor: str,
    ) -> None:
        self.streams, self._conductor = streams, conductor
        self._calls, self._members, self._post, self._token_came = calls, members, post, token_came
        self._computed = computed
        self._engines = engines
        self._limit = ps(RESERVE_LIMIT * config.reserve_timeout_s)
        self._block_size, self._keeps_tbt = config.block_size, keeps_tbt(config)
        self._cancels: dict[int, Callable[[], None]] = {}
        self._prefilling: dict[int, PrefillCall] = {}

    def __len__(self) -> int:
        return len(self._cancels)

    def cancel(self, io: int) -> None:
        """Give up a call; an `IoEnded` follows, unless the call has ended."""
        cancel = self._cancels.get(io)
        if cancel is not None:
            cancel()

    def abandon(self) -> None:
        """The conductor is lost: prefill and decode notice that after a while."""
        self._cancels.clear()
        self.streams.abandon()
        for call in self._prefilling.values():
            call.wire.close()
            self._calls.world.after(ps(NOTICED_S), self._leave, call)

    def _end(self, io: int, result: CallResult) -> None:
        self._prefilling.pop(io, None)
        if self._cancels.pop(io, None) is not None:
            self._post(IoEnded(io, result))

    def replicate(self, order: ReplicatePrefix) -> None:
        """Have an instance copy hot blocks."""
        instance = self._engines.prefills[order.instance]
        peer = order.source in self._engines.prefills or order.source in self._engines.decodes
        source = KVSource(order.source, len(order.keys), peer)
        keys = tuple(map(BlockKey, order.keys))
        self._calls.send(lambda: instance.replicate(keys, source) if instance.up else None)

    def stop_replication(self, order: StopReplication) -> None:
        """An instance need not copy a chain any more."""
        instance, tail = self._engines.prefills[order.instance], BlockKey(order.tail)
        self._calls.send(lambda: instance.stop_replication(tail) if instance.up else None)

    # --- Reserve ----------------------------------------------------------------------------------------------------

    def reserve(self, order: CallReserve, sequence: PlacedSequence) -> None:
        """Ask for room."""
        self._cancels[order.io] = _never
        if not self._is_there(order.decode, order.epoch):
            self._end(order.io, Failure(FailureKind.UNAVAILABLE, f"{order.decode} has left"))
            return
        late = Failure(FailureKind.DEADLINE, f"{order.decode} has not answered")
        self._calls.world.after(self._limit, lambda _: self._end(order.io, late))
        self._calls.send(lambda: self._ask(order, sequence))

    def _ask(self, order: CallReserve, sequence: PlacedSequence) -> None:
        decode = self._engines.decodes[order.decode]
        if _is_alive(decode, order.epoch):
            tbt_slo_s = (self._keeps_tbt and order.tbt_slo_s) or 0.0
            answer = decode.reserve(
                sequence, self._conductor, tbt_slo_s, order.starts_in_s, order.stores,
                whole=order.computes_prompt, max_queue_s=order.max_queue_s,
            )  # fmt: skip
            self._calls.send(partial(self._end, order.io, answer))

    # --- Prefill ----------------------------------------------------------------------------------------------------

    def prefill(self, order: CallPrefill, sequence: PlacedSequence) -> None:
        """Call prefill."""
        name, io = order.plan.prefill.id, order.io
        instance, wire = self._engines.prefills[name], SimulatedLink(self._calls, lambda: self._broken(call))
        call = PrefillCall(order, sequence, instance, wire, self._tell, self._token, self._end)
        self._cancels[io] = lambda: self._cancel_prefill(call)
        self._prefilling[io] = call
        if not self._is_there(name, order.epoch):
            self._end(io, Failure(FailureKind.UNAVAILABLE, f"{name} has left"))
            return
        wire.send(lambda: self._submit(call))

    def _submit(self, call: PrefillCall) -> None:
        instance, plan = call.instance, call.order.plan
        if not _is_alive(instance, call.order.epoch):
            return
        there = self._members.epoch
        call.sources = self._sources(plan)
        copies = tuple([WriteBackTarget(store.id, store.blocks) for store in plan.write_back if there(store.id)])
        target, max_queue_s, delay_s = call.order.target, call.order.max_queue_s, plan.prefill.delay_s or 0.0
        call.number = instance.submit(call.sequence, target, call, call.sources, copies, max_queue_s, delay_s)

    def _sources(self, plan: RoutingDecision) -> tuple[KVSource, ...]:
        """Where a prefix may be loaded from, by the members of this moment."""
        there = self._members.epoch
        return tuple([KVSource(source.id, source.blocks, source.peer) for source in plan.sources if there(source.id)])

    def _tell(self, call: PrefillCall, event: Event) -> None:
        if call.io in self._cancels:
            self._post(event)

    def _token(self, call: PrefillCall, told: ReportFirstToken) -> None:
        request = call.sequence.request
        known = all(answer.made > call.sequence.continued for answer in request.answers)
        if call.io not in self._cancels or not (known or self._token_came(call.order.request, told)):
            return
        how = _measured(request, call.sources, told, told.computed_tokens, told.queue_s + told.prefill_s)
        self._post(FirstToken(call.io, how, CompletionReason.STOP if request.whole else None, known))

    def _cancel_prefill(self, call: PrefillCall) -> None:
        call.wire.send(lambda: self._leave(call), reliable=True)
        self._end(call.io, Failure(FailureKind.UNAVAILABLE, "cancelled"))

    def _leave(self, call: PrefillCall) -> None:
        if _is_alive(call.instance, call.order.epoch):
            call.instance.leave(call.number)
        call.wire.close()

    def _broken(self, call: PrefillCall) -> None:
        call.instance.leave(call.number)  # numbers are never used twice
        self._end(call.io, Failure(FailureKind.UNAVAILABLE, f"the call of {call.instance.name} broke"))

    # --- sequences --------------------------------------------------------------------------------------------------

    def start(self, order: StartDecode, sequence: PlacedSequence) -> None:
        """Start a sequence at decode, and follow the sequence."""
        stream, transfer = self.streams.get(order.target.decode), order.target.transfer_id

        prompt, sources = WHOLE_PROMPT, tuple[KVSource, ...]()
        if order.plan is not None:
            sources = self._sources(order.plan)
            held = {store.id: store.blocks for store in order.plan.write_back}
            prompt = WholePrompt(order.plan.prefill.delay_s or 0.0, tuple(held.values()), sources)
        following = self._follow(order, sequence, stream, sources)
        begin = sequence.continued + (not order.compute)
        known = () if order.compute else _known(sequence, begin)
        if order.compute and order.plan is None:
            cached = order.target.held_blocks * self._block_size
            sequence.request.reused = min(cached, sequence.request.tokens - 1)
        positions = [begin + count for count in known or (0,) * sequence.width]
        stream.start(transfer, following.members(positions), known, compute=order.compute, prompt=prompt)

    def adopt(self, order: TakeOverSequence, sequence: PlacedSequence) -> None:
        """Take over a sequence where the sequence runs, and follow the sequence."""
        target = order.target
        if not self._is_there(target.decode, target.epoch):
            self._post(IoEnded(order.io, Failure(FailureKind.UNAVAILABLE, f"{target.decode} has left")))
            return
        stream, transfer = self.streams.get(target.decode), target.transfer_id
        positions = tuple([answer.made for answer in sequence.request.answers])
        members = self._follow(order, sequence, stream).members(positions)
        stream.resume(Resume(transfer, order.sequence, positions, order.fence), members)

    def _follow(
        self,
        order: StartDecode | TakeOverSequence,
        sequence: PlacedSequence,
        stream: DecodeStream,
        sources: tuple[KVSource, ...] = (),
    ) -> RequestSubscription:
        io, transfer = order.io, order.target.transfer_id

        def unfollow() -> None:
            stream.unfollow(transfer, sequence.width)

        def cancel() -> None:
            unfollow()
            stream.cancel(transfer)
            self._end(io, None)

        def computed(told: PromptReport) -> None:
            request, begun = sequence.request, told.begun
            tokens = sequence.tokens - begun.cached_tokens - begun.loaded_tokens
            if self._computed(order.request, begun):
                self._post(PromptComputed(io, _measured(request, sources, begun, tokens, told.there_s)))

        self._cancels[io] = cancel
        return RequestSubscription(io, sequence.request, self._post, self._end, unfollow, computed, sequence.width)

    def renew(self, order: RenewReservation) -> None:
        """Keep a promise."""
        if self._is_there(order.target.decode, order.target.epoch):
            self.streams.get(order.target.decode).open()

    def undo(self, order: CancelReservation) -> None:
        """Give a promise back."""
        if self._is_there(order.target.decode, order.target.epoch):
            self.streams.get(order.target.decode).cancel(order.target.transfer_id)

    def _is_there(self, name: str, epoch: int) -> bool:
        return epoch == self._members.epoch(name) != 0


def _measured(
    request: Request,
    sources: Sequence[KVSource],
    told: ReportFirstToken | BeginPrompt,
    computed_tokens: int,
    there_s: float,
) -> PrefillMeasurements:
    """How a prompt was computed, for the core."""
    misses = [(sources[miss.source].name, keys_of_chain(request, miss.block + 1)[-1]) for miss in told.misses]
    loads = [(sources[load.source].name, load.blocks, load.seconds) for load in told.loads]
    return PrefillMeasurements(computed_tokens, there_s, tuple(misses), tuple(loads))


def _known(sequence: PlacedSequence, begin: int) -> tuple[int, ...]:
    """Of each answer, tokens that there are from a position on; empty where they are few, as in the service."""
    known = tuple([max(0, answer.made - begin) for answer in sequence.request.answers])
    return known if max(known) >= MIN_KNOWN_TOKENS else ()


def _never() -> None:
    """A `Reserve` is never cancelled."""


def _is_alive(instance: SimulatedPrefill | SimulatedDecode, epoch: int) -> bool:
    return instance.up and instance.epoch == epoch
