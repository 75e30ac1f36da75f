"""Any order of arrivals, loads, steps, aborts and removals: invariants hold, all prompts end, all blocks come back."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.sched.block_manager import BlockManager
from moonpool.sched.prefill_scheduler import Load, PrefillScheduler, PrefillSequence, PrefillStep
from tests.unit.sched.helpers import BT, prefill_sequence, tokens

BLOCKS = 10


class PrefillMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = PrefillScheduler(BlockManager(BLOCKS), block_tokens=BT, step_tokens=40, stages=2)
        self.running: dict[str, PrefillSequence] = {}
        self.plans: list[PrefillStep] = []
        self.progress: dict[str, int] = {}
        self.broken: set[str] = set()
        self.count = 0

    @rule(n=st.integers(1, 4 * BT), family=st.integers(0, 1), load=st.integers(0, 3))
    def arrive(self, n: int, family: int, load: int) -> None:
        sequence = prefill_sequence(f"r{self.count}", tokens(n, first=1000 * family))
        self.count += 1
        self.scheduler.add(sequence)
        self.running[sequence.request_id] = sequence
        self.start(load)

    @rule(load=st.integers(0, 3))
    def start(self, load: int) -> None:
        sequence = self.scheduler.start_next(0.0)
        if sequence is None:
            return
        blocks = min(load, self.scheduler.reusable_blocks(sequence))
        if blocks > sequence.num_cached // BT:
            into = self.scheduler.load_started(sequence.request_id, blocks)
            assert all(self.scheduler.blocks.ref_count(block) == 1 for block in into), "nobody reads what is loaded"

    def loading(self) -> list[PrefillSequence]:
        return [s for s in self.running.values() if s.load is not Load.IDLE]

    def broken_loads(self) -> list[PrefillSequence]:
        return [s for s in self.loading() if s.request_id in self.broken]

    @precondition(lambda self: self.loading())
    @rule(what=st.sampled_from(["layer", "layer and plan", "complete", "break", "fail"]), left=st.integers(0, 3))
    def load(self, what: str, left: int) -> None:
        sequence = self.loading()[0]
        if what == "fail":
            step_id = self.scheduler.load_failed(sequence.request_id, left)
            assert (step_id is not None) == (sequence.in_flight > 0)
        elif what == "break":
            self.scheduler.load_broken(sequence.request_id)
            self.broken.add(sequence.request_id)
        elif sequence.request_id in self.broken:
            pass  # its loader is quiet; only `load_failed` can follow
        elif what == "complete":
            self.scheduler.load_complete(sequence.request_id)
        else:
            self.scheduler.layer_ready(sequence.request_id)
            if what == "layer and plan":
                self.plan()

    @rule()
    def plan(self) -> None:
        unproven = [s for s in self.running.values() if s.stale or s.gated or s in self.broken_loads()]
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return
        self.plans.append(plan)
        assert not any(chunk.sequence in unproven for chunk in plan.chunks)
        assert 0 < plan.num_tokens <= 40
        assert not plan.step.gated or len(plan.chunks) == 1
        for chunk in plan.chunks:
            assert chunk.start % BT == 0
            assert chunk.last or chunk.end % BT == 0
            own = chunk.sequence.block_table[chunk.start // BT :]
            blocks = self.scheduler.blocks
            assert all(blocks.ref_count(block) == 1 for block in own), "nobody reads what is written"

    @precondition(lambda self: self.plans)
    @rule(aborted=st.booleans())
    def done(self, aborted: bool) -> None:
        plan = self.plans.pop(0)
        outcome = self.scheduler.step_done(plan.step.step_id, aborted=aborted)
        assert not (aborted and outcome.finished)
        for sequence in outcome.finished:
            assert sequence.finished
        for sequence in outcome.removed:
            assert sequence.block_table == []

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 20))
    def remove(self, index: int) -> None:
        request_id = list(self.running)[index % len(self.running)]
        sequence = self.running.pop(request_id)
        assert self.scheduler.remove(request_id) == (sequence.in_flight == 0)

    @rule()
    def leave(self) -> None:
        """Finished sequences go."""
        for name in [n for n, s in self.running.items() if s.started_at is not None and s.finished]:
            del self.running[name]
            assert self.scheduler.remove(name)

    @invariant()
    def holds(self) -> None:
        self.scheduler.check_invariants()
        for name, sequence in self.running.items():
            assert sequence.num_computed >= self.progress.get(name, 0), "progress is never lost"
            self.progress[name] = sequence.num_computed

    def teardown(self) -> None:
        """Everything ends when loads end and steps run."""
        for _ in range(1000):
            if not self.running and not self.plans:
                break
            self.scheduler.start_next(0.0)
            for sequence in self.loading():
                if sequence.request_id in self.broken:
                    self.scheduler.load_failed(sequence.request_id, 1)
                else:
                    self.scheduler.load_complete(sequence.request_id)
            plan = self.scheduler.plan(0.0)
            if plan:
                self.plans.append(plan)
            if self.plans:
                self.scheduler.step_done(self.plans.pop(0).step.step_id)
            self.leave()
        assert not self.running
        assert self.scheduler.blocks.num_used == 0
        assert self.scheduler.blocks.num_available == BLOCKS
        self.scheduler.check_invariants()


PrefillMachine.TestCase.settings = settings(derandomize=True, max_examples=40, stateful_step_count=40, deadline=None)
TestPrefillMachine = PrefillMachine.TestCase


@pytest.mark.parametrize("seed", range(4))
def test_long_walks(seed: int) -> None:
    """Deep states, which short examples hardly reach."""
    rng = random.Random(seed)
    machine = PrefillMachine()
    for _ in range(600):
        choice = rng.random()
        if choice < 0.25 and machine.scheduler.num_waiting < 4:
            machine.arrive(n=rng.randint(1, 4 * BT), family=rng.randint(0, 1), load=rng.choice([0, 0, 1, 2, 3]))
        elif choice < 0.3:
            machine.start(load=rng.randint(0, 3))
        elif choice < 0.5 and machine.loading():
            machine.load(
                what=rng.choice(["layer", "layer and plan", "complete", "break", "fail"]), left=rng.randint(0, 3)
            )
        elif choice < 0.7:
            machine.plan()
        elif choice < 0.9 and machine.plans:
            machine.done(aborted=rng.random() < 0.2)
        elif choice > 0.97 and machine.running:
            machine.remove(index=rng.randint(0, 20))
        else:
            machine.leave()
        machine.holds()
    assert machine.count > 60
    machine.teardown()
