"""Sequences that outlive their conductor: they run on for a grace period, then park; whoever adopts one has it.

docs/adr/0012-resuming.md has the rules.
"""

from moonpool.core.digest import digest_of
from moonpool.core.timers import Timers, earliest
from services.decode.core import groups
from services.decode.core.actions import Action, Adopted, Fenced, Gone, Parked
from services.decode.core.config import CoreConfig
from services.decode.core.events import Adopt
from services.decode.core.logs import Logs
from services.decode.core.planner import Planner
from services.decode.core.preemption import Parking
from services.decode.core.request import ACTIVE, NOBODY, Request, State
from services.decode.core.room import Room
from services.decode.core.roster import Roster

_PARKABLE = (*ACTIVE, State.PARKED)
_COPYING = (State.SWAPPING_OUT, State.SWAPPING_IN, State.LOADING)


class Orphans:
    """The sequences whose conductor is lost, and what is kept of those that have ended.

    The sequences of a group stay together.

    Args:
        config: of the core.
        roster: all of the core's requests; a sequence that is kept here without blocks is not among them.
        planner: the batch and those who wait.
        parking: the preempted ones.
        room: counts blocks.
    """

    def __init__(self, config: CoreConfig, roster: Roster, planner: Planner, parking: Parking, room: Room) -> None:
        self.now = 0.0
        """Time of the event that is being handled."""
        self._config = config
        self._roster = roster
        self._requests = roster.requests
        self._planner = planner
        self._parking = parking
        self._room = room
        self._graces: Timers[int] = Timers()
        self._late: list[Request] = []  # their grace is over; a step or a copy still uses their blocks
        self.logs = Logs(config.log_ttl_s, config.log_bytes)

    def __len__(self) -> int:
        """Sequences that run without a conductor."""
        return len(self._graces) + len(self._late)

    @property
    def wait(self) -> bool:
        """Whether one whose grace is over waits for the running step's end."""
        return bool(self._late) and any(self._planner.in_flight(request) for request in self._late)

    def due(self) -> float | None:
        """When the next grace period is over, or a log is forgotten."""
        return earliest(self._graces.next(), self.logs.due())

    # --- losing a conductor ----------------------------------------------------------------------------------------

    def orphan(self, request: Request) -> None:
        """A started sequence has lost its conductor."""
        request.stream = NOBODY
        self._graces.set(request.id, self.now + self._config.grace_s)

    def of(self, conductor: str) -> list[Request]:
        """The orphans of a conductor that has said who it is."""
        if not conductor or not len(self):
            return []
        mine = (it for it in self._requests.values() if it.stream == NOBODY and it.state is not State.LEAVING)
        return [request for request in mine if request.conductor == conductor]

    def ended(self, request: Request, out: list[Action]) -> None:
        """A request has ended: what it has said is kept, if it may be asked for."""
        self._forget(request)
        logged = request.resumable and request.is_started
        out.append(Gone(request.id, logged))
        if logged:
            self.logs.ended(self.now, request, out)

    def tick(self, out: list[Action]) -> None:
        """Time has passed."""
        while (number := self._graces.pop_due(self.now)) is not None:
            self._late.append(self._requests[number])
        self.logs.expire(self.now, out)

    def settle(self, out: list[Action]) -> list[Request]:
        """Parks those whose grace is over and whose blocks are quiet.

        Returns:
            Those that are to be ended instead: their KV has not come whole.
        """
        if not self._late:
            return []
        waiting, never = [], []
        for request in self._late:
            if request.state in _COPYING or self._planner.in_flight(request):
                waiting.append(request)
            elif request.state in _PARKABLE:
                self._park(request, out)
            elif request.state is not State.LEAVING:
                never.append(request)
        self._late = waiting
        return never

    def _park(self, request: Request, out: list[Action]) -> None:
        """Gives up all blocks. Full ones stay in the pool as cache as long as they are not needed."""
        self._planner.take_out(request)
        self._planner.seats_kept.pop(request.id, None)
        if request.state is not State.PARKED:
            request.shape = groups.shape_of(request, self._config)
        self._parking.forget(request, out)
        self._room.claim(request, 0)
        self._room.give_back(request)
        request.state, request.tbt_slo_s = State.LOGGED, 0.0  # no place is kept for it any more
        self._roster.remove(request)
        out.append(Parked(request.id))
        self.logs.parked(self.now, request, out)

    # --- adopting --------------------------------------------------------------------------------------------------

    def adopt(self, event: Adopt, conductor: str, out: list[Action]) -> None:
        """Gives a sequence, or what is kept of it, to a conductor with a higher fence than the one before."""
        request, log = self._requests.get(event.id), self.logs.get(event.id)
        if log is not None:
            fence = log.fence
        elif request is not None and request.resumable and request.is_started and request.state is not State.LEAVING:
            fence = request.fence
        else:
            return
        if event.fence <= fence:
            out.append(Fenced(event.id, event.stream))
        elif log is not None and log.request is None:
            self.logs.read(event.id, event.fence)
            out.append(Adopted(event.id, event.stream, event.positions))
        else:
            self._hand_over(request or self.logs.take(event.id), event, conductor, out)

    def _hand_over(self, request: Request, event: Adopt, conductor: str, out: list[Action]) -> None:
        assert request.stream is not None
        if request.stream != NOBODY:
            out.append(Fenced(request.id, request.stream))
        self._forget(request)
        request.stream, request.conductor, request.fence = event.stream, conductor, event.fence
        if request.state is State.LOGGED:
            self._roster.add(request)
            self._parking.park(request)
        out.append(Adopted(request.id, event.stream, event.positions))

    def _forget(self, request: Request) -> None:
        self._graces.clear(request.id)
        self._late = [late for late in self._late if late is not request]

    # --- checks ----------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Asserts that each orphan's time ends, and that those that are kept hold nothing."""
        self.logs.check_invariants()
        for request in self._requests.values():
            waits = self._graces.at(request.id) is not None or request in self._late
            assert waits <= (request.stream == NOBODY)
            assert waits or request.stream != NOBODY or request.state is State.LEAVING, "it would run for ever"
            assert request.state is not State.LOGGED
        for number, log in self.logs:
            assert number not in self._requests
            if log.request is not None:
                kept = log.request
                assert kept.state is State.LOGGED
                assert (kept.blocks, kept.claim, kept.promised, kept.saved) == ([], 0, 0, 0), "it holds something"

    def digest(self) -> bytes:
        """Hash of what is kept, and of the times."""
        graces = [(number, at) for number in self._requests if (at := self._graces.at(number)) is not None]
        return digest_of(graces, [request.id for request in self._late], self.logs)
