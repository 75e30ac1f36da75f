"""The installed command, in the moment before it has imported its modules."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HELD_IMPORT = """
import sys
from importlib.abc import MetaPathFinder

class Held(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "moonpool.cli.main":
            print("importing", flush=True)
            sys.stdin.read()

sys.meta_path.insert(0, Held())
from moonpool.cli.entry import main
main()
"""


def started() -> subprocess.Popen[str]:
    """The command, which waits within its import until standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HELD_IMPORT, "--version"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # tests may run in the background
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    return process


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    with started() as process:
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")
        assert process.returncode == -signal.SIGINT


def test_it_goes_on_as_ever() -> None:
    with started() as process:
        told, wrong = process.communicate("")
        assert (told.split()[0], wrong, process.returncode) == ("moonpool", "", 0)


TELLS = """
import os, sys
from importlib.abc import MetaPathFinder
from moonpool.cli.entry import main

class Tells(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "moonpool.cli.main":
            print(os.environ["PYTHONPATH"], os.environ["LD_LIBRARY_PATH"], os.getcwd() in sys.path)
            sys.exit()

sys.meta_path.insert(0, Tells())
main()
"""


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("{0}::{1}", "{0}:{1}", False),
        ("{0}:", "{0}", False),
        ("{0}:{1}", "{0}:{1}", False),
        ("{0}::{2}", "{0}:{2}", True),
    ],
    ids=["an empty part", "at the end", "none", "named also"],
)
def test_an_empty_part_of_a_path_names_nothing(before: str, after: str, kept: bool, tmp_path: Path) -> None:
    """Else it is the working folder, also for each process that is started."""
    (tmp_path / "else").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "script").write_text(TELLS)
    before, after = (text.format(ROOT, tmp_path / "else", tmp_path / "here") for text in (before, after))
    done = subprocess.run(
        [sys.executable, tmp_path / "script"],
        cwd=tmp_path / "here",
        env=os.environ | {"PYTHONPATH": before, "LD_LIBRARY_PATH": ":/nothing"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [*after.split(), "/nothing", str(kept)], done.stderr


@pytest.mark.parametrize("verb", ["--help", "list", "keys"])
def test_a_full_disk_is_said_in_a_line(verb: str) -> None:
    """Standard output is a file there: also what is written only at the command's end."""
    command = [sys.executable, "-c", "from moonpool.cli.entry import main; main()", verb]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (2, "moonpool: standard output: No space left on device\n")
