"""Random damages to every kind of file from elsewhere; `python -m tests.unit.damaged_files` does many more."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.damaged_files import READERS, Damages, Reader, damage

QUICK = 12
"""Damages of each kind in `make test`."""
MANY = 10_000
"""Damages of all kinds in `make test-all`."""


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_damaged_file_gives_values_or_an_error_for_people(reader: Reader, tmp_path: Path) -> None:
    damages = Damages(reader, tmp_path)
    outcomes = [damages.run(random.Random(f"{reader.name} {number}")) for number in range(QUICK)]
    assert [fault for _, fault in outcomes if fault] == []


@pytest.mark.slow
def test_ten_thousand_damages(tmp_path: Path) -> None:
    """In a process of its own, whose memory is bounded."""
    command = [sys.executable, "-m", "tests.unit.damaged_files", "--count", str(MANY), "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=3000)
    assert done.returncode == 0, done.stdout[-5000:]


def test_each_damage_changes_the_file(tmp_path: Path) -> None:
    """Nearly each: bits that are flipped twice, or zeros in place of zeros, are none."""
    file, changed = tmp_path / "x.json", 0
    for number in range(200):
        file.write_text('{"a": [1, 2, {"b": "c"}], "d": null}' * 1)
        before = file.read_bytes()
        damage(random.Random(number), file)
        changed += file.read_bytes() != before
    assert changed > 180
