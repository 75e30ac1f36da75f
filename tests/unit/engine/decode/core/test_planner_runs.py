"""Runs of several steps: k steps at once lead to the same decisions at the same times as k steps one by one."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.state_machine import IoEnded
from moonpool.engine.decode.core.actions import (
    Action,
    AppendBlock,
    ReservationGranted,
    ReservationRefused,
    SetBlockTable,
    StartRun,
    StopReceiving,
    StopRun,
    SwapIn,
    SwapOut,
)
from moonpool.engine.decode.core.events import (
    AbortRequest,
    Event,
    ReceiveEnd,
    ReserveBlocks,
    RunDone,
    RunProgress,
    StartDecoding,
    StreamOpened,
    SwapEnd,
    TransferComplete,
    TransferOpened,
)
from moonpool.engine.decode.core.scheduler import DecodeScheduler
from moonpool.engine.decode.core.settings import DecodeSettings, Preemption
from tests.examples import examples

BT = 4
LONGEST = 60
SPEEDS = Speeds(prefill_per_token_s=1e-3, decode_per_sequence_s=1e-3, decode_per_context_token_s=1e-4)


@dataclass
class Ask:
    """A request: when it comes, what it wants, and when it is cancelled."""

    at: int
    prompt: int
    answer: int
    tbt_slo_s: float
    left_at: int


@dataclass
class Clock:
    """A core whose steps each take 10 units of time, and what it decided.

    Attributes:
        story: actions but those of runs, with their times, and each step's batch.
    """

    core: DecodeScheduler
    asks: list[Ask]
    now: int = 0
    story: list[tuple[int, object]] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)
    runs: int = 0
    arrival: tuple[int, int, int] = (3, 14, 15)
    """After which the first one's KV begins to come, has come, and its first token is known."""
    _asked: list[Ask] = field(default_factory=list)
    _run: StartRun | None = None
    _begun: int = 0
    _told: int = 0
    _ends: int = 0
    _heap: list[tuple[int, int, Event | Ask]] = field(default_factory=list)
    _count: int = 0

    def play(self) -> None:
        """Lets everything happen. A step that ends at a time is before what else happens then."""
        self._post(StreamOpened(1, "c"))
        for ask in self.asks:
            self._at(ask.at, ask)
        while self._run is not None or self._heap:
            if self._run is not None and (not self._heap or self._ends <= self._heap[0][0]):
                self.now = self._ends
                self._post(self._done())
            else:
                self.now, _, event = heappop(self._heap)
                self._progress()
                if isinstance(event, Ask):
                    self._reserve(event)
                else:
                    self._post(event)

    def _reserve(self, ask: Ask) -> None:
        """Asks for room under the next number."""
        self._asked.append(ask)
        number, total = len(self._asked), ask.prompt + LONGEST
        self._at(max(self.now, ask.left_at), AbortRequest(number, "cancelled"))
        spec = EngineRequest(keys(number, ask.prompt), ask.prompt, ask.prompt)
        self._post(ReserveBlocks(number, spec, total, ask.tbt_slo_s))

    def _at(self, when: int, event: Event | Ask) -> None:
        self._count += 1
        heappush(self._heap, (when, self._count, event))

    def _progress(self) -> None:
        """Tells of the steps that are over."""
        if self._run is not None and (steps := (self.now - self._begun) // 10 - self._told):
            self._take(steps)
            self.core.handle(self.now, RunProgress(self._run.step, steps, 0.0, self._filled(self._run.batch)), [])
            self._told += steps

    def _take(self, steps: int) -> None:
        assert self._run is not None
        for step in range(self._told, self._told + steps):
            self.story.append((self._begun + 10 * (step + 1), self._run.batch))
        for number in self._run.batch:
            self.made[number] += steps

    def _done(self) -> RunDone:
        run, steps = self._run, (self._ends - self._begun) // 10 - self._told
        assert run is not None
        self._take(steps)
        sampled = [*run.batch]
        for chunk in run.chunks:
            if chunk.sample:
                sampled.append(chunk.id)
                self.made[chunk.id] += 1
        self._run = None
        ended = tuple((number, 1) for number in sampled if self.made[number] >= self._asked[number - 1].answer)
        return RunDone(run.step, False, 0.0, ended, self._filled(sampled), steps)

    def _filled(self, numbers: Iterable[int]) -> tuple[tuple[int, BlockKey], ...]:
        """Blocks that have become full, and that the core has not heard of."""
        found = []
        for number in numbers:
            computed, known = (
                self._asked[number - 1].prompt + self.made[number] - 1,
                self.core.requests[number].sequences[0],
            )
            found += [(number, key(number, end)) for end in range((len(known.keys) + 1) * BT, computed + 1, BT)]
        return tuple(found)

    def _post(self, event: Event) -> None:
        out: list[Action] = []
        self.core.handle(self.now, event, out)
        self.core.check_invariants()
        for action in out:
            if not isinstance(action, StartRun | StopRun):
                self.story.append((self.now, action))
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case StartRun():
                self.runs += 1
                self._run, self._begun, self._told = action, self.now, 0
                left = [self._asked[number - 1].answer - self.made[number] for number in action.batch]
                self._ends = self.now + 10 * min([action.steps, *left])
            case StopRun():
                self._ends = min(self._ends, self._begun + 10 * (self._told + 1))
            case ReservationGranted(number):
                self.made[number] = 1
                events: tuple[Event, ...] = (
                    TransferOpened(number),
                    TransferComplete(number),
                    StartDecoding(number, 1, 0),
                )
                for delay, next_one in zip(self.arrival if number == 1 else (3, 14, 15), events, strict=True):
                    self._at(self.now + delay, next_one)
            case ReservationRefused(number):
                ask = self._asked[number - 1]
                if self.now < ask.left_at - 17:
                    self._at(self.now + 17, replace(ask, tbt_slo_s=0.0))
            case SwapOut(io) | SwapIn(io):
                self._at(self.now + 25, IoEnded(io, SwapEnd(True, 0.0)))
            case StopReceiving(io):
                self._at(self.now, IoEnded(io, ReceiveEnd()))


def key(number: int, tokens: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little") + tokens.to_bytes(16, "little"))


def keys(number: int, tokens: int) -> tuple[BlockKey, ...]:
    return tuple(key(number, end) for end in range(BT, tokens + 1, BT))


def play(asks: list[Ask], blocks: int, batch: int, way: Preemption, run_steps: int, ahead_steps: int = 0) -> Clock:
    config = DecodeSettings(
        num_blocks=blocks, block_size=BT, block_bytes=1 << 10, max_num_seqs=batch, lease_s=1e9, speeds=SPEEDS,
        preemption=way, chunked_prefill_size=8, swap_blocks=40, assumed_answer_tokens=2, run_steps=run_steps,
        ahead_steps=ahead_steps,
    )  # fmt: skip
    clock = Clock(DecodeScheduler(config), asks)
    clock.play()
    assert clock.core.blocks.num_available == blocks
    assert not clock.core.requests
    return clock


ASK = st.builds(
    Ask, st.integers(0, 400), st.integers(1, 20), st.integers(2, LONGEST),
    st.sampled_from([0.0, 0.0, 0.006, 0.009]), st.one_of(st.just(100_000), st.integers(50, 1500)),
)  # fmt: skip


@pytest.mark.parametrize("way", Preemption)
@given(
    asks=st.lists(ASK, min_size=1, max_size=10),
    blocks=st.integers(20, 40),
    batch=st.integers(1, 6),
    most=st.sampled_from([2, 3, 1000]),
)
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(40))
def test_steps_at_once_are_as_steps_one_by_one(
    way: Preemption, asks: list[Ask], blocks: int, batch: int, most: int
) -> None:
    """Also with preemption, full pools, cancelling, promised times and places that are waited for."""
    single, several = (play(asks, blocks, batch, way, steps) for steps in (1, most))
    assert several.story == single.story
    assert several.made == single.made
    assert several.runs <= single.runs


@given(
    asks=st.lists(ASK, min_size=1, max_size=5),
    batch=st.integers(1, 5),
    steps=st.sampled_from([(2, 2), (9, 9), (1000, 1000), (1000, 9)]),
)
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(40))
def test_blocks_granted_ahead_change_nothing_but_the_runs(asks: list[Ask], batch: int, steps: tuple[int, int]) -> None:
    """Where there is room for all: the same as steps one by one, also the blocks, but for when and which they are."""
    single, plain, ahead = (
        play(asks, 120, batch, Preemption.AUTO, *settings) for settings in ((1, 0), (steps[0], 0), steps)
    )
    assert decided(ahead) == decided(single)
    assert ahead.made == single.made
    assert ahead.runs <= plain.runs
    for number in single.made:
        needed, got = (sum(grown_id == number for grown_id in grown(clock)) for clock in (single, ahead))
        assert needed <= got <= needed + -(-steps[1] // BT), "and not many that it did not come to"


def decided(clock: Clock) -> list[tuple[int, object]]:
    """What happened, but for when blocks were given, and which."""
    story = [(at, what) for at, what in clock.story if not isinstance(what, AppendBlock)]
    return [(at, (what.id, len(what.blocks)) if isinstance(what, SetBlockTable) else what) for at, what in story]


def grown(clock: Clock) -> list[int]:
    """The sequences that got blocks, each as often as it did."""
    return [what.id for _, what in clock.story if isinstance(what, AppendBlock)]


def test_a_batch_that_gives_way_is_followed_by_who_waits() -> None:
    """The second one starts first, has the only place, and needs the first one's blocks: then that one runs."""
    first, second = Ask(0, 17, 40, 0.0, 100_000), Ask(1, 2, 60, 0.0, 100_000)
    config = DecodeSettings(num_blocks=20, block_size=BT, block_bytes=1, max_num_seqs=1, lease_s=1e9, speeds=SPEEDS,
                        preemption=Preemption.RECOMPUTE, assumed_answer_tokens=2)  # fmt: skip
    clock = Clock(DecodeScheduler(config), [first, second], arrival=(3, 14, 150))
    clock.play()
    assert clock.made == {1: 40, 2: 60}
    assert clock.core.preempted.preemptions > 0


def test_a_quiet_batch_is_asked_about_once_a_block() -> None:
    """41 steps: up to the first token of each further block, and to the answer's end."""
    ask = Ask(0, 8, 42, 0.0, 100_000)
    assert play([ask], 40, 4, Preemption.AUTO, 1).runs == 41
    assert play([ask], 40, 4, Preemption.AUTO, 1000).runs == 11
    assert play([ask], 40, 4, Preemption.AUTO, 3).runs == 10 * 2 + 1


def test_a_run_is_cut_for_who_waits_and_for_nobody_else() -> None:
    core = DecodeScheduler(
        DecodeSettings(num_blocks=40, block_size=64, block_bytes=1, max_num_seqs=4, lease_s=1.0, run_steps=9)
    )
    out: list[Action] = []
    events: list[Event] = [
        StreamOpened(1, "c"),
        ReserveBlocks(1, EngineRequest((), 5, 5), 50),
        TransferOpened(1),
        TransferComplete(1),
        StartDecoding(1, 1, 0),
    ]
    for event in events:
        core.handle(0.0, event, out)
    assert out[-1] == StartRun(1, (1,), steps=9)
    out.clear()
    events = [
        RunProgress(1, 2, 0.0),
        ReserveBlocks(2, EngineRequest((), 5, 5), 50),
        TransferOpened(2),
        TransferComplete(2),
        StartDecoding(2, 1, 0),
        AbortRequest(1, ""),
    ]
    for event in events:
        core.handle(0.0, event, out)
    assert [action for action in out if isinstance(action, StartRun | StopRun)] == [StopRun(1)]
    core.handle(0.0, RunDone(1, False, 0.0), out)
    assert out[-1] == StartRun(2, (2,), steps=9)
    assert core.requests[2].sequences[0].tokens + core.planner.batch.ticks == 6


@pytest.mark.parametrize("run_steps", [9, 1])
def test_a_patient_step_is_hurried_for_who_waits_and_is_not_patient(run_steps: int) -> None:
    config = DecodeSettings(
        num_blocks=40, block_size=64, block_bytes=1, max_num_seqs=4, lease_s=1.0, run_steps=run_steps
    )
    core, out = DecodeScheduler(config), list[Action]()
    core.handle(0.0, StreamOpened(1, "c"), out)
    for number in (1, 2, 3, 4):
        asked = ReserveBlocks(number, EngineRequest((), 5, 5), 50)
        for event in (asked, TransferOpened(number), TransferComplete(number)):
            core.handle(0.0, event, out)
        core.handle(0.0, StartDecoding(number, 1, 0, patient=number < 3), out)
    cuts = [StopRun(1), StopRun(1, hurried=True)] if run_steps > 1 else [StopRun(1, hurried=True)]
    assert [action for action in out if isinstance(action, StartRun | StopRun)] == [
        StartRun(1, (1,), steps=run_steps, patient=True),
        *cuts,
    ]
    core.handle(0.0, RunDone(1, False, 0.0), out)
    assert out[-1] == StartRun(2, (1, 2, 3, 4), steps=run_steps)


def begun(config: DecodeSettings, total: int = 14) -> tuple[DecodeScheduler, list[Action]]:
    """A core whose one sequence has 5 tokens of a prompt and its first one; and the actions."""
    core, out = DecodeScheduler(config), list[Action]()
    for event in (
        StreamOpened(1, "c"),
        ReserveBlocks(1, EngineRequest(keys(1, 5), 5, 5), total),
        TransferOpened(1),
        TransferComplete(1),
        StartDecoding(1, 1, 0),
    ):
        core.handle(0.0, event, out)
        core.check_invariants()
    return core, out


AHEAD = DecodeSettings(
    num_blocks=9, block_size=BT, block_bytes=1, max_num_seqs=4, lease_s=1.0, run_steps=6, ahead_steps=6
)


def test_a_block_for_the_steps_to_come_lets_a_run_go_on_where_one_becomes_full() -> None:
    core, out = begun(AHEAD)
    assert out[-2:] == [AppendBlock(1, core.requests[1].sequences[0].table.blocks[2]), StartRun(1, (1,), steps=6)]
    core.handle(1.0, RunProgress(1, 1, 0.5), out)
    core.handle(2.0, RunProgress(1, 1, 0.5), out)
    core.handle(3.0, RunProgress(1, 1, 0.5, ((1, key(1, 8)),)), out)
    core.check_invariants()
    assert isinstance(out[-1], StartRun), "nobody was asked for anything"
    assert core.blocks.match([*keys(1, 4), key(1, 8)]) == core.requests[1].sequences[0].table.blocks[:2]
    core.handle(6.0, RunDone(1, False, 1.5, (), ((1, key(1, 12)),), 3), out)
    core.check_invariants()
    assert out[-2:] == [AppendBlock(1, core.requests[1].sequences[0].table.blocks[3]), StartRun(2, (1,), steps=5)]
    assert len(core.requests[1].sequences[0].table.blocks) == core.settings.blocks_for(14), (
        "and none beyond the longest answer"
    )


def test_a_sequence_that_got_no_token_needs_its_next_block_a_step_later() -> None:
    core, out = begun(replace(AHEAD, run_steps=1, ahead_steps=1))
    for step in range(1, 4):
        core.handle(float(step), RunDone(step, False, 0.5, late=(1,)), out)
        core.check_invariants()
        assert core.planner.batch.context == 6
    assert not [action for action in out if isinstance(action, AppendBlock)]
    for step in range(4, 7):
        core.handle(float(step), RunDone(step, False, 0.5), out)
        core.check_invariants()
    assert core.planner.batch.context == 9
    assert [action for action in out if isinstance(action, AppendBlock)]
    core.handle(8.0, RunDone(7, False, 0.5, ((1, 1),), late=(2,)), out)
    core.check_invariants()


def test_no_block_is_given_ahead_that_others_may_need() -> None:
    core, out = begun(replace(AHEAD, num_blocks=3), 12)
    core.handle(0.0, RunDone(1, False, 0.5), out)
    core.check_invariants()
    assert [action for action in out if isinstance(action, AppendBlock | StartRun)] == [
        StartRun(1, (1,), steps=3),
        StartRun(2, (1,), steps=2),
    ]


def test_a_step_of_a_run_that_takes_too_long_counts_before_it_is_over() -> None:
    core, _ = begun(replace(AHEAD, speeds=SPEEDS))
    core.handle(1.0, RunProgress(1, 1, 0.001), [])
    assert core.planner.speeds(1.001) == core.tracker.speeds
    assert core.planner.speeds(2.0).decode_per_sequence_s > 100 * core.tracker.speeds.decode_per_sequence_s
