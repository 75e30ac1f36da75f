"""Steps with LoRA adapters on in-process stages: mixed batches, runs, gates, and adapters that cannot be loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.checkpoint import load_config
from moonpool.base.checkpoint.lora import read_adapter
from moonpool.base.scheduling.steps import LayerDone, SequenceStep, Step
from moonpool.engine.messages import DropLora, LoadLora, LoraAnswer, StageDone
from moonpool.engine.models.random_checkpoint import create_lora
from moonpool.engine.platforms.staged import StagedDevice
from tests.unit.engine.stages import GREEDY, PROMPT, Stages, ids, stages

OTHER = tuple(range(60, 83))


def loaded(opened: Stages, folder: Path) -> bytes:
    """The id of an adapter that all stages have loaded."""
    lora = read_adapter(folder).id
    opened.events.clear()
    for runner in opened.runners:
        runner.max_lora_rank = 8
        runner.load_lora(LoadLora(7, lora, str(folder)))
    assert [(event.number, event.failure) for event in opened.events if isinstance(event, LoraAnswer)] == [
        (7, None) for _ in opened.runners
    ]
    return lora


def prompts(loras: Sequence[bytes], **how: Any) -> Step:
    parts = ((PROMPT, (4, 1, 6)), (OTHER, (2, 3)))
    chosen = zip(parts, loras, strict=False)
    return Step(
        1, tuple(SequenceStep(ids(*opened), 0, blocks, GREEDY, lora=lora) for (opened, blocks), lora in chosen), **how
    )


def following(step: Step, tokens: Sequence[int | None], steps: int) -> Step:
    """A run of further steps, in which each sequence begins with the token that it got."""
    parts = []
    for part, token in zip(step.sequences, tokens, strict=True):
        assert token is not None
        parts.append(SequenceStep(ids(token), len(part.token_ids) // 4, part.block_table, GREEDY, lora=part.lora))
    return Step(2, tuple(parts), steps=steps)


@pytest.fixture
def folders(checkpoint: Path, tmp_path: Path) -> tuple[Path, Path]:
    config = load_config(checkpoint)
    return create_lora(tmp_path / "a", config, 1), create_lora(tmp_path / "b", config, 2, ("v", "down"), rank=4)


def answers(opened: Stages, loras: Sequence[bytes]) -> list[tuple[int | None, ...]]:
    """Tokens of a prompt step and of the steps behind it, a run where there is one stage."""
    step = prompts(loras)
    found = [opened.run(step)[-1].sampled]
    opened.events.clear()
    done = opened.run(following(step, found[0], 1 if len(opened.runners) > 1 else 4))
    return found + [event.sampled for event in done if event.stage == len(opened.runners) - 1]


@pytest.mark.parametrize("count", [1, 2])
def test_adapters_in_one_step_answer_as_alone(count: int, checkpoint: Path, folders: tuple[Path, Path]) -> None:
    with stages(checkpoint, count) as opened:
        a, b = (loaded(opened, folder) for folder in folders)
    alone = {}
    for lora, folder in ((b"", None), (a, folders[0]), (b, folders[1])):
        with stages(checkpoint, count) as opened:
            if folder is not None:
                loaded(opened, folder)
            alone[lora] = answers(opened, (lora, lora))
    assert alone[a] != alone[b""] != alone[b] != alone[a]
    for pair in ((a, b), (b, b""), (b"", a)):
        with stages(checkpoint, count) as opened:
            for folder in folders:
                loaded(opened, folder)
            together = answers(opened, pair)
        assert together == [(mine[0], other[1]) for mine, other in zip(alone[pair[0]], alone[pair[1]], strict=True)]


def test_on_a_device_with_its_own_memory(checkpoint: Path, folders: tuple[Path, Path]) -> None:
    with stages(checkpoint, 1) as opened:
        loras = loaded(opened, folders[0]), loaded(opened, folders[1])
        expected = answers(opened, loras)
    device = StagedDevice(seed=3)
    with stages(checkpoint, 1, device) as opened:
        for folder in folders:
            loaded(opened, folder)
        found = [event.sampled for event in _closed(opened, prompts(loras))]
    assert found == expected[:1]


def _closed(opened: Stages, step: Step) -> list[StageDone]:
    opened.events.clear()
    opened.run(step)
    for runner in opened.runners:
        runner.platform.close()
    return [event for event in opened.events if isinstance(event, StageDone)]


def test_layers_are_reported_and_gates_hold(checkpoint: Path, folders: tuple[Path, Path]) -> None:
    with stages(checkpoint, 1) as opened:
        lora = loaded(opened, folders[0])
        opened.events.clear()
        opened.gates[0].open(1, 1)
        (done,) = opened.run(prompts((lora, b""), gated=True, layer_events=True))
        assert done.aborted
        assert [event.layer for event in opened.events if isinstance(event, LayerDone)] == [0, 1]


def test_a_dropped_adapter_is_gone_and_can_come_back(checkpoint: Path, folders: tuple[Path, Path]) -> None:
    with stages(checkpoint, 1) as opened:
        lora = loaded(opened, folders[0])
        (runner,) = opened.runners
        assert runner.loras[lora].nbytes > 0
        runner.drop_lora(DropLora(8, lora))
        assert not runner.loras
        assert opened.events[-1] == LoraAnswer(8, 0)
        assert loaded(opened, folders[0]) == lora


def test_an_adapter_that_cannot_be_loaded_is_told_and_costs_nothing(
    checkpoint: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with stages(checkpoint, 1) as opened:
        (runner,) = opened.runners
        for order, kind, words in (
            (LoadLora(1, b"x" * 32, str(tmp_path / "none")), "CheckpointError", "no adapter_config.json"),
            (LoadLora(2, b"x" * 32, str(folders[0])), "CheckpointError", "have changed"),
            (LoadLora(3, read_adapter(folders[0]).id, str(folders[0])), "UnsupportedModel", "rank 8"),
        ):
            opened.events.clear()
            runner.load_lora(order)
            (answer,) = opened.events
            assert isinstance(answer, LoraAnswer)
            assert answer.failure is not None
            assert (answer.number, answer.failure.kind) == (order.number, kind)
            assert words in answer.failure.message
        assert not runner.loras
        opened.events.clear()
        assert opened.run(prompts((b"", b"")))[-1].sampled
