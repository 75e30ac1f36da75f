"""Nights of seeds: works take turns, go on where the last night ended, and keep what failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.nightly import FAILURES, FIRST_SEED, STATE, WORKS, Work, run


def ticks(turns: int) -> tuple[float, Callable[[], float]]:
    """Seconds of a night with so many turns, and its clock."""
    now = iter(range(10_000))
    return turns + 0.5, lambda: float(next(now))


def writing(name: str, file: Path, seeds: int, fails: str = "0") -> Work:
    """A work that notes its seeds; `fails` is an expression of the seed."""
    note = f"open({str(file)!r}, 'a').write(f'{name} {{{{seed}}}}\\n')"
    code = f"import sys; seed = {{seed}}; {note}; print('told'); sys.exit({fails})"
    return Work(name, f'-c "{code}"', seeds)


def test_works_take_turns_and_the_next_night_goes_on(tmp_path: Path) -> None:
    tried = tmp_path / "tried"
    works = [writing("a", tried, 5), writing("b", tried, 1)]
    for night in (3, 2):
        seconds, clock = ticks(night)
        assert run(works, tmp_path / "kept", seconds, clock) == 0
    first = FIRST_SEED
    assert tried.read_text().split("\n")[:-1] == [
        f"a {first}",
        f"b {first}",
        f"a {first + 5}",
        f"a {first + 10}",
        f"b {first + 1}",
    ]
    assert json.loads((tmp_path / "kept" / STATE).read_text()) == {"a": first + 15, "b": first + 2}
    assert not (tmp_path / "kept" / FAILURES).exists()


def test_what_failed_is_kept_with_its_command(tmp_path: Path) -> None:
    work = writing("a", tmp_path / "tried", 1, f"int(seed == {FIRST_SEED + 1})")
    seconds, clock = ticks(3)
    assert run([work], tmp_path, seconds, clock) == 1
    kept = (tmp_path / FAILURES).read_text()
    assert f"seed = {FIRST_SEED + 1};" in kept
    assert kept.endswith("told\n\n\n")


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_the_works_are_commands_that_exist(work: Work) -> None:
    _, module_flag, module, *_ = work.command(FIRST_SEED)
    assert module_flag == "-m"
    path = Path(__file__).parents[3] / module.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    assert str(FIRST_SEED) in work.command(FIRST_SEED)
