"""A cluster in virtual time: exact times of small cases, leaps that change nothing, nothing lost under faults."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonpool.engine.decode.core.settings import Preemption
from moonpool.simulator.clock import PS, ps
from moonpool.simulator.cluster.cluster import Cluster
from moonpool.simulator.cluster.config import DecodeMemory, Runs, SloTargets
from moonpool.simulator.cluster.requests import DONE, GIVEN_UP, REFUSED, TOO_LARGE, Request, TokenTimes
from moonpool.simulator.network import CallDelays, exponential
from moonpool.simulator.traces.mooncake import TraceRequest
from tests.examples import examples
from tests.unit.simulator.cluster.rig import config, request, run


def test_the_times_of_one_request() -> None:
    (value,), cluster = run(config(kvstore=0), [request(1.0, 100, 4, 0)])
    assert (value.outcome, value.made) == (DONE, 4)
    assert value.first_at == ps(1.1)  # 100 tokens of a millisecond
    # 10,000 bytes at a million a second: three layers of four while the prompt is computed, the last one after it
    sent = value.first_at + ps(0.0025)
    steps = [ps(0.011) + (100 + number) * ps(1e-6) for number in (1, 2, 3)]
    assert value.intervals == [sent - value.first_at + steps[0], steps[1], steps[2]]
    assert value.ended_at == sent + sum(steps)
    assert value.predicted_ttft_s == pytest.approx(0.1)
    assert cluster.decodes[0].use.steps == 3


def test_each_run_of_decode_steps_has_a_way_to_its_engine() -> None:
    """The second answer joins the first: a run ends then, and one ends with each answer."""
    trace = [request(1.0, 100, 20, 0), request(1.05, 100, 5, 100)]
    alike = config(kvstore=0)
    far = replace(alike, delays=replace(alike.delays, run_s=0.03))
    ((plain, _), _), ((value, other), cluster) = run(alike, trace), run(far, trace)
    assert cluster.decodes[0].core.planner.steps == 3
    first, second, third = (ps(exponential(0.03, far.seed, 0, number)) for number in (1, 2, 3))
    assert value.first_at == plain.first_at
    assert value.intervals[0] == plain.intervals[0] + first
    assert other.intervals[0] > second
    assert value.ended_at - plain.ended_at == pytest.approx(first + second + third, abs=ps(0.001))


def test_an_answer_of_one_token_needs_no_decode() -> None:
    (value,), cluster = run(config(kvstore=0), [request(0.0, 100, 1, 0)])
    assert (value.outcome, value.ended_at, value.intervals) == (DONE, ps(0.1), [])
    assert cluster.decodes[0].use.steps == 0


def test_a_prefix_is_reused_from_the_pool() -> None:
    first, second = run(config(kvstore=0), [request(0.0, 200, 2, 0), request(1.0, 300, 2, 0)])[0]
    assert (first.reused, second.reused) == (0, 192)
    assert second.first_at - second.arrived == ps(0.108)


def test_a_prompt_that_is_all_cached_computes_its_last_token() -> None:
    _, second = run(config(kvstore=0), [request(0.0, 128, 1, 0), request(1.0, 128, 1, 0)])[0]
    assert second.reused == 127
    assert second.first_at - second.arrived == ps(0.001)


def test_a_prefix_is_loaded_from_a_store_ahead_of_the_computation() -> None:
    """Two instances: the second prompt finds the first busy and loads from the store, which has what was written."""
    long = request(1.0, 1000, 1, 100)
    trace = [request(0.0, 640, 1, 0), replace(long, hash_ids=(*range(10), *range(110, 116))), request(1.0, 700, 1, 0)]
    first, second, third = run(config(prefill=2, kvstore=1), trace)[0]
    assert (first.reused, second.reused, third.reused) == (0, 640, 640)
    # 60 tokens take 60 ms, 640 tokens of 100 bytes 64 ms: the load is longer, a quarter of the computation comes after
    assert third.first_at - third.arrived == pytest.approx(
        ps(0.064 + 0.015), abs=10_000
    )  # begun just in time, by a tick
    assert third.predicted_ttft_s == pytest.approx(0.079)


BUSY = [
    request(0.0, 640, 1, 0),
    replace(request(1.0, 1000, 1, 100), hash_ids=(*range(10), *range(110, 116))),
    request(1.0, 700, 1, 0),
]
"""The second prompt keeps the instance busy that has the prefix of the third one."""


def test_a_prefix_is_loaded_from_another_instance() -> None:
    """There is no store: as quick as from one, with the same links."""
    ended, cluster = run(config(prefill=2, kvstore=0), BUSY)
    third = ended[2]
    assert (third.reused, cluster.use()["loaded_from_peers_blocks"]) == (640, 10)
    assert third.first_at - third.arrived == pytest.approx(ps(0.064 + 0.015), abs=10_000)
    assert third.predicted_ttft_s == pytest.approx(0.079)


def test_without_peers_it_waits_for_the_one_that_has_it() -> None:
    ended, cluster = run(config(prefill=2, kvstore=0, peers=False), BUSY)
    assert cluster.use()["loaded_from_peers_blocks"] == 0
    assert ended[2].first_at - ended[2].arrived > ps(0.360)


def test_a_peer_that_is_lost_in_the_middle_of_a_read_costs_time_only() -> None:
    ended: list[Request] = []
    cluster = Cluster(config(prefill=2, kvstore=0), ended.append)
    cluster.feed(BUSY)
    cluster.world.at(ps(1.030), lambda _: cluster.crash("p0", 1.0))
    cluster.run()
    cluster.check_at_rest()
    assert [each.outcome for each in ended] == [DONE] * 3
    assert next(each for each in ended if each.number == 3).reused == 0


def test_a_lost_store_costs_time_only() -> None:
    trace = [request(0.0, 640, 1, 0), request(1.0, 1000, 1, 0), request(1.0, 700, 1, 0)]
    ended: list[Request] = []
    cluster = Cluster(config(prefill=2, kvstore=1), ended.append)
    cluster.feed(trace)
    cluster.world.at(ps(1.030), lambda _: cluster.crash("s0", 0.0))
    cluster.run()
    cluster.check_at_rest()
    assert [each.outcome for each in ended] == [DONE] * 3
    third = next(each for each in ended if each.number == 3)
    assert third.reused == 0
    # the step that follows the load began at 1.019; its layer of 15 ms ends first
    assert third.first_at == pytest.approx(ps(1.019 + 0.015 + 0.700), abs=10_000)


def test_blocks_come_from_disk_when_dram_is_small() -> None:
    trace = [request(0.0, 640, 1, 0), request(2.0, 640, 1, 100), request(4.0, 3000, 1, 200), request(4.0, 650, 1, 0)]
    wanted = config(prefill=2, kvstore=1, store_bytes=12 * 6400, disk_bytes=100 * 6400, disk_bytes_per_s=1e6)
    wanted = replace(wanted, pool_blocks=60)
    _, cluster = run(wanted, trace)
    assert cluster.stores[0].read_blocks >= cluster.stores[0].disk_blocks >= 0


def test_what_is_predicted_to_miss_the_limit_is_refused() -> None:
    trace = [request(0.0, 1000, 2, number * 100) for number in range(4)]
    ended = run(config(kvstore=0, admission="early", slo=SloTargets(ttft_s=2.5)), trace)[0]
    assert [each.outcome for each in ended] == [DONE, DONE, REFUSED, REFUSED]


def test_the_rest_of_a_prompt_is_computed_at_decode_when_prefill_is_busy() -> None:
    trace = [request(0.0, 128, 3, 0), request(2.0, 1000, 1, 100), request(2.0, 180, 3, 0)]
    apart = run(config(kvstore=0), trace)[0][2]
    here, cluster = run(config(kvstore=0, decode_prompt_tokens=64), trace)
    assert [each.outcome for each in here] == [DONE] * 3
    assert apart.first_at - apart.arrived == ps(1.0 + 0.052)
    # 52 tokens of a millisecond, beside a step over nobody
    assert here[2].first_at - here[2].arrived == ps(0.010 + 0.052)
    assert (here[2].reused, here[2].made) == (128, 3)
    assert cluster.decodes[0].core.planner.starts.begun == 1


def test_what_fits_nowhere_is_too_large() -> None:
    ended = run(config(kvstore=0), [request(0.0, 201 * 64, 2, 0), request(0.0, 64, 300 * 64, 500)])[0]
    assert [each.outcome for each in ended] == [TOO_LARGE, TOO_LARGE]


def test_the_tbt_limit_bounds_the_batch() -> None:
    """As the conductor does: who would be too slow, or make others too slow, is refused and does not wait."""
    trace = [request(0.0, 10, 200, number) for number in range(30)]
    tight = config(kvstore=0, keep_tbt=True, slo=SloTargets(tbt_s=0.0205))
    crowded, cluster = run(tight, trace)
    assert cluster.decodes[0].use.most_sequences == 8  # nine at their answers' ends would be too slow
    assert [each.outcome for each in crowded] == [DONE] * 8 + [REFUSED] * 22


# Leaps

REQUESTS = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 900), st.integers(1, 400), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


def trace_of(plans: list[tuple[int, int, int, int]]) -> list[TraceRequest]:
    return [request(at / 1000, tokens, answer, 1000 * chain) for at, tokens, answer, chain in sorted(plans)]


def story(ended: list[Request]) -> list[object]:
    return [(each.number, each.outcome, each.first_at, each.ended_at, each.intervals) for each in ended]


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way is not Preemption.AUTO else ()) for way in Preemption]
)
@given(plans=REQUESTS, blocks=st.integers(22, 60), slow=st.sampled_from((1.0, 2.0)))
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(20))
def test_steps_at_once_are_as_steps_one_by_one(
    way: Preemption, plans: list[tuple[int, int, int, int]], blocks: int, slow: float
) -> None:
    """Every token comes at the same picosecond, also with preemption, full pools and engines that share cores."""
    memory = DecodeMemory(preemption=way, assumed_answer_tokens=2)
    wanted = config(kvstore=0, pool_blocks=blocks, memory=memory, max_num_seqs=7, host_slowdown=slow)
    leaping, leapt = run(wanted, trace_of(plans))
    single, stepped = run(wanted, trace_of(plans), runs=Runs(1))
    assert story(leaping) == story(single)
    assert leapt.decodes[0].preempted == stepped.decodes[0].preempted
    assert leapt.world.events <= stepped.world.events
    assert {each.outcome for each in leaping} <= {DONE, TOO_LARGE}


@pytest.mark.parametrize(("way", "swaps"), [(Preemption.SWAP, True), (Preemption.RECOMPUTE, False)])
def test_a_crowded_pool_preempts_and_loses_nothing(way: Preemption, swaps: bool) -> None:
    trace = [request(0.01 * number, 64, 600, 10 * number) for number in range(12)]
    memory = DecodeMemory(preemption=way, assumed_answer_tokens=2)
    ended, cluster = run(config(kvstore=0, pool_blocks=40, memory=memory), trace)
    core = cluster.decodes[0].core
    assert core.preempted.preemptions > 0
    assert (core.preempted.swaps > 0, core.planner.recomputed_tokens > 0) == (swaps, not swaps)
    assert [(each.outcome, each.made, len(each.intervals)) for each in ended] == [(DONE, 600, 599)] * 12


# Faults


def test_a_lost_conductor_takes_no_answer_with_it() -> None:
    """Decode goes on meanwhile; the next conductor takes the sequence over, and nothing is computed twice."""
    trace = [request(0.0, 100, 400, 0)]
    (plain,), _ = run(config(kvstore=0), trace)
    ended: list[Request] = []
    cluster = Cluster(config(kvstore=0), ended.append)
    cluster.feed(trace)
    cluster.world.at(ps(2.0), lambda _: cluster.crash("c0", 0.5))
    cluster.run()
    cluster.check_at_rest()
    (value,) = ended
    assert (value.outcome, value.made, value.attempts) == (DONE, 400, 1)
    assert cluster.decodes[0].use.steps == 399
    assert value.ended_at == plain.ended_at
    assert sum(value.intervals) == sum(plain.intervals)
    assert max(value.intervals) > ps(1.4)  # what was made without a conductor came with the next one


@pytest.mark.parametrize("name", ["p0", "p1", "d0", "d1", "s0", "c0"])
def test_a_crash_loses_no_request(name: str) -> None:
    trace = [request(0.05 * number, 300 + 7 * number, 50, 100 * (number % 5)) for number in range(60)]
    ended: list[Request] = []
    cluster = Cluster(config(prefill=2, decode=2, kvstore=1, deadline_s=60.0), ended.append)
    cluster.feed(trace)
    cluster.world.at(ps(2.0), lambda _: cluster.crash(name, 5.0))
    cluster.run()
    cluster.check_at_rest()
    assert len(ended) == 60
    assert {each.outcome for each in ended} == {DONE}
    assert all(each.made == 50 and len(each.intervals) == 49 for each in ended)
    assert (max(each.attempts for each in ended) > 1) == (name != "s0")  # a new conductor places anew what had no token
    assert all(each.ended_at - each.arrived == sum(each.intervals) + each.first_at - each.arrived for each in ended)


@given(seed=st.integers(0, 2**32), drop=st.floats(0.0, 0.3), late=st.floats(0.0, 0.2))
@settings(max_examples=examples(30))
def test_lost_and_late_messages_leave_nothing_behind(seed: int, drop: float, late: float) -> None:
    delays = CallDelays(drop_share=drop, late_share=late, late_s=3.0)
    trace = [request(0.1 * number, 200, 20, 100 * (number % 3)) for number in range(15)]
    ended = run(config(prefill=2, decode=2, deadline_s=10.0, seed=seed, delays=delays), trace)[0]
    assert len(ended) == 15
    assert {each.outcome for each in ended} <= {DONE, GIVEN_UP}
    assert all(len(each.intervals) == each.made - 1 for each in ended if each.made)
    assert all(each.ended_at < 200 * PS for each in ended)


def test_tokens_that_are_known_are_dropped() -> None:
    made = TokenTimes(10, [2, 3, 4], 19)
    assert made.after(0) is made
    assert made.after(2) == TokenTimes(15, [4], 19)
    assert made.after(4) is None
