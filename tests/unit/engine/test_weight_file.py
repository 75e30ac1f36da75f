"""The file of arranged weights: one writer, users of a whole file, and room on a full disk."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moonpool.base.checkpoint import weight_file
from moonpool.base.checkpoint.weight_file import WeightFile, gives_large_pages, in_use


def write(folder: Path, name: str, nbytes: int = 4096) -> WeightFile:
    """A whole file."""
    made = WeightFile(folder, name)
    assert made.notes is None
    made.allocate(0, nbytes)
    made.finish([nbytes])
    return made


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_whole_file_is_used_again(tmp_path: Path) -> None:
    first = write(tmp_path, "a")
    assert WeightFile(tmp_path, "a").notes == [4096]  # while the first has it
    first.close()
    assert WeightFile(tmp_path, "a").notes == [4096]
    assert files(tmp_path) == ["a.json", "a.weights"]


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    """Also while others have it."""
    write(tmp_path, "a").close()
    os.truncate(tmp_path / "a.weights", 100)
    damaged = WeightFile(tmp_path, "a")
    assert damaged.notes is None
    damaged.allocate(0, 4096)
    damaged.finish([1])
    os.truncate(tmp_path / "a.weights", 100)
    assert WeightFile(tmp_path, "a").notes is None


@pytest.mark.parametrize("at", [0, 5000, 9 * 4096 - 1])
def test_a_changed_byte_is_noticed(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any piece; a hole between pieces is nobody's."""
    monkeypatch.setattr(weight_file, "PIECE_BYTES", 4096)
    made = WeightFile(tmp_path, "a")
    made.allocate(0, 3 * 4096)
    made.allocate(3 * 4096, 100)
    made.allocate(8 * 4096, 4096)
    os.pwrite(made.descriptor, bytes(range(1, 101)) * 120, 0)
    made.finish([1])
    made.close()
    whole = WeightFile(tmp_path, "a")
    assert whole.notes == [1]
    whole.close()
    with (tmp_path / "a.weights").open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    assert WeightFile(tmp_path, "a").notes is None


@pytest.mark.parametrize(
    "notes", ["", "[]", "null", '{"bytes": 4096, "notes": [1]}', '{"bytes": 4096, "pieces": [[1]]}']
)
def test_notes_that_cannot_be_read_make_a_file_anew(notes: str, tmp_path: Path) -> None:
    write(tmp_path, "a").close()
    (tmp_path / "a.json").write_text(notes)
    assert WeightFile(tmp_path, "a").notes is None


def test_only_this_user_may_change_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir(mode=0o777)
    write(folder, "a").close()
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "b.weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        WeightFile(folder, "b")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="another user's"):
        WeightFile(tmp_path, "a")


def test_a_file_that_is_not_finished_goes(tmp_path: Path) -> None:
    made = WeightFile(tmp_path, "a")
    made.allocate(0, 4096)
    made.close()
    made.close()
    assert files(tmp_path) == []


def test_what_a_killed_writer_left_is_written_anew(tmp_path: Path) -> None:
    program = "import os, sys, pathlib; from moonpool.base.checkpoint.weight_file import WeightFile\n"
    program += "made = WeightFile(pathlib.Path(sys.argv[1]), 'a'); made.allocate(0, 9000); os._exit(1)"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert (tmp_path / "a.weights").stat().st_size == 9000
    made = WeightFile(tmp_path, "a")
    assert (made.notes, (tmp_path / "a.weights").stat().st_size) == (None, 0)


def test_others_wait_for_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "POLL_S", 0.01)
    made, waits = WeightFile(tmp_path, "a"), threading.Event()
    found: list[WeightFile] = []
    thread = threading.Thread(target=lambda: found.append(WeightFile(tmp_path, "a", waits.set)))
    thread.start()
    assert waits.wait(30)
    assert not found
    made.allocate(0, 100)
    made.finish("whole")
    thread.join(30)
    assert found[0].notes == "whole"


def test_unused_files_make_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate(("new", "used", "old")):
        made = write(tmp_path, name)
        os.utime(tmp_path / f"{name}.weights", (2e9 - age, 2e9 - age))
        if name == "used":
            used = made
        else:
            made.close()
    room = [False, True]

    def allocate(file: int, begin: int, nbytes: int) -> None:
        if not room.pop(0):
            raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    made = WeightFile(tmp_path, "next")
    made.allocate(0, 100)
    assert files(tmp_path) == ["new.json", "new.weights", "next.weights", "used.json", "used.weights"]
    room += [False, False]
    with pytest.raises(OSError, match="no room"):
        made.allocate(0, 100)
    assert files(tmp_path) == ["next.weights", "used.json", "used.weights"]
    used.close()


def test_a_file_that_was_long_not_used_goes(tmp_path: Path) -> None:
    write(tmp_path, "old").close()
    os.utime(tmp_path / "old.weights", (1e9, 1e9))
    write(tmp_path, "new").close()
    assert files(tmp_path) == ["new.json", "new.weights"]


def test_a_file_is_in_use_while_one_has_it_whole(tmp_path: Path) -> None:
    assert not in_use(tmp_path, "a")
    begun = WeightFile(tmp_path, "a-0-4")
    begun.allocate(0, 100)
    assert not in_use(tmp_path, "a")  # may yet fail
    begun.finish("")
    assert in_use(tmp_path, "a")
    assert not in_use(tmp_path, "b")
    begun.close()
    assert not in_use(tmp_path, "a")


def test_whether_files_lie_on_large_pages_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it stays; the answer is what the process's own map says."""
    folder = tmp_path / "weights"
    gives_large_pages(folder)
    assert files(folder) == []
    monkeypatch.setattr(weight_file, "large_bytes", lambda address: 2 << 20)
    assert gives_large_pages(folder)
    monkeypatch.setattr(weight_file, "large_bytes", lambda address: 0)
    assert not gives_large_pages(folder)


def test_another_users_folder_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `moonpool serve` would choose a file there that engines then refuse."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="another user's"):
        gives_large_pages(tmp_path)
