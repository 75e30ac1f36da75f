"""Does what the conductor's core orders at instances, in virtual time, as `services/conductor/calls.py` does for real.

Each call that is started posts exactly one `Ended`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from moonpool.core.kernel import Ended
from moonpool.kv.keys import BlockKey
from services.conductor.core.failures import Failure, Kind, Stale
from services.conductor.core.hot import Replicate
from services.conductor.core.legs import LEAST_KNOWN
from services.conductor.core.messages import (
    Accepted,
    Adopt,
    Delivered,
    Event,
    Finish,
    FirstToken,
    Prefill,
    Prefilled,
    Renew,
    Reserve,
    Result,
    Start,
    Undo,
)
from services.prefill.core.actions import TellToken
from services.prefill.core.events import Copy, Source
from simulator.cluster.config import ClusterConfig
from simulator.cluster.decode import DecodeInstance
from simulator.cluster.engines import Engines
from simulator.cluster.entrance import keeps_tbt
from simulator.cluster.following import Following
from simulator.cluster.members import Members
from simulator.cluster.prefill import PrefillInstance
from simulator.cluster.requests import Sequence, keys_of_chain
from simulator.cluster.sequences import Resume
from simulator.cluster.streams import DecodeStream, DecodeStreams
from simulator.kernel.calls import NOTICED_S, Calls, Wire
from simulator.kernel.clock import ps

RESERVE_LIMIT = 2.0
"""A `Reserve` call ends after so many times the seconds that the core waits for it, as in the service."""

Token = Callable[[int, TellToken], bool]
"""Takes the first token of a request; returns whether the request goes on."""


@dataclass(slots=True, eq=False)
class PrefillCall:
    """One call of a prefill instance. What comes after its end at the conductor is not heard."""

    order: Prefill
    sequence: Sequence
    instance: PrefillInstance
    wire: Wire
    tell: Callable[["PrefillCall", Event], None]
    """Tells the core, unless the call has ended."""
    token_came: Callable[["PrefillCall", TellToken], None]
    ended: Callable[[int, Result], None]
    sources: tuple[Source, ...] = ()
    job: int = 0

    @property
    def io(self) -> int:
        """Its number."""
        return self.order.io

    def accepted(self, number: int) -> None:
        """See `Client.accepted`."""
        self.wire.send(lambda: self.tell(self, Accepted(self.io, number)), back=True)

    def token(self, told: TellToken) -> None:
        """See `Client.token`."""
        self.wire.send(lambda: self.token_came(self, told), back=True)

    def delivered(self) -> None:
        """See `Client.delivered`."""
        self.wire.send(lambda: self.tell(self, Delivered(self.io)), back=True)

    def over(self, result: Failure | Stale | None) -> None:
        """See `Client.over`."""
        self.wire.send(lambda: self._over(result), back=True)

    def _over(self, result: Failure | Stale | None) -> None:
        self.wire.close()
        self.ended(self.io, result)


class Orders:
    """All calls that are under way.

    Args:
        calls: carry messages.
        engines: the instances.
        members: who has joined.
        config: of the cluster.
        post: hands an event to the core.
        token_came: takes first tokens.
        streams: to decode instances.
        conductor: whose calls these are.
    """

    def __init__(
        self,
        calls: Calls,
        engines: Engines,
        members: Members,
        config: ClusterConfig,
        post: Callable[[Event], None],
        token_came: Token,
        streams: DecodeStreams,
        conductor: str,
    ) -> None:
        self.streams, self._conductor = streams, conductor
        self._calls, self._members, self._post, self._token_came = calls, members, post, token_came
        self._engines = engines
        self._limit = ps(RESERVE_LIMIT * config.reserve_timeout_s)
        self._block_tokens, self._keeps_tbt = config.block_tokens, keeps_tbt(config)
        self._cancels: dict[int, Callable[[], None]] = {}
        self._prefilling: dict[int, PrefillCall] = {}

    def __len__(self) -> int:
        return len(self._cancels)

    def cancel(self, io: int) -> None:
        """Gives up a call; its `Ended` follows, unless it has ended."""
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

    def _end(self, io: int, result: Result) -> None:
        self._prefilling.pop(io, None)
        if self._cancels.pop(io, None) is not None:
            self._post(Ended(io, result))

    def replicate(self, order: Replicate) -> None:
        """Has an instance copy hot blocks."""
        instance = self._engines.prefills[order.instance]
        peer = order.source in self._engines.prefills or order.source in self._engines.decodes
        source = Source(order.source, len(order.keys), peer)
        keys = tuple(map(BlockKey, order.keys))
        self._calls.send(lambda: instance.replicate(keys, source) if instance.up else None)

    # --- Reserve ----------------------------------------------------------------------------------------------------

    def reserve(self, order: Reserve, sequence: Sequence) -> None:
        """Asks for room."""
        self._cancels[order.io] = _never
        if not self._is_there(order.decode, order.incarnation):
            self._end(order.io, Failure(Kind.UNAVAILABLE, f"{order.decode} has left"))
            return
        late = Failure(Kind.DEADLINE, f"{order.decode} has not answered")
        self._calls.world.after(self._limit, lambda _: self._end(order.io, late))
        self._calls.send(lambda: self._ask(order, sequence))

    def _ask(self, order: Reserve, sequence: Sequence) -> None:
        decode = self._engines.decodes[order.decode]
        if _is_alive(decode, order.incarnation):
            tbt_slo_s = (self._keeps_tbt and order.tbt_slo_s) or 0.0
            answer = decode.reserve(sequence, self._conductor, tbt_slo_s, order.starts_in_s, order.stores)
            self._calls.send(partial(self._end, order.io, answer))

    # --- Prefill ----------------------------------------------------------------------------------------------------

    def prefill(self, order: Prefill, sequence: Sequence) -> None:
        """Calls prefill."""
        name, io = order.plan.prefill.id, order.io
        instance, wire = self._engines.prefills[name], Wire(self._calls, lambda: self._broken(call))
        call = PrefillCall(order, sequence, instance, wire, self._tell, self._token, self._end)
        self._cancels[io] = lambda: self._cancel_prefill(call)
        self._prefilling[io] = call
        if not self._is_there(name, order.incarnation):
            self._end(io, Failure(Kind.UNAVAILABLE, f"{name} has left"))
            return
        wire.send(lambda: self._submit(call))

    def _submit(self, call: PrefillCall) -> None:
        instance, plan = call.instance, call.order.plan
        if not _is_alive(instance, call.order.incarnation):
            return
        there = self._members.incarnation
        call.sources = tuple([Source(it.id, it.blocks, it.peer) for it in plan.sources if there(it.id)])
        copies = tuple([Copy(store.id, store.blocks) for store in plan.write_back if there(store.id)])
        order = call.order
        call.job = instance.submit(call.sequence, order.target, call, call.sources, copies, order.max_queue_s)

    def _tell(self, call: PrefillCall, event: Event) -> None:
        if call.io in self._cancels:
            self._post(event)

    def _token(self, call: PrefillCall, told: TellToken) -> None:
        request = call.sequence.request
        known = all(answer.made > call.sequence.continued for answer in request.answers)
        if call.io not in self._cancels or not (known or self._token_came(call.order.request, told)):
            return
        misses = tuple(
            (call.sources[miss.source].name, keys_of_chain(request, miss.block + 1)[-1]) for miss in told.misses
        )
        loads = tuple([(call.sources[it.source].name, it.blocks, it.seconds) for it in told.loads])
        how = Prefilled(told.computed_tokens, told.queue_s + told.prefill_s, misses, loads)
        self._post(FirstToken(call.io, how, Finish.STOP if request.whole else None, known))

    def _cancel_prefill(self, call: PrefillCall) -> None:
        call.wire.send(lambda: self._leave(call), reliable=True)
        self._end(call.io, Failure(Kind.UNAVAILABLE, "cancelled"))

    def _leave(self, call: PrefillCall) -> None:
        if _is_alive(call.instance, call.order.incarnation):
            call.instance.leave(call.job)
        call.wire.close()

    def _broken(self, call: PrefillCall) -> None:
        call.instance.leave(call.job)  # numbers are never used twice
        self._end(call.io, Failure(Kind.UNAVAILABLE, f"the call of {call.instance.name} broke"))

    # --- sequences --------------------------------------------------------------------------------------------------

    def start(self, order: Start, sequence: Sequence) -> None:
        """Starts a sequence at decode, and follows it."""
        stream, transfer = self.streams.get(order.target.decode), order.target.transfer_id

        following = self._follow(order.io, sequence, stream, transfer)
        begin = sequence.continued + (not order.compute)
        known = () if order.compute else _known(sequence, begin)
        if order.compute:
            held = order.target.held_blocks * self._block_tokens
            sequence.request.reused = min(held, sequence.request.tokens - 1)
        positions = [begin + its for its in known or (0,) * sequence.width]
        stream.start(transfer, following.members(positions), known, compute=order.compute)

    def adopt(self, order: Adopt, sequence: Sequence) -> None:
        """Takes a sequence over where it runs, and follows it."""
        target = order.target
        if not self._is_there(target.decode, target.incarnation):
            self._post(Ended(order.io, Failure(Kind.UNAVAILABLE, f"{target.decode} has left")))
            return
        stream, transfer = self.streams.get(target.decode), target.transfer_id
        positions = tuple([answer.made for answer in sequence.request.answers])
        members = self._follow(order.io, sequence, stream, transfer).members(positions)
        stream.resume(Resume(transfer, order.sequence, positions, order.fence), members)

    def _follow(self, io: int, sequence: Sequence, stream: DecodeStream, transfer: int) -> Following:
        def unfollow() -> None:
            stream.unfollow(transfer, sequence.width)

        def cancel() -> None:
            unfollow()
            stream.cancel(transfer)
            self._end(io, None)

        self._cancels[io] = cancel
        return Following(io, sequence.request, self._post, self._end, unfollow, sequence.width)

    def renew(self, order: Renew) -> None:
        """Keeps a promise."""
        if self._is_there(order.target.decode, order.target.incarnation):
            self.streams.get(order.target.decode).open()

    def undo(self, order: Undo) -> None:
        """Gives a promise back."""
        if self._is_there(order.target.decode, order.target.incarnation):
            self.streams.get(order.target.decode).cancel(order.target.transfer_id)

    def _is_there(self, name: str, incarnation: int) -> bool:
        return incarnation == self._members.incarnation(name) != 0


def _known(sequence: Sequence, begin: int) -> tuple[int, ...]:
    """Of each answer, tokens that there are from a position on; empty where they are few, as in the service."""
    known = tuple([max(0, answer.made - begin) for answer in sequence.request.answers])
    return known if max(known) >= LEAST_KNOWN else ()


def _never() -> None:
    """A `Reserve` is never cancelled."""


def _is_alive(instance: PrefillInstance | DecodeInstance, incarnation: int) -> bool:
    return instance.up and instance.incarnation == incarnation
