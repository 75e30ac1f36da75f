"""Tokens of one attempt that have come from its instances and are not handed on yet.

No token is lost or doubled. Tokens that come faster than the client reads are gathered, up to the answer's length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moonpool.errors import MoonpoolError, StreamBroken
from moonpool.v1 import kv_pb2


class Inbox:
    """Tokens from a position on, then an end or a failure."""

    def __init__(self, position: int, limit: int) -> None:
        """Expect the token at `position` next, and none at or beyond `limit`."""
        self._next = position
        self._limit = limit
        self._tokens: list[int] = []
        self._finish: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED
        self._failure: MoonpoolError | None = None
        self._changed = asyncio.Event()

    @property
    def position(self) -> int:
        """Position of the token expected next."""
        return self._next

    @property
    def closed(self) -> bool:
        """Nothing more is taken."""
        return self._failure is not None or bool(self._finish)

    def tokens(self, position: int, token_ids: Sequence[int]) -> None:
        """Take tokens; those known already are dropped, a gap is a failure."""
        if self.closed:
            return
        if position > self._next:
            self.fail(StreamBroken(f"tokens {self._next} to {position - 1} were lost"))
            return
        new = token_ids[self._next - position :][: self._limit - self._next]
        self._tokens.extend(new)
        self._next += len(new)
        self._changed.set()

    def finish(self, reason: kv_pb2.FinishReason.ValueType) -> None:
        """No more tokens will come: the answer is complete."""
        if not self.closed:
            self._finish = reason
            self._changed.set()

    def fail(self, error: MoonpoolError) -> None:
        """No more tokens will come from this attempt; those that came are still handed on."""
        if not self.closed:
            self._failure = error
            self._changed.set()

    async def take(self) -> tuple[list[int], kv_pb2.FinishReason.ValueType]:
        """Wait for news: tokens, and with the last of them the reason of the end.

        The caller bounds the wait.

        Raises:
            MoonpoolError: the attempt failed and all its tokens were taken.
        """
        while not self._tokens and not self.closed:
            self._changed.clear()
            await self._changed.wait()
        tokens, self._tokens = self._tokens, []
        if self._failure is not None and not tokens:
            raise self._failure
        return tokens, self._finish
