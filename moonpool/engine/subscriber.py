"""The sending side of a conductor's Steps stream, and how the conductor's messages are read. Torch-free.

A conductor that reads slowly gets fewer, larger messages: a sequence's waiting tokens are merged, so memory is bounded
by what the admitted sequences may generate.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence

from moonpool.base.contracts import logprobs_to_proto
from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.base.logprobs import Logprobs
from moonpool.base.rpc.stream_writes import write_each
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.send_queue import STALL_S
from moonpool.base.transport.server_stream import ServerStream, Write
from moonpool.v1 import decode_pb2, kv_pb2, prefill_pb2

log = get_logger(__name__)
Order = decode_pb2.StartSequence | decode_pb2.CancelSequence | decode_pb2.ResumeSequence
"""What a conductor asks of one request."""
MAX_CANCEL_ANSWERS = 4096
"""Failures, and answers to cancels and resumes, that wait at most.

The conductor's next message is read when there is room again.
"""


class Subscriber:
    """The sending side of one conductor's Steps stream: a message queue, merged while waiting."""

    def __init__(self, conductor: kv_pb2.Instance) -> None:
        self.conductor = conductor
        self._tokens: dict[tuple[str, int], decode_pb2.SequenceTokens] = {}  # by request and choice
        self._rest = decode_pb2.StepsResponse()
        self._wake = asyncio.Event()
        self._read = asyncio.Event()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Sequences and answers not sent yet."""
        return len(self._tokens) + len(self._rest.tokens) + self._answers

    def tokens(
        self,
        request_id: str,
        position: int,
        token_ids: list[int],
        reason: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED,
        choice: int = 0,
        score: float | None = None,
        logprobs: Logprobs | None = None,
        prompt: prefill_pb2.FirstToken | None = None,
    ) -> None:
        """Queue one answer's new tokens, sent at the next `flush`. A hypothesis comes whole, with the score.

        `prompt`: how the prompt was computed here, with the first answer's first token.
        """
        waiting = self._tokens.get((request_id, choice))
        if waiting is None:
            waiting = decode_pb2.SequenceTokens(request_id=request_id, position=position, choice=choice, score=score)
            self._tokens[request_id, choice] = waiting
        assert waiting.position + len(waiting.token_ids) == position, "tokens of a sequence come in order"
        waiting.token_ids.extend(token_ids)
        if score is not None:
            waiting.score = score
        if prompt is not None:
            waiting.prompt.CopyFrom(prompt)
        if logprobs is not None:
            waiting.logprobs.MergeFrom(logprobs_to_proto(logprobs))
        waiting.finish_reason = reason
        if reason:
            self._rest.tokens.append(self._tokens.pop((request_id, choice)))

    def failed(self, request_id: str, reason: str, *, transfer: bool = False) -> None:
        """A request cannot continue; `transfer`: because the prompt's KV has not arrived whole."""
        self._rest.tokens.extend(self._take(request_id))
        self._rest.failed.add(request_id=request_id, reason=reason, transfer=transfer)
        self.flush()

    def cancelled(self, request_id: str, outcome: kv_pb2.CancelOutcome.ValueType) -> None:
        """Answer a cancel. Queued tokens of the request are dropped."""
        if outcome != kv_pb2.CANCEL_OUTCOME_UNKNOWN:
            self.drop(request_id)
        self._rest.cancelled.add(request_id=request_id, outcome=outcome)
        self.flush()

    def fenced(self, request_id: str) -> None:
        """Another conductor has the request. Queued tokens of the request are dropped."""
        self.drop(request_id)
        self._rest.fenced.add(request_id=request_id)
        self.flush()

    def drop(self, request_id: str) -> None:
        """Drop queued tokens of a request."""
        self._take(request_id)

    def _take(self, request_id: str) -> list[decode_pb2.SequenceTokens]:
        """Take the request's queued tokens: later tokens under this id belong to another request."""
        return [self._tokens.pop(key) for key in list(self._tokens) if key[0] == request_id]

    @property
    def _answers(self) -> int:
        rest = self._rest
        return len(rest.failed) + len(rest.cancelled) + len(rest.fenced)

    async def wait_until_read(self) -> None:
        """Wait while too many answers are unread, so that no further message of this conductor is read."""
        while self._answers >= MAX_CANCEL_ANSWERS and not self._closed:
            self._read.clear()
            await self._read.wait()

    def flush(self) -> None:
        """Send queued messages; called after a step."""
        if self.waiting:
            self._wake.set()

    def close(self) -> None:
        """End the stream; `next` still returns queued messages."""
        self._closed = True
        self._wake.set()
        self._read.set()

    async def next(self) -> decode_pb2.StepsResponse | None:
        """Return the next message; None after the last."""
        while not self.waiting:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        message, self._rest = self._rest, decode_pb2.StepsResponse()
        self._read.set()
        message.tokens.extend(self._tokens.values())
        self._tokens.clear()
        self._wake.clear()
        if self._closed:
            self._wake.set()
        return message


def conductor_identity(conductor: kv_pb2.Instance) -> str:
    """Return a conductor's identity for the scheduler; "" without identity."""
    return f"{conductor.id}/{conductor.epoch}" if conductor.id else ""


def known_tokens(message: decode_pb2.StartSequence, answers: int) -> list[Sequence[int]]:
    """For each answer, the tokens known behind the first token."""
    further: list[Sequence[int]] = [known.token_ids for known in message.further_known]
    return [message.known_token_ids, *(further or [()] * (answers - 1))]


class SubscribedStream(ServerStream[decode_pb2.StepsRequest]):
    """A conductor's Steps stream: its orders, and the answers of a `Subscriber`, which `on_hello` makes."""

    _subscriber: Subscriber

    @abstractmethod
    def carry_out(self, message: decode_pb2.StepsRequest) -> None:
        """Carry out one order: start, cancel or resume."""

    @abstractmethod
    def give_up(self, order: Order, reason: str) -> None:
        """End the request of an order that met a defect, and tell the conductor so."""

    def on_message(self, message: decode_pb2.StepsRequest, payload: memoryview) -> None:
        """Take one order. A defect ends the order's request only."""
        kind = message.WhichOneof("message")
        if kind not in ("start", "cancel", "resume"):
            raise InvalidRequest("message", f"{kind or 'nothing'} has no place in the middle of a stream")
        try:
            self.carry_out(message)
        except Exception:
            order: Order = getattr(message, kind)
            log.exception(
                "an order cannot be carried out: the order's request ends", order=kind, request=order.request_id
            )
            self.give_up(order, f"a defect: its {kind} cannot be carried out")

    async def room(self) -> None:
        """Wait while too many answers were not read."""
        await self._subscriber.wait_until_read()

    async def write_answers(self, write: Write) -> None:
        """Messages as they come, those that wait merged."""
        try:
            await write_each(write, self._subscriber.next, STALL_S)
        except TimeoutError:
            raise Unavailable(f"{self._subscriber.conductor.id} read no message for {STALL_S:g} s") from None

    def on_closing(self) -> None:
        """What waits still goes out."""
        self.finish()

    def finish(self) -> None:
        """No more messages will wait."""
        self._subscriber.close()
