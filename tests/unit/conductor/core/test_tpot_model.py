"""What the mean time between an answer's tokens is foreseen to be."""

import pytest

from moonpool.conductor.core.actions import AnnouncePlacement, CallPrefill, CallReserve, StartDecode
from moonpool.conductor.core.events import CompletionReason
from moonpool.conductor.core.tpot_model import TpotForecast, TpotModel
from tests.unit.conductor.core.world import World

STEP_S, ONCE_S = 0.002, 0.03


def test_an_answer_takes_longer_than_reserved() -> None:
    """Prompts that came later were computed beside it."""
    model = TpotModel(STEP_S)
    assert model.forecast(3 * STEP_S, 0) == TpotForecast(3 * STEP_S, 3 * STEP_S, 0), "nothing was measured"
    for number in range(120):
        steps, reserved_s = 5 + 10 * (number % 4), STEP_S * (1 + number % 3)
        model.observe(model.forecast(reserved_s, 0), steps, steps * (reserved_s + 1.5 * STEP_S))
    for reserved_s in (STEP_S, 4 * STEP_S):
        assert model.forecast(reserved_s, 0).tpot_s == pytest.approx(reserved_s + 1.5 * STEP_S, rel=0.02)


def test_load_buckets_are_learnt_apart_and_begin_with_the_nearest() -> None:
    model = TpotModel(STEP_S)
    for _ in range(60):
        model.observe(model.forecast(STEP_S, 1), 10, 10 * 2.0 * STEP_S)
    assert [model.forecast(STEP_S, others).tpot_s for others in (0, 1, 20)] == pytest.approx([0.004] * 3, rel=0.05)
    for _ in range(60):
        model.observe(model.forecast(STEP_S, 9), 10, 10 * 3.5 * STEP_S)
    found = [model.forecast(STEP_S, others).tpot_s for others in (1, 2, 4, 8, 20)]
    assert found == pytest.approx([0.004, 0.004, 0.007, 0.007, 0.007], rel=0.05)


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
        assert self.serve(world, answer=8).tpot_s == STEP_S
        assert self.serve(world, answer=8).tpot_s > 1.5 * STEP_S
        world.finish_all()

    @pytest.mark.parametrize("changes", [{"finish": CompletionReason.CANCELLED}, {"choices": 2}])
    def test_answers_that_were_cut_off_or_several_teach_nothing(self, changes: dict[str, object]) -> None:
        world = World(decodes=1)
        self.serve(world, answer=8, **changes)  # type: ignore[arg-type]
        assert self.serve(world, answer=8).tpot_s == STEP_S
        world.finish_all()

    def test_without_a_promised_time_nothing_is_learnt(self) -> None:
        """There is nothing to compare with."""
        world = World(decodes=1)
        assert self.serve(world, answer=8, tbt_s=0.0).tpot_s == 0.0
        assert self.serve(world, answer=8).tpot_s == STEP_S
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
