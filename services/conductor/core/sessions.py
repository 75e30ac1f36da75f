"""Sessions: what clients have said of each, and how long each takes from one turn to the next."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.frozen import frozen
from moonpool.scheduling.sessions import SessionHint, SessionTurn
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
SESSION_BYTES = 16
"""Of a session's name at kvstores."""


@frozen
class TellSession:
    """Tell a kvstore what is known of a session after a turn."""

    instance: str
    hint: SessionHint


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
        stores: kvstores that shall hold the latest prompt's KV.
        running: turns that have come and not ended.
        paused_at: when the latest turn ended; None while a turn runs.
        return_at: when the next turn is expected; None = not known.
        pauses: the session's.
    """

    turn: SessionTurn
    tail: bytes = b""
    stores: tuple[str, ...] = ()
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

    def began(self, tenant: str, turn: SessionTurn, now: float) -> None:
        """A turn has come."""
        if not turn.id:
            return
        state = self._sessions.setdefault((tenant, turn.id), SessionState(turn))
        self._sessions.move_to_end((tenant, turn.id))
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        if state.paused_at is not None:
            state.pauses.add(now - state.paused_at)
            self._usual(tenant).add(now - state.paused_at)
        state.turn = turn
        state.running, state.paused_at, state.return_at = state.running + 1, None, None

    def ended(
        self, tenant: str, turn: SessionTurn, tail: bytes, stores: tuple[str, ...], now: float
    ) -> Sequence[TellSession]:
        """A turn has ended: with an answer, an error, or without a client. Returns what kvstores must know.

        Args:
            tenant: the session's.
            turn: what the client said with the turn.
            tail: key of the last full block of the turn's prompt; b"" = the prompt had none.
            stores: kvstores that shall hold the prompt's KV; none for a turn without a placement.
            now: the time.
        """
        state = self._sessions.get((tenant, turn.id)) if turn.id else SessionState(turn, running=1)
        if state is None:
            return ()
        if stores and tail:
            state.tail, state.stores = tail, stores
        state.running = max(0, state.running - 1)
        return () if state.running else self._pause(tenant, state, now)

    def update(self, tenant: str, turn: SessionTurn, now: float) -> Sequence[TellSession]:
        """Takes what a client says between two turns. Returns what kvstores must know."""
        state = self._sessions.get((tenant, turn.id))
        if state is None:
            return ()
        state.turn = turn
        return () if state.running else self._pause(tenant, state, now)

    def _pause(self, tenant: str, state: SessionState, now: float) -> Sequence[TellSession]:
        turn = state.turn
        if state.paused_at is None:
            state.paused_at = now
        return_s = turn.return_s if turn.return_s is not None else self._expected_s(tenant, state)
        state.return_at = None if turn.last or return_s is None else now + return_s
        if turn.last and turn.id:
            del self._sessions[tenant, turn.id]
        if not state.tail:
            return ()
        name = f"{tenant}\n{turn.id}".encode() if turn.id else state.tail
        session = hashlib.blake2b(name, digest_size=SESSION_BYTES).digest()
        told = turn.return_s is not None
        hint = SessionHint(session, state.tail, return_s, told, turn.keep_s, turn.retention, turn.last)
        return [TellSession(store, hint) for store in state.stores]

    def _expected_s(self, tenant: str, state: SessionState) -> float | None:
        """The usual pause of the session: the geometric mean, drawn towards the tenant's."""
        usual = self._tenants.get(tenant)
        if not state.turn.id or usual is None or usual.count < LEAST_PAUSES:
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
