"""Random damages to data folders at rest; `python -m tests.unit.kvstore.damages --count 10000` does many more."""

import pytest

from tests.unit.kvstore.damages import Folders

FIRST, COUNT, QUICK = 100_000, 60, 30
"""Damages of `make test-all`, and of `make test`."""


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "encrypted"])
def folders(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Folders:
    return Folders(tmp_path_factory.mktemp("damages"), encrypted=request.param)


@pytest.mark.parametrize(
    "first",
    [pytest.param(FIRST + at, marks=() if at < QUICK else pytest.mark.slow) for at in range(0, COUNT, 10)],
)
def test_each_start_on_a_damaged_folder_serves_and_new_blocks_become_durable(folders: Folders, first: int) -> None:
    for seed in range(first, first + 10):
        print("seed", seed, *folders.run(seed))
