"""One stack for all that is hostile to it; each test ends with the check that the stack was not harmed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.hostile.raw import Stack, running


@pytest.fixture(scope="package")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(checkpoint, tmp_path_factory.mktemp("raw")) as stack:
        yield stack


@pytest.fixture(autouse=True)
def everything_comes_back(stack: Stack) -> None:
    """`pytest_runtest_teardown` has a check that includes the check of all other stacks."""


def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Item | None) -> None:
    """Checks the stack after the last case of a test, and after every method that is fuzzed."""
    more_cases = isinstance(nextitem, pytest.Function) and nextitem.function is item.function
    stack = item.funcargs.get("stack")
    if isinstance(stack, Stack) and (not more_cases or item.function.__name__ == "test_rpc"):
        stack.check_unharmed()
