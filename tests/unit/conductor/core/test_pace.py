"""What the mean time between an answer's tokens is foreseen to be."""

import pytest

from services.conductor.core.messages import Announce, Finish, Prefill, Reserve, Start
from services.conductor.core.pace import Foreseen, Pace
from tests.unit.conductor.core.world import World

STEP_S, BESIDE_S = 0.002, 0.03


def test_an_answer_takes_its_steps_and_once_what_is_beside_them() -> None:
    pace = Pace()
    foreseen = pace.foresee(STEP_S, 10, 0, joins=True)
    assert foreseen == Foreseen(STEP_S, STEP_S, 0), "nothing was measured"
    for _ in range(9):
        pace.observe(foreseen, 10, 10 * STEP_S + BESIDE_S)
    assert pace.foresee(STEP_S, 10, 0, joins=True).tpot_s == pytest.approx(0.005)
    assert pace.foresee(STEP_S, 30, 0, joins=True).tpot_s == pytest.approx(0.003)
    assert pace.foresee(STEP_S, 0.2, 0, joins=True).tpot_s == pytest.approx(0.032), "at least one step"
    assert pace.foresee(STEP_S, 10, 0, joins=False).tpot_s == STEP_S, "decode computes the first token itself"


class TestRequests:
    def serve(self, world: World, *, answer: int, finish: Finish = Finish.LENGTH, choices: int = 1) -> Foreseen:
        """A request whose answer takes its steps and something beside them; returns what was foreseen of it."""
        world.arrive(answer=answer, choices=choices)
        world.promise(world.one(Reserve), tbt_s=STEP_S)
        call = world.one(Prefill)
        world.first_token(call)
        world.sleep((answer - 1) * STEP_S + BESIDE_S)
        world.more(world.one(Start), answer - 1, finish)
        for left in list(world.calls.values()):
            world.end(left)
        return world.all(Announce)[-1].pace

    def test_answers_teach_what_is_beside_their_steps(self) -> None:
        world = World(decodes=1)
        assert self.serve(world, answer=8).tpot_s == STEP_S
        assert self.serve(world, answer=8).tpot_s > STEP_S + BESIDE_S / 7
        world.finish_all()

    @pytest.mark.parametrize("changes", [{"finish": Finish.CANCELLED}, {"choices": 2}])
    def test_answers_that_were_cut_off_or_several_teach_nothing(self, changes: dict[str, object]) -> None:
        world = World(decodes=1)
        self.serve(world, answer=8, **changes)  # type: ignore[arg-type]
        assert self.serve(world, answer=8).tpot_s == STEP_S
        world.finish_all()
