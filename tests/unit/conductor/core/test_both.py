"""Instances in the role both: a prompt is placed as at prefill, and the answer runs where the prompt was computed."""

from dataclasses import replace

import pytest

from moonpool.base.errors import InvalidRequest, Unavailable
from moonpool.conductor.core.actions import (
    AnnouncePlacement,
    CallPrefill,
    CallReserve,
    CompleteRequest,
    FailRequest,
    Rehash,
    StartDecode,
)
from moonpool.conductor.core.events import CompletionReason, PrefillMeasurements, PromptComputed, StalePlacement
from moonpool.conductor.core.failures import STALE, Failure, FailureKind
from moonpool.conductor.core.instances import InstanceFacts, LoadFacts
from moonpool.conductor.core.request_spec import SloLimits

from . import world as machine
from .worlds import SECOND_PER_TOKEN, World, facts

KEYS = [bytes([number]) * 32 for number in range(4)]
SPEEDS = replace(SECOND_PER_TOKEN, decode_base_s=2.0, decode_per_sequence_s=1.0, transfer_bytes_per_s=1e9)
STALE_QUEUE = Failure(FailureKind.OVERLOADED, "the prompts there take longer", reason=STALE)


def both(name: str) -> InstanceFacts:
    return facts(name, speeds=SPEEDS, computes_prompts=True)


class TestRoutes:
    def test_one_instance_is_a_cluster(self) -> None:
        world = World(both("decode-0"))
        assert world.cluster.ready
        plan = world.plan(64, keys=KEYS)
        assert (plan.prefill.id, [decode.id for decode in plan.decodes], plan.both) == ("decode-0", ["decode-0"], True)
        assert (plan.at_decode, plan.send_s, plan.prefill.ttft_s) == (False, 0.0, 64.0)

    def test_an_only_token_is_decoded_there_too(self) -> None:
        plan = World(both("decode-0")).plan(64, keys=KEYS, answer_tokens=1)
        assert [decode.id for decode in plan.decodes] == ["decode-0"]

    def test_the_sooner_first_token_wins(self) -> None:
        world = World(facts("prefill-0", speeds=SPEEDS), both("decode-0"))
        world.report("prefill-0", drain_s=10.0)
        assert world.plan(64).prefill.id == "decode-0"
        world.report("decode-0", drain_s=30.0, queued_tokens=30, free_blocks=100)
        plan = world.plan(64)
        assert (plan.prefill.id, plan.both) == ("prefill-0", False)
        assert [decode.id for decode in plan.decodes] == ["decode-0"], "its memory serves others' prompts, too"

    def test_answers_beside_the_prompt_take_their_share(self) -> None:
        world = World(both("decode-0"))
        world.report("decode-0", running=2, free_blocks=100, drain_s=0.0)
        # One chunk, and five steps of 4 s: its own, and the four that decode does between chunks.
        assert world.plan(64).prefill.ttft_s == 64.0 + 5 * 4.0

    def test_blocks_there_are_a_prefix(self) -> None:
        world = World(both("decode-0"), both("decode-1"))
        world.events("decode-1", KEYS[:3])
        plan = world.plan(64, keys=KEYS)
        assert (plan.prefill.id, plan.prefill.used_blocks, plan.prefill.ttft_s) == ("decode-1", 3, 16.0)

    def test_blocks_at_another_are_a_source(self) -> None:
        world = World(both("decode-0"), both("decode-1"), peers=True)
        world.events("decode-1", KEYS[:3])
        world.report("decode-1", drain_s=1000.0, queued_tokens=1000, free_blocks=100)
        plan = world.plan(64, keys=KEYS)
        assert (plan.prefill.id, plan.prefill.source) == ("decode-0", "decode-1")

    def test_one_without_memory_comes_after_the_others(self) -> None:
        world = World(both("decode-0"), both("decode-1"))
        world.report("decode-0", free_blocks=1, drain_s=0.0)
        world.report("decode-1", free_blocks=100, drain_s=30.0, queued_tokens=30)
        assert world.plan(64).prefill.id == "decode-1"

    def test_drains_or_is_too_small(self) -> None:
        world = World(both("decode-0"))
        with pytest.raises(InvalidRequest) as refused:
            world.plan(64, answer_tokens=100_000)
        assert refused.value.field == "sampling.max_tokens"
        world.report("decode-0", draining=True)
        with pytest.raises(Unavailable, match="missing: prefill, decode"):
            world.plan(64)

    def test_prompts_that_wait_lengthen_the_steps(self) -> None:
        world = World(both("decode-0"))
        [alone] = world.plan(64).decodes
        world.report("decode-0", drain_s=10.0, queued_tokens=10, free_blocks=100)
        [beside] = world.plan(64).decodes
        assert beside.tbt_s - alone.tbt_s == 16.0  # a block at a second a token

    def test_copies_are_ordered_from_prefill_instances_alone(self) -> None:
        assert not facts("decode-0", computes_prompts=True).takes_copies


class TestRequests:
    def test_one_reservation_and_one_start(self) -> None:
        world = machine.World(prefills=0, decodes=1, boths=1)
        number = world.arrive()
        reserve = world.one(CallReserve)
        assert (reserve.computes_prompt, reserve.max_queue_s) == (True, None)
        world.promise(reserve)
        assert [placed.plan.both for placed in world.all(AnnouncePlacement)] == [True]
        start = world.one(StartDecode)
        assert start.compute
        assert start.plan is not None
        assert not world.all(CallPrefill)
        assert world.cluster.prompts_in_flight == world.cluster.answers_in_flight == 1
        world.prompt_computed(start)
        assert (world.cluster.prompts_in_flight, world.cluster.answers_in_flight) == (0, 1)
        world.more(start, 8, CompletionReason.LENGTH, known=True)
        world.end(start)
        assert world.ends[number] == CompleteRequest(number, CompletionReason.LENGTH)
        world.finish_all()

    @pytest.mark.parametrize("asked", [{"answer": 1}, {"choices": 3}, {"deferred": True}])
    def test_every_kind_of_request(self, asked: dict[str, object]) -> None:
        world = machine.World(prefills=0, decodes=1, boths=1)
        number = world.arrive(**asked)  # type: ignore[arg-type]
        world.promise(world.one(CallReserve))
        start = world.one(StartDecode)
        world.more(start, 1, CompletionReason.LENGTH, known=True)
        assert world.cluster.prompts_in_flight == 0, "its tokens say that the prompt is computed"
        world.end(start)
        assert isinstance(world.ends[number], CompleteRequest)
        world.finish_all()

    def test_the_prediction_learns_from_the_prompt(self) -> None:
        world = machine.World(prefills=0, decodes=1, boths=1)
        for _ in range(40):
            number = world.arrive(prompt=1000)
            world.promise(world.one(CallReserve))
            start = world.one(StartDecode)
            before = world.all(AnnouncePlacement)[-1].plan.prefill.prefill_s
            world.now += 2.0
            world.post(PromptComputed(start.io, PrefillMeasurements(computed_tokens=1000, there_s=2.0)))
            world.more(start, 8, CompletionReason.LENGTH, known=True)
            world.end(start)
            assert number in world.ends
        assert before == pytest.approx(2.0, rel=0.05)

    def test_after_a_failure_the_prompt_is_computed_at_another(self) -> None:
        world = machine.World(prefills=0, decodes=2, boths=2)
        number = world.arrive()
        world.promise(world.one(CallReserve))
        first = world.one(StartDecode)
        world.more(first, 3)
        world.leave(first.target.decode)
        world.end(first, machine.GONE)
        assert [rehash.request for rehash in world.all(Rehash)] == [number]
        world.rehash(number)
        again = world.one(CallReserve)
        assert (again.computes_prompt, again.decode != first.target.decode) == (True, True)
        world.promise(again)
        world.more(world.one(StartDecode), 5, CompletionReason.LENGTH)
        world.finish_all()

    def test_prompts_move_away_from_one_that_drains(self) -> None:
        world = machine.World(prefills=0, decodes=2, boths=2)
        number = world.arrive()
        world.promise(world.one(CallReserve))
        first = world.one(StartDecode)
        world.drain(first.target.decode)
        assert first.io in world.cancelled
        world.rehash(number)
        assert world.one(CallReserve).decode != first.target.decode
        world.finish_all()

    def test_another_one_is_asked_where_the_first_has_no_memory(self) -> None:
        world = machine.World(prefills=0, decodes=3, boths=3)
        world.arrive()
        asked = []
        for _ in range(3):
            reserve = world.one(CallReserve)
            asked.append(reserve.decode)
            world.end(reserve, machine.NO_ROOM)
        assert sorted(asked) == ["decode-0", "decode-1", "decode-2"]
        assert not world.open(CallReserve)
        assert len(world.core.scheduler.memory_queue) == 1
        for name in ("decode-0", "decode-2"):
            world.report(name, 0, drain_s=0.0)
        world.report("decode-1", 64, drain_s=0.0)
        assert world.one(CallReserve).decode == "decode-1"
        world.finish_all()

    def test_a_queue_that_is_longer_than_predicted(self) -> None:
        """The next one is asked; and if all are so, one of them must take the prompt."""
        world = machine.World(prefills=0, decodes=2, boths=2)
        for name in ("decode-0", "decode-1"):
            world.report(name, 64, drain_s=0.0)
        world.arrive()
        asked, limits = [], []
        for _ in range(2):
            reserve = world.one(CallReserve)
            asked.append(reserve.decode)
            limits.append(reserve.max_queue_s is not None)
            world.end(reserve, STALE_QUEUE)
        assert (sorted(asked), limits) == (["decode-0", "decode-1"], [True, True])
        last = world.one(CallReserve)
        assert last.max_queue_s is None
        world.promise(last)
        assert world.one(StartDecode).compute
        world.finish_all()

    def test_a_prefill_instance_that_did_not_take_the_prompt_is_replaced_by_one_of_both(self) -> None:
        world = machine.World(prefills=1, decodes=2, boths=1)
        for name in ("prefill-0", "decode-1"):
            world.report(name, 64, drain_s=0.1 if name == "decode-1" else 0.0)
        world.arrive()
        world.promise(world.one(CallReserve))
        prefill = world.one(CallPrefill)
        world.end(prefill, StalePlacement(5.0, 1))
        reserve = world.one(CallReserve)
        assert (reserve.decode, reserve.computes_prompt) == ("decode-1", True)
        world.finish_all()

    def test_a_limit_that_only_one_of_both_keeps(self) -> None:
        world = machine.World(prefills=0, decodes=2, boths=2)
        for name, running in (("decode-0", 40), ("decode-1", 0)):
            world.report(name, 64, running=running, drain_s=0.0)
        world.arrive(prompt=32, slo=SloLimits(tbt_s=0.02))
        assert world.one(CallReserve).decode == "decode-1"
        number = world.arrive(prompt=32, slo=SloLimits(tbt_s=0.0001))
        assert isinstance(world.ends[number], FailRequest)
        world.finish_all()


def test_a_report_tells_prompts_apart_from_answers() -> None:
    load = LoadFacts(running=7, waiting=3, queued_tokens=100, drain_s=1.0)
    assert (load.of_prompts.running, load.of_prompts.waiting, load.of_prompts.drain_s) == (0, 1, 1.0)
