"""Steps with LoRA adapters are graphs on a device: tokens are those of a plain CPU, and loading captures nothing anew.

The device has a hostile order; `SEED=...` repeats one.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from moonpool.base.checkpoint import load_config
from moonpool.base.checkpoint.lora import read_adapter
from moonpool.base.scheduling.steps import SequenceStep
from moonpool.engine.messages import DropLora, LoadLora, LoraAnswer
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.lora import lora_slots
from moonpool.engine.models.random_checkpoint import create_lora
from moonpool.engine.models.stage import StageModel
from moonpool.engine.platforms.base import Device
from moonpool.engine.platforms.cuda import CudaDevice
from tests.unit.engine.test_devices import FEW, GREEDY, OTHER, PROMPT, Rig, ids, rig
from tests.unit.engine.test_steps_ahead import Counted

MAX_RANK, STEPS = 8, 6
TABLES = (4, 1, 6), (7, 2)


def load(checkpoint: Path, slots: int, device: Device | None = None) -> StageModel:
    config, where = load_config(checkpoint), torch.device("cpu") if device is None else device.torch_device
    model = load_stage(checkpoint, config, torch.float32, 0, config.num_layers, where)
    assert isinstance(model, StageModel)
    if slots:
        model.lora_slots = lora_slots(config, model.layers, 0, count=slots, max_rank=MAX_RANK)
    return model


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of adapters of several ranks and places."""
    config, path = load_config(checkpoint), tmp_path_factory.mktemp("loras")
    return [
        create_lora(path / "a", config, 1),
        create_lora(path / "b", config, 2, ("v", "down"), rank=4),
        create_lora(path / "c", config, 3, ("q", "output", "gate"), rank=2),
    ]


def loaded(tested: Rig, folder: Path) -> bytes:
    tested.runner.max_lora_rank = MAX_RANK
    lora = read_adapter(folder).id
    tested.runner.load_lora(LoadLora(7, lora, str(folder)))
    answer = tested.events.pop()
    assert isinstance(answer, LoraAnswer)
    assert answer.failure is None
    assert tested.runner.loras[lora].nbytes > 0
    return lora


def answers(tested: Rig, loras: Sequence[bytes]) -> list[object]:
    """Tokens of two prompts in one step, and of a run behind them."""
    texts = zip((PROMPT, OTHER), TABLES, loras, strict=True)
    prompts = [SequenceStep(ids(text), 0, table, GREEDY, lora=lora) for text, table, lora in texts]
    found: list[object] = [tokens := tested.run(*prompts).sampled]
    starts = [len(PROMPT), len(OTHER)]
    for count in (STEPS,) if tested.place.device is not None else (1,) * STEPS:
        step = [
            SequenceStep(ids([token or 0]), start, table, GREEDY, lora=lora)
            for token, start, table, lora in zip(tokens, starts, TABLES, loras, strict=True)
        ]
        tokens = tested.run(*step, steps=count).sampled
        starts = [start + count for start in starts]
    return [*found, tokens]


def story(tested: Rig, folders: Sequence[Path]) -> list[object]:
    """Two adapters, alone and beside none, and a third one in place of the first."""
    a, b = loaded(tested, folders[0]), loaded(tested, folders[1])
    found = [answers(tested, pair) for pair in ((a, b), (b, b""), (b"", b""), (a, a))]
    tested.runner.drop_lora(DropLora(8, a))
    tested.events.pop()
    c = loaded(tested, folders[2])
    return [*found, *(answers(tested, pair) for pair in ((c, b), (b"", c)))]


@pytest.mark.parametrize("seed", FEW[:3])
def test_tokens_are_those_of_a_plain_cpu(checkpoint: Path, folders: list[Path], seed: int) -> None:
    device = Counted(seed)
    with rig(load(checkpoint, 0), None) as plain:
        expected = story(plain, folders)
    assert len({repr(each) for each in expected}) == len(expected)
    with rig(model := load(checkpoint, 2), device, graphs=True) as tested:
        assert tested.not_captured == ("", "")
        device.replays = 0
        left = device.captures
        assert story(tested, folders) == expected
        # A prompt of 65 tokens is launched; behind the layers of a step are head and sampling.
        assert device.replays >= 6 * 2 * STEPS
        assert device.captures == left, "an adapter is loaded without another capture"
        tokens = len(PROMPT) + len(OTHER)
        assert tokens > 64
        device.replays = 0
        part = SequenceStep(ids(PROMPT), 0, TABLES[0], GREEDY, lora=read_adapter(folders[1]).id)
        tested.run(part)
        assert device.replays == model.config.num_layers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_chooses_the_same_tokens(checkpoint: Path, folders: list[Path]) -> None:
    with rig(load(checkpoint, 0), None) as plain:
        expected = story(plain, folders)
    device = CudaDevice(0)
    with rig(load(checkpoint, 2, device), device, graphs=True) as tested:
        assert story(tested, folders) == expected


def test_without_a_free_slot_an_adapter_is_refused(checkpoint: Path, folders: list[Path]) -> None:
    with rig(load(checkpoint, 1), Counted(1)) as tested:
        first = loaded(tested, folders[0])
        tested.runner.load_lora(LoadLora(9, lora := read_adapter(folders[1]).id, str(folders[1])))
        answer = tested.events.pop()
        assert isinstance(answer, LoraAnswer)
        assert answer.failure is not None
        assert answer.failure.kind == "Unavailable"
        assert list(tested.runner.loras) == [first]
        tested.runner.drop_lora(DropLora(8, first))
        tested.events.pop()
        assert loaded(tested, folders[1]) == lora
