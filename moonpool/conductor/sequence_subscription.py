"""Tokens of one sequence, on their way from decode to a request."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.base.errors import MoonpoolError, StreamBroken
from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.core.events import CompletionReason, Event, PromptComputed, StopRequested, TokensArrived
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.decode_streams import NewTokens
from moonpool.conductor.generate_stream import GenerateStream
from moonpool.conductor.proto_conversion import error_of, failure_of, finish_of, prefill_measurements
from moonpool.v1 import kv_pb2, prefill_pb2

log = get_logger(__name__)
COUNT_S = 0.25
"""The core hears at most so often how many tokens have come, in seconds: clients do not wait for the core."""


class SequenceSubscription:
    """One sequence's tokens on their way to the request's stream, and their number to the core: none lost or doubled.

    The first tokens and the last ones are told at once; between them the core hears of several at a time. While a
    request moves, two sequences give tokens: the request knows which the core has heard of.

    Args:
        io: the call's number at the core.
        stream: the request.
        post: hands an event to the core.
        end: ends the call with a result; with `cancel` decode does not know the end yet.
        stop: stops one choice at decode.
        clock: seconds.
    """

    def __init__(
        self,
        io: int,
        sequence: str,
        stream: GenerateStream,
        post: Callable[[Event], None],
        end: Callable[..., None],
        stop: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self._io = io
        self._sequence = sequence
        self._stream = stream
        self._post = post
        self._end = end
        self._stop = stop
        self._clock, self._began = clock, clock()
        self._running = set(range(len(stream.choices)))  # choices that decode has not ended
        self._told_at = float("-inf")

    def add_tokens(self, new: NewTokens) -> bool:
        """Take tokens; see `SequenceSubscriber`. Known tokens are dropped; a gap ends the call with a failure."""
        try:
            if new.prompt is not None:
                self._prompt_computed(new.prompt)
            self._added(new.choice, self._stream.add_tokens(new, self._sequence), new.reason)
        except StreamBroken as error:
            self._failed(error, cancel=True)
            return True
        except Exception:
            end_after_defect(self._stream, self._post)
            return True
        return not self._running

    def _prompt_computed(self, first: prefill_pb2.FirstToken) -> None:
        """The instance has computed the prompt, in the time since the start."""
        stream = self._stream
        keys = stream.sequence_spec(self._sequence).block_keys if stream.sequence == self._sequence else b""
        how = prefill_measurements(first, keys, self._clock() - self._began)
        stream.add_prompt(first, self._sequence)
        self._post(PromptComputed(self._io, how))

    def _added(self, choice: int, count: int, reason: kv_pb2.FinishReason.ValueType) -> None:
        """A choice has `count` more tokens."""
        stream = self._stream
        if reason:
            self._running.discard(choice)
        elif count and stream.choices[choice].finish and not stream.finish:
            self._stop(choice)
        stream.untold += count
        if reason or stream.choices[choice].finish or self._clock() - self._told_at >= COUNT_S:
            self._tell(finish_of(stream.finish) if stream.choices[choice].finish else None)
        if not self._running:
            self._end(None, cancel=False)

    def _tell(self, finish: CompletionReason | None = None) -> None:
        """Tell the core of the tokens that it has not heard of."""
        first = self._told_at == float("-inf")
        if self._stream.untold or finish or first:
            count, self._stream.untold, self._told_at = self._stream.untold, 0, self._clock()
            self._post(TokensArrived(self._io, count, finish, known=not self._running))

    def stop_complete(self) -> None:
        """Stop the choices at decode that are complete from an earlier placement."""
        for choice in self._stream.choices:
            if choice.finish:
                self._stop(choice.index)

    def fail(self, error: MoonpoolError) -> None:
        self._failed(error, cancel=False)

    def _failed(self, error: MoonpoolError, *, cancel: bool) -> None:
        """End the call, after the tokens that came before."""
        if self._stream.untold:
            self._tell()
        self._end(failure_of(error), cancel=cancel)


def end_after_defect(stream: GenerateStream, post: Callable[[Event], None]) -> None:
    """End only the request whose tokens met a defect (the exception being handled).

    The request is not placed again: which of the tokens were taken is not certain.
    """
    log.exception("tokens cannot be sent: the request ends", request=stream.spec.id)
    failure = Failure(FailureKind.INTERNAL, "a defect: the conductor cannot send tokens of this request")
    try:
        post(StopRequested(stream.spec.number, failure))
    except Exception:
        log.exception("a request cannot be ended", request=stream.spec.id)
        stream.outgoing.end(error_of(failure))
