"""What one conductor is told of its sequences: tokens, failures, answers to cancels.

Owns the messages between the step loop and one Steps stream. A conductor that reads slowly gets fewer, larger messages:
what waits is merged, so that memory is bounded by what its admitted sequences may generate at all. Knows nothing of
batches or blocks.
"""

import asyncio

from moonpool.v1 import decode_pb2, kv_pb2


class Subscriber:
    """One conductor's Steps stream, from the side that has something to tell."""

    def __init__(self, conductor: kv_pb2.Instance) -> None:
        self.conductor = conductor
        self._tokens: dict[str, decode_pb2.SequenceTokens] = {}
        self._rest = decode_pb2.StepsResponse()
        self._wake = asyncio.Event()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Sequences and answers that were not sent yet."""
        return len(self._tokens) + len(self._rest.failed) + len(self._rest.cancelled)

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

    def failed(self, request_id: str, reason: str) -> None:
        """A sequence cannot go on."""
        self._rest.failed.add(request_id=request_id, reason=reason)
        self.flush()

    def cancelled(self, request_id: str, outcome: kv_pb2.CancelOutcome.ValueType) -> None:
        """Answer to a cancel. Tokens of the request that wait are not sent any more."""
        self._tokens.pop(request_id, None)
        self._rest.cancelled.add(request_id=request_id, outcome=outcome)
        self.flush()

    def flush(self) -> None:
        """A step is over: what waits may go."""
        if self.waiting:
            self._wake.set()

    def close(self) -> None:
        """Nothing more will come; `next` still gives what waits."""
        self._closed = True
        self._wake.set()

    async def next(self) -> decode_pb2.StepsResponse | None:
        """The next message, None after the last."""
        while not self.waiting:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        message, self._rest = self._rest, decode_pb2.StepsResponse()
        message.tokens.extend(self._tokens.values())
        self._tokens.clear()
        self._wake.clear()
        if self._closed:
            self._wake.set()
        return message
