"""Messages to one client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from moonpool.base.errors import MoonpoolError
from moonpool.v1 import conductor_pb2

MAX_MERGED_TOKENS = 8192
"""Tokens in one message: with log probabilities some 150 bytes each, and a message has 8 MiB at most."""
WHOLE_EVERY_S = 1.0
"""Seconds between messages to a client that wants the answer whole: a client that leaves has paid for all but these."""


class OutputQueue:
    """Messages to one client. The end, or a failure, comes after the last message.

    With `whole`, tokens wait for the end, or for `WHOLE_EVERY_S`.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._messages: deque[conductor_pb2.GenerateResponse] = deque()
        self._due = 0  # of `_messages`, the first: the client gets them now
        # By choice, the last of `_messages`: more tokens are merged into them.
        self._growing: dict[int, conductor_pb2.GenerateResponse] = {}
        self._changed = asyncio.Event()
        self._news: Callable[[], object] = _to_nobody
        self._timer: asyncio.TimerHandle | None = None  # of tokens that wait
        self._ended = False
        self._failure: MoonpoolError | None = None

    @property
    def ended(self) -> bool:
        """Whether no message will be added."""
        return self._ended

    def placed(self, placed: conductor_pb2.Placed) -> None:
        self._growing.clear()
        self._put(conductor_pb2.GenerateResponse(placed=placed))

    def prompt_results(self, message: conductor_pb2.GenerateResponse) -> None:
        """The prompt's log probabilities or embedding are known."""
        self._put(message)

    def delta(self, delta: conductor_pb2.TokenDelta | None) -> None:
        """Tokens and text; None for no news."""
        if delta is None:
            return
        last = self._growing.get(delta.choice)
        if last is not None and len(last.delta.token_ids) < MAX_MERGED_TOKENS:
            last.delta.token_ids.extend(delta.token_ids)
            last.delta.text += delta.text
            last.delta.reason = delta.reason
            if delta.HasField("logprobs"):
                last.delta.logprobs.MergeFrom(delta.logprobs)
            return
        self._growing[delta.choice] = conductor_pb2.GenerateResponse(delta=delta)
        self._put(self._growing[delta.choice], at_once=not self._whole)

    def finished(self, finished: conductor_pb2.Finished) -> None:
        """The request is complete: the last message."""
        self._put(conductor_pb2.GenerateResponse(finished=finished))
        self.end()

    def end(self, failure: MoonpoolError | None = None) -> None:
        """End the queue, with the failure if there is one."""
        self._ended, self._failure = True, failure
        self._all_due()

    def drop(self) -> None:
        """End the queue without waiting messages: another call sends the client everything."""
        self._messages.clear()
        self._growing.clear()
        self.end()

    def listen(self, news: Callable[[], object]) -> None:
        """Call `news` now and whenever `take` may have something, or the queue has ended."""
        self._news = news
        news()

    def take(self) -> conductor_pb2.GenerateResponse | None:
        """Return the next message that is due, None if there is none now."""
        if not self._due:
            return None
        self._due -= 1
        message = self._messages.popleft()
        if self._growing.get(message.delta.choice) is message:
            del self._growing[message.delta.choice]
        return message

    def over(self) -> bool:
        """Return whether nothing more comes.

        Raises:
            MoonpoolError: the failure, behind the last message.
        """
        if not self._ended or self._due:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    async def next(self) -> conductor_pb2.GenerateResponse | None:
        """Return the next message, None after the last.

        Raises:
            MoonpoolError: the failure.
        """
        while (message := self.take()) is None:
            if self.over():
                return None
            self._changed.clear()
            await self._changed.wait()
        return message

    def _all_due(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = len(self._messages)
        self._changed.set()
        self._news()

    def _put(self, message: conductor_pb2.GenerateResponse, *, at_once: bool = True) -> None:
        self._messages.append(message)
        if at_once:
            self._all_due()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WHOLE_EVERY_S, self._all_due)


def _to_nobody() -> None:
    """Nobody listens."""
