"""Each command of the pages for new users runs, as it stands there; what needs a network or hours says so."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.documents import PAGES, ROOT, Reader, commands
from tests.integration.namespaces import Network, missing

RUN = [name for name in ("README.md", *PAGES) if any(not each.reason for each in commands(ROOT / name))]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Two machines, `a` and `b`."""
    if reason := missing():
        pytest.skip(reason)
    with Network(tmp_path, ["a", "b"]) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RUN)
def test_the_commands_of_a_page_run(name: str, network: Network, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    given = {key: value for key, value in os.environ.items() if not key.startswith("MOONPOOL_")}
    said = []
    with Reader(network, folder, given | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}) as reader:
        for command in commands(ROOT / name):
            if not command.reason:
                said.append(reader.run(command))
    if name in ("docs/tutorial.md", "docs/restarts.md"):
        assert sum(", 0 loaded, 25 computed" in text or " loaded, " in text for text in said) > 0
