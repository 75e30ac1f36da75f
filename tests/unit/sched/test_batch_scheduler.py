import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.errors import InvalidRequest
from moonpool.sampling import SamplingParams
from moonpool.sched.batch_scheduler import BatchScheduler, DecodeSequence, Reservation
from moonpool.sched.block_manager import BlockManager
from moonpool.sched.sampling import SequenceSampling
from moonpool.sched.steps import SequenceStep, Step
from moonpool.v1 import kv_pb2
from tests.unit.sched.helpers import BT, decode_sequence, key, tokens

STOP, LENGTH, GOES_ON = kv_pb2.FINISH_REASON_STOP, kv_pb2.FINISH_REASON_LENGTH, kv_pb2.FINISH_REASON_UNSPECIFIED
END = 99999


def scheduler(blocks: int = 8, *, max_batch: int = 2, max_tokens: int = 1000) -> BatchScheduler:
    return BatchScheduler(BlockManager(blocks), block_tokens=BT, max_batch=max_batch, max_tokens=max_tokens)


def admitted(s: BatchScheduler, name: str, prompt: int, max_tokens: int) -> DecodeSequence:
    sampling = SequenceSampling(prompt, SamplingParams(max_tokens=max_tokens), end_token_ids=frozenset({END}))
    reservation = s.reserve([], s.blocks_for(sampling))
    assert reservation is not None
    sequence = decode_sequence(name, tokens(prompt + 1), s.bind_reservation(reservation), sampling)
    assert s.admit(sequence) == GOES_ON
    s.check_invariants()
    return sequence


def test_promises_are_bounded_and_kept() -> None:
    s = scheduler(blocks=4)
    assert s.promise(3)
    assert not s.promise(2)
    assert s.promised_blocks == 3
    assert s.bind(2) == [0, 1]
    s.check_invariants()
    assert (s.promised_blocks, s.blocks.num_available) == (1, 2)
    assert s.promise(1)
    assert not s.promise(1)
    s.unpromise(2)
    assert s.promised_blocks == 0


def test_held_blocks_that_were_cached_take_room_too() -> None:
    s = scheduler(blocks=4)
    blocks = s.blocks.allocate(2)
    for n, block in enumerate(blocks):
        s.blocks.register(block, key(n))
    s.blocks.release(blocks)
    assert s.promise(1)
    assert s.reserve([key(0), key(1)], 4) is None  # 2 held and 2 new, where only 3 are left
    assert (s.promised_blocks, s.blocks.num_cached) == (1, 2)
    reservation = s.reserve([key(0), key(1), key(2)], 3)
    assert reservation == Reservation(held=(0, 1), promised=1)
    s.check_invariants()
    shared = s.reserve([key(0), key(1)], 2)
    assert shared == Reservation(held=(0, 1), promised=0)  # used already: takes no room
    s.cancel_reservation(shared)
    assert s.bind_reservation(reservation) == [0, 1, 2]
    s.check_invariants()


def test_what_a_step_says() -> None:
    s = scheduler()
    sequence = admitted(s, "a", 16, 3)
    assert len(sequence.block_table) == 2
    plan = s.plan()
    assert plan is not None
    last = SequenceStep(array("i", [16]).tobytes(), 16, (0, 1), sequence.sampling.at(sequence.token_ids))
    assert plan.step == Step(1, (last,))
    assert last.sample is not None
    assert last.sample.position == 1
    assert plan.context_tokens == 17
    assert s.plan() is None
    assert s.step_in_flight is plan
    (token,) = s.step_done([42]).tokens
    assert (token.sequence, token.position, token.token_id, token.finish_reason) == (sequence, 1, 42, GOES_ON)
    assert sequence.token_ids == array("i", [*range(17), 42])
    assert (sequence.num_computed, sequence.output_tokens) == (17, 2)
    s.plan()
    (token,) = s.step_done([43]).tokens
    assert (token.position, token.finish_reason) == (2, LENGTH)
    assert s.get("a") is None
    assert s.plan() is None
    assert s.blocks.num_used == 2  # the caller's
    s.check_invariants()


def test_end_tokens_and_the_models_length_end_a_sequence() -> None:
    s = scheduler(max_tokens=20)
    a, b = admitted(s, "a", 10, 100), admitted(s, "b", 18, 100)
    assert (s.blocks_for(a.sampling), len(b.block_table)) == (2, 2)
    s.plan()
    tokens_ = s.step_done([END, 5]).tokens
    assert [t.finish_reason for t in tokens_] == [STOP, LENGTH]
    assert s.num_running == 0


def test_a_sequence_that_has_ended_is_not_admitted() -> None:
    s = scheduler()
    ended = decode_sequence("a", array("i", [1, END]), [0], SequenceSampling(1, end_token_ids=frozenset({END})))
    assert s.admit(ended) == STOP
    full = decode_sequence("a", array("i", [1, 2]), [0], SequenceSampling(1, SamplingParams(max_tokens=1)))
    assert s.admit(full) == LENGTH
    assert (s.num_waiting, s.get("a")) == (0, None)
    admitted(s, "a", 1, 5)
    with pytest.raises(InvalidRequest, match="running already"):
        s.admit(decode_sequence("a", tokens(2), [0], SequenceSampling(1)))


def test_the_batch_is_bounded_and_filled_in_order() -> None:
    s = scheduler(max_batch=2)
    for name in "abc":
        admitted(s, name, 4, 3)
    plan = s.plan()
    assert plan is not None
    assert [q.request_id for q in plan.sequences] == ["a", "b"]
    assert (s.num_running, s.num_waiting, s.context_tokens) == (2, 1, 15)
    s.step_done([END, 1])
    plan = s.plan()
    assert plan is not None
    assert [q.request_id for q in plan.sequences] == ["b", "c"]


def test_removal_waits_for_the_step() -> None:
    s = scheduler(max_batch=2)
    a, b, c = (admitted(s, name, 4, 3) for name in "abc")
    s.plan()
    assert s.get("a") is a
    assert s.remove("a") is None
    assert s.get("a") is None
    assert s.remove("c") is c  # waits, not in flight
    assert s.remove("nobody") is None
    s.check_invariants()
    outcome = s.step_done([7, 8])
    assert outcome.removed == (a,)
    assert a.token_ids == tokens(5)
    assert [t.sequence for t in outcome.tokens] == [b]
    assert s.remove("b") is b
    s.check_invariants()


def test_an_aborted_step_changes_nothing() -> None:
    s = scheduler()
    a = admitted(s, "a", 4, 3)
    first = s.plan()
    assert s.step_done([], aborted=True).tokens == ()
    assert a.token_ids == tokens(5)
    again = s.plan()
    assert first is not None
    assert again is not None
    assert again.step.sequences == first.step.sequences
    assert again.step.step_id == 2


class BatchMachine(RuleBasedStateMachine):
    """Any order of reservations, arrivals, steps and removals: promises are kept and all blocks come back."""

    blocks = 8

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler(self.blocks, max_batch=2, max_tokens=6 * BT)
        self.reserved: list[tuple[SequenceSampling, Reservation]] = []
        self.bound: list[DecodeSequence] = []
        self.count = 0

    def end(self, sequence: DecodeSequence) -> None:
        for n in range(sequence.num_computed // BT):
            self.scheduler.blocks.register(sequence.block_table[n], key(n))
        self.scheduler.blocks.release(sequence.block_table)

    @rule(prompt=st.integers(1, 4 * BT), max_tokens=st.integers(2, 3 * BT), keys=st.integers(0, 3))
    def reserve(self, prompt: int, max_tokens: int, keys: int) -> None:
        sampling = SequenceSampling(prompt, SamplingParams(max_tokens=max_tokens), end_token_ids=frozenset({END}))
        reusable = [key(n) for n in range(min(keys, prompt // BT))]
        reservation = self.scheduler.reserve(reusable, self.scheduler.blocks_for(sampling))
        if reservation is not None:
            self.reserved.append((sampling, reservation))

    @precondition(lambda self: self.reserved)
    @rule(lost=st.booleans())
    def bind(self, lost: bool) -> None:
        sampling, reservation = self.reserved.pop(0)
        if lost:
            self.scheduler.cancel_reservation(reservation)
            return
        table = self.scheduler.bind_reservation(reservation)
        name, ids = f"r{self.count}", tokens(sampling.prompt_tokens + 1)
        self.count += 1
        self.bound.append(decode_sequence(name, ids, table, sampling))

    @precondition(lambda self: self.bound)
    @rule()
    def admit(self) -> None:
        sequence = self.bound.pop(0)
        if self.scheduler.admit(sequence) != GOES_ON:
            self.end(sequence)

    @rule()
    def plan(self) -> None:
        self.scheduler.plan()

    @precondition(lambda self: self.scheduler.step_in_flight)
    @rule(first_ends=st.booleans(), aborted=st.booleans())
    def done(self, first_ends: bool, aborted: bool) -> None:
        plan = self.scheduler.step_in_flight
        assert plan is not None
        sampled = [END if first_ends and n == 0 else 1 for n in range(len(plan.sequences))]
        outcome = self.scheduler.step_done([] if aborted else sampled, aborted=aborted)
        for sequence in outcome.removed:
            self.end(sequence)
        for token in outcome.tokens:
            if token.finish_reason != GOES_ON:
                self.end(token.sequence)

    @precondition(lambda self: self.count)
    @rule(index=st.integers(0, 20))
    def remove(self, index: int) -> None:
        self.remove_one(f"r{index % self.count}")

    @invariant()
    def holds(self) -> None:
        self.scheduler.check_invariants()
        assert self.scheduler.promised_blocks == sum(r.promised for _, r in self.reserved)

    def teardown(self) -> None:
        for _, reservation in self.reserved:
            self.scheduler.cancel_reservation(reservation)
        for sequence in self.bound:
            self.end(sequence)
        if self.scheduler.step_in_flight:
            outcome = self.scheduler.step_done([END] * len(self.scheduler.step_in_flight.sequences))
            for sequence in [*outcome.removed, *(token.sequence for token in outcome.tokens)]:
                self.end(sequence)
        for n in range(self.count):
            self.remove_one(f"r{n}")
        assert self.scheduler.blocks.num_used == 0
        assert self.scheduler.blocks.num_available == self.blocks
        self.scheduler.check_invariants()

    def remove_one(self, name: str) -> None:
        sequence = self.scheduler.remove(name)
        if sequence is not None:
            self.end(sequence)


BatchMachine.TestCase.settings = settings(derandomize=True, max_examples=40, stateful_step_count=40, deadline=None)
TestBatchMachine = BatchMachine.TestCase


@pytest.mark.parametrize("seed", range(4))
def test_long_walks(seed: int) -> None:
    """Deep states, which short examples hardly reach."""
    rng = random.Random(seed)
    machine = BatchMachine()
    for _ in range(800):
        choice = rng.random()
        if choice < 0.2:
            machine.reserve(prompt=rng.randint(1, 4 * BT), max_tokens=rng.randint(2, 3 * BT), keys=rng.randint(0, 3))
        elif choice < 0.35 and machine.reserved:
            machine.bind(lost=rng.random() < 0.2)
        elif choice < 0.5 and machine.bound:
            machine.admit()
        elif choice < 0.7:
            machine.plan()
        elif choice < 0.97 and machine.scheduler.step_in_flight:
            machine.done(first_ends=rng.random() < 0.1, aborted=rng.random() < 0.1)
        elif choice > 0.97 and machine.count:
            machine.remove(index=rng.randint(0, 20))
        machine.holds()
    assert machine.count > 20
    machine.teardown()
