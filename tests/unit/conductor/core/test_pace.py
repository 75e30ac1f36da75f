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
    def serve(
        self, world: World, *, answer: int, finish: Finish = Finish.LENGTH, choices: int = 1, tbt_s: float = STEP_S
    ) -> Foreseen:
        """A request whose answer takes its steps and something beside them; returns what was foreseen of it."""
        world.arrive(answer=answer, choices=choices)
        world.promise(world.one(Reserve), tbt_s=tbt_s)
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

    def test_without_a_promised_time_nothing_is_learnt(self) -> None:
        """The whole answer would count as beside its steps."""
        world = World(decodes=1)
        assert self.serve(world, answer=8, tbt_s=0.0).tpot_s == 0.0
        assert self.serve(world, answer=8).tpot_s == STEP_S
        world.finish_all()

    def test_an_answer_that_was_resumed_teaches_nothing(self) -> None:
        """Most of its tokens came before it was placed here."""
        world = World(decodes=1)
        self.serve(world, answer=8)
        decode = world.picture.decodes.get("decode-0")
        assert decode is not None
        learnt = decode.pace.state
        world.resume("", tokens=500, answer=510)
        world.promise(world.one(Reserve), tbt_s=STEP_S)
        world.first_token(world.one(Prefill))
        start = world.one(Start)
        world.more(start, 2, Finish.STOP, known=True)
        world.end(start)
        assert decode.pace.state == learnt
        world.finish_all()
