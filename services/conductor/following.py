"""Follows a request's sequences at decode: their tokens go to its answers, and their number to the core."""

from collections.abc import Callable

from moonpool.errors import MoonpoolError, StreamBroken
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2
from services.conductor.answer import NewTokens
from services.conductor.core.failures import Failure, Kind
from services.conductor.core.messages import Event, Stopped, Tokens
from services.conductor.serving import Serving
from services.conductor.translate import error_of, failure_of, finish_of

log = get_logger(__name__)


class Following:
    """Follows one request: tokens go to its answers, their number to the core. No token is lost or doubled."""

    def __init__(
        self,
        io: int,
        serving: Serving,
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
            self._post(Tokens(self._io, count, finish, known=not self._going))
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


def end_untold(serving: Serving, post: Callable[[Event], None]) -> None:
    """Tokens cannot be told, for a defect of ours that is being handled: their request ends, and no other one.

    It is not placed anew: which of the tokens were taken is not certain, so what follows could be wrong.
    """
    log.exception("tokens cannot be told: the request ends", request=serving.ask.id)
    failure = Failure(Kind.INTERNAL, "a defect: the conductor cannot tell tokens of this answer")
    try:
        post(Stopped(serving.ask.number, failure))
    except Exception:
        log.exception("a request cannot be ended", request=serving.ask.id)
        serving.outgoing.end(error_of(failure))
