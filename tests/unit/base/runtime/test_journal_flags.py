"""Where a service keeps its journal."""

import os
from pathlib import Path

import pytest

from moonpool.base.runtime.driver import CoreServiceConfig


@pytest.mark.parametrize("folder", ["j", "{pid}/j"])
def test_each_process_can_have_a_folder_of_its_own(folder: str) -> None:
    found = folder.replace("{pid}", str(os.getpid()))
    assert CoreServiceConfig.load(["--set", f"journal_dir={folder}"]).journal_dir == Path(found)


def test_no_folder_is_none() -> None:
    assert CoreServiceConfig.load(["--set", "journal_dir="]).journal() is None
