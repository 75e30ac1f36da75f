"""Journals: what is written is read again, and what somebody else has written runs nothing."""

import os
import pickle
import random
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moonpool.base.runtime.core_codec import CoreEncoder
from moonpool.base.runtime.journal import (
    MAGIC,
    CoreError,
    JournalError,
    JournalWriter,
    journal_files,
    read_journal,
    rerun,
)
from moonpool.base.scheduling.state_machine import IoEnded, Tick, Timers
from moonpool.cli.main import app
from tests.unit.fakes.counter_core import Add, Counter, Start

OURS = ("tests.unit.fakes.counter_core",)


def framed(*records: bytes) -> bytes:
    return MAGIC + b"".join(struct.pack("<II", len(record), zlib.crc32(record)) + record for record in records)


def journal(folder: Path, *values: object) -> Path:
    """A journal file of these values."""
    encoder = CoreEncoder()
    path = folder / "x.0"
    path.write_bytes(framed(*map(encoder.encode, values)))
    return path


def counted(folder: Path) -> Path:
    """A journal of a core that counts."""
    core, writer = Counter(), JournalWriter(folder, "a", 1 << 20)
    events: list[Add | IoEnded[int] | Tick] = [Add(1), Add(2), IoEnded(1, 1), Add(300), Tick(), IoEnded(2, 2)]
    for now, event in enumerate(events):
        actions: list[Any] = []
        writer.before(core)
        core.handle(float(now), event, actions)
        writer.record(float(now), event, actions)
    writer.close()
    return folder / "a.0"


def test_an_event_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    path = journal(tmp_path, Timers(), (1.0, "event", 0))
    path.write_bytes(path.read_bytes()[:-3])
    core, entries = read_journal(path)
    assert isinstance(core, Timers)
    assert list(entries) == []


def test_a_killed_process_leaves_a_journal_that_can_be_read(tmp_path: Path) -> None:
    """Also one that had no event yet, and closed nothing; in a folder that it made."""
    writer = JournalWriter(tmp_path / "new", "a", 1 << 20)
    writer.before(Timers())
    core, entries = read_journal(tmp_path / "new" / "a.0")
    assert isinstance(core, Timers)
    assert list(entries) == []
    writer.close()


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.0"
    path.write_bytes(b"something else")
    with pytest.raises(JournalError, match="is not a journal"):
        read_journal(path)
    with pytest.raises(JournalError, match="there is no journal"):
        journal_files(tmp_path / "nothing")


def test_a_file_has_half_of_the_bytes_for_events_beside_its_snapshot(tmp_path: Path) -> None:
    core, writer = Counter(), JournalWriter(tmp_path, "a", 4000)
    core.ended = list(range(-500, 500))  # a snapshot of about half
    writer.before(core)
    first, second = tmp_path / "a.0", tmp_path / "a.1"
    snapshot = first.stat().st_size
    assert snapshot > 1000
    while not second.exists():
        writer.record(0.0, Add(1), [])
        writer.before(core)
    writer.close()
    assert 2000 <= first.stat().st_size - snapshot < 2100


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
    result = rerun(tmp_path / "a.0", modules=OURS)
    assert result.events == 2
    assert result.difference is not None
    assert result.difference.entry.event == Add(2)
    assert result.difference.actions == (Start(2),)


def test_what_a_core_cannot_take_is_named(tmp_path: Path) -> None:
    """Such as an event of another core; also a defect that ended the process that wrote the journal."""
    path = journal(tmp_path, Counter(), (1.0, Add(1), 0), (2.0, Add("x"), 0))  # type: ignore[arg-type]
    entry = read_journal(path, OURS)[1]
    assert next(entry).event == Add(1)
    path = journal(tmp_path, Counter(), (2.0, Add("x"), 0))  # type: ignore[arg-type]
    with pytest.raises(CoreError, match=r"x\.0: the core fails at event 1: TypeError") as failed:
        rerun(path, modules=OURS)
    assert isinstance(failed.value.__cause__, TypeError)
    with pytest.raises(JournalError, match=r"x\.0 begins with a tuple, which is no core"):
        rerun(journal(tmp_path, (1, 2)))
    for event in ("event", (1.0, Add(1)), ("now", Add(1), 0), (1.0, Add(1), "crc"), Add(1)):
        with pytest.raises(JournalError, match=r"x\.0: event 1 is no event of a journal"):
            rerun(journal(tmp_path, Counter(), event), modules=OURS)


# --- from elsewhere ---------------------------------------------------------------------------------------------------


class Harm:
    """Harm that is done when a pickle is read."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self._call = call, arguments

    def __reduce__(self) -> Any:
        return self._call


DOTTED = b"\x80\x04\x8c\x16moonpool.base.kv.file_io\x8c\x0bctypes.CDLL\x93N\x85R."


def said(path: Path) -> str:
    """What `moonpool rerun` says, which ends as for a damaged journal, without a traceback."""
    shown = CliRunner().invoke(app, ["rerun", str(path)])
    assert shown.exit_code != 0
    assert isinstance(shown.exception, JournalError)
    return str(shown.exception)


@pytest.mark.parametrize("what", ["call", "dotted"])
def test_pickles_are_not_read(tmp_path: Path, what: str) -> None:
    """Neither as journals of earlier versions, nor as values of this one."""
    marker, path = tmp_path / "was here", tmp_path / "x.0"
    data = DOTTED if what == "dotted" else pickle.dumps(Harm(os.mkdir, str(marker)))
    path.write_bytes(b"moonpool journal 1\n" + struct.pack("<I", len(data)) + data)
    assert "x.0 was written by an earlier version, as pickles" in said(path)
    path.write_bytes(framed(data))
    assert "x.0 is damaged between bytes 27 and" in said(path)
    path.write_bytes(data)
    assert "x.0 is not a journal" in said(path)
    assert not marker.exists()


def test_a_name_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "was here"
    (tmp_path / "a_stranger.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = b"a_stranger.Thing"
    path = tmp_path / "x.0"
    path.write_bytes(framed(b"C" + struct.pack("<H", len(name)) + name + b"\0\0c\0\0"))
    assert "names 'a_stranger.Thing', which is no class of a core of this version" in said(path)
    assert "a_stranger" not in sys.modules
    assert not marker.exists()
    shown = CliRunner().invoke(app, ["rerun", str(path), "--policy", "a_stranger:Thing"])
    assert "begins with a Thing, which is no core" in str(shown.exception)
    assert marker.exists(), "whoever names a module trusts it"


def test_a_policy_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="the classes of not_there cannot be imported"):
        read_journal(journal(tmp_path, Timers()), ["not_there"])


@pytest.mark.parametrize("cut", ["length", "crc", "value"])
def test_damage_is_an_error_that_names_the_place(tmp_path: Path, cut: str) -> None:
    path = journal(tmp_path, Timers(), (1.0, "event", 0))
    data = bytearray(path.read_bytes())
    data[{"length": len(MAGIC), "crc": len(MAGIC) + 5, "value": -1}[cut]] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"x\.0 is damaged between bytes \d+ and \d+$"):
        list(read_journal(path)[1])


def test_every_truncation_leaves_whole_events(tmp_path: Path) -> None:
    data = counted(tmp_path).read_bytes()
    path, lengths = tmp_path / "cut", set[int]()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        try:
            result = rerun(path, modules=OURS)
        except JournalError:
            assert not lengths, "an event is whole, and the snapshot is not"
            continue
        assert result.difference is None
        lengths.add(result.events)
    assert lengths == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("checked", [True, False], ids=["damage", "made to fit"])
def test_random_damage(tmp_path: Path, checked: bool) -> None:
    """With right checksums, as an attacker writes them, anything may come out; `MOONPOOL_FUZZ_SEED=N` repeats a run."""
    seed = int(os.environ.get("MOONPOOL_FUZZ_SEED") or random.randrange(1 << 32))
    print(f"MOONPOOL_FUZZ_SEED={seed}")
    draw = random.Random(seed)
    data, path, ends = counted(tmp_path).read_bytes(), tmp_path / "x.0", set()
    for _ in range(600):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(MAGIC), len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged if checked else _fitting(bytes(damaged)))
        try:
            result = rerun(path, modules=OURS)
            ends.add("differs" if result.difference else "same")
        except JournalError as error:
            ends.add(type(error).__name__ if str(path) in str(error) else "nowhere")
    assert "JournalError" in ends
    assert "nowhere" not in ends
    assert checked == (not ends & {"CoreError", "differs"}), ends


def _fitting(data: bytes) -> bytes:
    """The journal with right checksums."""
    at, records = len(MAGIC), []
    while at + 8 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        records.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return framed(*records)
