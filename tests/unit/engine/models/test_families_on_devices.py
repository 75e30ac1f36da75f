"""Each family's tokens on a device are a plain CPU's: prompts in chunks and runs of decode steps, by graphs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moonpool.base.checkpoint import load_config
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.stage import StageModel
from moonpool.engine.platforms.registry import DeviceName
from moonpool.engine.platforms.stage_platform import open_device
from tests.unit.engine.models.test_families import CASES, reference
from tests.unit.engine.test_devices import OTHER, PROMPT, Rig, part, rig

GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
DEVICES = [pytest.param("staged", marks=pytest.mark.slow), pytest.param("cuda", marks=GPU)]
TOKENS = 24
"""Of each answer: across a block's end."""


def answers(tested: Rig) -> list[list[int]]:
    """A prompt in two chunks, another beside the second one, and an answer of each."""
    tested.run(part(PROMPT[:32], 0, (4, 1), sample=False), layer_events=True)
    first = tested.run(part(PROMPT, 32, (4, 1, 6)), part(OTHER, 0, (7, 2)), layer_events=True).sampled
    found = [list(PROMPT), list(OTHER)]
    for tokens, token, table in zip(found, first, ((4, 1, 6, 9), (7, 2, 8, 5)), strict=True):
        assert token is not None
        tokens.append(token)
        tested.go_on(tokens, table, TOKENS)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_a_plain_cpu(
    case: str, device: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """By graphs, for all families but those that say why they have none, which is told."""
    reference(*CASES[case]).save_pretrained(tmp_path)
    config = load_config(tmp_path)

    def model(where: torch.device) -> StageModel:
        return load_stage(tmp_path, config, torch.float32, 0, config.num_layers, where)

    with rig(model(torch.device("cpu")), None) as plain:
        expected = answers(plain)
    opened = open_device(DeviceName.parse(device))
    assert opened is not None
    without = config.decoder.not_captured
    if without:
        record_property(f"{case}: not captured", without)
    with rig(model(opened.torch_device), opened, graphs=not without) as tested:
        assert tested.not_captured == ("", "")
        assert answers(tested) == expected
