"""The conductor's sessions: what is expected of each after a turn."""

import pytest

from moonpool.scheduling.sessions import SessionTurn
from services.conductor.core.sessions import MAX_SESSIONS, SessionTable

TURN = SessionTurn(id="s")


def paused(table: SessionTable, turn: SessionTurn, at: float, tenant: str = "") -> float | None:
    """A turn comes and ends at the same time; when the next is expected."""
    table.began(tenant, turn, b"tail", at)
    table.ended(tenant, turn.id, at)
    state = table.get(tenant, turn.id)
    assert state is not None
    return state.return_at


def test_the_next_turn_is_expected_when_the_client_says() -> None:
    table = SessionTable()
    assert paused(table, SessionTurn(id="s", return_s=20.0), 100.0) == 120.0
    assert table.update("", SessionTurn(id="s", return_s=5.0), 107.0)
    state = table.get("", "s")
    assert state is not None
    assert (state.return_at, state.tail, state.paused_at) == (112.0, b"tail", 100.0)


def test_the_usual_pause_is_learnt_from_the_tenant_and_the_session() -> None:
    table = SessionTable()
    assert [paused(table, TURN, 10.0 * turn) for turn in range(4)] == [None] * 4  # three pauses tell too little
    assert paused(table, TURN, 40.0) == pytest.approx(50.0)
    assert paused(table, SessionTurn(id="other"), 41.0) == pytest.approx(51.0)  # as the tenant's
    assert paused(table, TURN, 41.0, tenant="another") is None
    for turn in range(20):
        expected = paused(table, TURN, 42.0 + turn)
    assert expected == pytest.approx(61.0 + 10.0 ** (4 / 26), abs=1.0)  # nearer to the session's own second


def test_a_session_is_forgotten_at_its_end_and_when_there_are_too_many() -> None:
    table = SessionTable()
    table.began("", TURN, b"", 0.0)
    assert table.update("", SessionTurn(id="s", last=True), 1.0)  # while a turn runs
    assert len(table) == 1
    table.ended("", "s", 2.0)
    assert len(table) == 0
    assert not table.update("", TURN, 3.0)
    for number in range(MAX_SESSIONS + 1):
        table.began("", SessionTurn(id=str(number)), b"", 4.0)
    assert (len(table), table.get("", "0")) == (MAX_SESSIONS, None)


def test_turns_at_the_same_time_end_before_the_session_pauses() -> None:
    table = SessionTable()
    turn = SessionTurn(id="s", return_s=1.0)
    table.began("", turn, b"a", 0.0)
    table.began("", turn, b"b", 1.0)
    table.ended("", "s", 2.0)
    state = table.get("", "s")
    assert state is not None
    assert state.paused_at is None
    table.ended("", "s", 3.0)
    assert [state.return_at, state.tail] == [4.0, b"b"]
