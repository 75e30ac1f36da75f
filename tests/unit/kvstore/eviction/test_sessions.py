"""Which blocks leave when sessions are known: behaviour one by one, and on a trace of agents."""

import itertools

import pytest

from moonpool.base.kv.blocks import NO_PARENT, BlockInfo
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.sessions import SessionHint
from moonpool.kvstore.eviction.policies import LRU
from moonpool.kvstore.eviction.retention import SessionRetention
from moonpool.simulator.eviction import optimum, replay, replay_sessions
from moonpool.simulator.experiments.prefix_caching import chains_in
from moonpool.simulator.traces.agentic import AgenticMix, AgenticWorkload
from tests.unit.kvstore.helpers import FORMAT, keys_of


class Blocks:
    """A store's order of eviction over LRU, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order = SessionRetention(LRU(), lambda: self.now)
        self.parents: dict[BlockKey, BlockKey] = {}

    def turn(self, chain: list[BlockKey], hint: SessionHint | None = None, *, at: float) -> None:
        """A request reads and stores a chain; then the store is told of the session."""
        self.now = at
        here = [key for key in chain if key in self.parents]
        if here:
            self.order.touched(here)
        for parent, key in itertools.pairwise([NO_PARENT, *chain]):
            if key not in self.parents:
                self.parents[key] = parent
                self.order.added(BlockInfo(key, parent, "", FORMAT))
        self.order.arrived(chain)
        if hint is not None:
            self.order.hint(hint)

    def leaving(self, at: float) -> list[BlockKey]:
        """All blocks in the order of leaving."""
        self.now = at
        return list(self.order.candidates())


KEYS = keys_of(12)
SYSTEM, ONE, OTHER, THIRD = KEYS[:2], KEYS[2:4], KEYS[4:6], KEYS[6:8]


def hint(session: str, chain: list[BlockKey], return_s: float | None = None, **more: object) -> SessionHint:
    """What a client told; `more` as for `SessionHint`."""
    return SessionHint(session.encode(), chain[-1], return_s, return_s is not None, **more)  # type: ignore[arg-type]


def test_without_sessions_the_order_is_the_policys() -> None:
    blocks = Blocks()
    blocks.turn(ONE, at=0.0)
    blocks.turn(OTHER, at=1.0)
    assert blocks.leaving(at=2.0) == [*ONE[::-1], *OTHER[::-1]]


def test_an_ended_session_leaves_first_and_what_others_share_stays() -> None:
    blocks = Blocks()
    blocks.turn([*SYSTEM, *ONE], hint("one", ONE), at=0.0)
    blocks.turn([*SYSTEM, *OTHER], hint("other", OTHER), at=1.0)
    blocks.turn(THIRD, at=2.0)
    blocks.order.hint(hint("other", OTHER, ended=True))
    assert blocks.leaving(at=3.0) == [*OTHER[::-1], *ONE[::-1], *SYSTEM[::-1], *THIRD[::-1]]
    assert (len(blocks.order), blocks.order.unwanted) == (1, 2)


def test_a_system_prompt_is_shared_even_if_its_sessions_never_met() -> None:
    blocks = Blocks()
    for session, own in (("one", ONE), ("other", OTHER)):
        chain = [*SYSTEM, *own]
        blocks.turn(chain, hint(session, chain, ended=True), at=0.0)
        for key in chain if session == "one" else ():
            blocks.order.removed(key)
            del blocks.parents[key]
    assert blocks.leaving(at=1.0) == [*OTHER[::-1], *SYSTEM[::-1]]
    assert blocks.order.unwanted == 2


def test_the_session_that_is_back_last_leaves_before_others() -> None:
    blocks = Blocks()
    blocks.turn(ONE, hint("one", ONE, 100.0), at=0.0)
    blocks.turn(OTHER, hint("other", OTHER, 20.0), at=0.0)
    blocks.turn(THIRD, at=0.0)
    assert blocks.leaving(at=5.0) == [*ONE[::-1], *OTHER[::-1], *THIRD[::-1]]  # in 95 s, in 15 s, 5 s old
    assert blocks.leaving(at=15.0) == [*ONE[::-1], *THIRD[::-1], *OTHER[::-1]]  # in 85 s, 15 s old, in 5 s
    assert blocks.leaving(at=80.0) == [*THIRD[::-1], *OTHER[::-1], *ONE[::-1]]  # 80 s old, 60 s late, in 20 s


def test_the_usual_pause_is_no_promise() -> None:
    blocks = Blocks()
    blocks.turn(ONE, SessionHint(b"one", ONE[-1], 10.0), at=0.0)
    blocks.turn(OTHER, at=0.5)
    assert blocks.leaving(at=3.0) == [*ONE[::-1], *OTHER[::-1]]  # 10 s from now still, 2.5 s old
    blocks.turn(OTHER, at=50.0)
    assert blocks.leaving(at=55.0) == [*ONE[::-1], *OTHER[::-1]]  # away for 55 s


def test_retention_counts_as_a_sooner_return() -> None:
    blocks = Blocks()
    blocks.turn(ONE, hint("one", ONE, 100.0, retention=3), at=0.0)
    blocks.turn(OTHER, hint("other", OTHER, 20.0), at=0.0)
    assert blocks.leaving(at=1.0) == [*OTHER[::-1], *ONE[::-1]]  # 19 s and 99 / 8 s


def test_blocks_are_not_wanted_after_their_time() -> None:
    blocks = Blocks()
    blocks.turn(OTHER, at=0.0)
    blocks.turn(ONE, hint("one", ONE, keep_s=300.0), at=10.0)
    assert blocks.leaving(at=310.0) == [*OTHER[::-1], *ONE[::-1]]
    assert blocks.leaving(at=312.0) == [*ONE[::-1], *OTHER[::-1]]
    blocks.turn(ONE, at=313.0)  # wanted after all
    assert blocks.leaving(at=314.0) == [*OTHER[::-1], *ONE[::-1]]


def test_a_turns_answer_is_the_sessions_too() -> None:
    blocks = Blocks()
    blocks.turn(ONE, hint("one", ONE, 50.0), at=0.0)
    blocks.turn([*ONE, THIRD[0]], at=0.0)
    blocks.turn(OTHER, at=0.0)
    assert blocks.leaving(at=20.0) == [*OTHER[::-1], THIRD[0], *ONE[::-1]] or blocks.leaving(at=20.0)[0] == THIRD[0]


def test_a_session_that_is_being_served_stays() -> None:
    blocks = Blocks()
    blocks.turn(ONE, hint("one", ONE, 100.0), at=0.0)
    blocks.turn(OTHER, at=1.0)
    blocks.turn(ONE, at=2.0)  # back early
    assert blocks.leaving(at=3.0) == [*OTHER[::-1], *ONE[::-1]]


def test_what_a_compaction_leaves_behind_goes_first_unless_branches_run_in_parallel() -> None:
    blocks = Blocks()
    first, second = [*SYSTEM, *ONE], [*SYSTEM, *OTHER]
    blocks.turn(first, hint("s", first), at=0.0)
    blocks.turn(second, hint("s", second), at=1.0)
    assert blocks.leaving(at=2.0)[:2] == ONE[::-1]
    assert blocks.order.unwanted == 2
    blocks.turn([*first, THIRD[0]], hint("s", [*first, THIRD[0]]), at=3.0)
    assert blocks.order.unwanted == 0
    blocks.turn(second, hint("s", second), at=4.0)
    assert blocks.order.unwanted == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hints_close_half_of_the_gap_to_the_optimum(seed: int) -> None:
    """Sessions of agents that need about twice the store: who is done, and, beside it, who is back when."""
    requests = AgenticWorkload(seed, AgenticMix(sessions_per_s=0.1)).requests(10)[:700]
    chains = chains_in(requests)
    capacity = len({key for chain in chains for key in chain}) // 2
    plain, best = replay(chains, LRU(), capacity), optimum(chains, capacity)
    assert best > plain + 0.002
    for returns in (False, True):
        share = replay_sessions(requests, chains, LRU(), capacity, returns=returns)
        assert (share - plain) / (best - plain) > 0.5


def test_a_hint_counts_when_the_last_block_comes() -> None:
    """The store is told at the turn's end, and blocks are still being written."""
    blocks = Blocks()
    blocks.turn(ONE[:1], at=0.0)
    blocks.order.hint(hint("one", ONE, 100.0))
    blocks.turn(ONE, at=10.0)
    blocks.turn(OTHER, at=10.0)
    assert len(blocks.order) == 1
    assert blocks.leaving(at=20.0) == [*ONE[::-1], *OTHER[::-1]]  # in 80 s, 10 s old
    blocks.order.hint(hint("one", THIRD, ended=True))
    blocks.order.hint(hint("one", KEYS[8:9], 5.0))  # the latest word counts
    blocks.turn(THIRD, at=21.0)
    assert len(blocks.order) == 1
    assert blocks.order.unwanted == 0
