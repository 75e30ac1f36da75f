"""Every policy in any order of requests, evictions and other removals, beside what must hold for all of them."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from moonpool.base.kv.blocks import NO_PARENT, BlockInfo
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.sessions import SessionHint
from moonpool.kvstore.eviction.base import EvictionPolicy
from moonpool.kvstore.eviction.kv_aware import KVAware
from moonpool.kvstore.eviction.policies import POLICIES
from moonpool.kvstore.eviction.retention import SessionRetention
from tests.examples import examples
from tests.unit.kvstore.helpers import FORMAT, keys_of
from tests.unit.kvstore.invariants import check

KEYS = keys_of(24)
PARENTS = {key: KEYS[(place - 1) // 2] if place else NO_PARENT for place, key in enumerate(KEYS)}
"""A tree in which every block has two children."""
LEAVES = st.integers(0, len(KEYS) - 1)


def chain_to(place: int) -> list[BlockKey]:
    """The block and all before it, head first."""
    chain = [KEYS[place]]
    while PARENTS[chain[-1]] != NO_PARENT:
        chain.append(PARENTS[chain[-1]])
    return chain[::-1]


class PolicyMachine(RuleBasedStateMachine):
    """`held` is the model; blocks come and go like in a tier, and at random like pinned and broken ones."""

    make: Callable[[], EvictionPolicy]

    def __init__(self) -> None:
        super().__init__()
        self.policy = type(self).make()
        self.held: set[BlockKey] = set()
        self.parents: dict[BlockKey, BlockKey] = {}

    def add(self, key: BlockKey, parent: BlockKey) -> None:
        self.policy.added(BlockInfo(key, parent, "", FORMAT))
        self.held.add(key)
        self.parents.setdefault(key, parent)

    def remove(self, key: BlockKey) -> None:
        self.policy.removed(key)
        self.held.remove(key)

    @rule(place=LEAVES, whole=st.booleans())
    def request(self, place: int, whole: bool) -> None:
        chain = chain_to(place)
        present = [key for key in chain if key in self.held]
        if present:
            self.policy.touched(present)
        for key in chain:
            if key not in self.held:
                self.add(key, PARENTS[key])
        if whole:
            self.policy.arrived(chain)

    @rule(place=LEAVES, skipped=st.integers(0, 3))
    def read_part(self, place: int, skipped: int) -> None:
        self.policy.touched([key for key in chain_to(place)[skipped:] if key in self.held])

    @precondition(lambda self: self.held)
    @rule(count=st.integers(1, 6), skip=st.integers(0, 2))
    def evict(self, count: int, skip: int) -> None:
        """Takes several from one walk, past some that are held."""
        walk = self.policy.candidates()
        for key in [key for key, _ in zip(walk, range(skip + count), strict=False)][skip:]:
            self.remove(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove_any(self, data: Any) -> None:
        self.remove(data.draw(st.sampled_from(sorted(self.held))))

    @rule(place=LEAVES, parent=LEAVES)
    def come_alone(self, place: int, parent: int) -> None:
        """A block whose writer names any parent, a wrong one or itself among them."""
        if KEYS[place] not in self.held:
            self.add(KEYS[place], KEYS[parent])

    @invariant()
    def names_what_is_held(self) -> None:
        check(self.policy)
        order = list(self.policy.candidates())
        assert len(order) == len(set(order)) == len(self.held)
        assert set(order) == self.held
        assert list(self.policy.candidates()) == order
        if isinstance(self.policy, KVAware):
            self.tails_first(self.policy, order)

    def tails_first(self, policy: KVAware, order: list[BlockKey]) -> None:
        place = {key: number for number, key in enumerate(order)}
        for key in order:
            node = policy.nodes[key].parent
            while node is not None:
                assert node.key not in place or place[node.key] > place[key]
                node = node.parent


class SessionMachine(PolicyMachine):
    """The same with sessions over the policy, which come, pause and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.policy = self.sessions = SessionRetention(self.policy, lambda: self.now)

    @rule(place=LEAVES, session=st.sampled_from([b"a", b"b", b"c"]), ended=st.booleans(), known=st.booleans())
    def hint(self, place: int, session: bytes, ended: bool, known: bool) -> None:
        self.sessions.hint(SessionHint(session, KEYS[place], 5.0 if known else None, ended=ended))

    @rule(seconds=st.integers(0, 9))
    def wait(self, seconds: int) -> None:
        self.now += seconds


@pytest.mark.parametrize("name", POLICIES)
def test_any_order_of_events_with_sessions(name: str) -> None:
    machine = type("Machine", (SessionMachine,), {"make": staticmethod(POLICIES[name])})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(15), stateful_step_count=30))


@pytest.mark.parametrize("name", POLICIES)
def test_any_order_of_events(name: str) -> None:
    policies = {**POLICIES, "kv-aware": lambda: KVAware(refit_least=8)}  # so that it learns within some steps
    machine = type("Machine", (PolicyMachine,), {"make": staticmethod(policies[name])})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(15), stateful_step_count=30))
