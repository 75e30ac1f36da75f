"""Streams to decode instances.

One multiplexed `Steps` stream per instance, and subscriptions of requests to their sequences.

When a stream breaks, all its sequences fail with StreamBroken, and the next sequence opens a new stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from moonpool.contracts import logprobs_from_proto, logprobs_to_proto
from moonpool.errors import InvalidRequest, MoonpoolError, StreamBroken, TransferFailed
from moonpool.logprobs import Logprobs
from moonpool.rpc.channels import Channels, ConnectionMonitor, MonitoredCall, check_health
from moonpool.telemetry.logs import get_logger
from moonpool.transport.streams import ClientStream
from moonpool.v1 import decode_pb2, kv_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from services.conductor.core.events import FENCE_FIELD, Event, Failure, FailureKind, StopRequested, TokensArrived
from services.conductor.session import NewTokens, Session, error_of, failure_of, finish_of

log = get_logger(__name__)


QUEUE_MESSAGES = 8192
"""Starts and cancels waiting to be written; a decode instance that lets them grow beyond it does not read at all."""


WRITE_TIMEOUT_S = 10.0


SILENCE_S = 1.0
"""A stream with sequences that says nothing for so long, of an instance that does not answer on the same connection
either, is given up: the way there is cut, although the instance may go on reporting."""


class SequenceSubscriber(Protocol):
    """Follows one request's sequences."""

    def tokens(self, new: NewTokens) -> bool:
        """Takes tokens; returns whether nothing more is to come."""

    def fail(self, error: MoonpoolError) -> None:
        """The sequence cannot go on."""


class _StepsCall(ClientStream[decode_pb2.StepsRequest, decode_pb2.StepsResponse]):
    """One call. Steps has no welcome: orders may follow the hello at once."""

    def __init__(
        self,
        channels: Channels,
        decode: kv_pb2.Instance,
        conductor: kv_pb2.Instance,
        on_message: Callable[[decode_pb2.StepsResponse], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        super().__init__(
            f"Steps of {decode.id}",
            lambda: DecodeServiceStub(channels.get(decode.address)).Steps(),
            decode_pb2.StepsRequest(hello=decode_pb2.StepsHello(conductor=conductor)),
            stall_s=WRITE_TIMEOUT_S,
            max_messages=QUEUE_MESSAGES,
        )
        self._on_message = on_message
        self._on_broken = on_broken

    def on_message(self, message: decode_pb2.StepsResponse, payload: memoryview) -> None:
        """Tokens and failures."""
        self._on_message(message)

    def on_broken(self, error: Exception) -> None:
        """Every sequence fails."""
        self._on_broken(error)


class StepsStream:
    """The stream to one incarnation of one decode instance; connects on first use and again after a break."""

    def __init__(
        self,
        channels: Channels,
        decode: kv_pb2.Instance,
        conductor: kv_pb2.Instance,
        on_idle_break: Callable[[StepsStream], None] = lambda stream: None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Wire the stream; `on_idle_break` is called when it broke and no sequence is on it."""
        self.decode = decode
        self._channels = channels
        self._conductor = conductor
        self._on_idle_break = on_idle_break
        self._followers: dict[str, SequenceSubscriber] = {}
        self._call: _StepsCall | None = None
        self._pulse = ConnectionMonitor(lambda seconds: check_health(channels.get(decode.address), seconds), silence_s)
        self._waiting: MonitoredCall | None = None

    def __len__(self) -> int:
        """Sequences on the stream."""
        return len(self._followers)

    @property
    def is_open(self) -> bool:
        """Whether its call is under way."""
        return self._call is not None and self._call.error is None

    @property
    def unsent(self) -> int:
        """Starts and cancels that wait to be written; a broken stream has none."""
        return len(self._call.outbox) if self._call is not None else 0

    def subscribe(self, sequence_id: str, follower: SequenceSubscriber) -> None:
        """Let a sequence's tokens go to `follower`, until its end."""
        assert sequence_id not in self._followers, f"{sequence_id} is subscribed already"
        self._followers[sequence_id] = follower
        if self._waiting is None:
            self._waiting = self._pulse.begin(self._cut)

    def unsubscribe(self, sequence_id: str) -> None:
        """End it; unknown ids are fine."""
        self._followers.pop(sequence_id, None)
        self._rest()

    def _rest(self) -> None:
        """Nothing is waited for when no sequence is on the stream."""
        if self._waiting is not None and not self._followers:
            self._pulse.end(self._waiting)
            self._waiting = None

    def _cut(self) -> None:
        self.fail(StreamBroken(f"{self.decode.id} does not answer"))

    def start(
        self,
        sequence_id: str,
        target: kv_pb2.TransferTarget,
        first_tokens: Sequence[int],
        log_probabilities: Sequence[float] = (),
        logprobs: Logprobs | None = None,
        known: Sequence[Sequence[int]] = (),
        *,
        compute: bool = False,
        gather: bool = False,
    ) -> None:
        """Tell decode each answer's first token, or for beams the candidates: with them they may join the batch.

        Of each answer, tokens behind the first one may be `known` too.

        With `compute` there is none: decode computes the prompt. With `gather` nobody waits for single tokens.
        """
        start = decode_pb2.StartSequence(
            request_id=sequence_id,
            transfer_id=target.transfer_id,
            generation=target.generation,
            first_token_id=first_tokens[0] if first_tokens else 0,
            further_token_ids=first_tokens[1:],
            log_probabilities=log_probabilities,
            logprobs=None if logprobs is None else logprobs_to_proto(logprobs),
            compute_prompt=compute,
            known_token_ids=known[0] if known else (),
            further_known=[decode_pb2.KnownTokens(token_ids=it) for it in known[1:]],
            gather=gather,
        )
        self._send(decode_pb2.StepsRequest(start=start))

    def resume(self, message: decode_pb2.ResumeSequence) -> None:
        """Ask decode for a sequence that was another conductor's."""
        self._send(decode_pb2.StepsRequest(resume=message))

    def cancel(self, sequence_id: str, target: kv_pb2.TransferTarget, choice: int | None = None) -> None:
        """Tell decode that a sequence, or the promise for it, is no longer wanted; or one of its answers."""
        cancel = decode_pb2.CancelSequence(
            request_id=sequence_id, transfer_id=target.transfer_id, generation=target.generation, choice=choice
        )
        self._send(decode_pb2.StepsRequest(cancel=cancel))

    def open(self) -> None:
        """Let the stream be there: while it is, decode keeps what it has promised to this conductor."""
        self._connected()

    def fail(self, error: MoonpoolError) -> None:
        """Break the stream, because the instance is lost."""
        if self._call is not None and self._call.error is None:
            self._call.break_(error)
        else:
            self._broken(error)

    async def aclose(self) -> None:
        """End the stream; may be called again."""
        call = self._call
        self.fail(StreamBroken("the conductor is closing"))
        await self._pulse.aclose()
        if call is not None:
            await call.aclose()

    def _send(self, message: decode_pb2.StepsRequest) -> None:
        try:
            self._connected().outbox.post(message)
        except StreamBroken:
            self.fail(StreamBroken(f"{self.decode.id} does not read its Steps stream"))

    def _connected(self) -> _StepsCall:
        if self._call is None or self._call.error is not None:
            self._call = _StepsCall(self._channels, self.decode, self._conductor, self._tell, self._broken)
            self._call.begin()
        return self._call

    def _broken(self, error: Exception) -> None:
        followers, self._followers = self._followers, {}
        self._rest()
        failure = error if isinstance(error, MoonpoolError) else StreamBroken(str(error))
        for follower in followers.values():
            follower.fail(failure)
        if followers:
            log.warning("steps stream broken", decode=self.decode.id, sequences=len(followers), error=str(error))
        self._on_idle_break(self)

    def _tell(self, response: decode_pb2.StepsResponse) -> None:
        self._pulse.heard()
        for tokens in response.tokens:
            self._hand_on(tokens)
        for failed in response.failed:
            follower = self._followers.pop(failed.request_id, None)
            if follower is not None:
                kind = TransferFailed if failed.transfer else StreamBroken
                follower.fail(kind(f"{self.decode.id} cannot go on: {failed.reason}"))
        for fenced in response.fenced:
            follower = self._followers.pop(fenced.request_id, None)
            if follower is not None:
                follower.fail(InvalidRequest(FENCE_FIELD, "another conductor has the request, by a higher count"))
        self._rest()

    def _hand_on(self, tokens: decode_pb2.SequenceTokens) -> None:
        reason, sequence_id = tokens.finish_reason, tokens.request_id
        follower = self._followers.get(sequence_id)
        if follower is None:
            return
        cancelled = reason == kv_pb2.FINISH_REASON_CANCELLED  # not by us: what we cancel has no follower any more
        told = kv_pb2.FINISH_REASON_UNSPECIFIED if cancelled else reason
        score = tokens.score if tokens.HasField("score") else None
        logprobs = logprobs_from_proto(tokens.logprobs) if tokens.HasField("logprobs") else None
        over = follower.tokens(NewTokens(tokens.choice, tokens.position, tokens.token_ids, told, score, logprobs))
        if over or cancelled:
            self._followers.pop(sequence_id, None)
        if cancelled:
            follower.fail(StreamBroken(f"{self.decode.id} cancelled the sequence"))


class StepsPool:
    """The streams to all decode instances; closed together."""

    def __init__(self, channels: Channels) -> None:
        """Start with none; `conductor` must be set before the first use."""
        self.conductor = kv_pb2.Instance(kind=kv_pb2.INSTANCE_KIND_CONDUCTOR)
        self._channels = channels
        self._streams: dict[tuple[str, int], StepsStream] = {}

    @property
    def sequences(self) -> int:
        """Sequences on all streams."""
        return sum(len(stream) for stream in self._streams.values())

    @property
    def unsent(self) -> int:
        """Messages that wait to be written, on all streams."""
        return sum(stream.unsent for stream in self._streams.values())

    def get(self, decode: kv_pb2.Instance) -> StepsStream:
        """Return the stream to an incarnation of a decode instance."""
        key = decode.id, decode.incarnation
        if key not in self._streams:
            self._streams[key] = StepsStream(self._channels, decode, self.conductor, self._forget)
        return self._streams[key]

    def left(self, decode: kv_pb2.Instance) -> None:
        """The instance has left the cluster in order: sequences on it may end, an idle stream is ended."""
        stream = self._streams.get((decode.id, decode.incarnation))
        if stream is not None and not len(stream):
            stream.fail(StreamBroken(f"{decode.id} has left"))

    def lost(self, decode: kv_pb2.Instance) -> None:
        """The instance is silent: its sequences fail now."""
        stream = self._streams.get((decode.id, decode.incarnation))
        if stream is not None:
            stream.fail(StreamBroken(f"{decode.id} is lost"))

    async def aclose(self) -> None:
        """End all streams."""
        await asyncio.gather(*(stream.aclose() for stream in list(self._streams.values())))

    def _forget(self, stream: StepsStream) -> None:
        key = stream.decode.id, stream.decode.incarnation
        if self._streams.get(key) is stream and not len(stream) and not stream.is_open:
            del self._streams[key]


class SequenceSubscription:
    """Follows one request: tokens go to its answers, their number to the core. No token is lost or doubled."""

    def __init__(
        self,
        io: int,
        serving: Session,
        post: Callable[[Event], None],
        end: Callable[..., None],
        stop: Callable[[int], None],
    ) -> None:
        self._io = io
        self._serving = serving
        self._post = post
        self._end = end
        self._stop = stop
        self._going = set(range(len(serving.answer.choices)))  # answers that decode has not ended
        self._spoken = False

    def tokens(self, new: NewTokens) -> bool:
        """See `Follower.tokens`. Tokens known already are dropped, a gap is a failure."""
        try:
            self._taken(new.choice, self._serving.tokens(new), new.reason)
        except StreamBroken as error:
            self._end(failure_of(error), tell=True)
            return True
        except Exception:
            end_untold(self._serving, self._post)
            return True
        return not self._going

    def _taken(self, choice: int, count: int, reason: kv_pb2.FinishReason.ValueType) -> None:
        """An answer has taken so many tokens."""
        answer = self._serving.answer
        if reason:
            self._going.discard(choice)
        elif count and answer.choices[choice].finish and not answer.finish:
            self._stop(choice)
        finish = finish_of(answer.finish)
        if count or finish or not self._spoken:
            self._spoken = True
            self._post(TokensArrived(self._io, count, finish, known=not self._going))
        if not self._going:
            self._end(None, tell=False)

    def stop_complete(self) -> None:
        """Answers that are complete, from an earlier placement, need not be generated to their end."""
        for choice in self._serving.answer.choices:
            if choice.finish:
                self._stop(choice.index)

    def fail(self, error: MoonpoolError) -> None:
        """The sequence cannot go on."""
        self._end(failure_of(error), tell=False)


def end_untold(serving: Session, post: Callable[[Event], None]) -> None:
    """Tokens cannot be told, for a defect of ours that is being handled: their request ends, and no other one.

    It is not placed anew: which of the tokens were taken is not certain, so what follows could be wrong.
    """
    log.exception("tokens cannot be told: the request ends", request=serving.ask.id)
    failure = Failure(FailureKind.INTERNAL, "a defect: the conductor cannot tell tokens of this answer")
    try:
        post(StopRequested(serving.ask.number, failure))
    except Exception:
        log.exception("a request cannot be ended", request=serving.ask.id)
        serving.outgoing.end(error_of(failure))
