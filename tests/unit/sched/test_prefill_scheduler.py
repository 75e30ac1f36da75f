import pytest

from moonpool.errors import ConfigError, InvalidRequest
from moonpool.kv.keys import tokens_from_bytes
from moonpool.sched.block_manager import BlockManager
from moonpool.sched.prefill_scheduler import Load, PrefillScheduler, PrefillSequence, PrefillStep
from moonpool.sched.steps import Step
from tests.unit.sched.helpers import BT, keys_of, prefill_sequence, tokens


def scheduler(blocks: int = 16, *, step_tokens: int = 2 * BT, stages: int = 1) -> PrefillScheduler:
    return PrefillScheduler(BlockManager(blocks), block_tokens=BT, step_tokens=step_tokens, stages=stages)


def start(s: PrefillScheduler) -> list[str]:
    started = []
    while sequence := s.start_next(1.0):
        started.append(sequence.request_id)
        s.check_invariants()
    return started


def spans(plan: PrefillStep | None) -> list[tuple[str, int, int]]:
    assert plan is not None
    return [(c.sequence.request_id, c.start, c.end) for c in plan.chunks]


def run(s: PrefillScheduler) -> list[list[tuple[str, int, int]]]:
    """Runs to the end; returns the spans of all steps."""
    steps: list[list[tuple[str, int, int]]] = []
    while True:
        start(s)
        plan = s.plan(2.0)
        if plan is None:
            return steps
        steps.append(spans(plan))
        s.check_invariants()
        for sequence in s.step_done(plan.step.step_id).finished:
            assert s.remove(sequence.request_id)
        s.check_invariants()


def add(s: PrefillScheduler, request_id: str, n: int, *, first: int = 0) -> PrefillSequence:
    sequence = prefill_sequence(request_id, tokens(n, first=first))
    s.add(sequence)
    return sequence


def test_chunks_end_on_block_borders_and_steps_are_packed() -> None:
    s = scheduler(step_tokens=40)
    add(s, "a", 50)
    add(s, "b", 10, first=100)
    add(s, "c", 100, first=200)
    # 40 tokens hold two blocks; the 12 left in the second step are no chunk of c; c's end need not be on a border.
    assert run(s) == [
        [("a", 0, 32)],
        [("a", 32, 50), ("b", 0, 10)],
        [("c", 0, 32)],
        [("c", 32, 64)],
        [("c", 64, 100)],
    ]
    assert s.blocks.num_used == 0
    assert s.blocks.num_cached == 3 + 0 + 6


def test_what_a_step_says() -> None:
    s = scheduler()
    sequence = add(s, "a", 40, first=5)
    start(s)
    plan = s.plan(3.0)
    assert plan is not None
    assert plan.step == Step(1, plan.step.sequences, gated=False, layer_events=True)
    (first,) = plan.step.sequences
    assert tokens_from_bytes(first.token_ids) == tokens(32, first=5)
    assert (first.start, first.block_table, first.sample) == (0, (0, 1), None)
    assert (plan.chunks[0].first, plan.chunks[0].last, plan.num_tokens) == (True, False, 32)
    assert s.plan(3.0) is None  # one stage, one step
    outcome = s.step_done(1)
    assert (outcome.chunks, outcome.finished, outcome.removed) == (plan.chunks, (), ())
    assert s.blocks.keys() == sequence.keys
    plan = s.plan(4.0)
    assert plan is not None
    (last,) = plan.step.sequences
    assert (plan.step.step_id, last.start, last.block_table) == (2, 32, (0, 1, 2))
    assert last.sample == sequence.sampling.at(sequence.token_ids)
    assert (plan.chunks[0].first, plan.chunks[0].last) == (False, True)
    assert s.step_done(2).finished == (sequence,)
    assert (sequence.started_at, sequence.first_step_at) == (1.0, 3.0)
    assert s.blocks.num_used == 3
    assert s.remove("a")
    assert (s.blocks.num_cached, s.blocks.num_free) == (2, 14)


def test_a_cached_prefix_is_not_computed_but_the_last_token_is() -> None:
    s = scheduler()
    add(s, "a", 48)
    run(s)
    assert s.blocks.num_cached == 3
    add(s, "same", 48)
    add(s, "longer", 60)
    assert run(s) == [[("same", 32, 48), ("longer", 48, 60)]]
    assert s.blocks.num_used == 0


def test_blocks_computed_meanwhile_are_matched_again() -> None:
    s = scheduler(step_tokens=2 * BT)
    add(s, "a", 40)
    twin = add(s, "b", 60)
    assert start(s) == ["a", "b"]
    assert twin.num_cached == 0
    assert spans(s.plan(0)) == [("a", 0, 32)]
    s.step_done(1)
    plan = s.plan(0)
    assert spans(plan) == [("a", 32, 40), ("b", 32, 48)]
    assert twin.block_table[:2] == [0, 1]
    assert (twin.num_cached, s.blocks.ref_count(0)) == (32, 2)
    s.check_invariants()


def test_a_prompt_waits_for_blocks_and_keeps_its_turn() -> None:
    s = scheduler(blocks=4)
    add(s, "a", 3 * BT - 1)
    add(s, "b", 2 * BT - 1, first=500)
    add(s, "c", 1, first=900)
    assert start(s) == ["a"]
    assert (s.num_waiting, s.num_started, s.queued_tokens) == (2, 1, 47 + 31 + 1)
    assert run(s) == [[("a", 0, 32)], [("a", 32, 47)], [("b", 0, 31), ("c", 0, 1)]]


def test_sequences_are_not_started_far_ahead() -> None:
    s = scheduler(step_tokens=BT)
    for name in "abc":
        add(s, name, 2 * BT, first=ord(name) * 100)
    assert start(s) == ["a"]  # two steps of work are enough
    s.plan(0)
    assert start(s) == ["b"]


def test_what_cannot_be_served_is_refused() -> None:
    s = scheduler(blocks=2)
    with pytest.raises(InvalidRequest, match="must not be empty"):
        add(s, "a", 0)
    with pytest.raises(InvalidRequest, match="33 tokens do not fit this instance's 32"):
        add(s, "a", 33)
    add(s, "a", 32)
    with pytest.raises(InvalidRequest, match="'a' is running already"):
        add(s, "a", 5)
    with pytest.raises(ConfigError, match="at least one block"):
        scheduler(step_tokens=BT - 1)


def test_two_stages_take_two_steps_of_one_prompt() -> None:
    s = scheduler(stages=2)
    sequence = add(s, "a", 80)
    start(s)
    assert spans(s.plan(0)) == [("a", 0, 32)]
    assert spans(s.plan(0)) == [("a", 32, 64)]
    assert s.plan(0) is None
    assert (sequence.num_scheduled, sequence.num_computed) == (64, 0)
    s.step_done(1)
    assert spans(s.plan(0)) == [("a", 64, 80)]
    s.check_invariants()
    s.step_done(2)
    assert s.step_done(3).finished == (sequence,)


def test_an_aborted_step_is_planned_again_after_those_behind_it() -> None:
    s = scheduler(stages=2)
    sequence = add(s, "a", 80)
    start(s)
    s.plan(0)
    s.plan(0)
    assert s.step_done(1, aborted=True).chunks == ()
    assert s.plan(0) is None  # the second step computes on sand: nothing more until it is over
    s.check_invariants()
    assert s.step_done(2).chunks == ()
    assert sequence.num_computed == 0
    assert s.blocks.keys() == []
    assert spans(s.plan(0)) == [("a", 0, 32)]


def test_removing_in_flight_keeps_the_blocks_until_the_step_is_over() -> None:
    s = scheduler(stages=2)
    sequence = add(s, "a", 80)
    add(s, "b", 10, first=300)
    start(s)
    s.plan(0)
    s.plan(0)
    assert not s.remove("a")
    assert s.get("a") is None
    assert s.blocks.num_used == 6
    s.step_done(1)
    s.check_invariants()
    assert s.blocks.num_used == 6
    outcome = s.step_done(2)
    assert (outcome.removed, outcome.finished) == ((sequence,), ())
    assert s.blocks.num_used == 1
    assert s.remove("a")
    assert s.remove("nobody")
    assert s.remove("b")
    assert s.blocks.num_available == 16


def test_removing_a_waiting_sequence() -> None:
    s = scheduler(blocks=1)
    add(s, "a", 16)
    add(s, "b", 16, first=50)
    assert start(s) == ["a"]
    assert s.remove("b")
    assert s.num_waiting == 0
    s.check_invariants()


def test_a_loading_prefix_gates_its_step() -> None:
    s = scheduler()
    a = add(s, "a", 60)
    add(s, "b", 20, first=500)
    add(s, "c", 4, first=700)
    assert s.start_next(0) is a
    assert s.reusable_blocks(a) == 3
    assert s.load_started("a", 2) == [0, 1]
    assert start(s) == ["b", "c"]
    assert spans(s.plan(0)) == [("b", 0, 20), ("c", 0, 4)]  # its first layer is not there: others go on
    s.step_done(1)
    s.layer_ready("a")
    plan = s.plan(0)
    assert spans(plan) == [("a", 32, 60)]
    assert plan is not None
    assert plan.step.gated
    assert a.num_computed == 0
    assert s.step_done(2).finished == (a,)  # all gates were opened, so all was loaded
    assert (a.load, a.num_loaded, a.num_computed) == (Load.IDLE, 32, 60)
    assert set(a.keys) <= set(s.blocks.keys())
    assert s.load_failed("a", 0) is None
    s.load_complete("a")
    s.check_invariants()


def test_a_gated_step_goes_alone_and_holds_back_the_next_chunk() -> None:
    s = scheduler(stages=3)
    add(s, "b", 4, first=500)
    a = add(s, "a", 100)
    add(s, "c", 4, first=700)
    start(s)
    s.load_started("a", 2)
    s.layer_ready("a")
    assert spans(s.plan(0)) == [("b", 0, 4), ("c", 0, 4)]
    plan = s.plan(0)
    assert spans(plan) == [("a", 32, 64)]
    assert plan is not None
    assert plan.step.gated
    s.load_complete("a")
    assert a.num_computed == 32
    assert s.plan(0) is None  # not before the gated step is over: nothing is built on what may be aborted
    s.step_done(1)
    s.step_done(2)
    plan = s.plan(0)
    assert spans(plan) == [("a", 64, 96)]
    assert plan is not None
    assert not plan.step.gated
    s.check_invariants()


def test_a_complete_load_needs_no_gate() -> None:
    s = scheduler()
    a = add(s, "a", 40)
    start(s)
    s.load_started("a", 2)
    s.load_complete("a")
    plan = s.plan(0)
    assert spans(plan) == [("a", 32, 40)]
    assert plan is not None
    assert not plan.step.gated
    assert (a.num_cached, a.num_loaded) == (0, 32)
    assert s.blocks.keys() == a.keys


@pytest.mark.parametrize(("blocks_left", "start_at"), [(0, 0), (1, 16), (9, 48)])
def test_a_failed_load_is_computed(blocks_left: int, start_at: int) -> None:
    s = scheduler()
    a = add(s, "a", 60)
    start(s)
    s.load_started("a", 3)
    assert s.load_failed("a", blocks_left) is None
    assert (a.num_loaded, a.num_computed) == (start_at, start_at)
    assert s.blocks.keys() == a.keys[: start_at // BT]
    assert spans(s.plan(0)) == [("a", start_at, min(60, start_at + 32))]
    s.check_invariants()


@pytest.mark.parametrize("aborted", [True, False])
def test_a_load_that_fails_under_its_step_is_computed_when_the_step_is_over(aborted: bool) -> None:
    s = scheduler(stages=2)
    a = add(s, "a", 60)
    start(s)
    s.load_started("a", 3)
    s.layer_ready("a")
    assert spans(s.plan(0)) == [("a", 48, 60)]
    assert s.load_failed("a", 1) == 1
    assert s.plan(0) is None
    s.check_invariants()
    outcome = s.step_done(1, aborted=aborted)
    assert (outcome.chunks, outcome.finished) == ((), ())
    assert a.num_computed == 16
    assert run(s) == [[("a", 16, 48)], [("a", 48, 60)]]


def test_a_broken_load_holds_everything_back_until_it_has_failed() -> None:
    s = scheduler(stages=2)
    a = add(s, "a", 60)
    start(s)
    assert s.load_broken("a") is None  # nothing is loading
    s.load_started("a", 3)
    s.layer_ready("a")
    s.plan(0)
    assert s.load_broken("a") == 1
    s.check_invariants()
    assert s.step_done(1).finished == ()
    assert s.plan(0) is None
    assert s.load_failed("a", 2) is None
    assert a.num_computed == 32
    assert run(s) == [[("a", 32, 60)]]


def test_a_gate_that_never_opened_is_tried_again() -> None:
    s = scheduler()
    add(s, "a", 60)
    start(s)
    s.load_started("a", 3)
    s.layer_ready("a")
    s.plan(0)
    s.step_done(1, aborted=True)
    plan = s.plan(0)
    assert spans(plan) == [("a", 48, 60)]
    assert plan is not None
    assert plan.step.gated


def test_loading_starts_after_what_is_cached() -> None:
    s = scheduler()
    add(s, "a", 20)
    run(s)
    b = add(s, "b", 60)
    start(s)
    assert b.num_cached == 16
    assert s.load_started("b", 3) == b.block_table[1:3]
    assert s.load_failed("b", 0) is None
    assert (b.num_cached, b.num_loaded, b.num_computed) == (16, 0, 16)
    assert keys_of(b.token_ids) == b.keys


def test_slow_loads_do_not_keep_others_from_starting() -> None:
    s = scheduler(blocks=64)
    for n in range(3):
        add(s, f"slow{n}", 100, first=1000 * n)
    add(s, "quick", 10, first=9000)
    for n in range(3):
        assert s.start_next(0) is not None
        s.load_started(f"slow{n}", 1)
    assert start(s) == ["quick"]
    assert spans(s.plan(0)) == [("quick", 0, 10)]
