"""Sessions: what clients have said of each, and how long each takes from one turn to the next."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.base.scheduling.sessions import SessionHint, SessionTurn
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.retention import ExpectedUse, RetainedChain, RetainedChains, TellSession
from moonpool.conductor.placement.base import SessionFacts

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
        chain: the latest prompt's full blocks; None = there were none.
        turns: that were placed.
        prefill: instance to which the latest of them went; "" = there was none.
        running: turns that have come and not ended.
        paused_at: when the latest turn ended; None while a turn runs.
        pauses: the session's.
    """

    turn: SessionTurn
    chain: RetainedChain | None = None
    turns: int = 0
    prefill: str = ""
    running: int = 0
    paused_at: float | None = None
    pauses: Pauses = field(default_factory=Pauses)


class SessionTable:
    """All sessions that a conductor knows, by tenant and id.

    Args:
        retained: gets the sessions' chains, and the next turns whose time is foreseen.
    """

    def __init__(self, retained: RetainedChains) -> None:
        self._sessions: OrderedDict[tuple[str, str], SessionState] = OrderedDict()
        self._tenants: OrderedDict[str, Pauses] = OrderedDict()
        self._retained = retained

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
            self._retained.forget(self._sessions.popitem(last=False)[0])
        if state.paused_at is not None:
            state.pauses.add(now - state.paused_at)
            self._usual(tenant).add(now - state.paused_at)
        state.turn = turn
        state.running += 1
        state.paused_at = None
        self._retained.expect_no_more((tenant, turn.id))

    def facts(self, tenant: str, turn: SessionTurn) -> SessionFacts:
        """What policies see of a turn's session."""
        state = self._sessions.get((tenant, turn.id))
        return SessionFacts(last=turn.last) if state is None else SessionFacts(state.turns, state.prefill, turn.last)

    def placed(self, tenant: str, turn: SessionTurn, prefill: str) -> None:
        """A turn goes to a prefill instance."""
        state = self._sessions.get((tenant, turn.id))
        if state is not None:
            state.turns, state.prefill = state.turns + 1, prefill

    def ended(
        self, tenant: str, turn: SessionTurn, keys: Sequence[bytes], stores: tuple[str, ...], now: float
    ) -> Sequence[TellSession]:
        """A turn has ended: with an answer, an error, or without a client. Returns what kvstores must know.

        Args:
            tenant: the session's.
            turn: what the client said with the turn.
            keys: of the turn's full blocks.
            stores: kvstores that shall hold the prompt's KV; none for a turn without a placement.
            now: the time.
        """
        state = self._sessions.get((tenant, turn.id)) if turn.id else SessionState(turn, running=1)
        if state is None:
            return ()
        if stores and keys:
            state.chain = RetainedChain.of((tenant, turn.id), keys, stores, lasting=True)
            if turn.id:
                self._retained.keep(state.chain)
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
        owner, chain = (tenant, turn.id), state.chain
        return_s = turn.return_s if turn.return_s is not None else self._expected_s(tenant, state)
        hint = session_hint(tenant, turn, b"" if chain is None else chain.tail, return_s)
        if turn.id:
            self._retained.expect_no_more(owner)
            if turn.last:
                del self._sessions[owner]
                self._retained.forget(owner)
            elif return_s is not None:
                self._retained.expect(owner, ExpectedUse(turn, hint, now, now + return_s), now)
        return [TellSession(store, hint) for store in chain.stores] if chain is not None else ()

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

    def check_invariants(self) -> None:
        """Assert that the chains that stay are those of the sessions."""
        chains = {owner: state.chain for owner, state in self._sessions.items() if state.chain and state.chain.keys}
        assert self._retained.lasting() == chains

    def digest(self) -> bytes:
        """Hash of all sessions."""
        return digest_of(self._sessions, self._tenants)


def session_hint(tenant: str, turn: SessionTurn, tail: bytes, return_s: float | None) -> SessionHint:
    """What a kvstore is told after a turn with this last full block; without an id, of this turn alone."""
    name = f"{tenant}\n{turn.id}".encode() if turn.id else tail
    session = hashlib.blake2b(name, digest_size=SESSION_BYTES).digest()
    return SessionHint(session, tail, return_s, turn.return_s is not None, turn.keep_s, turn.retention, turn.last)
