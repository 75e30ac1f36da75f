"""Conditional disaggregation: when a decode instance computes the end of a prompt itself, and what happens then."""

from dataclasses import replace

import pytest

from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.actions import (
    AnnouncePlacement,
    CallPrefill,
    CallReserve,
    CancelReservation,
    CompleteRequest,
    FailRequest,
    Rehash,
    StartDecode,
)
from moonpool.conductor.core.decode_instance import PlacedAnswer
from moonpool.conductor.core.events import CompletionReason, LoadReported
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.instances import LoadFacts
from moonpool.conductor.core.request_spec import SloLimits

from . import world as machine
from .worlds import SECOND_PER_TOKEN, World, facts

KEYS = [bytes([number]) * 32 for number in range(4)]
SPEEDS = replace(SECOND_PER_TOKEN, decode_base_s=2.0, decode_per_sequence_s=1.0, transfer_bytes_per_s=1e9)


def world(decode_prompt_tokens: int = 32, *, running: int = 0, held: int = 3) -> World:
    """A prefill instance that holds nothing, and a decode instance that holds blocks of the prompt."""
    found = World(
        facts("prefill-0", speeds=SPEEDS), facts("decode-0", speeds=SPEEDS), decode_prompt_tokens=decode_prompt_tokens
    )
    found.report("prefill-0", drain_s=0.0)
    found.report("decode-0", running=running, free_blocks=100)
    found.events("decode-0", KEYS[:held])
    return found


@pytest.mark.parametrize(
    ("tokens", "decode_prompt_tokens", "running", "at_decode", "predicted"),
    [
        # Behind 48 tokens 16 are computed at a second each, 64 at prefill.
        (64, 32, 0, True, (0.0, 16.0)),
        # A step of two sequences takes 4 s: one is waited for, one is run beside the others.
        (64, 32, 2, True, (4.0, 16.0 + 4.0)),
        # Two lose 16 s each: 24 + 32 < 64. With three, 25 + 5 + 48 > 64.
        (64, 32, 3, False, (5.0, 16.0 + 5.0)),
        (64, 15, 0, False, None),
        (64, 0, 0, False, None),
    ],
)
def test_a_rest_is_computed_at_decode_where_all_together_gain(
    tokens: int, decode_prompt_tokens: int, running: int, at_decode: bool, predicted: tuple[float, float] | None
) -> None:
    plan = world(decode_prompt_tokens, running=running).plan(tokens, keys=KEYS, at_decode=True)
    assert plan.at_decode == at_decode
    assert plan.prefill.id == ("decode-0" if at_decode else "prefill-0")
    found = [(candidate.queue_s, candidate.prefill_s) for candidate in plan.candidates if candidate.id == "decode-0"]
    assert found == ([predicted] if predicted is not None else [])
    assert [decode.id for decode in plan.decodes] == ["decode-0"]


@pytest.mark.parametrize(
    ("running", "why"),
    [(3, "those that run there would lose 48.0000 s together"), (60, ""), (1, None)],
)
def test_explain_is_told_why_a_quicker_way_was_not_taken(running: int, why: str | None) -> None:
    plan = world(running=running).plan(64, keys=KEYS, at_decode=True)
    told = [candidate.excluded for candidate in plan.candidates if candidate.id == "decode-0" and not plan.at_decode]
    assert told == ([] if why is None else [why])


def test_only_when_it_is_asked_for() -> None:
    assert [candidate.id for candidate in world().plan(64, keys=KEYS).candidates] == ["prefill-0"]


@pytest.mark.parametrize("tokens", [64, 65])
def test_of_a_prompt_that_is_held_in_full_blocks_one_token_is_left(tokens: int) -> None:
    plan = world(decode_prompt_tokens=1, held=4).plan(tokens, keys=KEYS, at_decode=True)
    assert (plan.at_decode, plan.prefill.prefill_s, plan.prefill.used_blocks) == (True, 1.0, 4)


def test_one_without_room_or_a_suspect_is_passed_over() -> None:
    full = world()
    full.report("decode-0", free_blocks=1)
    assert not full.plan(64, keys=KEYS, at_decode=True).at_decode
    assert not world().plan(64, keys=KEYS, at_decode=True, suspects={"decode-0"}).at_decode


def test_of_those_that_hold_most_the_least_loaded_is_taken() -> None:
    found = world(running=2)
    for name in ("decode-1", "decode-2"):
        found.join(facts(name, speeds=SPEEDS))
    found.events("decode-1", KEYS[:3])
    found.events("decode-2", KEYS[:2])
    assert found.plan(64, keys=KEYS, at_decode=True).prefill.id == "decode-1"


@pytest.mark.parametrize(
    ("queue_s", "running", "at_decode"),
    # 64 s at decode alone; two that run there lose 64 s each, and four of their steps come on top.
    [(0.0, 0, False), (21.0, 0, False), (22.0, 0, True), (210.0, 2, True), (100.0, 2, False)],
)
def test_a_whole_prompt_is_computed_at_decode_where_prefill_is_behind(
    queue_s: float, running: int, at_decode: bool
) -> None:
    found = world(1 << 20, running=running, held=0)
    found.report("prefill-0", drain_s=queue_s)
    plan = found.plan(64, keys=KEYS, at_decode=True)
    assert (plan.at_decode, plan.prefill.used_blocks) == (at_decode, 0)


def test_prompts_that_wait_at_decode_go_first() -> None:
    """Until the first token of their answers."""
    found = world(1 << 20, held=0)
    found.report("prefill-0", drain_s=1000.0)
    answer = PlacedAnswer(64, 4, prompt_s=64.0)
    claim = found.cluster.claim_decode("decode-0", answer)
    waiting = found.plan(64, keys=KEYS, at_decode=True).prefill.queue_s
    found.cluster.answer_grew(claim, 1, 0.0)
    assert (waiting - found.plan(64, keys=KEYS, at_decode=True).prefill.queue_s, answer.prompt_s) == (64.0, 0.0)


def test_speeds_that_are_not_known_promise_nothing() -> None:
    found = World(facts("prefill-0", speeds=SPEEDS), facts("decode-0", speeds=Speeds()), decode_prompt_tokens=32)
    found.events("decode-0", KEYS[:3])
    assert not found.plan(64, keys=KEYS, at_decode=True).at_decode


class Cluster(machine.World):
    """The core with two decode instances, the first of which holds two blocks of what comes."""

    def __init__(self) -> None:
        super().__init__(prefills=1, decode_prompt_tokens=32)
        self.holds("decode-0", tuple(KEYS[:2]))

    def come(self, *, slo: SloLimits = SloLimits(), choices: int = 1) -> int:  # noqa: B008
        return self.arrive(slo=slo, keys=tuple(KEYS[:2]), choices=choices)


class TestLife:
    def test_decode_is_asked_then_told_to_compute_and_gives_all_tokens(self) -> None:
        world = Cluster()
        number = world.come()
        asked = world.one(CallReserve)
        assert (asked.decode, world.cluster.prompts_in_flight) == ("decode-0", 0)
        world.promise(asked, held=2)
        start = world.one(StartDecode)
        assert (start.compute, world.all(CallPrefill)) == (True, [])
        [told] = world.all(AnnouncePlacement)
        assert (told.plan.prefill.id, told.target) == ("decode-0", start.target)
        world.more(start, 8, CompletionReason.LENGTH, known=True)
        world.end(start)
        assert isinstance(world.ends[number], CompleteRequest)
        world.finish_all()

    def test_one_that_holds_more_computes_less(self) -> None:
        world = Cluster()
        world.come()
        world.promise(world.one(CallReserve), held=3)
        assert world.one(StartDecode).target.held_blocks == 3
        world.finish_all()

    @pytest.mark.parametrize("held", [0, 1])
    def test_one_that_holds_something_else_gives_its_promise_back(self, held: int) -> None:
        """And prefill computes the prompt, as nothing else is tried a second time."""
        world = Cluster()
        world.come()
        world.promise(world.one(CallReserve), held=held)
        assert [undo.target.held_blocks for undo in world.all(CancelReservation)] == [held]
        world.promise(world.one(CallReserve))
        assert (len(world.open(CallPrefill)), world.all(StartDecode)) == (1, [])
        world.finish_all()

    def test_one_that_has_no_room_is_not_waited_for(self) -> None:
        world = Cluster()
        world.come()
        world.end(world.one(CallReserve), machine.NO_ROOM)
        world.promise(world.one(CallReserve))
        assert len(world.open(CallPrefill)) == 1
        world.finish_all()

    def test_one_that_cannot_compute_it_after_all_is_to_blame_and_prefill_takes_over(self) -> None:
        world = Cluster()
        number = world.come()
        world.promise(world.one(CallReserve), held=2)
        world.end(world.one(StartDecode), Failure(FailureKind.STREAM, "the prompt cannot be computed here now"))
        assert len(world.all(Rehash)) == 1
        world.rehash(number)
        assert world.one(CallReserve).decode == "decode-1"
        world.promise(world.one(CallReserve))
        assert len(world.open(CallPrefill)) == 1
        world.finish_all()

    @pytest.mark.parametrize("promised", [False, True])
    def test_one_that_is_lost_is_replaced(self, promised: bool) -> None:
        world = Cluster()
        number = world.come()
        if promised:
            world.promise(world.one(CallReserve), held=2)
            world.more(world.one(StartDecode), 3)
        world.leave("decode-0")
        world.rehash(number)
        assert world.open(CallReserve)[-1].decode == "decode-1"
        world.finish_all()

    def test_a_limit_that_it_would_miss_is_no_reason_to_refuse(self) -> None:
        """Where prefill and another decode instance keep it, they serve the request."""
        world = Cluster()
        world.post(LoadReported("decode-0", LoadFacts(running=8, free_blocks=64)))
        number = world.come(slo=SloLimits(None, 0.005))
        assert number not in world.ends
        assert world.one(CallReserve).decode == "decode-1"
        assert world.cluster.prompts_in_flight == 1
        world.finish_all()

    def test_several_answers_are_for_prefill(self) -> None:
        world = Cluster()
        world.come(choices=2)
        assert world.cluster.prompts_in_flight == 1
        world.finish_all()

    def test_who_cannot_keep_it_either_refuses(self) -> None:
        world = Cluster()
        number = world.come(slo=SloLimits(1e-6))
        end = world.ends[number]
        assert isinstance(end, FailRequest)
        assert end.failure.reason == "ttft_slo"
