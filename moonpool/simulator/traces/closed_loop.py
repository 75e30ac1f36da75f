"""Which requests in a trace wait for which: agents ask again after an answer has come and a tool has run.

A sub-agent's first request waits for a parent's request, and the parent's next request waits for each sub-agent's last.
Load is a closed loop: if the cluster is slow, the next turn comes later, as behind a real agent.
"""

from moonpool.simulator.traces.mooncake import TraceRequest


class ClosedLoop:
    """Requests that wait, and the names of requests that have ended.

    A request that fails or is refused counts as ended, so that every cluster gets all requests of a trace.
    """

    def __init__(self) -> None:
        self._ended: set[str] = set()
        self._waiting: dict[str, list[tuple[int, TraceRequest]]] = {}  # by one name that the request still waits for
        self._kept = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return self._kept

    def keeps(self, place: int, request: TraceRequest) -> bool:
        """Keep a request that waits for an unended request; False: the request may come after the request's `delay`.

        Args:
            place: the request's place in the trace.
            request: see above.
        """
        name = next((name for name in request.wait_for if name not in self._ended), None)
        if name is None:
            return False
        self._waiting.setdefault(name, []).append((place, request))
        self._kept += 1
        return True

    def ended(self, name: str) -> list[tuple[int, TraceRequest]]:
        """A request has ended: return the requests that may come now, each after a delay, with their places."""
        if not name:
            return []
        self._ended.add(name)
        released = self._waiting.pop(name, [])
        self._kept -= len(released)
        return [(place, request) for place, request in released if not self.keeps(place, request)]
