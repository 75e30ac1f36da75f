import pickle
import re
import struct
from pathlib import Path

import pytest

from moonpool.base.runtime.journal import MAGIC, JournalError, JournalWriter, journal_files, read_journal, rerun
from moonpool.base.scheduling.state_machine import Timers
from tests.unit.fakes.counter_core import Add, Counter, Start


def journal(folder: Path, *values: object) -> Path:
    """A journal file of these pickles."""
    path = folder / "x.0"
    with path.open("wb") as file:
        file.write(MAGIC)
        for value in values:
            data = pickle.dumps(value)
            file.write(struct.pack("<I", len(data)) + data)
    return path


def test_an_event_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    path = journal(tmp_path, Timers(), (1.0, "event", 0))
    path.write_bytes(path.read_bytes()[:-3])
    core, entries = read_journal(path)
    assert isinstance(core, Timers)
    assert list(entries) == []


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.0"
    path.write_bytes(b"something else")
    with pytest.raises(JournalError, match="is not a journal"):
        read_journal(path)
    with pytest.raises(JournalError, match="there is no journal"):
        journal_files(tmp_path / "nothing")


@pytest.mark.parametrize("harm", [print, Path("x"), pytest.raises, re.compile("x")])
def test_a_journal_that_names_other_things_than_cores_is_refused(tmp_path: Path, harm: object) -> None:
    with pytest.raises(JournalError, match="no class of a core of this version: if another version"):
        read_journal(journal(tmp_path, harm))


def test_damage_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = journal(tmp_path, Timers())
    path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    with pytest.raises(JournalError, match=r"x\.0 is damaged between bytes"):
        read_journal(path)


def test_a_writer_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "a.1").write_bytes(b"of an earlier process")
    writer = JournalWriter(tmp_path, "a", 1000)
    writer.before(Timers())
    writer.close()
    assert [path.name for path in journal_files(tmp_path)] == ["a.0"]


def test_a_rerun_stops_at_the_first_action_that_differs(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "a", 1000)
    writer.before(Counter())
    writer.record(1.0, Add(1), [Start(1)])
    writer.record(2.0, Add(2), [Start(7)])
    writer.record(3.0, Add(3), [Start(3)])
    writer.close()
    result = rerun(tmp_path / "a.0", modules=re.compile(r"(moonpool\.base\.scheduling|tests\.unit\.fakes)\..*"))
    assert result.events == 2
    assert result.difference is not None
    assert result.difference.entry.event == Add(2)
    assert result.difference.actions == (Start(2),)
