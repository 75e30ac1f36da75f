"""What the mean time between an answer's tokens is foreseen to be."""

import pytest

from services.conductor.core.events import AnnouncePlacement, CallPrefill, CallReserve, CompletionReason, StartDecode
from services.conductor.core.latency_model import FIRST_TPOT, TpotForecast, TpotModel
from tests.unit.conductor.core.world import World

STEP_S, ONCE_S = 0.002, 0.03


def first_of(answer: int) -> float:
    """What is foreseen of an answer of so many tokens before anything was measured."""
    return STEP_S + FIRST_TPOT[0] / (answer - 1)


def test_an_answer_takes_its_steps_and_once_what_is_beside_them() -> None:
    """Steps take 1.5 times as long as was promised: prompts that came later were computed beside them."""
    model = TpotModel(0.0)
    assert model.forecast(STEP_S, 10, 0, joins=True) == TpotForecast(STEP_S, first_of(11), 0), "nothing was measured"
    for number in range(100):
        steps = 5 + 10 * (number % 4)
        model.observe(model.forecast(STEP_S, steps, 0, joins=True), steps, 1.5 * steps * STEP_S + ONCE_S)
    assert model.forecast(STEP_S, 10, 0, joins=True).tpot_s == pytest.approx(0.006, rel=0.03)
    assert model.forecast(STEP_S, 30, 0, joins=True).tpot_s == pytest.approx(0.004, rel=0.03)
    assert model.forecast(STEP_S, 0.2, 0, joins=True).tpot_s == pytest.approx(0.033, rel=0.05), "at least one step"
    alone = model.forecast(STEP_S, 10, 0, joins=False).tpot_s
    assert alone == pytest.approx(0.003, rel=0.05), "decode computes the first token itself"


def test_what_is_promised_counts_as_far_as_it_was_right() -> None:
    """Promises follow the moment, here between one and four of the instance's first steps; answers took two of them."""
    model = TpotModel(STEP_S)
    for number in range(200):
        steps, promised_s = 5 + 10 * (number % 4), STEP_S * (1 + number % 3 * 1.5)
        model.observe(model.forecast(promised_s, steps, 0, joins=True), steps, 2 * steps * STEP_S + ONCE_S)
    for promised_s in (STEP_S, 4 * STEP_S):
        foreseen = model.forecast(promised_s, 20, 0, joins=True)
        assert foreseen.tpot_s == pytest.approx(2 * STEP_S + ONCE_S / 20, rel=0.1)


class TestRequests:
    def serve(
        self,
        world: World,
        *,
        answer: int,
        finish: CompletionReason = CompletionReason.LENGTH,
        choices: int = 1,
        tbt_s: float = STEP_S,
    ) -> TpotForecast:
        """A request whose answer takes its steps and something beside them; returns what was foreseen of it."""
        world.arrive(answer=answer, choices=choices)
        world.promise(world.one(CallReserve), tbt_s=tbt_s)
        call = world.one(CallPrefill)
        world.first_token(call)
        world.sleep((answer - 1) * STEP_S + ONCE_S)
        world.more(world.one(StartDecode), answer - 1, finish)
        for left in list(world.calls.values()):
            world.end(left)
        return world.all(AnnouncePlacement)[-1].tpot

    def test_answers_teach_what_is_beside_their_steps(self) -> None:
        world = World(decodes=1)
        assert self.serve(world, answer=8).tpot_s == pytest.approx(first_of(8), rel=0.02)
        assert self.serve(world, answer=8).tpot_s > STEP_S + 1.5 * FIRST_TPOT[0] / 7
        world.finish_all()

    @pytest.mark.parametrize("changes", [{"finish": CompletionReason.CANCELLED}, {"choices": 2}])
    def test_answers_that_were_cut_off_or_several_teach_nothing(self, changes: dict[str, object]) -> None:
        world = World(decodes=1)
        self.serve(world, answer=8, **changes)  # type: ignore[arg-type]
        assert self.serve(world, answer=8).tpot_s == pytest.approx(first_of(8), rel=0.02)
        world.finish_all()

    def test_without_a_promised_time_nothing_is_learnt(self) -> None:
        """The whole answer would count as beside its steps."""
        world = World(decodes=1)
        assert self.serve(world, answer=8, tbt_s=0.0).tpot_s == 0.0
        assert self.serve(world, answer=8).tpot_s == pytest.approx(first_of(8), rel=0.02)
        world.finish_all()

    def test_an_answer_that_was_resumed_teaches_nothing(self) -> None:
        """Most of its tokens came before it was placed here."""
        world = World(decodes=1)
        self.serve(world, answer=8)
        decode = world.cluster.decodes.get("decode-0")
        assert decode is not None
        learnt = decode.tpot.state
        world.resume("", tokens=500, answer=510)
        world.promise(world.one(CallReserve), tbt_s=STEP_S)
        world.first_token(world.one(CallPrefill))
        start = world.one(StartDecode)
        world.more(start, 2, CompletionReason.STOP, known=True)
        world.end(start)
        assert decode.tpot.state == learnt
        world.finish_all()
