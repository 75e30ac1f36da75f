"""Keeps the tests of the tools to themselves: torch's random state is as it was."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _own_random_state() -> Iterator[None]:
    with torch.random.fork_rng():
        yield
