"""Any order of events: invariants hold after each, every request ends once, all blocks come back, reruns are equal."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.decode.core.config import Preemption
from services.decode.core.messages import Beams, Died, Gone, Promised, Stop, StreamClosed, StreamOpened
from services.decode.core.request import State
from tests.unit.decode.core.world import BT, World, config, prompt


class DecodeMachine(RuleBasedStateMachine):
    """A small pool that many sequences fight for."""

    world: World

    @initialize(way=st.sampled_from(Preemption), swap=st.sampled_from([0, 3, 50]), every=st.sampled_from([0, 0, 1, 3]))
    def begin(self, way: Preemption, swap: int, every: int) -> None:
        self.world = World(
            config(
                12,
                max_batch=3,
                preemption=way,
                swap_blocks=swap,
                step_tokens=20,
                watermark_blocks=1,
                preempt_every=every,
                assumed_answer_tokens=8,
            )
        )
        self.streams = 1

    def states(self, *states: State) -> list[int]:
        return [number for number, request in self.world.core.requests.items() if request.state in states]

    @rule(
        length=st.integers(1, 3 * BT),
        seed=st.integers(0, 2),
        answer=st.integers(1, 5 * BT),
        slo=st.sampled_from([0.0, 0.0, 0.0035, 1.0]),
        stores=st.sampled_from([0, 0, 2]),
    )
    def reserve(self, length: int, seed: int, answer: int, slo: float, stores: int) -> None:
        self.world.reserve(prompt(length, seed), answer, slo=slo, conductor="conductor", stores=stores, total=9 * BT)

    @rule(
        length=st.integers(1, 2 * BT),
        seed=st.integers(0, 2),
        answers=st.lists(st.integers(1, 2 * BT), min_size=2, max_size=3),
        slo=st.sampled_from([0.0, 0.0, 1.0]),
    )
    def reserve_group(self, length: int, seed: int, answers: list[int], slo: float) -> None:
        self.world.reserve(prompt(length, seed), tuple(answers), slo=slo, conductor="conductor", stores=1, total=4 * BT)

    @rule(
        length=st.integers(1, 2 * BT),
        seed=st.integers(0, 2),
        answer=st.integers(1, 2 * BT),
        width=st.integers(1, 3),
        penalty=st.sampled_from([1.0, 0.0, 2.0, -1.0]),
        early=st.sampled_from([False, True, "never"]),
    )
    def reserve_beams(self, length: int, seed: int, answer: int, width: int, penalty: float, early: bool | str) -> None:
        self.world.reserve(
            prompt(length, seed), (answer,) * width, conductor="conductor", stores=1, beams=Beams(penalty, early)
        )

    @precondition(lambda self: self.states(State.PROMISED))
    @rule()
    def arrive(self) -> None:
        self.world.arrive(self.states(State.PROMISED)[0])

    @precondition(lambda self: self.states(State.WHOLE))
    @rule()
    def start(self) -> None:
        self.world.start(self.states(State.WHOLE)[0], self.streams)

    @precondition(lambda self: self.world.run)
    @rule()
    def step(self) -> None:
        self.world.step()

    @precondition(lambda self: self.world.run)
    @rule()
    def give_a_step_up(self) -> None:
        self.world.abort()

    @precondition(lambda self: self.world.run)
    @rule(times=st.integers(2, 40))
    def steps(self, times: int) -> None:
        for _ in range(times):
            if self.world.run is not None:
                self.world.step()

    @precondition(lambda self: self.world.ios)
    @rule(pick=st.integers(0, 5), ok=st.sampled_from([True, True, True, False]))
    def end_io(self, pick: int, ok: bool) -> None:
        self.world.end_io(sorted(self.world.ios)[pick % len(self.world.ios)], ok=ok)

    @precondition(lambda self: self.world.stored)
    @rule(store=st.integers(0, 1), keep=st.integers(0, 3))
    def lose(self, store: int, keep: int) -> None:
        """A kvstore evicts what it wants."""
        for number, place in enumerate(list(self.world.stored)):
            if place[0] == store and number % 4 >= keep:
                del self.world.stored[place]

    @precondition(lambda self: self.world.core.requests)
    @rule(pick=st.integers(0, 20))
    def stop(self, pick: int) -> None:
        numbers = list(self.world.core.requests)
        self.world.post(Stop(numbers[pick % len(numbers)], "cancelled"))

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def time(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule()
    def conductor_leaves(self) -> None:
        self.world.post(StreamClosed(self.streams))
        assert not self.states(State.PROMISED, State.RECEIVING, State.WHOLE)
        self.streams += 1
        self.world.post(StreamOpened(self.streams, "conductor"))

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for number in self.states(State.PROMISED):
            self.world.arrive(number)
        for number in self.states(State.WHOLE):
            self.world.start(number, self.streams)
        self.world.work()
        self.world.assert_at_rest()
        self.world.assert_reruns()
        ended = [action.id for action in self.world.actions if isinstance(action, Gone)]
        promised = [action.id for action in self.world.actions if isinstance(action, Promised)]
        assert sorted(ended) == sorted(promised), "every request that was promised room ends once"


DecodeMachine.TestCase.settings = settings(derandomize=True, max_examples=50, stateful_step_count=60, deadline=None)
TestDecodeMachine = DecodeMachine.TestCase


def test_an_engine_that_dies_ends_everything() -> None:
    world = World(config(12))
    for seed in range(3):
        world.go(prompt(20, seed), 40)
    world.reserve(prompt(5, 9))
    world.post(Died("out of memory"))
    assert set(world.failed.values()) == {"out of memory"}
    world.assert_at_rest()
