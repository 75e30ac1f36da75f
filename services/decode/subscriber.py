"""What one conductor is sent on its Steps stream: tokens, failures, answers to cancels.

A conductor that reads slowly gets fewer, larger messages: waiting tokens of a sequence are merged, so memory is bounded
by what its admitted sequences may generate.
"""

import asyncio

from moonpool.contracts import logprobs_to_proto
from moonpool.logprobs import Logprobs
from moonpool.v1 import decode_pb2, kv_pb2

MAX_ANSWERS = 4096
"""Failures, and answers to cancels and resumes, that wait at most.

The conductor's next message is read when there is room again.
"""


class Subscriber:
    """The sending side of one conductor's Steps stream."""

    def __init__(self, conductor: kv_pb2.Instance) -> None:
        self.conductor = conductor
        self._tokens: dict[tuple[str, int], decode_pb2.SequenceTokens] = {}  # by request and choice
        self._rest = decode_pb2.StepsResponse()
        self._wake = asyncio.Event()
        self._read = asyncio.Event()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Sequences and answers that were not sent yet."""
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
    ) -> None:
        """New tokens of one of a request's answers; sent at the next `flush`. A hypothesis comes whole, scored."""
        waiting = self._tokens.get((request_id, choice))
        if waiting is None:
            waiting = decode_pb2.SequenceTokens(request_id=request_id, position=position, choice=choice, score=score)
            self._tokens[request_id, choice] = waiting
        assert waiting.position + len(waiting.token_ids) == position, "tokens of a sequence come in order"
        waiting.token_ids.extend(token_ids)
        if score is not None:
            waiting.score = score
        if logprobs is not None:
            waiting.logprobs.MergeFrom(logprobs_to_proto(logprobs))
        waiting.finish_reason = reason
        if reason:
            self._rest.tokens.append(self._tokens.pop((request_id, choice)))

    def failed(self, request_id: str, reason: str, *, transfer: bool = False) -> None:
        """A request cannot go on; `transfer`: because its prompt's KV has not come whole."""
        self._rest.tokens.extend(self._take(request_id))
        self._rest.failed.add(request_id=request_id, reason=reason, transfer=transfer)
        self.flush()

    def cancelled(self, request_id: str, outcome: kv_pb2.CancelOutcome.ValueType) -> None:
        """Answer to a cancel. Waiting tokens of the request are dropped."""
        if outcome != kv_pb2.CANCEL_OUTCOME_UNKNOWN:
            self.forget(request_id)
        self._rest.cancelled.add(request_id=request_id, outcome=outcome)
        self.flush()

    def fenced(self, request_id: str) -> None:
        """Another conductor has the request. Waiting tokens of it are dropped."""
        self.forget(request_id)
        self._rest.fenced.add(request_id=request_id)
        self.flush()

    def forget(self, request_id: str) -> None:
        """Drops waiting tokens of a request."""
        self._take(request_id)

    def _take(self, request_id: str) -> list[decode_pb2.SequenceTokens]:
        """Closes the request's waiting tokens: later tokens under this id belong to another request."""
        return [self._tokens.pop(key) for key in list(self._tokens) if key[0] == request_id]

    @property
    def _answers(self) -> int:
        rest = self._rest
        return len(rest.failed) + len(rest.cancelled) + len(rest.fenced)

    async def room(self) -> None:
        """Waits while too many answers are unread, so that no further message of this conductor is read."""
        while self._answers >= MAX_ANSWERS and not self._closed:
            self._read.clear()
            await self._read.wait()

    def flush(self) -> None:
        """Lets waiting messages go; called after a step."""
        if self.waiting:
            self._wake.set()

    def close(self) -> None:
        """Ends the stream; `next` still returns what waits."""
        self._closed = True
        self._wake.set()
        self._read.set()

    async def next(self) -> decode_pb2.StepsResponse | None:
        """The next message, None after the last."""
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


def identity(conductor: kv_pb2.Instance) -> str:
    """A conductor's name for the core; "" when it does not say who it is."""
    return f"{conductor.id}/{conductor.incarnation}" if conductor.id else ""
