"""What all tests of this folder have: one small random checkpoint, torch's draws from one seed, patient connections."""

from pathlib import Path

import pytest
import torch

from moonpool.engine import role_service
from moonpool.engine.models.random_checkpoint import create
from moonpool.engine.prefill import service as prefill_service

SEED = 6


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Llama."""
    return create("tiny-llama", tmp_path_factory.mktemp("tiny-llama"), seed=3, dtype="float32")


@pytest.fixture(autouse=True)
def drawn_alike() -> None:
    """What a test draws without a generator of its own is the same in each run, in whatever order tests run."""
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances connect to one another in as much time as a busy machine needs."""
    for service in (role_service, prefill_service):
        monkeypatch.setattr(service, "CONNECT_TIMEOUT_S", 60.0)
