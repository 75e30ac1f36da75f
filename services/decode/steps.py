"""What one conductor is told of its sequences: tokens, failures, answers to cancels.

Owns the messages between the step loop and one Steps stream. A conductor that reads slowly gets fewer, larger messages:
what waits is merged, so that memory is bounded by what its admitted sequences may generate at all. Knows nothing of
batches or blocks.
"""

import asyncio

from moonpool.v1 import decode_pb2, kv_pb2

MAX_ANSWERS = 4096
"""Failures and answers to cancels that wait at most; the conductor's next message is read when there is room again."""


class Subscriber:
    """One conductor's Steps stream, from the side that has something to tell."""

    def __init__(self, conductor: kv_pb2.Instance) -> None:
        self.conductor = conductor
        self._tokens: dict[str, decode_pb2.SequenceTokens] = {}
        self._rest = decode_pb2.StepsResponse()
        self._wake = asyncio.Event()
        self._read = asyncio.Event()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Sequences and answers that were not sent yet."""
        rest = self._rest
        return len(self._tokens) + len(rest.tokens) + len(rest.failed) + len(rest.cancelled)

    def tokens(
        self,
        request_id: str,
        position: int,
        token_ids: list[int],
        reason: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED,
    ) -> None:
        """New tokens of one sequence; sent at the next `flush`."""
        waiting = self._tokens.get(request_id)
        if waiting is None:
            waiting = decode_pb2.SequenceTokens(request_id=request_id, position=position)
            self._tokens[request_id] = waiting
        assert waiting.position + len(waiting.token_ids) == position, "tokens of a sequence come in order"
        waiting.token_ids.extend(token_ids)
        waiting.finish_reason = reason
        if reason:
            self._settle(request_id)

    def failed(self, request_id: str, reason: str) -> None:
        """A sequence cannot go on."""
        self._settle(request_id)
        self._rest.failed.add(request_id=request_id, reason=reason)
        self.flush()

    def cancelled(self, request_id: str, outcome: kv_pb2.CancelOutcome.ValueType) -> None:
        """Answer to a cancel. Tokens of the sequence that wait are not sent any more."""
        if outcome != kv_pb2.CANCEL_OUTCOME_UNKNOWN:
            self._tokens.pop(request_id, None)
        self._rest.cancelled.add(request_id=request_id, outcome=outcome)
        self.flush()

    def _settle(self, request_id: str) -> None:
        """Tokens that wait are the last of their sequence: what else comes under this id is another one's."""
        if request_id in self._tokens:
            self._rest.tokens.append(self._tokens.pop(request_id))

    async def room(self) -> None:
        """Waits while too many answers were not read: whoever does not read is not listened to either."""
        while len(self._rest.failed) + len(self._rest.cancelled) >= MAX_ANSWERS and not self._closed:
            self._read.clear()
            await self._read.wait()

    def flush(self) -> None:
        """A step is over: what waits may go."""
        if self.waiting:
            self._wake.set()

    def close(self) -> None:
        """Nothing more will come; `next` still gives what waits."""
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
