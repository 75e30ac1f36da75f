"""Steps over the ranks of stages: runs, gates, aborts, copies, types of KV; the first rank decides for all."""

import threading
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moonpool.base.checkpoint import load_config
from moonpool.base.checkpoint.lora import read_adapter
from moonpool.base.kv.keys import slice_hash
from moonpool.base.quantization import Quantization
from moonpool.base.sampling_params import SampleSpec
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.messages import LoadLora, LoraAnswer, StageDone
from moonpool.engine.models.random_checkpoint import create, create_lora
from moonpool.engine.models.tensor_reader import KeptWeights
from tests.examples import pairs
from tests.unit.engine.ranks import SIZE, RankedStages, ranked

PROMPT = [7 + number * 13 % 90 for number in range(2 * SIZE + 9)]
TABLE = (4, 1, 6, 2, 7)


def part(tokens: list[int], start: int, *, sample: bool = True, ends: frozenset[int] = frozenset()) -> SequenceStep:
    ids = array("i", tokens[start:]).tobytes()
    return SequenceStep(ids, start, TABLE, SampleSpec() if sample else None, end_token_ids=ends)


def story(stages: RankedStages) -> tuple[list[int], list[tuple[bytes, int]], list[int]]:
    """A prompt in two chunks, then runs of steps where there is one stage: tokens, KV, layers that were told."""
    tokens = list(PROMPT)
    stages.run(Step(1, (part(PROMPT[: 2 * SIZE], 0, sample=False),), layer_events=True))
    done = stages.run(Step(2, (part(PROMPT, 2 * SIZE),), layer_events=True))
    tokens += [token for token in done.sampled if token is not None]
    step_id, steps = 3, 6 if len(stages.runners) == 1 else 1
    while len(tokens) < len(PROMPT) + 13:
        stages.run(Step(step_id, (part(tokens, len(tokens) - 1),), steps=steps))
        tokens += [token for sampled in stages.sampled(step_id) for token in sampled if token is not None]
        step_id += 1
    slices = [stages.pool.read(layer, block) for layer in range(stages.pool.layout.layers) for block in TABLE[:3]]
    return tokens, [(bytes(data), value) for data, value in slices], sorted(stages.layers())


@pytest.mark.parametrize(
    ("shape", "ranks", "count", "kv_dtype"),
    pairs(
        ["tiny-qwen2", "tiny-gemma3", "tiny-deepseek-v3", "tiny-mixtral"], [2, 4], [1, 2], ["auto", "int8"]
    ),
)  # fmt: skip
def test_tokens_are_those_of_one_process(shape: str, ranks: int, count: int, kv_dtype: str, tmp_path: Path) -> None:
    """With biases and two heads of keys for four ranks; windows; latent attention with experts; experts."""
    create(shape, tmp_path / "model", seed=1, dtype="float32")
    with ranked(tmp_path / "model", 1, stages=count, kv_dtype=kv_dtype) as alone:
        expected = story(alone)
    with ranked(tmp_path / "model", ranks, stages=count, kv_dtype=kv_dtype) as several:
        tokens, kv, layers = story(several)
    assert (tokens, layers) == (expected[0], expected[2])
    assert all(value == slice_hash(data) for data, value in kv)


def test_bfloat16_is_near_one_process(checkpoint: Path) -> None:
    """Sums of rounded parts differ in their last bits."""
    found = []
    for ranks in (1, 2):
        with ranked(checkpoint, ranks, dtype="bfloat16") as stages:
            stages.run(Step(1, (part(PROMPT, 0),), layer_events=True))
            data = b"".join(bytes(stages.pool.slice(layer, TABLE[0])) for layer in range(stages.pool.layout.layers))
            found.append(torch.frombuffer(bytearray(data), dtype=torch.bfloat16).float())
    assert torch.allclose(found[0], found[1], rtol=0.05, atol=0.05 * float(found[0].abs().max()))
    assert not torch.equal(found[0], torch.zeros_like(found[0]))


def test_a_run_ends_with_an_end_token_on_all_ranks(checkpoint: Path) -> None:
    with ranked(checkpoint, 2) as stages:
        tokens, _, _ = story(stages)
        new = tokens[len(PROMPT) :]
        end = next(index for index, token in enumerate(new) if index > 1 and token not in new[:index])
        before = tokens[: len(PROMPT) + 1]
        stages.run(Step(50, (part(before, len(PROMPT), ends=frozenset({new[end]})),), steps=20))
        assert [token for (token,) in stages.sampled(50)] == new[1 : end + 1]
        [further] = [event for event in stages.events[0][1] if isinstance(event, StageDone) and event.step_id == 50][
            -1:
        ]
        assert further.over
        assert further.sampled == ()


def test_the_first_rank_waits_at_gates_and_the_others_follow(checkpoint: Path) -> None:
    """Gates are opened at the first rank alone."""
    with ranked(checkpoint, 2) as stages:
        expected = stages.run(Step(1, (part(PROMPT, 0),))).sampled
        opening = threading.Thread(target=stages.gates[0][0].open, args=(2, stages.pool.layout.layers - 1))
        opening.start()
        done = stages.run(Step(2, (part(PROMPT, 0),), gated=True, layer_events=True))
        opening.join()
        assert done.sampled == expected
        assert stages.layers() == list(range(stages.pool.layout.layers))


def test_a_load_that_ends_midway_costs_one_sequence_whatever_the_other_ranks_hear(checkpoint: Path) -> None:
    """A lease runs out while a prefix arrives: the sequence is dropped, computed whole, and the others go on."""
    other = SequenceStep(array("i", PROMPT[::-1]).tobytes(), 0, (0, 3, 5), SampleSpec())
    with ranked(checkpoint, 2, stages=2) as stages:
        [expected] = stages.run(Step(1, (part(PROMPT, 0),))).sampled
        [beside] = stages.run(Step(2, (other,))).sampled
        for block in TABLE[:3]:
            for layer in range(1, stages.pool.layout.layers):
                stages.pool.slice(layer, block)[:] = bytes(stages.pool.layout.slice_bytes(layer))
        for gates in (stages.gates[0][0], stages.gates[1][0]):  # of the second layer comes nothing
            gates.open(3, 0)
            gates.drop(3, 0)
            gates.open(3, stages.pool.layout.layers)
        assert stages.run(Step(3, (part(PROMPT, 2 * SIZE), other), gated=True)).sampled[1] == beside
        assert stages.run(Step(4, (part(PROMPT, 0),))).sampled == (expected,)


def test_an_abort_at_the_first_rank_ends_the_step_on_all(checkpoint: Path) -> None:
    """Whatever the other ranks hear of it; the next step is right."""
    with ranked(checkpoint, 2, stages=2) as stages:
        expected = stages.run(Step(1, (part(PROMPT, 0),))).sampled
        stages.gates[0][0].abort(2)
        assert stages.run(Step(2, (part(PROMPT, 0),), gated=True)).aborted
        stages.gates[0][1].abort(3)
        done = stages.run(Step(3, (part(PROMPT, 0),)))
        assert (done.aborted, done.sampled) == (False, expected)


def test_a_later_stage_does_not_give_up_a_step_that_recurrent_states_have_taken_in(tmp_path: Path) -> None:
    """A token within a block is in the first stage's states when the second hears of the abort."""
    create("tiny-qwen3-next", tmp_path / "model", seed=1, dtype="float32")
    with ranked(tmp_path / "model", 1, stages=2) as stages:
        expected, _, _ = story(stages)
        given_up = range(100, 104)
        for step_id in given_up:
            stages.gates[1][0].abort(step_id)
        tokens, number = expected[: len(PROMPT) + 1], iter([90, 91, *given_up, *range(104, 120)])
        stages.run(Step(next(number), (part(PROMPT[: 2 * SIZE], 0, sample=False),)))
        stages.run(Step(next(number), (part(PROMPT, 2 * SIZE),)))
        while len(tokens) < len(expected):
            done = stages.run(Step(next(number), (part(tokens, len(tokens) - 1),)))
            tokens += [token for token in done.sampled if token is not None]
        assert tokens == expected
        stages.gates[1][0].abort(130)
        assert stages.run(Step(130, (part(PROMPT, 0),))).aborted, "whatever begins at a border is computed again"


def test_copied_blocks_are_there_for_all_ranks(checkpoint: Path) -> None:
    with ranked(checkpoint, 2) as stages:
        tokens, _, _ = story(stages)
        before = tokens[: len(PROMPT) + 1]
        for block in (0, 3):
            stages.run(Step(60 + block, (part(list(reversed(PROMPT)), 0),)))
            stages.run(Step(70 + block, (part(before, 0),)))
            copied = SequenceStep(array("i", before[-1:]).tobytes(), len(PROMPT), (4, 1, block), SampleSpec())
            done = stages.run(Step(80 + block, (copied,), copies=((6, block),)))
            assert done.sampled == (tokens[len(PROMPT) + 1],)


def test_adapters_of_all_projections_and_ranks(checkpoint: Path, tmp_path: Path) -> None:
    """B by rows, A by columns: sums of the ranks' additions are one process's."""
    config = load_config(checkpoint)
    folder = create_lora(tmp_path / "lora", config, 1)
    lora, found = read_adapter(folder).id, []
    for ranks in (1, 2, 4):
        with ranked(checkpoint, ranks) as stages:
            for runner in stages.runners[0]:
                runner.max_lora_rank = 16
                runner.load_lora(LoadLora(7, lora, str(folder)))
            answers = [event for its in stages.events[0] for event in its if isinstance(event, LoraAnswer)]
            assert [answer.failure for answer in answers] == [None] * ranks
            sequence = replace(part(PROMPT, 0), lora=lora)
            first = stages.run(Step(1, (sequence,), layer_events=True)).sampled
            further = replace(part([*PROMPT, *first], len(PROMPT)), lora=lora)  # type: ignore[list-item]
            stages.run(Step(2, (further,), steps=8))
            found.append((first, stages.sampled(2)))
            plain = stages.run(Step(3, (part(PROMPT, 0),))).sampled
    assert found[0] == found[1] == found[2]
    assert plain != found[0][0], "the adapter changes the answer"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_that_are_packed_at_load(quantization: Quantization, checkpoint: Path) -> None:
    found = []
    for ranks in (1, 2):
        with ranked(checkpoint, ranks, kept=KeptWeights(quantization)) as stages:
            stages.run(Step(1, (part(PROMPT, 0),), layer_events=True))
            data = b"".join(bytes(stages.pool.slice(layer, TABLE[0])) for layer in range(stages.pool.layout.layers))
            found.append(torch.frombuffer(bytearray(data), dtype=torch.float32))
    gap = (found[0] - found[1]).abs().mean() / found[0].abs().mean()
    assert gap < 0.03, "rows in bytes are rounded over a rank's inputs"
