"""Random checkpoints, one per shape and session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moonpool.engine.models.random_checkpoint import create


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
