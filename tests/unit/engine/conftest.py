"""What all tests of this folder have: one small random checkpoint, and torch's draws from one seed."""

from pathlib import Path

import pytest
import torch

from moonpool.engine.models.random_checkpoint import create

SEED = 6


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Llama."""
    return create("tiny-llama", tmp_path_factory.mktemp("tiny-llama"), seed=3, dtype="float32")


@pytest.fixture(autouse=True)
def drawn_alike() -> None:
    """What a test draws without a generator of its own is the same in each run, in whatever order tests run."""
    torch.manual_seed(SEED)
