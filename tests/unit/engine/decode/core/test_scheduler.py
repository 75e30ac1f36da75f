"""Any order of events: invariants hold after each, every request ends once, all blocks come back, reruns are equal."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moonpool.base.scheduling.latency import Speeds, decode_step_seconds
from moonpool.engine.decode.core.actions import FenceConductor, RequestAdopted, RequestFreed, ReservationGranted
from moonpool.engine.decode.core.events import AbortRequest, EngineDied, SearchRules, StreamOpened
from moonpool.engine.decode.core.request import NO_STREAM, RequestStatus
from moonpool.engine.decode.core.settings import Preemption
from tests.examples import examples
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.tbt_world import STEEP, PacedWorld
from tests.unit.engine.decode.core.world import SPEEDS, World, config

COPYING = (RequestStatus.SWAPPING_OUT, RequestStatus.SWAPPING_IN)
STARTED = (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.RECOMPUTING, RequestStatus.PREEMPTED, *COPYING)


TENANTS = (("", 1.0), ("", 1.0), ("calm", 1.0), ("heavy", 3.0), ("faint", 1e-300))
"""Tenants and their weights; most requests are of the common one."""


class DecodeMachine(RuleBasedStateMachine):
    """A small pool that many sequences fight for."""

    world: PacedWorld

    @initialize(
        way=st.sampled_from(Preemption),
        swap=st.sampled_from([0, 3, 50]),
        every=st.sampled_from([0, 0, 1, 3]),
        steps=st.sampled_from([(1, 0), (5, 0), (5, 5), (40, 40)]),
        speeds=st.sampled_from([SPEEDS, STEEP]),
        grants=st.sampled_from([(64, 64), (2, 1), (4, 5)]),
    )
    def begin(
        self,
        way: Preemption,
        swap: int,
        every: int,
        steps: tuple[int, int],
        speeds: Speeds,
        grants: tuple[int, int],
    ) -> None:
        run_steps, ahead_steps = steps
        patience_steps, grant_steps = grants
        self.world = PacedWorld(
            config(
                12,
                max_num_seqs=3,
                preemption=way,
                swap_blocks=swap,
                chunked_prefill_size=20,
                watermark_blocks=1,
                preempt_every=every,
                assumed_answer_tokens=8,
                run_steps=run_steps,
                ahead_steps=ahead_steps,
                patience_steps=patience_steps,
                grant_steps=grant_steps,
                speeds=speeds,
                grace_s=2.0,
                log_ttl_s=30.0,
                log_bytes=4000,
            )
        )
        self.streams = 1
        self.fences: dict[int, int] = {}

    @property
    def conductor(self) -> str:
        """The one that is there now."""
        return "conductor" if self.streams == 1 else f"conductor {self.streams}"

    @property
    def begun(self) -> list[int]:
        """Requests that were started, also such as have ended."""
        return sorted(self.world.started)

    def states(self, *states: RequestStatus) -> list[int]:
        return [number for number, request in self.world.core.requests.items() if request.status in states]

    @rule(
        length=st.integers(1, 3 * BT),
        seed=st.integers(0, 2),
        answer=st.integers(1, 5 * BT),
        slo=st.sampled_from([0.0, 0.0, 0.0022, 0.0035, 1.0]),
        stores=st.sampled_from([0, 0, 2]),
        resumable=st.sampled_from([True, True, False]),
        tenant=st.sampled_from(TENANTS),
    )
    def reserve(
        self, length: int, seed: int, answer: int, slo: float, stores: int, resumable: bool, tenant: tuple[str, float]
    ) -> None:
        self.world.reserve(
            prompt(length, seed),
            answer,
            slo=slo,
            conductor=self.conductor,
            stores=stores,
            total=9 * BT,
            resumable=resumable,
            tenant=tenant[0],
            weight=tenant[1],
        )

    @rule(
        length=st.integers(1, 3 * BT),
        seed=st.integers(0, 2),
        answer=st.integers(1, 5 * BT),
        slo=st.sampled_from([0.0, 0.0, 0.0022, 0.0035]),
        stores=st.integers(0, 1),
        known=st.sampled_from([0, 0, 1, BT, 2 * BT + 1]),
        tenant=st.sampled_from(TENANTS),
    )
    def go(
        self, length: int, seed: int, answer: int, slo: float, stores: int, known: int, tenant: tuple[str, float]
    ) -> None:
        """A request up to its start, at once: by single rules few get so far. Of some more than one token is known."""
        number = self.world.reserve(
            prompt(length, seed),
            answer,
            slo=slo,
            conductor=self.conductor,
            stores=stores,
            total=9 * BT,
            resumable=True,
            tenant=tenant[0],
            weight=tenant[1],
        )
        if number is not None:
            self.world.arrive(number)
            self.world.start(number, self.streams, known)

    @rule(seed=st.integers(0, 1), answers=st.tuples(*[st.integers(20, 60)] * 2), more=st.integers(16, 40))
    def two_go(self, seed: int, answers: tuple[int, int], more: int) -> None:
        """Two whose promises are kept until they have so many more tokens together."""
        slo = decode_step_seconds(self.world.core.tracker.speeds, 2, 2 * 4 + more)
        for number, answer in enumerate(answers):
            what, who = prompt(4, 2 * seed + number), self.conductor
            asked = self.world.reserve(what, answer, slo=slo, conductor=who, total=9 * BT, resumable=True)
            if asked is not None:
                self.world.arrive(asked)
                self.world.start(asked, self.streams)

    @rule(
        length=st.integers(1, 2 * BT),
        seed=st.integers(0, 2),
        answers=st.lists(st.integers(1, 2 * BT), min_size=2, max_size=3),
        slo=st.sampled_from([0.0, 0.0, 0.0045, 1.0]),
        resumable=st.sampled_from([True, True, False]),
        tenant=st.sampled_from(TENANTS),
    )
    def reserve_group(
        self, length: int, seed: int, answers: list[int], slo: float, resumable: bool, tenant: tuple[str, float]
    ) -> None:
        self.world.reserve(
            prompt(length, seed),
            tuple(answers),
            slo=slo,
            conductor=self.conductor,
            stores=1,
            total=4 * BT,
            resumable=resumable,
            tenant=tenant[0],
            weight=tenant[1],
        )

    @rule(
        length=st.integers(1, 2 * BT),
        seed=st.integers(0, 2),
        answers=st.lists(st.integers(1, 2 * BT), min_size=2, max_size=3),
        known=st.sampled_from([0, 0, 1, BT, 2 * BT + 1]),
        tenant=st.sampled_from(TENANTS),
    )
    def group_goes(self, length: int, seed: int, answers: list[int], known: int, tenant: tuple[str, float]) -> None:
        """As `go`, of several answers, some of which may have ended elsewhere."""
        number = self.world.reserve(
            prompt(length, seed),
            tuple(answers),
            conductor=self.conductor,
            stores=1,
            total=4 * BT,
            resumable=True,
            tenant=tenant[0],
            weight=tenant[1],
        )
        if number is not None:
            self.world.arrive(number)
            self.world.start(number, self.streams, known)

    @rule(
        length=st.integers(1, 2 * BT),
        seed=st.integers(0, 2),
        answer=st.integers(1, 2 * BT),
        width=st.integers(1, 3),
        penalty=st.sampled_from([1.0, 0.0, 2.0, -1.0]),
        early=st.sampled_from([False, True, "never"]),
        begins=st.booleans(),
        tenant=st.sampled_from(TENANTS),
    )
    def beams(
        self,
        length: int,
        seed: int,
        answer: int,
        width: int,
        penalty: float,
        early: bool | str,
        begins: bool,
        tenant: tuple[str, float],
    ) -> None:
        number = self.world.reserve(
            prompt(length, seed),
            (answer,) * width,
            conductor=self.conductor,
            stores=1,
            search=SearchRules(penalty, early),
            resumable=True,
            tenant=tenant[0],
            weight=tenant[1],
        )
        if number is not None and begins:
            self.world.arrive(number)
            self.world.start(number, self.streams)

    @precondition(lambda self: self.states(RequestStatus.PROMISED))
    @rule()
    def arrive(self) -> None:
        self.world.arrive(self.states(RequestStatus.PROMISED)[0])

    @precondition(lambda self: self.states(RequestStatus.PROMISED))
    @rule(leading=st.integers(0, 3))
    def tear(self, leading: int) -> None:
        """Whoever finds the blocks that were whole needs no more of them, and `World` looks at what is in them."""
        number = self.states(RequestStatus.PROMISED)[0]
        request, keys = self.world.core.requests[number], self.world.asked[number].request.keys
        whole = 0 if request.owner.transient else min(leading, len(keys))
        self.world.tear(number, leading)
        assert number in self.world.failed
        assert len(self.world.core.blocks.match(keys)) >= whole

    @precondition(lambda self: self.states(RequestStatus.RECEIVED))
    @rule()
    def start(self) -> None:
        self.world.start(self.states(RequestStatus.RECEIVED)[0], self.streams)

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
    def many_steps(self, times: int) -> None:
        self.steps(times)

    def steps(self, times: int) -> None:
        """As many as there are."""
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
        self.world.post(AbortRequest(numbers[pick % len(numbers)], "cancelled"))

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def time(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule()
    def conductor_leaves(self) -> None:
        """Another one comes; nothing is resumed yet."""
        self.world.close(self.streams)
        assert not self.states(RequestStatus.PROMISED, RequestStatus.RECEIVING, RequestStatus.RECEIVED)
        self.streams += 1
        self.world.post(StreamOpened(self.streams, self.conductor))

    @precondition(lambda self: self.states(*STARTED))
    @rule(steps=st.integers(0, 6))
    def orphans_wait_in_vain(self, steps: int) -> None:
        """Some steps, then nobody comes for longer than the grace period, and the running step ends."""
        self.steps(steps)
        self.conductor_leaves()
        self.world.tick(2.0)
        self.steps(1)
        orphans = [request for request in self.world.core.requests.values() if request.stream == NO_STREAM]
        assert all(orphan.status in COPYING or orphan.status is RequestStatus.FINISHING for orphan in orphans)

    @precondition(lambda self: self.begun)
    @rule(pick=st.integers(0, 20), higher=st.sampled_from([0, 1, 1, 2]))
    def adopt(self, pick: int, higher: int) -> None:
        """What there is of a request is had by whoever has the highest fence, and by nobody else."""
        world = self.world
        number = self.begun[pick % len(self.begun)]
        live, before = world.core.requests.get(number), world.followers.get(number)
        there = live is not None and live.asked.resumable and live.status is not RequestStatus.FINISHING
        there = there or number in world.logged
        fence = self.fences.get(number, 0) + higher
        out = [
            action
            for action in world.adopt(number, self.streams, fence)
            if isinstance(action, RequestAdopted | FenceConductor)
        ]
        taken = there and higher
        assert [type(action) for action in out if isinstance(action, RequestAdopted)] == [RequestAdopted] * bool(taken)
        loser = before if taken and live is not None else self.streams if there and not taken else None
        assert [action.stream for action in out if isinstance(action, FenceConductor)] == [loser] * (loser is not None)
        if taken:
            self.fences[number] = fence
            numbers = range(number, number + world.asked[number].request.width)
            told = [(world.heard.get(other), world.answers.get(other, [])) for other in numbers]
            assert all(heard == answer for heard, answer in told), "not a token lost or doubled"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for number in self.states(RequestStatus.PROMISED):
            self.world.arrive(number)
        for number in self.states(RequestStatus.RECEIVED):
            self.world.start(number, self.streams)
        self.world.work()
        self.world.tick(2.0)  # orphans park
        self.world.work()
        self.world.tick(31.0)
        assert not self.world.logged
        self.world.assert_at_rest()
        self.world.assert_reruns()
        ended = [action.id for action in self.world.actions if isinstance(action, RequestFreed)] + self.world.lost
        promised = [action.id for action in self.world.actions if isinstance(action, ReservationGranted)]
        assert sorted(ended) == sorted(promised), "every request that was promised room ends once, or is forgotten once"


DecodeMachine.TestCase.settings = settings(max_examples=examples(35), stateful_step_count=60)
TestDecodeMachine = DecodeMachine.TestCase


def test_an_engine_that_dies_ends_everything() -> None:
    world = World(config(12))
    for seed in range(3):
        world.go(prompt(20, seed), 40)
    world.reserve(prompt(5, 9))
    world.post(EngineDied("out of memory"))
    assert set(world.failed.values()) == {"out of memory"}
    world.assert_at_rest()
