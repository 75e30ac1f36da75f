"""Steps behind pictures of models with M-RoPE are graphs: rows turn by their places and the sequence's shift."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moonpool.base.checkpoint import load_config
from moonpool.base.scheduling.steps import SequenceStep
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.pictures import PicturePositions
from moonpool.engine.models.stage import StageModel
from tests.unit.engine.test_devices import FEW, GREEDY, OTHER, PROMPT, Rig, ids, rig
from tests.unit.engine.test_steps_ahead import Counted

STEPS = 12
"""Of a run, across a block's end."""


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> StageModel:
    """Of one that takes pictures, as far as prompts behind pictures look at the rule."""
    config = load_config(checkpoint)
    found = load_stage(checkpoint, config, torch.float32, 0, config.num_layers)
    assert isinstance(found, StageModel)
    found.picture_positions = PicturePositions(SimpleNamespace(components=(0, 1, 2)))  # type: ignore[arg-type]
    return found


def story(tested: Rig, shift: int) -> tuple[list[object], list[object]]:
    """Tokens and KV of a prompt in two chunks, with a picture in the first, and of an answer, beside another."""
    tested.run(SequenceStep(ids(PROMPT[:24]), 0, (4, 1)))
    second = SequenceStep(ids(PROMPT[24:]), 24, (4, 1, 6), GREEDY, rope_shift=shift)
    found = list[object]()
    tokens = tested.run(second, SequenceStep(ids(OTHER), 0, (7, 2), GREEDY)).sampled
    runs = [(len(PROMPT), (4, 1, 6, 9), shift), (len(OTHER), (7, 2, 8), 0)]
    for count in (STEPS,) if tested.place.device is not None else (1,) * STEPS:
        step = [
            SequenceStep(ids([token or 0]), start, table, GREEDY, rope_shift=own)
            for token, (start, table, own) in zip(tokens, runs, strict=True)
        ]
        tokens = tested.run(*step, steps=count).sampled
        runs = [(start + count, table, own) for start, table, own in runs]
        found.append(tokens)
    tested.fetch(1, 6, 2)
    return found[-1:], [tested.slices(block) for block in (1, 6, 2)]


@pytest.mark.parametrize("seed", FEW[:3])
def test_tokens_and_kv_behind_a_picture_are_those_of_launched_layers(model: StageModel, seed: int) -> None:
    device = Counted(seed)
    with rig(model, None) as plain:
        expected = story(plain, -9)
    with rig(model, None) as plain:
        assert story(plain, 0)[1] != expected[1]
    with rig(model, device, graphs=True) as tested:
        device.replays = 0
        assert story(tested, -9) == expected
        assert device.replays >= 2 * model.config.num_layers + STEPS
