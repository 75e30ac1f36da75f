"""Output of ended and parked requests, kept for takeovers (ADR 12)."""

from collections.abc import Iterator
from dataclasses import replace

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.engine.decode.core.actions import DropOutputLog
from moonpool.engine.decode.core.request import DecodeRequest
from moonpool.engine.decode.core.state import DecodeState

RETAINED_BYTES = 512
"""Bytes that retained output counts for beside the tokens and keys."""
TOKEN_BYTES = 4
KEY_BYTES = 32


@frozen
class RetainedOutput:
    """One request's output after the request has ended, or was parked.

    Attributes:
        until: time at which the output is dropped, seconds.
        bytes: size that counts in `log_bytes`.
        fence: fence of the last conductor that had the request.
        request: the parked request; None if the request has ended.
    """

    until: float
    bytes: int
    fence: int
    request: DecodeRequest | None = None


class OutputRetention:
    """Output of ended and parked requests, kept for takeovers; oldest first.

    Attributes:
        bytes: size of all output; beyond `DecodeSettings.log_bytes`, the oldest output is dropped.
    """

    def __init__(self, state: DecodeState) -> None:
        self._state = state
        self._outputs: dict[int, RetainedOutput] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def __iter__(self) -> Iterator[tuple[int, RetainedOutput]]:
        return iter(self._outputs.items())

    def get(self, number: int) -> RetainedOutput | None:
        """Return a request's output."""
        return self._outputs.get(number)

    def due(self) -> float | None:
        """Return when the oldest output is dropped."""
        return next(iter(self._outputs.values())).until if self._outputs else None

    @property
    def parked(self) -> list[DecodeRequest]:
        return [output.request for output in self._outputs.values() if output.request is not None]

    def keep_ended(self, request: DecodeRequest) -> None:
        """Keep an ended request's answers."""
        self._keep(request, RETAINED_BYTES + TOKEN_BYTES * request.answer_tokens + _logprob_bytes(request), None)

    def keep_parked(self, request: DecodeRequest) -> None:
        """Keep a parked request: tokens (as received, and as int32), log probabilities and keys."""
        size = RETAINED_BYTES + TOKEN_BYTES * _retained_tokens(request) + _logprob_bytes(request)
        size += KEY_BYTES * sum(len(sequence.keys) for sequence in request.sequences)
        self._keep(request, size, request)

    def set_fence(self, number: int, fence: int) -> None:
        """Note the higher fence of a conductor that reads an ended request's output, which is not kept longer."""
        self._outputs[number] = replace(self._outputs[number], fence=fence)

    def take(self, number: int) -> DecodeRequest:
        """Take a parked request out."""
        output = self._remove(number)
        assert output.request is not None, "the request has ended"
        return output.request

    def expire(self) -> None:
        """Drop output that is too old."""
        while self._outputs and (first := next(iter(self._outputs.items())))[1].until <= self._state.now:
            self._drop(first[0])

    def _keep(self, request: DecodeRequest, size: int, parked: DecodeRequest | None) -> None:
        until = self._state.now + self._state.settings.log_ttl_s
        self._outputs[request.id] = RetainedOutput(until, size, request.takeover.fence, parked)
        self.bytes += size
        while self.bytes > self._state.settings.log_bytes:
            self._drop(next(iter(self._outputs)))

    def _drop(self, number: int) -> None:
        self._remove(number)
        self._state.act(DropOutputLog(number))

    def _remove(self, number: int) -> RetainedOutput:
        output = self._outputs.pop(number)
        self.bytes -= output.bytes
        return output

    def check_invariants(self) -> None:
        """Assert that the bytes are right and within the limit, and that the oldest output is dropped first."""
        assert self.bytes == sum(output.bytes for output in self._outputs.values()) <= self._state.settings.log_bytes
        ends = [output.until for output in self._outputs.values()]
        assert ends == sorted(ends)

    def digest(self) -> bytes:
        """Return a hash of the outputs."""
        return digest_of(self._outputs)


def _retained_tokens(request: DecodeRequest) -> int:
    """Return tokens kept from a parked request: from each sequence, running or ended, with the prompt's."""
    tokens = sum(2 * sequence.tokens for sequence in request.sequences)
    if request.search is not None:
        search = request.search
        return tokens + len(search.kept) * (request.spec.prompt_tokens + search.length)
    return tokens + (request.spec.width - len(request.sequences)) * request.spec.prompt_tokens + request.ended_tokens


def _logprob_bytes(request: DecodeRequest) -> int:
    """Return bytes for the answers' log probabilities."""
    return request.spec.logprob_bytes * request.answer_tokens
