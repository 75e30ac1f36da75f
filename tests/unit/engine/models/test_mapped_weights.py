"""The memory of weights: about their file's; in a file that is mapped, also where memory holds no whole model."""

import gc
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers.gguf_files import write_gguf
from moonpool.base.checkpoint import load_config
from moonpool.base.errors import ConfigError
from moonpool.base.malloc import release_memory
from moonpool.engine.kernels.native import library
from moonpool.engine.models import loader
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.models.stage import StageModel
from moonpool.engine.models.tensor_reader import KeptWeights
from tests.unit.engine.models.limited_memory import NO_ROOM, logits_of
from tests.unit.engine.models.loading_peak import CANNOT

LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
SLACK = 24 << 20
"""Bytes that an arena and the parts of files to check are larger than what is in them, on two cores."""
SPARE = 48 << 20
"""Bytes for one tensor, stacks and one chunk of weights; all weights in float32 take twice as many."""


@pytest.fixture(autouse=True)
def native() -> None:
    if library.get() is None:
        pytest.skip("there are no native kernels here, which take mapped weights")


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen2", "tiny-mixtral"])
def test_results_are_the_same(shape: str, quantization: Any, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """tiny-qwen2 has a tied head."""
    path = checkpoint(shape)
    config = load_config(path)
    held, mapped, again = (
        load_stage(path, config, torch.float32, 0, config.num_layers, kept=KeptWeights(quantization, file=file))
        for file in (None, tmp_path / "weights" / "a", tmp_path / "weights" / "a")
    )
    assert torch.equal(logits_of(held), logits_of(mapped))
    assert torch.equal(logits_of(held), logits_of(again))
    assert held.mapped_bytes == 0
    assert held.weight_bytes * 0.8 < mapped.mapped_bytes < held.weight_bytes * 1.1
    assert again.mapped_bytes == mapped.mapped_bytes
    assert len(list((tmp_path / "weights").glob("*.weights"))) == 1


@pytest.mark.parametrize("type_", ["Q4_0", "Q8_0"])
def test_codes_of_a_file_are_used_again(type_: str, tmp_path: Path) -> None:
    """Also by stages, which have files of their own; an embedding of codes is one of the pieces."""
    folder = create("tiny-llama", tmp_path / "model", 3, "float32", overrides={**LARGE, "num_hidden_layers": 3})
    file = write_gguf("llama", folder, tmp_path / "model.gguf", type_)
    config = load_config(file)
    held = load_stage(file, config, torch.float32, 0, config.num_layers, kept=KeptWeights("file"))
    kept = KeptWeights("file", file=tmp_path / "weights" / "a")
    for _ in range(2):
        stage = load_stage(file, config, torch.float32, 0, config.num_layers, kept=kept)
        assert torch.equal(logits_of(stage), logits_of(held))
        assert stage.changed_weights == held.changed_weights
        load_stage(file, config, torch.float32, 0, 1, kept=kept)
        load_stage(file, config, torch.float32, 1, config.num_layers, kept=kept)
    assert len(list((tmp_path / "weights").glob("*.weights"))) == 3


def test_weights_are_not_read_again(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = checkpoint("tiny-llama"), KeptWeights("int4", file=tmp_path / "weights" / "a")
    config = load_config(path)
    first = load_stage(path, config, torch.float32, 0, config.num_layers, kept=kept)
    monkeypatch.setattr(loader, "PACKERS", {"int4": None})  # nothing packs
    again = load_stage(path, config, torch.float32, 0, config.num_layers, kept=kept)
    assert torch.equal(logits_of(first), logits_of(again))


def test_a_head_in_bytes_has_a_file_of_its_own(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Engines with one and without one share the other weights; of several with one the first makes the bytes."""
    path, file = checkpoint("tiny-qwen2"), tmp_path / "weights" / "a"
    config = load_config(path)

    def load(*, int8_head: bool, file: Path | None) -> StageModel:
        kept = KeptWeights(int8_head=int8_head, file=file)
        return load_stage(path, config, torch.bfloat16, 0, config.num_layers, kept=kept)

    held = load(int8_head=True, file=None)
    if held.int8_head is None:
        pytest.skip("this processor makes no bytes of a head")
    plain, first, second = (load(int8_head=wanted, file=file) for wanted in (False, True, True))
    assert plain.int8_head is None
    assert first.mapped_bytes == second.mapped_bytes == plain.mapped_bytes
    assert len(list(file.parent.glob("*.weights"))) == 2
    rows = torch.randn(1, config.hidden_size, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    for made in (first, second):
        assert made.int8_head is not None
        assert made.int8_head.highest(rows) == held.int8_head.highest(rows)
        assert made.int8_head.nbytes == held.int8_head.nbytes


def anonymous_bytes() -> int:
    """Memory of this process that no file holds, without what was freed."""
    gc.collect()
    release_memory()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_codes_take_the_memory_of_their_file(tmp_path: Path) -> None:
    folder = create("tiny-llama", tmp_path / "model", 3, "float32", overrides=LARGE)
    file = write_gguf("llama", folder, tmp_path / "model.gguf", "Q8_0")
    config = load_config(file)
    load_stage(file, config, torch.bfloat16, 0, 1, kept=KeptWeights("auto"))  # what the first use takes
    before = anonymous_bytes()
    stage = load_stage(file, config, torch.bfloat16, 0, config.num_layers, kept=KeptWeights("auto"))
    grown = anonymous_bytes() - before
    print(f"{grown / file.stat().st_size:.3f} of the file")
    assert stage.weight_bytes * 0.9 < grown < 1.15 * file.stat().st_size + (2 << 20)  # a large page is not filled


def test_a_folder_that_is_none_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file")
    path = checkpoint("tiny-llama")
    with pytest.raises(ConfigError, match=f"mmap_weights: weights cannot be put into {tmp_path}"):
        load_stage(path, load_config(path), torch.float32, 0, 1, kept=KeptWeights(file=tmp_path / "weights" / "a"))


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """A disk that is full behind so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_is_told_with_the_setting(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path, folder = checkpoint("tiny-llama"), tmp_path / "weights"
    why = f"mmap_weights: weights cannot be put into {folder}: .* XDG_CACHE_HOME names another place"
    with largest_file(1 << 20), pytest.raises(ConfigError, match=why):
        load_stage(path, load_config(path), torch.float32, 0, 1, kept=KeptWeights(file=folder / "a"))
    assert not list(folder.iterdir())


def test_loading_takes_the_weights_and_a_layer_at_most(tmp_path: Path) -> None:
    """In memory and in a mapped file: no second copy of the weights is in memory, nor their file."""
    shape = {**LARGE, "num_hidden_layers": 12, "vocab_size": 2048}
    folder = create("tiny-llama", tmp_path / "model", seed=1, dtype="bfloat16", overrides=shape)
    program = [sys.executable, "-m", "tests.unit.engine.models.loading_peak", str(folder), str(tmp_path / "mapped")]
    run = subprocess.run(program, capture_output=True, text=True, check=False)
    if run.returncode == CANNOT:
        pytest.skip("the system does not forget how much memory a process once had")
    assert run.returncode == 0, run.stderr
    weights = (folder / "model.safetensors").stat().st_size
    layer = weights // 12
    for peak in map(int, run.stdout.split()):
        assert weights * 0.9 < peak < weights + layer + SLACK, (peak, weights)


def test_a_model_runs_that_memory_does_not_hold(tmp_path: Path) -> None:
    path = create("tiny-llama", tmp_path / "model", 3, "bfloat16", overrides=LARGE)
    nbytes = (path / "model.safetensors").stat().st_size  # the reader maps the file as its own

    def loaded(*folder: Path) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "tests.unit.engine.models.limited_memory"]
        arguments = [path, nbytes + SPARE, tmp_path / "logits", *folder]
        return subprocess.run([*program, *map(str, arguments)], capture_output=True, text=True, check=False)

    refused = loaded()
    assert refused.returncode == NO_ROOM, refused.stderr
    assert "memory" in refused.stdout
    done = loaded(tmp_path / "weights")
    assert done.returncode == 0, done.stderr + done.stdout
    config = load_config(path)
    stage = load_stage(path, config, torch.float32, 0, config.num_layers)
    assert stage.weight_bytes > SPARE * 3 // 2
    assert torch.equal(torch.load(tmp_path / "logits"), logits_of(stage))
