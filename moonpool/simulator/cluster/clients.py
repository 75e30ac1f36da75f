"""Clients in virtual time: each client asks a conductor, and resumes lost requests at another conductor.

As the SDK does: a client stays with a conductor. A client soon notices that the conductor is lost, and goes to the next
conductor. A client that loses only the connection comes again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moonpool.conductor.core.request_spec import DecodeReservation, RequestSpec
from moonpool.conductor.core.routing import RoutingDecision
from moonpool.simulator.clock import SimulatedWorld, ps
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.cluster.requests import DONE, Request
from moonpool.simulator.cluster.requests import PlacedSequence as Placed

RETRY_S = 1.0
"""Until a client notices that a conductor is lost; and the pause after which a client tries again when no conductor can
take the request."""


@dataclass(slots=True, eq=False)
class Serving:
    """A request at a conductor that the core has not ended."""

    ask: RequestSpec
    request: Request
    continued: int = 0
    """The answer's tokens that are not made again, as at the last placement."""
    sequence: Placed | None = None
    """The latest sequence that engines know."""
    plan: RoutingDecision | None = None
    target: DecodeReservation | None = None
    """The last placement's promise."""
    fence: int = 0
    """How often the client had resumed the request before."""
    rejoined: int = 0
    """How often the client has lost only the connection since then, come again, and found the request here."""
    away: bool = False
    """The client has lost the connection, and that is known here."""
    announced: str = ""
    """The last placement's id: the prompt may change instances under the same id."""


class Frontend(Protocol):
    """A conductor's interface for clients."""

    @property
    def up(self) -> bool:
        """Whether the conductor answers."""
        ...

    def ask(self, request: Request) -> None:
        """Take a new request."""
        ...

    def resume(self, before: Serving) -> None:
        """Take a request that was another conductor's, or that this conductor has dropped."""
        ...

    def rejoin(self, before: Serving) -> bool:
        """Let a client that has lost the connection hear a request again; return whether the request is here."""
        ...

    def leave(self, before: Serving) -> None:
        """A client has lost the connection: the request, if here, is dropped."""
        ...


class Clients:
    """All requests that have not ended.

    Args:
        world: the time.
        config: the cluster's.
        ended: called with each ended request.
    """

    def __init__(self, world: SimulatedWorld, config: ClusterConfig, ended: Callable[[Request], None]) -> None:
        self._world, self._prompt_s, self._ended = world, config.delays.prompt_s, ended
        self._open: dict[Request, Serving | None] = {}
        self.conductors: Sequence[Frontend] = ()
        self.ended_at = 0
        """When the last request ended."""

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def arrive(self, request: Request) -> None:
        """Take a new request; the conductor's core hears of the request after tokenising and hashing."""
        self._open[request] = None
        self._world.after(ps(self._prompt_s), self._ask, request)

    def taken(self, serving: Serving) -> None:
        """A conductor has taken a request."""
        self._open[serving.request] = serving

    def again(self, request: Request) -> None:
        """No conductor can take a request now."""
        self._open[request] = None
        self._world.after(ps(RETRY_S), self._ask, request)

    def lost(self, requests: Iterable[Request]) -> None:
        """Their conductor is lost."""
        for request in requests:
            self._world.after(ps(RETRY_S), self._resume, request)

    def disconnect(self, request: Request, *, seen: bool) -> Serving | None:
        """A client loses only the connection, and comes again; `seen` = the conductor has noticed the loss before.

        A request without a placement counts as lost: only a placed request is resumed.

        Returns:
            The request's record at the conductor; None if the request has not come there or has ended.
        """
        serving = self._open.get(request)
        if serving is not None and not serving.away:
            for conductor in self.conductors if seen or serving.plan is None else ():
                conductor.leave(serving)
            self.lost([request])
        return serving

    def end(self, request: Request, outcome: str) -> None:
        """A request has ended."""
        del self._open[request]
        request.outcome = outcome
        request.ended_at = self.ended_at = self._world.now
        self._ended(request)

    def _ask(self, request: Request) -> None:
        conductor = self._answering(request)
        if conductor is None:
            self._world.after(ps(RETRY_S), self._ask, request)
        else:
            conductor.ask(request)

    def _resume(self, request: Request) -> None:
        """Comes with the tokens so far, and with the placement."""
        if request not in self._open:
            return  # the request has ended while the client was away
        before, conductor = self._open[request], self._answering(request)
        if before is not None and any(candidate.rejoin(before) for candidate in self.conductors):
            before.rejoined += 1
        elif before is None or before.sequence is None or before.plan is None:
            self._ask(request)  # the request was never placed: treat as new
        elif conductor is None:
            self._world.after(ps(RETRY_S), self._resume, request)
        elif request.whole:
            self.end(request, DONE)
        else:
            conductor.resume(before)

    def _answering(self, request: Request) -> Frontend | None:
        """The conductor that a request goes to: the request's own if that answers, else the next that answers."""
        count = len(self.conductors)
        in_turn = (self.conductors[(request.number + turn) % count] for turn in range(count))
        return next((conductor for conductor in in_turn if conductor.up), None)
