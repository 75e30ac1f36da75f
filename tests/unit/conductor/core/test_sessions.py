"""The conductor's sessions: what is expected of each after a turn, and what kvstores are told."""

import hashlib

import pytest

from moonpool.base.scheduling.sessions import SessionHint, SessionTurn
from moonpool.conductor.core import retention
from moonpool.conductor.core.actions import CallPrefill, CallReserve
from moonpool.conductor.core.events import CompletionReason, KeysChanged, SessionUpdated
from moonpool.conductor.core.retention import MEMORY_LEAD_S, RetainedChains, TellSession
from moonpool.conductor.core.sessions import MAX_SESSIONS, SessionTable
from moonpool.conductor.placement.base import SessionFacts

from .world import World

TURN = SessionTurn(id="s")
STORES = ("store-0", "store-1")
TAIL = b"t" * 32


def turn_ends(table: SessionTable, turn: SessionTurn, at: float, tenant: str = "") -> SessionHint:
    """A turn comes and ends at the same time; what the first of its stores is told."""
    table.began(tenant, turn, at)
    told, also = table.ended(tenant, turn, (TAIL,), STORES, at)
    assert (told.instance, also.instance) == STORES
    return told.hint


def test_the_next_turn_is_expected_when_the_client_says() -> None:
    retained = RetainedChains()
    table = SessionTable(retained)
    turn = SessionTurn(id="s", return_s=20.0, keep_s=300.0, retention=2)
    told = turn_ends(table, turn, 100.0)
    assert (told.tail, told.return_s, told.told, told.keep_s, told.retention) == (TAIL, 20.0, True, 300.0, 2)
    later, _ = table.update("", SessionTurn(id="s", return_s=5.0), 107.0)
    assert (later.hint.session, later.hint.tail, later.hint.return_s, later.hint.keep_s) == (
        told.session,
        TAIL,
        5.0,
        None,
    )
    assert retained.due() == 107.0  # the return is sooner than blocks come from SSD


def test_the_usual_pause_is_learnt_from_the_tenant_and_the_session() -> None:
    table = SessionTable(RetainedChains())
    assert [turn_ends(table, TURN, 10.0 * turn).return_s for turn in range(4)] == [None] * 4  # three pauses: too few
    told = turn_ends(table, TURN, 40.0)
    assert told.return_s == pytest.approx(10.0)
    assert not told.told
    assert turn_ends(table, SessionTurn(id="other"), 41.0).return_s == pytest.approx(10.0)  # as the tenant's
    assert turn_ends(table, TURN, 41.0, tenant="another").return_s is None
    for turn in range(20):
        expected_s = turn_ends(table, TURN, 42.0 + turn).return_s
    assert expected_s == pytest.approx(1.5, abs=0.5)  # nearer to the session's own second


def test_tenants_share_no_session() -> None:
    table = SessionTable(RetainedChains())
    first, other = turn_ends(table, TURN, 0.0, "a"), turn_ends(table, TURN, 0.0, "b")
    assert first.session != other.session


def test_a_turn_without_a_name_tells_of_itself() -> None:
    table = SessionTable(RetainedChains())
    told, _ = table.ended("", SessionTurn(keep_s=300.0), (TAIL,), STORES, 0.0)
    assert (told.hint.session, told.hint.keep_s) == (hashlib.blake2b(TAIL, digest_size=16).digest(), 300.0)
    assert len(table) == 0


def test_a_session_is_forgotten_at_its_end_and_when_there_are_too_many() -> None:
    table = SessionTable(RetainedChains())
    table.began("", TURN, 0.0)
    assert table.update("", SessionTurn(id="s", last=True), 1.0) == ()  # while a turn runs
    told, _ = table.ended("", TURN, (TAIL,), STORES, 2.0)
    assert told.hint.ended
    assert (len(table), table.update("", TURN, 3.0)) == (0, ())
    for number in range(MAX_SESSIONS + 1):
        table.began("", SessionTurn(id=str(number)), 4.0)
    assert (len(table), table.get("", "0")) == (MAX_SESSIONS, None)


def test_what_a_client_tells_again_and_again_takes_no_more_memory() -> None:
    retained = RetainedChains()
    table = SessionTable(retained)
    turn_ends(table, TURN, 0.0)
    for number in range(3 * MAX_SESSIONS):
        table.update("", SessionTurn(id="s", return_s=1000.0 + number), 1.0)
    retained.check_invariants()
    assert retained.due() == 1000.0 + 3 * MAX_SESSIONS - MEMORY_LEAD_S


def test_keys_of_the_oldest_sessions_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_KEY_BYTES", 2 * len(TAIL))
    retained = RetainedChains()
    table = SessionTable(retained)
    for name in ("a", "b", "a", "c"):
        turn_ends(table, SessionTurn(id=name, return_s=60.0), 0.0)
        table.check_invariants()
        retained.check_invariants()
    assert {use.turn.id for _, use in retained.coming(60.0 - MEMORY_LEAD_S)} == {"a", "c"}
    [told, _] = table.update("", SessionTurn(id="b", return_s=1.0), 61.0)  # stores still hear of it, by its tail
    assert told.hint.tail == TAIL


def test_turns_at_the_same_time_end_before_the_session_pauses() -> None:
    table = SessionTable(RetainedChains())
    turn = SessionTurn(id="s", return_s=1.0)
    table.began("", turn, 0.0)
    table.began("", turn, 1.0)
    assert table.ended("", turn, (b"a",), STORES, 2.0) == ()
    told, _ = table.ended("", turn, (b"b",), STORES, 3.0)
    assert (told.hint.tail, told.hint.return_s) == (b"b", 1.0)


def test_kvstores_are_told_at_the_end_of_a_turn_and_of_the_session() -> None:
    world = World(prefills=1, decodes=1)
    world.join_store("kvstore-0")
    keys = (b"a" * 32, b"b" * 32)
    world.arrive(keys=keys, session=TURN)
    world.promise(world.one(CallReserve))
    assert world.all(TellSession) == []
    world.first_token(world.one(CallPrefill), CompletionReason.STOP)
    [told] = world.all(TellSession)
    assert (told.instance, told.hint.tail, told.hint.ended) == ("kvstore-0", keys[-1], False)
    world.post(SessionUpdated("", SessionTurn(id="s", last=True)))
    assert [order.hint.ended for order in world.all(TellSession)] == [False, True]
    world.arrive(keys=keys)
    world.promise(world.one(CallReserve))
    world.finish_all()
    assert len(world.all(TellSession)) == 2  # a request without a session tells nothing


def paused(world: World, keys: tuple[bytes, ...], **turn: float) -> None:
    """A session's turn ends, and the store moves its last block to SSD."""
    world.arrive(keys=keys, session=SessionTurn(id="s", **turn))  # type: ignore[arg-type]
    world.promise(world.one(CallReserve))
    world.first_token(world.one(CallPrefill), CompletionReason.STOP)
    world.post(KeysChanged("kvstore-0", 1, keys, (), True, True, keys[1:]))
    assert [order.prefetch for order in world.all(TellSession)] == [()]


def test_blocks_on_ssd_are_ordered_into_memory_before_the_return() -> None:
    world = World(prefills=1, decodes=1)
    world.join_store("kvstore-0")
    keys = (b"a" * 32, b"b" * 32)
    paused(world, keys, return_s=60.0)
    world.sleep(49.0)
    assert len(world.all(TellSession)) == 1
    world.sleep(2.0)
    order = world.all(TellSession)[-1]
    assert (order.instance, order.prefetch) == ("kvstore-0", keys)
    assert order.hint.return_s == pytest.approx(9.0, abs=1.0)
    world.sleep(60.0)
    assert len(world.all(TellSession)) == 2  # once
    world.post(SessionUpdated("", SessionTurn(id="s", last=True)))
    assert world.all(TellSession)[-1].prefetch == ()  # what is read is not wanted any more


def test_blocks_in_memory_and_sessions_that_are_served_or_over_order_nothing() -> None:
    world = World(prefills=1, decodes=1)
    world.join_store("kvstore-0")
    keys = (b"a" * 32, b"b" * 32)
    paused(world, keys, return_s=20.0)
    world.post(KeysChanged("kvstore-0", 2, keys[1:], (), False, False))
    world.sleep(15.0)
    assert len(world.all(TellSession)) == 1
    world.post(SessionUpdated("", SessionTurn(id="s", return_s=20.0)))
    world.post(KeysChanged("kvstore-0", 3, (), (), False, False, keys[1:]))
    world.arrive(keys=keys, session=TURN)
    world.sleep(15.0)
    assert [order.prefetch for order in world.all(TellSession)] == [(), ()]


def test_policies_see_where_the_sessions_last_turn_went() -> None:
    world = World(prefills=2, decodes=1)
    table = world.core.scheduler.sessions
    assert table.facts("", TURN) == SessionFacts()
    world.arrive(session=TURN)
    world.promise(world.one(CallReserve))
    first = world.one(CallPrefill).plan.prefill.id
    assert table.facts("", SessionTurn(id="s", last=True)) == SessionFacts(1, first, last=True)
    world.finish_all()
