"""Random checkpoints, one per shape and session, and one thread for torch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moonpool.model.create import create


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a shape's name to a float32 checkpoint of it, in several files for tiny-mistral."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = create(
                name, folder, seed=7, dtype="float32", shard_bytes=200_000 if name == "tiny-mistral" else 1 << 30
            )
        return made[name]

    return make
