"""Runs whose steps a device is given before the tokens of the step before are read: tokens are those of a plain CPU.

The device has a hostile order; `SEED=...` repeats one. Graphs do their work anew in each replay.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
import torch

from benchmarks.steps import idle_steps
from moonpool.base.checkpoint import load_config
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.steps import SequenceStep, Step
from moonpool.engine.messages import StageDone
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.stage import StageModel
from moonpool.engine.platforms.base import CapturedGraph
from moonpool.engine.platforms.staged import StagedDevice
from moonpool.engine.sampling.captured import MAX_ENDS
from moonpool.engine.sampling.sampler import NOT_FINITE
from tests.unit.engine.test_devices import FEW, Rig, ids, rig

TABLES = ((4, 1, 6), (7, 2, 8), (0, 3, 5), (9, 10, 11))
PROMPTS = tuple(tuple(range(first, first + 10)) for first in (5, 60, 90, 120))
SPECS = tuple(
    SampleSpec(params, seed=7 + row)
    for row, params in enumerate(
        [
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.9),
            SamplingParams(temperature=1.2, top_k=20, top_p=0.9),
            SamplingParams(temperature=1.5, min_p=0.02),
        ]
    )
)
STEPS = 20
Tokens = list[tuple[int | None, ...]]
"""Of each step, of all sequences."""


class Counted(StagedDevice):
    """Counts replays; captures nothing after `captures` graphs."""

    def __init__(self, seed: int, captures: int = 1 << 30) -> None:
        super().__init__(seed)
        self.replays, self.captures = 0, captures

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        if not self.captures:
            raise RuntimeError("out of memory")
        self.captures -= 1

        def counted() -> None:
            self.replays += 1
            work()

        return super().capture(counted)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> StageModel:
    config = load_config(checkpoint)
    return load_stage(checkpoint, config, torch.float32, 0, config.num_layers)


def prompts(specs: Sequence[SampleSpec] = SPECS) -> list[SequenceStep]:
    parts = zip(PROMPTS, TABLES, specs, strict=False)
    return [SequenceStep(ids(prompt), 0, table, spec) for prompt, table, spec in parts]


def later(tokens: Tokens, specs: Sequence[SampleSpec] = SPECS) -> list[SequenceStep]:
    """What continues after so many steps."""
    count = len(tokens)
    return [
        SequenceStep(ids([tokens[-1][row] or 0]), 10 + count - 1, table, replace(spec, position=count))
        for row, (table, spec) in enumerate(zip(TABLES, specs, strict=False))
    ]


def told(tested: Rig) -> list[StageDone]:
    """The steps that have been told since the last call."""
    tested.settle()
    done = [event for event in tested.events if isinstance(event, StageDone)]
    tested.events.clear()
    return done


def run(tested: Rig, sequences: Sequence[SequenceStep], steps: int) -> Tokens:
    tested.run(*sequences, steps=steps)
    return [done.sampled for done in told(tested)]


@pytest.fixture(scope="module")
def expected(model: StageModel) -> Tokens:
    with rig(model, None) as plain:
        tokens = run(plain, prompts(), 1)
        for _ in range(STEPS - 1):
            tokens += run(plain, later(tokens), 1)
        return tokens


@pytest.mark.parametrize("seed", FEW)
def test_a_run_chooses_what_its_steps_choose_one_by_one(model: StageModel, expected: Tokens, seed: int) -> None:
    """The first step is a prompt's, and the host chooses its tokens; then a run of decode steps alone."""
    device = Counted(seed)
    with rig(model, device, graphs=True) as tested:
        device.replays = 0
        tokens = run(tested, prompts(), 9)
        assert tokens == expected[:9]
        tokens += run(tested, later(tokens), STEPS - 9)
        assert tokens == expected
        # The prompt's layers; then all layers, and head with sampling.
        assert device.replays == model.config.num_layers + 2 * (STEPS - 1)


def end_of(expected: Tokens, first: int) -> tuple[int, int]:
    """A step from the `first` on whose first token has not been in a step since, and that token."""
    tokens = [step[0] for step in expected]
    step = next(at for at in range(first, STEPS) if tokens[at] not in tokens[first - 1 : at])
    return step, tokens[step] or 0


@pytest.mark.parametrize("seed", FEW)
def test_a_step_behind_an_end_is_thrown_away(model: StageModel, expected: Tokens, seed: int) -> None:
    """Its blocks are others' at once: what comes into them stays. Then the others' answers go on elsewhere."""
    device, (end, token) = Counted(seed), end_of(expected, 5)
    with rig(model, device, graphs=True) as tested:
        tokens = run(tested, prompts(), 3)
        device.replays = 0
        first, *others = later(tokens)
        assert (
            run(tested, [replace(first, end_token_ids=frozenset({token})), *others], STEPS - 3) == expected[3 : end + 1]
        )
        others_now = {
            block: [(bytes([layer + 1]) * len(data), 0) for layer, (data, _) in enumerate(tested.slices(block))]
            for table in (TABLES[0], *TABLES[2:])
            for block in table
        }
        for block, slices in others_now.items():
            tested.write(block, slices)
        tested.loaded()
        tested.place.stream.record().wait()
        assert device.replays == 2 * (end + 1 - 3 + 1)
        for block, slices in others_now.items():
            held = [layer[block].contiguous().view(torch.uint8) for layer in tested.place.memory.kv]
            assert [layer.numpy().tobytes() for layer in held] == [data for data, _ in slices]
        tested.fetch(*TABLES[1])
        saved = [tested.slices(block) for block in TABLES[1]]
        for block, slices in zip(TABLES[3], saved, strict=True):
            tested.write(block, slices)
        tokens = expected[: end + 1]
        moved = replace(later(tokens)[1], block_table=TABLES[3])
        assert run(tested, [moved], STEPS - end - 1) == [(step[1],) for step in expected[end + 1 :]]


@pytest.mark.parametrize("seed", FEW)
def test_a_run_that_is_stopped_late_ends_with_the_step_under_way(
    model: StageModel, expected: Tokens, seed: int
) -> None:
    device = Counted(seed)
    with rig(model, device, graphs=True) as tested:
        tokens = run(tested, prompts(), 3)
        device.replays = 0
        step = Step(50, tuple(later(tokens)), steps=9)
        assert tested.runner.run(step)
        tested.gates.stop_run(50)
        assert not tested.runner.go_on()
        done = told(tested)
        assert [event.over for event in done] == [False, True]
        tokens += [event.sampled for event in done]
        assert tokens == expected[:5]
        assert device.replays == 4
        step = Step(51, tuple(later(tokens)), steps=9)
        tested.gates.stop_run(51)  # before the first step is done
        assert not tested.runner.run(step)
        tokens += [event.sampled for event in told(tested)]
        assert tokens == expected[:6]


@pytest.mark.parametrize("seed", FEW)
def test_a_run_that_is_aborted_ends_behind_the_step_under_way(model: StageModel, expected: Tokens, seed: int) -> None:
    with rig(model, Counted(seed), graphs=True) as tested:
        tokens = run(tested, prompts(), 3)
        assert tested.runner.run(Step(50, tuple(later(tokens)), steps=9))
        tested.gates.abort(50)
        assert tested.runner.go_on()
        assert not tested.runner.go_on()
        *done, last = told(tested)
        assert [event.aborted for event in done] == [False, False]
        assert (last.aborted, last.sampled) == (True, ())
        tokens += [event.sampled for event in done]
        goes_on = tested.runner.run(Step(51, tuple(later(tokens)), steps=STEPS - 5))
        while goes_on:
            goes_on = tested.runner.go_on()
        assert tokens + [event.sampled for event in told(tested)] == expected


def test_the_host_chooses_the_tokens_of_rows_with_more_ends_than_graphs_know(
    model: StageModel, expected: Tokens
) -> None:
    """So the host knows the end before it gives a further step."""
    device, (end, token) = Counted(1), end_of(expected, 5)
    others = {number for number in range(3, 200) if number not in {tokens[0] for tokens in expected}}
    with rig(model, device, graphs=True) as tested:
        tokens = run(tested, prompts(), 3)
        device.replays = 0
        first, *rest = later(tokens)
        ending = replace(first, end_token_ids=frozenset({token, *sorted(others)[:MAX_ENDS]}))
        assert run(tested, [ending, *rest], STEPS - 3) == expected[3 : end + 1]
        assert device.replays == end + 1 - 3


def test_a_row_without_finite_logits_ends_the_run_and_the_others_have_their_tokens(
    model: StageModel, expected: Tokens
) -> None:
    """Its prompt was never computed, and the device's memory begins as no number."""
    with rig(model, Counted(1), graphs=True) as tested:
        tokens = run(tested, prompts()[:3], 3)
        beside = [*later([(*step, 3) for step in tokens])]
        tested.run(*beside, steps=5)
        [done] = told(tested)
        assert done.sampled == (*expected[3][:3], None)
        assert dict(done.failed) == {3: NOT_FINITE}
        assert done.over


def test_where_answers_end_often_no_step_is_given_ahead(model: StageModel, expected: Tokens) -> None:
    device, thrown = Counted(0), []
    with rig(model, device, graphs=True) as tested:
        tokens = run(tested, prompts(), 3)
        ends = frozenset(token for token in expected[3] if token is not None)
        for _ in range(9):
            device.replays = 0
            assert run(tested, [replace(part, end_token_ids=ends) for part in later(tokens)], 9) == expected[3:4]
            tested.place.stream.record().wait()
            thrown.append(device.replays // 2 - 1)
        assert thrown[0] == 1
        assert thrown[-1] == 0
        assert thrown == sorted(thrown, reverse=True)


@pytest.mark.parametrize("captures", [0, 3, 5])
def test_what_cannot_be_captured_is_named_and_done_as_before(
    model: StageModel, expected: Tokens, captures: int
) -> None:
    """Of three shapes of layers, and of three numbers of rows three ways to choose."""
    with rig(model, Counted(2, captures), graphs=True) as tested:
        assert tested.runner.graphs is not None
        assert ("out of memory" in tested.runner.graphs.not_sampled) == (captures > 0)
        tokens = run(tested, prompts(), 9)
        assert tokens + run(tested, later(tokens), STEPS - 9) == expected


def instructions(of: Callable[[], object]) -> int:
    """Instructions of Python that a call takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        of()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.9)])
def test_rows_of_a_step_are_handled_together(params: SamplingParams) -> None:
    """However many there are, the host runs as many instructions, and gives the device two graphs a step."""
    found = []
    for rows in (64, 256):
        with idle_steps(rows, layers=2) as steps:
            go_on = steps.run(params, 8)
            go_on()
            steps.device.replays = 0
            found.append(instructions(go_on))
            assert steps.device.replays == 2
    assert abs(found[1] - found[0]) < 64  # to find a graph; a third of an instruction a row
