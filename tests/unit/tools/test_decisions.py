"""`tools.decisions`: its text does not depend on names, and two recordings are compared pair by pair."""

from dataclasses import make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import pytest

from moonpool.base.scheduling.state_machine import Tick
from tools.decisions.canon import Canon
from tools.decisions.corpus import compare, record
from tools.decisions.places import cores
from tools.decisions.recorder import recorded
from tools.decisions.walks import walk


def values(record: str, fields: list[str], enum: str, members: str) -> list[Any]:
    made, make_enum = make_dataclass(record, fields), cast("Any", Enum)
    return [made(1, b"\x02"), {make_enum(enum, members)(2): 0.5}, frozenset({"b", "a"}), ("a b", None)]


def test_names_do_not_count() -> None:
    first, second = Canon(), Canon()
    text = first.text(values("Phase", ["number", "key"], "Way", "SWAP STORE"))
    assert text == '[#0(1, 02), {[#1:1, 0.5]}, {"a", "b"}, ["...", None]]'
    assert text == second.text(values("State", ["request", "hash"], "Preemption", "COPY KEEP"))
    assert (first.classes, second.classes) == (["Phase", "Way"], ["State", "Preemption"])


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(TypeError, match=r"builtins\.object has no canonical form"):
        Canon().text([object()])


def test_recordings_of_the_same_walks_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "other"):
        record(tmp_path / name, "walk-prefill", seeds=1, walks=1, jobs=1)
    record(tmp_path / "longer", "walk-prefill", seeds=1, walks=2, jobs=1)
    assert compare(tmp_path / "one", tmp_path / "other", loose=False) == 0
    capsys.readouterr()
    assert compare(tmp_path / "one", tmp_path / "longer", loose=False) == 1
    assert "walk-prefill-1: pair" in (said := capsys.readouterr().out)
    assert "- nothing" in said
    assert "+ part 1/1" in said


def test_what_a_part_raises_is_noted_and_cores_are_as_before(tmp_path: Path) -> None:
    before = [kind.handle for kind in cores()]
    with recorded(tmp_path / "it") as recorder:
        with recorder.part("one"):
            walk("prefill", 1, 0, recorder)
        with recorder.part("two"):
            recorder.pair("core", recorder.text(Tick()), ())
            raise AssertionError("wrong")
    [wrong] = recorder.close().wrong
    assert wrong.startswith("two: AssertionError: wrong (")
    assert [kind.handle for kind in cores()] == before
