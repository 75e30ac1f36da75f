"""Retained chains: one bound for all owners, and what stays when no use is expected any more."""

import pytest

from moonpool.base.scheduling.sessions import SessionHint, SessionTurn
from moonpool.conductor.core import retention
from moonpool.conductor.core.retention import ExpectedUse, RetainedChain, RetainedChains

KEY = b"k" * 32


def keep(chains: RetainedChains, name: str, *, lasting: bool, at: float = 60.0) -> RetainedChain:
    """Retain a chain of one block whose use is expected."""
    chain = RetainedChain.of(("", name), (KEY,), ("store",), lasting=lasting)
    chains.keep(chain)
    chains.expect(chain.owner, ExpectedUse(SessionTurn(id=name), SessionHint(b"s", KEY), 0.0, at), 0.0)
    return chain


def test_sessions_and_announcements_share_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_KEY_BYTES", 2 * len(KEY))
    chains = RetainedChains()
    oldest = keep(chains, "session", lasting=True)
    keep(chains, "announced", lasting=False)
    keep(chains, "another", lasting=True)
    chains.check_invariants()
    assert len(chains) == 2
    assert (oldest.keys, oldest.tail, oldest.stores, oldest.expected) == (b"", KEY, ("store",), None)


def test_a_session_keeps_the_chain_that_an_announcement_loses_with_the_use() -> None:
    chains = RetainedChains()
    session, announced = keep(chains, "session", lasting=True), keep(chains, "announced", lasting=False)
    for chain in (session, announced):
        chains.expect_no_more(chain.owner)
        chains.check_invariants()
    assert (session.block_keys, announced.keys) == ((KEY,), b"")
    assert chains.due() is None


def test_the_use_noted_longest_ago_is_expected_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_EXPECTED", 1)
    chains = RetainedChains()
    first, second = keep(chains, "first", lasting=True, at=20.0), keep(chains, "second", lasting=True, at=60.0)
    chains.check_invariants()
    assert (first.expected, first.block_keys) == (None, (KEY,))
    assert chains.due() == 60.0 - retention.MEMORY_LEAD_S
    assert [chain for chain, _ in chains.coming(100.0)] == [second, second]


def test_a_chain_without_room_is_not_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_KEY_BYTES", len(KEY) - 1)
    chains = RetainedChains()
    keep(chains, "session", lasting=True)
    assert (len(chains), chains.due()) == (0, None)
