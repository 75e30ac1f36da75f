"""Streams to decode instances: one `Steps` stream per instance, which carries all the instance's sequences.

If a stream breaks, all sequences on the stream fail with StreamBroken, and the next sequence opens a new stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moonpool.base.contracts import logprobs_from_proto, logprobs_to_proto
from moonpool.base.errors import InvalidRequest, MoonpoolError, StreamBroken, TransferFailed
from moonpool.base.frozen import frozen
from moonpool.base.logprobs import Logprobs
from moonpool.base.rpc.channels import Channels, check_health
from moonpool.base.rpc.connection_monitor import ConnectionMonitor, MonitoredCall
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.client_stream import ClientStream
from moonpool.conductor.core.failures import FENCE_FIELD
from moonpool.v1 import decode_pb2, kv_pb2, prefill_pb2
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub

log = get_logger(__name__)
QUEUE_MESSAGES = 8192
"""Most orders that wait to be written. If more wait, the decode instance does not read the stream."""

MAX_FORGOTTEN = 4096
"""Most cancels kept of a stream that broke; of more, the oldest are dropped, and decode's promises run out instead."""
MAX_LOST = 1024
"""Most instances without a stream for which cancels are kept: those that come under new names never ask for theirs."""
WRITE_TIMEOUT_S = 10.0

SILENCE_S = 1.0
"""A stream with sequences is checked after this silence: without an answer on the same connection, the stream is
broken. The instance may still report load on the instance's own connection.
"""


@frozen
class NewTokens:
    """One choice's new tokens, from an engine.

    Attributes:
        choice: number of the choice.
        position: the first token's position in the choice.
        reason: with the last tokens, why the choice ends.
        score: a deferred answer's score.
        logprobs: the tokens' log probabilities, if wanted.
        prompt: with the first answer's first tokens, how the prompt was computed there; None = elsewhere, or told.
    """

    choice: int
    position: int
    token_ids: Sequence[int]
    reason: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED
    score: float | None = None
    logprobs: Logprobs | None = None
    prompt: prefill_pb2.FirstToken | None = None


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """How a decode instance in the role both computes a prompt.

    Attributes:
        sources: where a prefix may be loaded from, best first.
        held_blocks: leading blocks that each kvstore of the reservation is believed to hold.
        delay_s: the prompt stands this many seconds behind its arrival.
    """

    sources: Sequence[prefill_pb2.PrefixSource] = ()
    held_blocks: Sequence[int] = ()
    delay_s: float = 0.0


PLAIN_PROMPT = PromptOrder()


class SequenceSubscriber(Protocol):
    """A receiver of one sequence's tokens."""

    def add_tokens(self, new: NewTokens) -> bool:
        """Take tokens; return whether the sequence is over."""

    def fail(self, error: MoonpoolError) -> None:
        """The sequence cannot go on."""


def _cancel_of(sequence_id: str, target: kv_pb2.TransferTarget, choice: int | None = None) -> decode_pb2.CancelSequence:
    return decode_pb2.CancelSequence(
        request_id=sequence_id, transfer_id=target.transfer_id, generation=target.generation, choice=choice
    )


class _StepsCall(ClientStream[decode_pb2.StepsRequest, decode_pb2.StepsResponse]):
    """One `Steps` call. There is no welcome: orders may follow the hello at once."""

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
        """Hand on tokens and failures."""
        self._on_message(message)

    def on_broken(self, error: Exception) -> None:
        """Fail every sequence."""
        self._on_broken(error)


class StepsStream:
    """The stream to one decode instance, for one epoch; connects on first use and again after a break."""

    def __init__(
        self,
        channels: Channels,
        decode: kv_pb2.Instance,
        conductor: kv_pb2.Instance,
        on_idle_break: Callable[[StepsStream], None] = lambda stream: None,
        silence_s: float = SILENCE_S,
        waited_s: Callable[[str], float] = lambda instance: 0.0,
        forgotten: dict[str, decode_pb2.CancelSequence] | None = None,
    ) -> None:
        """A stream that is not open yet.

        Args:
            channels: to the instances.
            decode: the instance at the other end.
            conductor: this end.
            on_idle_break: called after the stream broke and the sequences on the stream have failed.
            silence_s: seconds without a message after which the instance is checked.
            waited_s: seconds for which an instance has had no processor, by instance id.
            forgotten: cancels by sequence, from earlier streams to the same instance, with which this stream begins.
        """
        self._forgotten = {} if forgotten is None else forgotten
        self._targets: dict[str, kv_pb2.TransferTarget] = {}
        self._cancels: dict[str, decode_pb2.CancelSequence] = {}
        """Sent, and not answered."""
        self.decode = decode
        self._channels = channels
        self._conductor = conductor
        self._on_idle_break = on_idle_break
        self._subscribers: dict[str, SequenceSubscriber] = {}
        self._call: _StepsCall | None = None
        self._monitor = ConnectionMonitor(
            lambda seconds: check_health(channels.get(decode.address), seconds), silence_s, lambda: waited_s(decode.id)
        )
        self._monitored: MonitoredCall | None = None

    def __len__(self) -> int:
        """Sequences on the stream."""
        return len(self._subscribers)

    @property
    def is_open(self) -> bool:
        """Whether the stream's call is running."""
        return self._call is not None and self._call.error is None

    @property
    def unsent(self) -> int:
        """Orders that wait to be written; 0 for a broken stream."""
        return len(self._call.send_queue) if self._call is not None else 0

    def subscribe(self, sequence_id: str, subscriber: SequenceSubscriber, target: kv_pb2.TransferTarget) -> None:
        """Send tokens of a sequence, whose KV goes to `target`, to `subscriber`, until the sequence's end."""
        assert sequence_id not in self._subscribers, f"{sequence_id} is subscribed already"
        self._subscribers[sequence_id] = subscriber
        self._targets[sequence_id] = target
        if self._monitored is None:
            self._monitored = self._monitor.begin(self._on_silence)

    def unsubscribe(self, sequence_id: str) -> None:
        """End a subscription; unknown ids are ignored."""
        self._pop(sequence_id)
        self._stop_monitoring_if_idle()

    def _pop(self, sequence_id: str) -> SequenceSubscriber | None:
        self._targets.pop(sequence_id, None)
        return self._subscribers.pop(sequence_id, None)

    def _stop_monitoring_if_idle(self) -> None:
        """An idle stream may be silent."""
        if self._monitored is not None and not self._subscribers:
            self._monitor.end(self._monitored)
            self._monitored = None

    def _on_silence(self) -> None:
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
        order: PromptOrder = PLAIN_PROMPT,
        gather: bool = False,
    ) -> None:
        """Start a sequence at decode: the sequence may join the batch.

        Args:
            sequence_id: the id that engines see.
            target: the reservation.
            first_tokens: each choice's first token, or a deferred answer's candidates; empty with `compute`.
            log_probabilities: the candidates' log probabilities.
            logprobs: the first tokens' log probabilities, if wanted.
            known: for each choice, the known tokens after the first token.
            compute: decode computes the prompt and the first tokens.
            order: how, at an instance in the role both.
            gather: tokens may come in larger messages, as the client reads the answer at the end.
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
            further_known=[decode_pb2.KnownTokens(token_ids=tokens) for tokens in known[1:]],
            gather=gather,
            sources=order.sources,
            held_blocks=order.held_blocks,
            delay_s=order.delay_s,
        )
        self._send(decode_pb2.StepsRequest(start=start))

    def resume(self, message: decode_pb2.ResumeSequence) -> None:
        """Ask decode for a sequence of another conductor."""
        self._send(decode_pb2.StepsRequest(resume=message))

    def cancel(self, sequence_id: str, target: kv_pb2.TransferTarget, choice: int | None = None) -> None:
        """Cancel a sequence or the sequence's reservation at decode; with `choice`, a single choice in the sequence."""
        cancel = _cancel_of(sequence_id, target, choice)
        if choice is None:
            self._cancels[sequence_id] = cancel
        self._send(decode_pb2.StepsRequest(cancel=cancel))

    def open(self) -> None:
        """Open the stream if closed: decode keeps this conductor's reservations as long as the stream is open."""
        self._connected()

    def fail(self, error: MoonpoolError) -> None:
        """Break the stream: all sequences on the stream fail."""
        if self._call is not None and self._call.error is None:
            self._call.break_(error)
        else:
            self._broken(error)

    async def aclose(self) -> None:
        """End the stream. May be called twice."""
        call = self._call
        self.fail(StreamBroken("the conductor is closing"))
        await self._monitor.aclose()
        if call is not None:
            await call.aclose()

    def _send(self, message: decode_pb2.StepsRequest) -> None:
        try:
            self._connected().send_queue.post(message)
        except StreamBroken:
            self.fail(StreamBroken(f"{self.decode.id} does not read its Steps stream"))

    def _connected(self) -> _StepsCall:
        if self._call is None or self._call.error is not None:
            self._call = _StepsCall(self._channels, self.decode, self._conductor, self._on_message, self._broken)
            self._call.begin()
            forgotten = list(self._forgotten.values())
            self._forgotten.clear()
            for cancel in forgotten:
                self._cancels[cancel.request_id] = cancel
                self._call.send_queue.post(decode_pb2.StepsRequest(cancel=cancel))
        return self._call

    def _broken(self, error: Exception) -> None:
        subscribers, self._subscribers = self._subscribers, {}
        targets, self._targets = self._targets, {}
        # Orders on the way may be lost; what decode has promised would be kept while this conductor is there.
        self._forgotten |= self._cancels | {name: _cancel_of(name, target) for name, target in targets.items()}
        self._cancels.clear()
        for name in list(self._forgotten)[: max(0, len(self._forgotten) - MAX_FORGOTTEN)]:
            del self._forgotten[name]
        self._stop_monitoring_if_idle()
        failure = error if isinstance(error, MoonpoolError) else StreamBroken(str(error))
        for subscriber in subscribers.values():
            subscriber.fail(failure)
        if subscribers:
            log.warning("steps stream broken", decode=self.decode.id, sequences=len(subscribers), error=str(error))
        self._on_idle_break(self)

    def _on_message(self, response: decode_pb2.StepsResponse) -> None:
        self._monitor.heard()
        for cancelled in response.cancelled:
            self._cancels.pop(cancelled.request_id, None)
        for tokens in response.tokens:
            self._add_tokens(tokens)
        for failed in response.failed:
            subscriber = self._pop(failed.request_id)
            if subscriber is not None:
                kind = TransferFailed if failed.transfer else StreamBroken
                subscriber.fail(kind(f"{self.decode.id} cannot go on: {failed.reason}"))
        for fenced in response.fenced:
            subscriber = self._pop(fenced.request_id)
            if subscriber is not None:
                subscriber.fail(InvalidRequest(FENCE_FIELD, "another conductor has the request, by a higher count"))
        self._stop_monitoring_if_idle()

    def _add_tokens(self, tokens: decode_pb2.SequenceTokens) -> None:
        reason, sequence_id = tokens.finish_reason, tokens.request_id
        subscriber = self._subscribers.get(sequence_id)
        if subscriber is None:
            return
        cancelled = reason == kv_pb2.FINISH_REASON_CANCELLED  # not by us: a sequence we cancel has no subscriber
        reason = kv_pb2.FINISH_REASON_UNSPECIFIED if cancelled else reason
        score = tokens.score if tokens.HasField("score") else None
        logprobs = logprobs_from_proto(tokens.logprobs) if tokens.HasField("logprobs") else None
        prompt = tokens.prompt if tokens.HasField("prompt") else None
        new = NewTokens(tokens.choice, tokens.position, tokens.token_ids, reason, score, logprobs, prompt)
        over = subscriber.add_tokens(new)
        if over or cancelled:
            self._pop(sequence_id)
        if cancelled:
            subscriber.fail(StreamBroken(f"{self.decode.id} cancelled the sequence"))


class StepsPool:
    """The streams to all decode instances."""

    def __init__(self, channels: Channels, waited_s: Callable[[str], float] = lambda instance: 0.0) -> None:
        """A pool without streams. `conductor` must be filled in before the first use; `waited_s` as of a stream."""
        self._waited_s = waited_s
        self.conductor = kv_pb2.Instance(kind=kv_pb2.INSTANCE_KIND_CONDUCTOR)
        self._channels = channels
        self._streams: dict[tuple[str, int], StepsStream] = {}
        self._forgotten: dict[tuple[str, int], dict[str, decode_pb2.CancelSequence]] = {}

    @property
    def sequences(self) -> int:
        return sum(len(stream) for stream in self._streams.values())

    @property
    def unsent(self) -> int:
        """Orders that wait to be written, on all streams."""
        return sum(stream.unsent for stream in self._streams.values())

    def get(self, decode: kv_pb2.Instance) -> StepsStream:
        """Return the stream to a decode instance, for one epoch."""
        key = decode.id, decode.epoch
        if key not in self._streams:
            for other in [other for other in self._forgotten if other[0] == decode.id and other != key]:
                del self._forgotten[other]  # the instance has restarted
            forgotten = self._forgotten.setdefault(key, {})
            self._streams[key] = StepsStream(
                self._channels, decode, self.conductor, self._remove, waited_s=self._waited_s, forgotten=forgotten
            )
        return self._streams[key]

    def left(self, decode: kv_pb2.Instance) -> None:
        """The instance has left the cluster in order: sequences there may end; an idle stream is closed."""
        stream = self._streams.get((decode.id, decode.epoch))
        if stream is not None and not len(stream):
            stream.fail(StreamBroken(f"{decode.id} has left"))
        self._forgotten.pop((decode.id, decode.epoch), None)

    def lost(self, decode: kv_pb2.Instance) -> None:
        """The instance is lost: sequences there fail now."""
        stream = self._streams.get((decode.id, decode.epoch))
        if stream is not None:
            stream.fail(StreamBroken(f"{decode.id} is lost"))

    async def aclose(self) -> None:
        await asyncio.gather(*(stream.aclose() for stream in list(self._streams.values())))

    def _remove(self, stream: StepsStream) -> None:
        key = stream.decode.id, stream.decode.epoch
        if self._streams.get(key) is stream and not len(stream) and not stream.is_open:
            del self._streams[key]
            cancels = self._forgotten.pop(key, None)
            if cancels:
                self._forgotten[key] = cancels  # the last to be dropped
        lost = [other for other in self._forgotten if other not in self._streams]
        for other in lost[: max(0, len(lost) - MAX_LOST)]:
            del self._forgotten[other]
