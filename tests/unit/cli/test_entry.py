"""The installed command, in the moment before it has imported its modules."""

import signal
import subprocess
import sys

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
