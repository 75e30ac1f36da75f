"""`tools.preloaded` runs pytest in forks: each imports its folder's packages, and nothing is left behind."""

import os
import subprocess
import sys
from pathlib import Path

from tools.preloaded import OURS

ROOT = Path(__file__).parents[3]
RUN = """
import os, resource, select, sys, tempfile
from pathlib import Path
import moonpool, tools.house
from tools import preloaded

kept = tempfile.TemporaryDirectory()
options, limits = ["-q", "-p", "no:cacheprovider", "test_it.py"], {resource.RLIMIT_CPU: 3}
for text in ("assert moonpool.ANSWER == 42", "assert moonpool.ANSWER == 43", "loop()", "wait()"):
    Path("test_it.py").write_text(HEAD + text)
    number = preloaded.start(options, Path.cwd(), dict(os.environ), limits)
    while text == "wait()" and not Path("child").exists():
        pass
    print(preloaded.wait(number, 0.0 if text == "wait()" else 60.0))
try:
    ended = bool(select.select([os.pidfd_open(int(Path("child").read_text()))], [], [], 30.0)[0])
except ProcessLookupError:
    ended = True
print(Path(kept.name).exists(), ended)
"""
HEAD = """
import moonpool, os, signal, time
def loop():
    while True: pass
def wait():
    child = os.fork()
    if not child: os.execvp("sleep", ["sleep", "1000"])
    open("child.new", "w").write(str(child))
    os.rename("child.new", "child")
    signal.pause()
def test_it(): """


def test_forks_run_their_folders_packages_and_end_with_all_that_they_started(tmp_path: Path) -> None:
    (tmp_path / "moonpool").mkdir()
    (tmp_path / "moonpool" / "__init__.py").write_text("ANSWER = 42\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    program = f"HEAD = {HEAD!r}\n{RUN}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[:5] == ["0", "1", "-9", "None", "True True"], done.stderr


def test_all_packages_here_are_imported_anew() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= {*OURS}
