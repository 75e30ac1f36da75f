"""Sessions: what clients have said of each, and how long each takes from one turn to the next."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from moonpool.frozen import frozen
from moonpool.kv.keys import KEY_BYTES
from moonpool.scheduling.sessions import SessionHint, SessionTurn
from moonpool.scheduling.state_machine import digest_of
from services.conductor.placement.base import SessionFacts

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
PREFETCH_S = 10.0
"""Seconds before the expected return at which blocks are brought from SSD into memory."""
MAX_KEY_BYTES = 64 << 20
"""Bytes of the keys of sessions' chains that are remembered."""
SESSION_BYTES = 16
"""Of a session's name at kvstores."""


@frozen
class TellSession:
    """Tell a kvstore what is known of a session, and which blocks it shall bring from SSD into memory.

    `prefetch`: keys of the chain, from its beginning; () = none, and those of an earlier order are not wanted any more.
    """

    instance: str
    hint: SessionHint
    prefetch: tuple[bytes, ...] = ()


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
        keys: of the latest prompt's full blocks, concatenated; empty = there were none, or they are forgotten.
        tail: key of the last of these blocks; b"" = there was none.
        stores: kvstores that shall hold the latest prompt's KV.
        turns: that were placed.
        prefill: instance to which the latest of them went; "" = there was none.
        running: turns that have come and not ended.
        paused_at: when the latest turn ended; None while a turn runs.
        return_at: when the next turn is expected; None = not known.
        prefetch_at: when blocks on SSD are wanted in memory; None = not any more.
        hint, hinted_at: what kvstores were told last, and when.
        pauses: the session's.
    """

    turn: SessionTurn
    keys: bytes = b""
    tail: bytes = b""
    stores: tuple[str, ...] = ()
    turns: int = 0
    prefill: str = ""
    running: int = 0
    paused_at: float | None = None
    return_at: float | None = None
    prefetch_at: float | None = None
    hint: SessionHint | None = None
    hinted_at: float = 0.0
    pauses: Pauses = field(default_factory=Pauses)


class SessionTable:
    """All sessions that a conductor knows, by tenant and id."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], SessionState] = OrderedDict()
        self._tenants: OrderedDict[str, Pauses] = OrderedDict()
        self._coming: list[tuple[float, tuple[str, str]]] = []  # `prefetch_at` of sessions; outdated ones, too
        self._keyed: dict[tuple[str, str], SessionState] = {}  # sessions with keys, oldest first
        self._key_bytes = 0
        self.prefetches = 0
        """Orders to bring a session's blocks into memory."""

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
            self._keep_keys(*self._sessions.popitem(last=False), b"")
        if state.paused_at is not None:
            state.pauses.add(now - state.paused_at)
            self._usual(tenant).add(now - state.paused_at)
        state.turn = turn
        state.running += 1
        state.paused_at = state.return_at = state.prefetch_at = None

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
            state.tail, state.stores = keys[-1], stores
            if turn.id:
                self._keep_keys((tenant, turn.id), state, b"".join(keys))
        state.running = max(0, state.running - 1)
        return () if state.running else self._pause(tenant, state, now)

    def _keep_keys(self, name: tuple[str, str], state: SessionState, keys: bytes) -> None:
        """Keeps the keys of a session's chain; of too many, those of the oldest sessions are forgotten."""
        self._key_bytes += len(keys) - len(state.keys)
        state.keys = keys
        self._keyed.pop(name, None)
        if keys:
            self._keyed[name] = state
        while self._key_bytes > MAX_KEY_BYTES:
            oldest = self._keyed.pop(next(iter(self._keyed)))
            self._key_bytes -= len(oldest.keys)
            oldest.keys = b""

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
        state.return_at = state.prefetch_at = None
        if turn.last and turn.id:
            self._keep_keys((tenant, turn.id), self._sessions.pop((tenant, turn.id)), b"")
        elif turn.id and return_s is not None:
            state.return_at = now + return_s
            state.prefetch_at = max(now, state.return_at - PREFETCH_S)
            self._await(state.prefetch_at, (tenant, turn.id))
        if not state.tail:
            return ()
        name = f"{tenant}\n{turn.id}".encode() if turn.id else state.tail
        session = hashlib.blake2b(name, digest_size=SESSION_BYTES).digest()
        told = turn.return_s is not None
        hint = SessionHint(session, state.tail, return_s, told, turn.keep_s, turn.retention, turn.last)
        state.hint, state.hinted_at = hint, now
        return [TellSession(store, hint) for store in state.stores]

    def _await(self, prefetch_at: float, name: tuple[str, str]) -> None:
        """Notes when a session's blocks are wanted. Outdated notes are dropped before most are outdated."""
        heappush(self._coming, (prefetch_at, name))
        if len(self._coming) > 2 * len(self._sessions):
            coming = [(it.prefetch_at, name) for name, it in self._sessions.items() if it.prefetch_at is not None]
            self._coming = coming
            heapify(self._coming)

    def due(self) -> float | None:
        """When the next session's blocks are wanted in memory; None = no session is expected."""
        while self._coming:
            at, name = self._coming[0]
            state = self._sessions.get(name)
            if state is not None and state.prefetch_at == at:
                return at
            heappop(self._coming)
        return None

    def coming(self, now: float, is_cold: Callable[[str, bytes], bool]) -> Sequence[TellSession]:
        """Orders for sessions that are expected soon. The first store that has the last block on SSD reads the chain.

        Chains leave memory tail first. `is_cold`: whether a kvstore has a block on SSD only.
        """
        orders: list[TellSession] = []
        while (at := self.due()) is not None and at <= now:
            state = self._sessions[heappop(self._coming)[1]]
            state.prefetch_at = None
            store = next((store for store in state.stores if is_cold(store, state.tail)), "")
            if store and state.keys and state.hint is not None:
                keys = [state.keys[at : at + KEY_BYTES] for at in range(0, len(state.keys), KEY_BYTES)]
                hint = state.hint.after(now - state.hinted_at)
                orders.append(TellSession(store, hint, tuple(keys)))
        self.prefetches += len(orders)
        return orders

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
        """Asserts that what is remembered beside the sessions is bounded by them."""
        assert len(self._coming) <= 2 * MAX_SESSIONS, "outdated notes stay"
        with_keys = {name for name, state in self._sessions.items() if state.keys}
        assert set(self._keyed) == with_keys
        assert self._key_bytes == sum(len(state.keys) for state in self._keyed.values()) <= MAX_KEY_BYTES

    def digest(self) -> bytes:
        """Hash of all sessions."""
        return digest_of(self._sessions, self._tenants, self._coming, list(self._keyed))
