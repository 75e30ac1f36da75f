"""Output of ended and parked requests, for conductors that resume them."""

from collections.abc import Sequence

from moonpool.engine.decode.core.actions import (
    DropOutputLog,
    FenceConductor,
    RequestAdopted,
    RequestParked,
)
from moonpool.engine.decode.live_requests import LiveRequest, LiveRequestTable
from moonpool.engine.decode.output import RequestOutput
from moonpool.engine.subscriber import Subscriber
from moonpool.v1 import decode_pb2


class OutputLog:
    """Output of ended and parked requests. The scheduler decides how long the output is kept.

    Args:
        live: running requests; the executor's table.
        streams: the conductors' streams, with the core's numbers; the executor's.
    """

    def __init__(self, live: LiveRequestTable, streams: dict[Subscriber, int]) -> None:
        self._live = live
        self._streams = streams
        self._parked: dict[int, LiveRequest] = {}
        self._ended: dict[int, RequestOutput] = {}
        self.adopted = 0
        """Requests taken over, and answers read again, so far."""

    def knows(self, asked: decode_pb2.ResumeSequence) -> bool:
        """Return whether there is such a request that the conductor may take over."""
        output = self._output(asked.transfer_id)
        return output is not None and output.matches(asked)

    def ended(self, live: LiveRequest) -> None:
        """Keep an ended request's output."""
        self._ended[live.id] = live.output.without_prompt()

    def perform(self, action: RequestAdopted | FenceConductor | RequestParked | DropOutputLog) -> None:
        """Carry out a decision about retained output."""
        match action:
            case RequestParked(number):
                live = self._parked[number] = self._live.take(number)
                for sequence in live.sequences:
                    sequence.table = ()
            case DropOutputLog(number):
                self._parked.pop(number, None)
                self._ended.pop(number, None)
            case RequestAdopted(number, stream, positions):
                self._adopt(number, self._subscriber(stream), positions)
            case FenceConductor(number, stream):
                self._fence(number, self._subscriber(stream))

    def _adopt(self, number: int, subscriber: Subscriber | None, positions: Sequence[int]) -> None:
        self.adopted += 1
        if number in self._parked:
            self._live.add(self._parked.pop(number))
        if (live := self._live.requests.get(number)) is not None:
            live.subscriber = subscriber
            for sequence in live.sequences:
                sequence.sent_tokens = sequence.output.length
        output = self._output(number)
        if subscriber is not None and output is not None:
            output.send(subscriber, positions)

    def _fence(self, number: int, subscriber: Subscriber | None) -> None:
        output = self._output(number)
        if subscriber is not None and output is not None:
            subscriber.fenced(output.request_id)

    def _output(self, number: int) -> RequestOutput | None:
        live = self._live.requests.get(number) or self._parked.get(number)
        if live is None:
            return self._ended.get(number)
        return live.output if live.output.secret and live.started and not live.ending else None

    def _subscriber(self, stream: int) -> Subscriber | None:
        return next((subscriber for subscriber, number in self._streams.items() if number == stream), None)
