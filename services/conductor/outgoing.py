"""The queue of messages to one client, in order; those that wait are merged.

Tokens that come faster than the client reads are gathered, up to the answer's length; all of them where it wants the
answer whole.
"""

import asyncio
from collections import deque

from moonpool.errors import MoonpoolError
from moonpool.v1 import conductor_pb2


class Outgoing:
    """One client's messages. The end, or a failure, comes after the last message.

    With `whole` nobody is woken for tokens.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._messages: deque[conductor_pb2.GenerateResponse] = deque()
        self._waiting: dict[
            int, conductor_pb2.GenerateResponse
        ] = {}  # by choice: the last of `_messages`, may still grow
        self._changed = asyncio.Event()
        self._ended = False
        self._failure: MoonpoolError | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will be told."""
        return self._ended

    def placed(self, placed: conductor_pb2.Placed) -> None:
        """The request is placed."""
        self._waiting.clear()
        self._put(conductor_pb2.GenerateResponse(placed=placed))

    def prompt_logprobs(self, scored: conductor_pb2.PromptLogprobs) -> None:
        """The prompt's log probabilities are known."""
        self._put(conductor_pb2.GenerateResponse(prompt_logprobs=scored))

    def delta(self, delta: conductor_pb2.TokenDelta | None) -> None:
        """Tokens and text; None for nothing."""
        if delta is None:
            return
        last = self._waiting.get(delta.choice)
        if last is not None:
            last.delta.token_ids.extend(delta.token_ids)
            last.delta.text += delta.text
            if delta.HasField("logprobs"):
                last.delta.logprobs.MergeFrom(delta.logprobs)
            return
        self._waiting[delta.choice] = conductor_pb2.GenerateResponse(delta=delta)
        self._put(self._waiting[delta.choice], at_once=not self._whole)

    def finished(self, finished: conductor_pb2.Finished) -> None:
        """The answer is complete; nothing follows."""
        self._put(conductor_pb2.GenerateResponse(finished=finished))
        self.end()

    def end(self, failure: MoonpoolError | None = None) -> None:
        """Nothing follows but the failure."""
        self._ended, self._failure = True, failure
        self._changed.set()

    def drop(self) -> None:
        """Another call tells the client all of it: nothing follows, nor what waits."""
        self._messages.clear()
        self._waiting.clear()
        self.end()

    async def next(self) -> conductor_pb2.GenerateResponse | None:
        """The next message, None after the last.

        Raises:
            MoonpoolError: the failure.
        """
        while not self._messages:
            if self._ended:
                break
            self._changed.clear()
            await self._changed.wait()
        else:
            message = self._messages.popleft()
            if self._waiting.get(message.delta.choice) is message:
                del self._waiting[message.delta.choice]
            return message
        if self._failure is not None:
            raise self._failure
        return None

    def _put(self, message: conductor_pb2.GenerateResponse, *, at_once: bool = True) -> None:
        self._messages.append(message)
        if at_once:
            self._changed.set()
