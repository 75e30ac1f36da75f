"""Recurrent layers in captured work: a state takes in each token once, whatever is thrown away or given up.

The device has a hostile order; `SEED=...` repeats one. Graphs do their work anew in each replay.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.base.kv.pool import KVPool
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.model_runner import StageRunner
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.models.stage import StageModel
from moonpool.engine.pipeline import NoLinks
from moonpool.engine.platforms.callback_thread import CallbackThread
from moonpool.engine.platforms.cpu import CpuKVMemory, CpuStream
from moonpool.engine.platforms.stage_platform import StagePlatform
from moonpool.engine.platforms.staged import StagedDevice
from moonpool.engine.structured_output import MaskRequest, PendingMasks, TokenMasks
from tests.unit.engine.test_devices import FEW, SIZE, Rig, Story, ids, nothing_fails, part, rig, story
from tests.unit.engine.test_steps_ahead import STEPS, TABLES, Counted, Tokens, end_of, later, prompts, run, told

TWO = FEW[:2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recurrent") / "model"
    create("tiny-qwen3-next", path, seed=1, dtype="float32")
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> StageModel:
    config = load_config(folder)
    return load_stage(folder, config, torch.float32, 0, config.num_layers)


@pytest.fixture(scope="module")
def expected(model: StageModel) -> Tokens:
    with rig(model, None) as plain:
        tokens = run(plain, prompts(), 1)
        for _ in range(STEPS - 1):
            tokens += run(plain, later(tokens), 1)
        return tokens


@pytest.fixture(scope="module")
def expected_story(model: StageModel) -> Story:
    with rig(model, None) as plain:
        return story(plain)


@pytest.mark.parametrize("seed", TWO)
@pytest.mark.parametrize("graphs", [False, True])
def test_a_hostile_order_changes_nothing(model: StageModel, expected_story: Story, seed: int, *, graphs: bool) -> None:
    """Transfers, shared blocks, copies, preemption, prefixes behind gates. Graphs may round otherwise."""
    slots = [(7 * block + 3) % 12 for block in range(12)]
    with rig(model, StagedDevice(seed), 1 + seed % 5, graphs=graphs, slots=slots) as tested:
        tokens, states = story(tested)
        assert tokens == expected_story[0]
        assert graphs or states == expected_story[1]


def states(tested: Rig, model: StageModel, tables: Sequence[tuple[int, ...]], tokens: int) -> list[Tensor]:
    """Each sequence's states behind so many tokens."""
    blocks, kv = [table[(tokens - 1) // SIZE] for table in tables], tested.place.memory.kv
    recurrent = [layer.recurrent for layer in model.config.decoder.layers]
    return [kv[at][blocks].flatten(1)[:, : spec.state_elements] for at, spec in enumerate(recurrent) if spec]


@pytest.mark.parametrize("seed", TWO)
def test_a_step_behind_an_end_changes_no_state(model: StageModel, expected: Tokens, seed: int) -> None:
    """The others' answers go on from where they are."""
    device, (end, token) = Counted(seed), end_of(expected, 5)
    with rig(model, device, graphs=True) as tested:
        tokens = run(tested, prompts(), 3)
        device.replays = 0
        first, *others = later(tokens)
        ending = replace(first, end_token_ids=frozenset({token}))
        tokens += run(tested, [ending, *others], STEPS - 3)
        assert tokens == expected[: end + 1]
        tested.place.stream.record().wait()
        assert device.replays == 2 * (end + 1 - 3 + 1), "no step was thrown away"
        found = states(tested, model, TABLES, 10 + end)
        assert run(tested, later(tokens)[1:], STEPS - end - 1) == [step[1:] for step in expected[end + 1 :]]
    with rig(model, None) as plain:
        tokens = run(plain, prompts(), 1)
        while len(tokens) <= end:
            tokens += run(plain, later(tokens), 1)
        wanted = states(plain, model, TABLES, 10 + end)  # graphs have other numbers of rows, and so other sums
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_step_behind_a_row_without_finite_logits_changes_no_state(model: StageModel, expected: Tokens) -> None:
    """The row's prompt was never computed, and the device's memory begins as no number."""
    with rig(model, Counted(1), graphs=True) as tested:
        tokens = run(tested, prompts()[:3], 3)
        tested.run(*later([(*step, 3) for step in tokens]), steps=5)
        [done] = told(tested)
        tokens.append(done.sampled)
        assert [step[:3] for step in tokens] == [step[:3] for step in expected[:4]]
        assert run(tested, later(tokens)[:3], STEPS - 4) == [step[:3] for step in expected[4:]]


def run_from(tested: Rig, step_id: int, sequences: Sequence[SequenceStep], steps: int) -> Tokens:
    goes_on = tested.runner.run(Step(step_id, tuple(sequences), steps=steps))
    while goes_on:
        goes_on = tested.runner.go_on()
    return [event.sampled for event in told(tested)]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_that_is_given_up_before_it_begins_leaves_the_states_of_the_step_before(
    model: StageModel, expected: Tokens, *, graphs: bool
) -> None:
    """Which is not taken again."""
    with rig(model, StagedDevice(2), graphs=graphs) as tested:
        tokens = run(tested, prompts(), 3)
        mixed = [part(tuple(range(70, 75)), 0, (3,)), *later(tokens)[:2]]
        tokens.append((*tested.run(*mixed).sampled[1:], None, None))
        tested.gates.abort(50)
        assert not tested.runner.run(Step(50, (part(tuple(range(70, 75)), 0, (3,)),)))
        told(tested)
        found = run_from(tested, 51, later(tokens)[:2], STEPS - 4)
        assert [step[:2] for step in tokens] + found == [step[:2] for step in expected]


def test_gated_prompts_that_begin_within_a_block_are_launched(model: StageModel) -> None:
    """Between two layers such a step may be given up; then states are taken back, which graphs do not keep."""
    device, layers = Counted(1), model.config.num_layers
    steps = [(0, 20, True, layers), (20, 2, True, 0), (22, 3, False, layers), (25, 1, False, 1), (32, 8, True, layers)]
    with rig(model, device, graphs=True) as tested:
        for start, count, gated, replays in steps:
            device.replays = 0
            chunk = part(tuple(range(5, 5 + start + count)), start, (4, 1, 6), sample=False)
            tested.run(chunk, gated=gated, layer_events=gated)
            assert device.replays == replays


def test_a_prompt_beside_decode_rows_that_has_begun_is_not_given_up(model: StageModel, expected: Tokens) -> None:
    """All layers have taken in the rows' tokens: the rows go on."""
    with rig(model, Counted(3), graphs=True) as tested:
        tokens = run(tested, prompts(), 3)
        tested.aborting = True  # behind the first layer
        done = tested.run(part(tuple(range(70, 75)), 0, (3,)), *later(tokens)[:2], layer_events=True)
        tested.aborting = False
        assert not done.aborted
        tokens.append((*done.sampled[1:], None, None))
        told(tested)
        found = run_from(tested, 51, later(tokens)[:2], STEPS - 4)
        assert [step[:2] for step in tokens] + found == [step[:2] for step in expected]


class AllTokens:
    """Masks that allow all tokens; `late`: those of the next step are late."""

    def __init__(self, vocab_size: int) -> None:
        self.bits, self.late = memoryview(bytes([255]) * (vocab_size // 8)), False

    def begin(self, wanted: Sequence[MaskRequest], *, alone: bool) -> PendingMasks:
        rows = [request.index for request in wanted]
        late, self.late = self.late, False
        return PendingMasks(lambda: TokenMasks({} if late else dict.fromkeys(rows, self.bits), late=set(rows * late)))

    def close(self) -> None: ...


def test_steps_are_launched_if_a_mask_is_late(model: StageModel, expected: Tokens) -> None:
    """The row takes such a step again, and its states are taken back, which graphs do not keep."""
    params = SamplingParams(temperature=0.0, response_format="json_object")
    device, masks = Counted(1), AllTokens(model.config.vocab_size)
    with rig(model, device, graphs=True) as tested:
        tokens = run(tested, prompts()[:1], 1)
        tested.runner.masks = masks  # type: ignore[assignment]
        while len(tokens) < STEPS:
            [row] = later([(*step, 0, 0, 0) for step in tokens])[:1]
            assert row.sample is not None
            row = replace(row, sample=replace(row.sample, params=params), may_skip=True)
            for late in (True, False) if len(tokens) % 4 == 0 else (False,):
                device.replays, masks.late = 0, late
                [found] = run(tested, [row], 1)
                assert device.replays == (not late)
            tokens.append(found)
    assert tokens == [step[:1] for step in expected]


class NoMasks:
    """Makes no masks, and notes what was wanted."""

    def __init__(self) -> None:
        self.wanted: list[MaskRequest] = []

    def begin(self, wanted: Sequence[MaskRequest], *, alone: bool) -> None:
        self.wanted += wanted

    def advance(self, tokens: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class Zeros(NoLinks):
    """The stage before has sent zeros."""

    def receive(self, step_id: int, rows: int) -> Tensor:
        return torch.zeros(rows, 64)


@pytest.mark.parametrize("first", [0, 2])
def test_a_later_stage_waits_for_masks(folder: Path, first: int) -> None:
    """A sequence without a token takes the step again, and the stages before have advanced its states."""
    config, layers = load_config(folder), 4
    pool = KVPool.create(kv_layout(config, "float32", SIZE), 4, [(0, first), (first, layers)] if first else [(0, 4)])
    model = load_stage(folder, config, torch.float32, first, layers)
    callbacks, masks = CallbackThread(nothing_fails), NoMasks()
    place = StagePlatform(torch.device("cpu"), CpuStream(), CpuKVMemory(pool.parts[-1]), callbacks)
    runner = StageRunner(0, model, place, Zeros(), KVGates(), lambda event: None, 5.0, masks)  # type: ignore[arg-type]
    spec = SampleSpec(SamplingParams(response_format="json_object"))
    runner.run(Step(1, (SequenceStep(ids(range(3, 9)), 0, (1,), spec, may_skip=True),)))
    runner.close()
    pool.close()
    assert [request.may_skip for request in masks.wanted] == [first == 0]
