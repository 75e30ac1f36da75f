import math
from dataclasses import replace

import pytest

from moonpool.base.cluster.proto_conversion import speeds_from_proto, speeds_to_proto
from moonpool.base.scheduling.latency import (
    DEFAULT_BYTES_PER_S,
    Speeds,
    attention_pairs,
    decode_step_seconds,
    encoded_tokens,
    load_is_cheaper,
    load_seconds,
    overlapped_seconds,
    pipelined_seconds,
    pipelined_step_tokens,
    prefill_seconds,
    prompt_work,
    transfer_seconds,
    work_of,
    work_seconds,
)
from moonpool.base.scheduling.speed_tracker import SpeedTracker
from moonpool.conductor.core.demand import Demand
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.core.latency_model import PrefillLatencyModel
from moonpool.v1 import conductor_pb2

SPEEDS = Speeds(
    prefill_base_s=0.5,
    prefill_per_token_s=0.25,
    prefill_per_pair_s=0.125,
    decode_base_s=1.0,
    decode_per_sequence_s=0.5,
    decode_per_context_token_s=0.25,
    load_bytes_per_s=100.0,
    transfer_bytes_per_s=50.0,
)


def test_proto_round_trip_and_nonsense_is_unknown() -> None:
    assert speeds_from_proto(speeds_to_proto(SPEEDS)) == SPEEDS
    report = conductor_pb2.SpeedReport(
        prefill_base_s=math.nan, prefill_per_token_s=-1.0, load_bytes_per_s=math.inf, decode_base_s=2.0
    )
    assert speeds_from_proto(report) == Speeds(decode_base_s=2.0)


def test_pairs_count_the_causal_triangle() -> None:
    assert attention_pairs(3, 0) == 1 + 2 + 3
    assert attention_pairs(2, 5) == 6 + 7


def test_formulas() -> None:
    assert prefill_seconds(SPEEDS, 3, 0) == 0.5 + 0.75 + 0.125 * 6
    assert prefill_seconds(SPEEDS, 2, 5, steps=2) == 1.0 + 0.5 + 0.125 * 13
    assert prefill_seconds(SPEEDS, 0, 5) == 0.0
    prompt = replace(SPEEDS, prefill_per_prompt_s=8.0, prefill_per_cached_token_s=2.0)
    assert prefill_seconds(prompt, 2, 5) == prefill_seconds(SPEEDS, 2, 5) + 8.0 + 5 * 2.0
    assert prefill_seconds(prompt, 2, 5, begins=False) == prefill_seconds(SPEEDS, 2, 5)


def test_each_chunk_reads_all_kv_before_it() -> None:
    speeds = Speeds(prefill_base_s=0.5, prefill_per_context_token_s=0.25)
    assert prefill_seconds(speeds, 8, 0) == 0.5
    assert prefill_seconds(speeds, 8, 6) == 0.5 + 6 * 0.25
    assert prefill_seconds(speeds, 8, 6, steps=2) == 1.0 + (6 + 10) * 0.25
    assert prefill_seconds(speeds, 8, 6, steps=0, chunks=2) == (6 + 10) * 0.25, "steps that others pay for"
    assert prefill_seconds(speeds, 8, 6, steps=0) == 6 * 0.25
    assert work_seconds(speeds, *prompt_work(14, 6, 4)) == prefill_seconds(speeds, 8, 6, steps=2)
    assert prefill_seconds(speeds.slowed_prefill(2.0), 8, 6) == 2 * prefill_seconds(speeds, 8, 6)


def test_a_chunks_reading_of_the_kv_before_it_is_learnt() -> None:
    slow = replace(ENGINE, prefill_per_context_token_s=3e-6)
    tracker = SpeedTracker(replace(ENGINE, prefill_per_context_token_s=2e-6))
    for _ in range(100):
        for new, prefix in ((64, 0), (64, 4000), (512, 2000), (512, 0)):
            tracker.observe_prefill([(new, prefix, False)], prefill_seconds(slow, new, prefix, begins=False))
    assert tracker.speeds.prefill_per_context_token_s == pytest.approx(3e-6, rel=0.1)
    assert load_seconds(SPEEDS, 200) == 2.0
    assert transfer_seconds(SPEEDS, 200) == 4.0
    assert decode_step_seconds(SPEEDS, 2, 8) == 1.0 + 1.0 + 2.0
    assert load_seconds(Speeds(), int(DEFAULT_BYTES_PER_S)) == 1.0


def test_overlap_hides_all_but_a_layer() -> None:
    assert overlapped_seconds(4.0, 8.0, 4) == 9.0
    assert overlapped_seconds(8.0, 4.0, 4) == 9.0
    assert overlapped_seconds(8.0, 4.0, 1) == 12.0


@pytest.mark.parametrize(("rate", "cheaper"), [(1000.0, True), (1.0, False)])
def test_loading_pays_when_the_store_is_quick(rate: float, cheaper: bool) -> None:
    speeds = Speeds(prefill_per_token_s=1.0, load_bytes_per_s=rate)
    assert load_is_cheaper(speeds, prompt_work(10, 0, 0), prompt_work(10, 8, 0), nbytes=80) is cheaper


@pytest.mark.parametrize(("max_num_batched_tokens", "cheaper"), [(80, True), (0, False)])
def test_each_step_that_a_load_saves_counts(max_num_batched_tokens: int, cheaper: bool) -> None:
    """Timings at the start of a busy machine may give a step's fixed part alone."""
    speeds = Speeds(prefill_base_s=0.05, load_bytes_per_s=1e9)
    local, rest = (prompt_work(648, prefix, max_num_batched_tokens) for prefix in (0, 640))
    assert (local.steps, rest.steps) == ((9, 1) if max_num_batched_tokens else (1, 1))
    assert load_is_cheaper(speeds, local, rest, nbytes=90_000) is cheaper


def test_pictures_are_encoded_whole_unless_they_are_found_whole() -> None:
    pictures = ((10, 30), (40, 60))
    assert [encoded_tokens(pictures, prefix) for prefix in (0, 9, 29, 30, 59, 60)] == [40, 40, 40, 20, 20, 0]
    demand = Demand(64, 4, 5, 1, pictures=pictures)
    shape = KVShape(block_size=16, token_bytes=2, layers=2)
    blind = PrefillLatencyModel(replace(demand, pictures=()), shape, (), 1.0)
    model, speeds = PrefillLatencyModel(demand, shape, (), 1.0), replace(SPEEDS, encode_per_token_s=0.5)
    for blocks, tokens in ((0, 40), (1, 40), (2, 20), (3, 20)):
        added = model.cost(speeds, 1, 0, blocks).prefill_s - blind.cost(speeds, 1, 0, blocks).prefill_s
        assert added == pytest.approx(0.5 * tokens)
        added = model.alone_s(speeds, 1, 0, blocks) - blind.alone_s(speeds, 1, 0, blocks)
        assert added == pytest.approx(0.5 * tokens)
    known = PrefillLatencyModel(replace(demand, pictures=pictures[:1], encoded=pictures[1:]), shape, (), 1.0)
    speeds = replace(speeds, rows_per_token_s=0.125)
    for blocks, seconds in ((0, 0.625 * 20), (2, 0.125 * 20)):
        added = known.cost(speeds, 1, 0, blocks).prefill_s - blind.cost(speeds, 1, 0, blocks).prefill_s
        assert added == pytest.approx(seconds), "rows of a kvstore are read in less time"


def test_what_is_local_is_not_loaded() -> None:
    speeds = Speeds(prefill_per_token_s=1.0, load_bytes_per_s=1e9)
    assert not load_is_cheaper(speeds, prompt_work(10, 8, 0), prompt_work(10, 8, 0), nbytes=0)


def test_rates_follow_what_was_measured() -> None:
    tracker = SpeedTracker(SPEEDS, weight=0.5)
    tracker.observe_load(100, 2.0)  # 50 B/s against 100: the mean of seconds per byte
    assert tracker.speeds.load_bytes_per_s == pytest.approx(1 / (0.5 / 100 + 0.5 / 50))
    tracker.observe_transfer(50, 1.0)
    assert tracker.speeds.transfer_bytes_per_s == pytest.approx(50.0)


def test_stores_and_peers_are_read_at_rates_of_their_own() -> None:
    """What is known of loading from stores is where that from peers begins."""
    tracker = SpeedTracker(SPEEDS, weight=0.5)
    assert tracker.speeds.loading_from_peers() == tracker.speeds
    tracker.observe_load(100, 2.0, peer=True)
    assert tracker.speeds.load_bytes_per_s == 100
    assert tracker.speeds.peer_bytes_per_s == pytest.approx(1 / (0.5 / 100 + 0.5 / 50))
    assert tracker.speeds.loading_from_peers().load_bytes_per_s == tracker.speeds.peer_bytes_per_s


def test_a_step_without_a_share_of_its_cores_says_little() -> None:
    tracker = SpeedTracker(ENGINE)
    tracker.observe_prefill([(256, 0, True)], 0.03, share=0.0)
    assert 0.0 < tracker.speeds.prefill_per_token_s <= ENGINE.prefill_per_token_s


CHUNKS = ((16, 0), (300, 0), (512, 512), (100, 900), (512, 0), (64, 1300))
ENGINE = Speeds(
    prefill_base_s=0.002,
    prefill_per_token_s=1e-4,
    prefill_per_pair_s=5e-8,
    decode_base_s=0.002,
    decode_per_sequence_s=3e-4,
    decode_per_context_token_s=2e-7,
)


def test_a_slower_machine_is_slower_at_all_sizes() -> None:
    """A few prompts of one size teach what others take."""
    tracker = SpeedTracker(replace(ENGINE, prefill_per_prompt_s=0.01))
    slow = replace(ENGINE, prefill_per_prompt_s=0.01).slowed_prefill(1.8)
    for _ in range(8):
        tracker.observe_prefill([(300, 0, True)], prefill_seconds(slow, 300, 0))
    for new, prefix in CHUNKS:
        assert prefill_seconds(tracker.speeds, new, prefix) == pytest.approx(
            prefill_seconds(slow, new, prefix), rel=0.2
        )


def test_the_fixed_part_of_a_step_is_learnt_apart() -> None:
    """Six milliseconds around the engine make the base longer, not each token; steps that prompts share teach too."""
    tracker = SpeedTracker(ENGINE)
    for _ in range(20):
        for new, prefix in CHUNKS:
            both_s = prefill_seconds(ENGINE, new, prefix) + prefill_seconds(ENGINE, 40, 0, steps=0)
            tracker.observe_prefill([(new, prefix, True), (40, 0, True)], both_s + 0.006)
        tracker.observe_decode(4, 2000, decode_step_seconds(ENGINE, 4, 2000) + 0.003)
        tracker.observe_decode(1, 200, decode_step_seconds(ENGINE, 1, 200) + 0.003)
    learnt = tracker.speeds
    assert learnt.prefill_base_s == pytest.approx(0.008, rel=0.1)
    assert learnt.prefill_per_token_s == pytest.approx(1e-4, rel=0.1)
    assert learnt.decode_base_s == pytest.approx(0.005, rel=0.1)


def test_a_later_chunk_of_a_prompt_is_compared_with_its_own_prediction() -> None:
    """What a prompt costs once does not make its later chunks look quick."""
    base = replace(SPEEDS, prefill_per_prompt_s=100.0)
    tracker = SpeedTracker(base)
    tracker.observe_prefill([(4, 8, False)], prefill_seconds(base, 4, 8, begins=False))
    assert tracker.speeds == base


def test_outliers_are_bounded_and_the_unmeasurable_is_ignored() -> None:
    tracker = SpeedTracker(ENGINE)
    for _ in range(10):
        tracker.observe_prefill([(300, 0, True)], prefill_seconds(ENGINE, 300, 0))
    tracker.observe_prefill([(300, 0, True)], 1e9)
    assert prefill_seconds(tracker.speeds, 300, 0) < 1.1 * prefill_seconds(ENGINE, 300, 0)
    again = SpeedTracker(Speeds())
    again.observe_prefill([(4, 0, True)], 1.0)
    again.observe_load(0, 0.0)
    assert again.speeds == Speeds()


def test_steps_overlap_in_a_pipeline() -> None:
    assert pipelined_seconds(12.0, steps=3, stages=1) == 12.0
    assert pipelined_seconds(12.0, steps=3, stages=2) == 4.0 + 2 * 2.0  # the first whole, then one each half step
    assert pipelined_seconds(12.0, steps=1, stages=4) == 12.0
    assert pipelined_seconds(12.0, steps=0, stages=4) == 12.0


def test_weight_is_checked() -> None:
    with pytest.raises(ValueError, match="weight"):
        SpeedTracker(SPEEDS, weight=0.0)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("tokens", [640, 2048, 8192, 40_000])
@pytest.mark.parametrize(("base_s", "per_context_token_s"), [(1e-3, 0.0), (30e-3, 0.0), (1e-3, 4e-7), (0.0, 4e-7)])
@pytest.mark.parametrize("prefix", [0, 5000])
def test_steps_of_a_prompt_alone_in_a_pipeline_are_nearly_the_best_of_all(
    stages: int, tokens: int, prefix: int, base_s: float, per_context_token_s: float
) -> None:
    speeds = Speeds(base_s, 2e-5, 1e-9, prefill_per_context_token_s=per_context_token_s)

    def seconds(step_tokens: int) -> float:
        ends = [0.0] * stages
        for start in range(prefix, prefix + tokens, step_tokens):
            stage_s = prefill_seconds(speeds, min(step_tokens, prefix + tokens - start), start, begins=False) / stages
            for stage in range(stages):  # a step begins when this stage and the one before have ended
                ends[stage] = max(ends[stage], ends[stage - 1] if stage else 0.0) + stage_s
        return ends[-1]

    chosen = pipelined_step_tokens(speeds, stages, work_of(tokens, prefix), 8192, 64)
    assert chosen % 64 == 0
    assert seconds(chosen) <= 1.05 * min(seconds(size) for size in range(64, 8193, 64))


def test_steps_are_as_large_as_possible_without_a_pipeline_or_a_measured_base() -> None:
    measured = Speeds(prefill_base_s=1e-3, prefill_per_token_s=1e-5)
    assert pipelined_step_tokens(measured, 1, work_of(8192, 0), 4096, 64) == 4096
    assert pipelined_step_tokens(Speeds(prefill_per_token_s=1e-5), 4, work_of(8192, 0), 4096, 64) == 4096
    assert pipelined_step_tokens(measured, 4, work_of(100_000, 0), 512, 64) == 512, "never more than allowed"


def test_a_pipeline_that_is_busy_at_times_takes_large_steps() -> None:
    speeds = Speeds(prefill_base_s=1e-3, prefill_per_token_s=1e-5)
    idle, busy = (pipelined_step_tokens(speeds, 4, work_of(8192, 0), 4096, 64, share) for share in (0.1, 0.5))
    assert idle < busy == 4096
