"""Sessions: what clients have said of each, and how long each takes from one turn to the next."""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from moonpool.scheduling.sessions import SessionTurn
from moonpool.scheduling.state_machine import digest_of

MAX_SESSIONS = 16_384
"""Sessions that are remembered. Of more, the session that was heard of longest ago is forgotten."""
MAX_TENANTS = 1024
"""Tenants whose usual pause is remembered."""
LEAST_PAUSES = 4
"""Pauses of a tenant's sessions from which a usual pause is learnt."""
TENANT_WEIGHT = 2.0
"""Pauses of a session that the tenant's usual pause stands for."""
MOST_PAUSES = 256.0
"""Weight of everything learnt; the latest pauses count more."""
LEAST_PAUSE_S = 0.01


@dataclass(slots=True)
class Pauses:
    """Pauses between turns: how many, and the sum of the logarithms of their seconds."""

    count: float = 0.0
    logs: float = 0.0

    def add(self, pause_s: float) -> None:
        """Learns a pause."""
        if self.count >= MOST_PAUSES:
            self.count, self.logs = self.count / 2, self.logs / 2
        self.count += 1.0
        self.logs += math.log(max(pause_s, LEAST_PAUSE_S))


@dataclass(slots=True)
class SessionState:
    """One session.

    Attributes:
        turn: what the client said last.
        tail: key of the last full block of the latest prompt; b"" = the prompt had none.
        running: turns that have come and not ended.
        paused_at: when the latest turn ended; None while a turn runs.
        return_at: when the next turn is expected; None = not known.
        pauses: the session's.
    """

    turn: SessionTurn
    tail: bytes = b""
    running: int = 0
    paused_at: float | None = None
    return_at: float | None = None
    pauses: Pauses = field(default_factory=Pauses)


class SessionTable:
    """All sessions that a conductor knows, by tenant and id."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], SessionState] = OrderedDict()
        self._tenants: OrderedDict[str, Pauses] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, tenant: str, session: str) -> SessionState | None:
        """The session; None = not known."""
        return self._sessions.get((tenant, session))

    def began(self, tenant: str, turn: SessionTurn, tail: bytes, now: float) -> None:
        """A turn has come; `tail` is the key of the prompt's last full block."""
        if not turn.id:
            return
        state = self._sessions.setdefault((tenant, turn.id), SessionState(turn))
        self._sessions.move_to_end((tenant, turn.id))
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        if state.paused_at is not None:
            state.pauses.add(now - state.paused_at)
            self._usual(tenant).add(now - state.paused_at)
        state.turn, state.tail = turn, tail
        state.running, state.paused_at, state.return_at = state.running + 1, None, None

    def ended(self, tenant: str, session: str, now: float) -> None:
        """A turn has ended: with an answer, an error, or without a client."""
        state = self._sessions.get((tenant, session))
        if state is None:
            return
        state.running = max(0, state.running - 1)
        if not state.running:
            self._pause(tenant, state, now)

    def update(self, tenant: str, turn: SessionTurn, now: float) -> bool:
        """Takes what a client says between two turns; returns whether the session is known."""
        state = self._sessions.get((tenant, turn.id))
        if state is None:
            return False
        state.turn = turn
        if not state.running:
            self._pause(tenant, state, now)
        return True

    def _pause(self, tenant: str, state: SessionState, now: float) -> None:
        turn = state.turn
        if state.paused_at is None:
            state.paused_at = now
        return_s = turn.return_s if turn.return_s is not None else self._expected_s(tenant, state)
        state.return_at = None if turn.last or return_s is None else now + return_s
        if turn.last:
            del self._sessions[tenant, turn.id]

    def _expected_s(self, tenant: str, state: SessionState) -> float | None:
        """The usual pause of the session: the geometric mean, drawn towards the tenant's."""
        usual = self._tenants.get(tenant)
        if usual is None or usual.count < LEAST_PAUSES:
            return None
        weight = TENANT_WEIGHT / usual.count
        return math.exp((state.pauses.logs + weight * usual.logs) / (state.pauses.count + TENANT_WEIGHT))

    def _usual(self, tenant: str) -> Pauses:
        usual = self._tenants.setdefault(tenant, Pauses())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return usual

    def digest(self) -> bytes:
        """Hash of all sessions."""
        return digest_of(self._sessions, self._tenants)
