"""Steps on in-process stages: two of them, linked by a list, compute what one computes; aborts stay coherent."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moonpool.base.checkpoint import Tokenizer, load_config
from moonpool.base.kv.keys import slice_hash
from moonpool.base.kv.layout import KVLayout
from moonpool.base.kv.pool import KVPool
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import LayerDone, SequenceStep, Step, finished_blocks
from moonpool.engine.messages import StageDone, StageTokens
from moonpool.engine.platforms.kv_memory import StageSlices, pool_bytes
from moonpool.engine.structured_output import MaskBuilder, MaskRequest
from tests.layouts import one_tensor
from tests.unit.engine.stages import GREEDY, PROMPT, ids, stages, whole


def test_two_stages_and_chunks_compute_what_one_stage_computes_at_once(checkpoint: Path) -> None:
    with stages(checkpoint, 1) as pipeline, stages(checkpoint, 2) as two:
        (expected,) = pipeline.run(whole())
        two.run(Step(1, (SequenceStep(ids(*PROMPT[:32]), 0, (4, 1)),)))
        # The rest of the prompt shares its step with another sequence, of which nothing is sampled.
        rest = SequenceStep(ids(*PROMPT[32:]), 32, (4, 1, 6), GREEDY)
        done = two.run(Step(2, (SequenceStep(ids(9, 9), 0, (7,)), rest)))[-2:]
        assert [(d.stage, d.aborted) for d in done] == [(0, False), (1, False)]
        assert done[0].sampled == ()
        assert done[1].sampled == (None, *expected.sampled)
        kv = one_tensor(pipeline.runners[0].platform.memory.kv)
        got = torch.cat([one_tensor(runner.platform.memory.kv) for runner in two.runners])
        torch.testing.assert_close(got[:, [4, 1]], kv[:, [4, 1]], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[:, 6, :, :, :8], kv[:, 6, :, :, :8], rtol=1e-4, atol=1e-5)


def test_blocks_are_copied_in_all_layers_before_the_step_writes(checkpoint: Path) -> None:
    """Two sequences share a prompt, whose part-filled block one of them gets a copy of: both go on as if alone."""
    with stages(checkpoint, 1) as alone, stages(checkpoint, 2) as two:
        alone.run(whole())
        expected = [
            alone.run(Step(2 + n, (SequenceStep(ids(token), 40, (4, 1, 6), GREEDY),)))[-1].sampled[0]
            for n, token in enumerate((7, 8))
        ]
        two.run(whole())
        shares = tuple(SequenceStep(ids(token), 40, (4, 1, block), GREEDY) for token, block in ((7, 6), (8, 2)))
        assert list(two.run(Step(2, shares, copies=((6, 2),)))[-1].sampled) == expected


def test_several_samples_of_one_position_come_with_the_first(checkpoint: Path) -> None:
    how = SampleSpec(SamplingParams(temperature=1.0, n=3), seed=5, samples=3)
    with stages(checkpoint, 2) as two:
        alone = SequenceStep(ids(9), 0, (7,), GREEDY)
        step = Step(1, (alone, SequenceStep(ids(*PROMPT), 0, (4, 1, 6), how)))
        done = two.run(step)[-1]
        assert list(done.several) == [1]
        assert (len(done.several[1].tokens), done.several[1].tokens[0]) == (3, done.sampled[1])


def test_beams_get_the_most_likely_tokens_and_change_nothing_for_others(checkpoint: Path) -> None:
    how = SampleSpec(SamplingParams(beam_width=2), best=3)
    with stages(checkpoint, 2) as two:
        shares = [SequenceStep(ids(*PROMPT), 0, (4, 1, 6), GREEDY), SequenceStep(ids(*PROMPT), 0, (5, 2, 7), how)]
        done = two.run(Step(1, tuple(shares)))[-1]
        assert list(done.several) == [1]
        found = done.several[1]
        assert done.sampled == (found.tokens[0], found.tokens[0])
        assert len(found.tokens) == len(found.log_probabilities) == 3
        assert list(found.log_probabilities) == sorted(found.log_probabilities, reverse=True)


def test_layers_are_reported_in_order_and_before_the_step(checkpoint: Path) -> None:
    with stages(checkpoint, 2) as two:
        two.run(whole(layer_events=True))
        layers = load_config(checkpoint).num_layers
        times = [event.done if isinstance(event, StageTokens) else event for event in two.events]
        names = [(e.layer if isinstance(e, LayerDone) else f"done {e.stage}") for e in times]
        half = layers // 2
        assert names.count("done 1") == 2, "the tokens, and the step"
        names.remove("done 1")  # a thread that follows the layers may be behind the tokens
        assert names == [*range(half), "done 0", *range(half, layers), "done 1"]
        for event in times:
            assert isinstance(event, LayerDone | StageDone)
            assert 0 < event.start_ns <= event.end_ns


def test_a_step_aborted_on_the_first_stage_is_aborted_on_the_next(checkpoint: Path) -> None:
    with stages(checkpoint, 2) as two:
        two.gates[0].abort(1)
        done = two.run(whole(layer_events=True))
        assert [(d.aborted, d.sampled) for d in done] == [(True, ()), (True, ())]
        assert len(two.events) == 2
        assert not two.run(whole(2))[-1].aborted


def test_a_step_aborted_on_the_last_stage_takes_what_was_sent(checkpoint: Path) -> None:
    with stages(checkpoint, 2) as two:
        two.gates[1].abort(1)
        done = two.run(whole())
        assert [(d.aborted, d.sampled) for d in done] == [(False, ()), (True, ())]
        assert two.run(whole(2))[-1].sampled != ()


def test_a_gated_step_ends_at_the_first_gate_that_stays_shut(checkpoint: Path) -> None:
    with stages(checkpoint, 1) as pipeline:
        pipeline.gates[0].open(1, 0)
        (done,) = pipeline.run(whole(gated=True, layer_events=True))
        assert done.aborted
        assert [e.layer for e in pipeline.events if isinstance(e, LayerDone)] == [0]
        pipeline.gates[0].open(2, 99)
        assert not pipeline.run(whole(2, gated=True))[-1].aborted


def test_a_gated_step_whose_layers_go_together_ends_there_too(checkpoint: Path) -> None:
    with stages(checkpoint, 1) as pipeline, stages(checkpoint, 1) as alone:
        (expected,) = alone.run(whole())
        pipeline.gates[0].open(1, 0)
        assert pipeline.run(whole(gated=True))[-1].aborted
        pipeline.gates[0].open(2, 99)
        assert pipeline.run(whole(2, gated=True))[-1].sampled == expected.sampled


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_goes_on_without_a_dropped_share(checkpoint: Path, count: int) -> None:
    """Its prefix is not there: nothing of it is sampled, and the others are computed as if alone."""
    with stages(checkpoint, 1) as alone, stages(checkpoint, count) as shared:
        (expected,) = alone.run(whole())
        late = SequenceStep(ids(*PROMPT[16:]), 16, (0, 2, 3), GREEDY)
        for gates in shared.gates:
            gates.open(1, 0)
            gates.drop(1, 0)
            gates.open(1, 99)
        done = shared.run(Step(1, (late, *whole().sequences), gated=True, layer_events=True))[-1]
        assert done.sampled == (None, *expected.sampled)
        assert not any(len(gates) for gates in shared.gates)


def test_the_pool_is_computed_in_without_copies() -> None:
    layout = KVLayout.uniform(layers=3, kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
    pool = KVPool.create(layout, 4, [(0, 1), (1, 3)])
    kv, scales = StageSlices.of_pool(pool.parts[1], pool_bytes(pool.parts[1])).typed()
    assert scales is None
    assert isinstance(kv, torch.Tensor)
    assert (kv.shape, kv.dtype) == ((2, 4, 2, 2, 16, 8), torch.bfloat16)
    kv[1, 3, 1, 0, 2, 5] = 1.0
    offset = ((1 * 2 + 0) * 16 + 2) * 8 + 5  # head, K, token, element of the slice
    assert bytes(pool.slice(2, 3)[2 * offset : 2 * offset + 2]) == b"\x80\x3f"
    pool.slice(1, 0)[:2] = b"\x00\x40"
    assert kv[0, 0, 0, 0, 0, 0] == 2.0
    pool.close()


def test_quantised_pools_have_scales_behind_the_values_of_each_head() -> None:
    layout = KVLayout.uniform(layers=3, kv_heads=2, head_dim=8, block_size=16, dtype="float8_e4m3fn")
    pool = KVPool.create(layout, 4, [(0, 1), (1, 3)])
    kv, scales = StageSlices.of_pool(pool.parts[1], pool_bytes(pool.parts[1])).typed()
    assert isinstance(scales, torch.Tensor)
    assert isinstance(kv, torch.Tensor)
    assert (kv.shape, kv.dtype, scales.shape) == ((2, 4, 2, 2, 16, 8), torch.float8_e4m3fn, (2, 4, 2, 2, 16))
    kv[1, 3, 1, 0, 2, 5] = 1.0
    scales[1, 3, 1, 1, 15] = 2.0
    head_bytes = 2 * 16 * 8 + 2 * 16 * 4  # K and V of each token, then a scale for each
    assert pool.slice(2, 3)[1 * head_bytes + (0 * 16 + 2) * 8 + 5] == 0x38
    assert bytes(pool.slice(2, 3)[-4:]) == b"\0\0\0\x40"
    pool.close()


@pytest.mark.parametrize("layer_events", [True, False])
def test_slices_that_are_ready_to_leave_get_their_hashes(checkpoint: Path, layer_events: bool) -> None:
    with stages(checkpoint, 2) as two:
        two.run(whole(layer_events=layer_events))
        layout = two.pool.layout
        for layer in range(layout.layers):
            for block, valid in ((4, 16), (1, 16), (6, 8)):
                data, value = two.pool.read(layer, block)
                cleaned = bytearray(data)
                layout.zero_invalid(0, memoryview(cleaned), valid)
                # The part-filled last block leaves only where a prompt is sent layer by layer.
                assert value == (slice_hash(cleaned) if valid == 16 or layer_events else 0)


def test_a_block_is_finished_by_the_step_that_fills_it() -> None:
    def step(*spans: tuple[int, int], layer_events: bool = False) -> Step:
        table = (7, 5, 9)
        sequences = [
            SequenceStep(bytes(4 * (end - start)), start, table[: -(-end // 16)], GREEDY) for start, end in spans
        ]
        return Step(1, tuple(sequences), layer_events=layer_events)

    assert finished_blocks(step((0, 15)), 16) == []
    assert finished_blocks(step((0, 15), layer_events=True), 16) == [(7, 15)]
    assert finished_blocks(step((15, 16)), 16) == [(7, 16)]
    assert finished_blocks(step((16, 17)), 16) == []
    assert finished_blocks(step((3, 40)), 16) == [(7, 16), (5, 16)]
    assert finished_blocks(step((3, 40), layer_events=True), 16) == [(7, 16), (5, 16), (9, 8)]


def test_an_answer_whose_format_cannot_be_followed_gets_nothing_and_others_get_theirs(
    checkpoint: Path, tmp_path: Path
) -> None:
    how = SampleSpec(SamplingParams(response_format="json_object", logprobs=1))
    with stages(checkpoint, 2) as two:
        masks = two.runners[-1].masks = MaskBuilder(lambda: Tokenizer.load(tmp_path), 512, (1,))
        shares = (SequenceStep(ids(*PROMPT), 0, (4, 1, 6), how), SequenceStep(ids(*PROMPT), 0, (5, 2, 7), GREEDY))
        done = two.run(Step(1, shares))[-1]
        two.runners[-1].close()
        with pytest.raises(RuntimeError, match="shutdown"):
            masks.begin(MaskRequest.of(Step(2, shares)))
        assert done.sampled[0] is None
        assert done.sampled[1] is not None
        assert list(done.failed) == [0]
        assert "no tokenizer" in done.failed[0]
        assert done.logprobs == {}


def test_patient_steps_give_way(checkpoint: Path) -> None:
    with stages(checkpoint, 1) as pipeline:
        called: list[int] = []
        waited_ns: list[int] = []

        def give_way(urgent: Callable[[], bool]) -> None:
            called.append(len(pipeline.events))
            assert not urgent()
            began_ns = time.monotonic_ns()
            while time.monotonic_ns() == began_ns:
                pass
            waited_ns.append(time.monotonic_ns() - began_ns)

        pipeline.runners[0].give_way = give_way
        done = [
            report
            for told in pipeline.run(replace(whole(1), patient=True, steps=2))
            for report in (*told.earlier, told)
        ]
        assert len(called) == 2
        for told, wait in zip(done, waited_ns, strict=True):
            assert 0 < wait <= told.waited_ns < told.end_ns - told.start_ns
        pipeline.run(whole(2))
        assert len(called) == 2


def test_who_gives_way_hears_that_the_step_is_aborted(checkpoint: Path) -> None:
    with stages(checkpoint, 1) as pipeline:
        heard: list[bool] = []

        def give_way(urgent: Callable[[], bool]) -> None:
            heard.append(urgent())
            pipeline.gates[0].abort(1)
            heard.append(urgent())

        pipeline.runners[0].give_way = give_way
        [done] = pipeline.run(replace(whole(1), patient=True))
        assert (heard, done.aborted) == ([False, True], True)


def test_who_gives_way_hears_that_somebody_waits_who_is_not_patient(checkpoint: Path) -> None:
    with stages(checkpoint, 1) as pipeline:
        heard: list[bool] = []

        def give_way(urgent: Callable[[], bool]) -> None:
            for end_now in (False, True):
                pipeline.gates[0].stop_run(1, urgent=end_now)
                heard.append(urgent())

        pipeline.runners[0].give_way = give_way
        [done] = pipeline.run(replace(whole(1), patient=True, steps=6))
        assert (heard, done.aborted, done.over) == ([False, True], False, True)
        assert not len(pipeline.gates[0])
