"""One default stack and a gateway for the tests of this folder; each leaves all services running."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import small_plan
from tests.integration.stack import CheckedStack


@pytest.fixture(scope="package")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedStack]:
    with CheckedStack(small_plan(checkpoint, tmp_path_factory.mktemp("stack"))) as running:
        yield running


@pytest.fixture(scope="package")
def address(stack: CheckedStack) -> str:
    """Of a gateway, which stops with the stack."""
    flags = ["--id", "gateway-0", "--listen", "127.0.0.1:0", "--drain-s", "5"]
    flags += ["--conductor", stack.address, "--model", stack.plan.model]
    return stack.spawn("gateway", "gateway-0", flags).wait_ready(60)
