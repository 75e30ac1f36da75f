"""Where a service keeps its journal."""

import os
from pathlib import Path

import pytest

from moonpool.drive.config import CoreServiceConfig


@pytest.mark.parametrize(("folder", "found"), [("j", "j"), ("{pid}/j", f"{os.getpid()}/j")])
def test_each_process_can_have_a_folder_of_its_own(folder: str, found: str) -> None:
    assert CoreServiceConfig.load(["--journal-dir", folder]).journal_dir == Path(found)


def test_no_folder_is_none() -> None:
    assert CoreServiceConfig.load(["--journal-dir", ""]).journal() is None
