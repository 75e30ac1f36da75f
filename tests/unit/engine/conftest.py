"""One small random checkpoint for all tests of this folder."""

from pathlib import Path

import pytest

from moonpool.engine.models.random_checkpoint import create


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Llama."""
    return create("tiny-llama", tmp_path_factory.mktemp("tiny-llama"), seed=3, dtype="float32")
