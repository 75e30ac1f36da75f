"""What tests of engines share."""

from collections.abc import Iterator

import pytest

from tests.engines.servers import MAKES


@pytest.fixture(scope="session", autouse=True)
def makes() -> Iterator[None]:
    """Ends the processes that engines are forked from."""
    yield
    for make in MAKES:
        make.close()
