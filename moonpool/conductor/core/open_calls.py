"""Calls that have not ended."""

from enum import Enum

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.state_machine import PendingIo


class CallKind(Enum):
    """Kinds of calls."""

    RESERVE = 1
    PREFILL = 2
    SEQUENCE = 3
    TAKE_OVER = 4


FOLLOWING_CALLS = (CallKind.SEQUENCE, CallKind.TAKE_OVER)
"""Calls that follow a sequence at decode."""


@frozen
class OpenCall:
    """A call that has not ended.

    Attributes:
        kind: what the call does.
        request: number of the request.
        sequence: id that the instance sees; says to which attempt the call belongs.
        instance, epoch: the called instance.
        claim: claim on the cluster that the call holds; 0 = none.
    """

    kind: CallKind
    request: int
    sequence: str
    instance: str
    epoch: int
    claim: int = 0


class OpenCalls(PendingIo[OpenCall]):
    """All calls that have not ended. Calls that follow sequences are also found by their instance."""

    def __init__(self) -> None:
        super().__init__()
        self._following: dict[str, dict[int, OpenCall]] = {}

    def begin(self, holds: OpenCall) -> int:
        io = super().begin(holds)
        if holds.kind in FOLLOWING_CALLS:
            self._following.setdefault(holds.instance, {})[io] = holds
        return io

    def end(self, io: int) -> OpenCall:
        call = super().end(io)
        if call.kind in FOLLOWING_CALLS:
            there = self._following[call.instance]
            del there[io]
            if not there:
                del self._following[call.instance]
        return call

    def following(self, instance: str) -> list[OpenCall]:
        """Return the calls that follow sequences at an instance, in the order of their start."""
        return list(self._following.get(instance, {}).values())

    def check_invariants(self) -> None:
        """Assert that calls are listed at their instances."""
        following = {io: call for io, call in self if call.kind in FOLLOWING_CALLS}
        assert following == {io: call for there in self._following.values() for io, call in there.items()}
        assert all(call.instance == name for name, there in self._following.items() for call in there.values())
