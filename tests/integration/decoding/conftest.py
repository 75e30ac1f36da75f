"""One stack, whose decode instance starts again with the flags of each group of tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import small_plan
from tests.integration.stack import CheckedStack

DecodeWith = Callable[..., CheckedStack]
"""Starts the decode instance again with these flags; returns the stack."""


@pytest.fixture(scope="package")
def decode_with(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecodeWith]:
    plan = small_plan(checkpoint, tmp_path_factory.mktemp("decoding"))
    with CheckedStack(plan, invariants="decode") as stack:
        plain = tuple(stack.services["decode-0"].arguments)

        def start(*flags: str) -> CheckedStack:
            stack.services["decode-0"].arguments = [*plain, *flags]
            stack.restart("decode-0")
            return stack

        yield start
