"""One stack for all that is hostile to it; each test ends with the check that it was not harmed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.hostile.raw import Stack, running


@pytest.fixture(scope="package")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(checkpoint, tmp_path_factory.mktemp("raw")) as stack:
        yield stack


@pytest.fixture(autouse=True)
def everything_comes_back(stack: Stack) -> Iterator[None]:
    """Every test ends with the check, which includes the one that all other stacks have."""
    yield
    stack.check_unharmed()
