"""Runs compilers in a separate process group, and ends the group when the parent has ended.

A compiler starts further processes that outlive the compiler. So this program leads their group. Run by path, as
`compiling.py AT_ONCE COMMANDS`, with a pipe from the parent as standard input.

Standard output has a line for each command that is done; a line that is not empty says why one failed, in JSON.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor


def end_with_parent() -> None:
    """Wait for the end of the parent, then end the whole group at once."""
    while os.read(0, 4096):  # not by sys.stdin, whose lock the interpreter's end would miss
        pass
    os.killpg(0, signal.SIGKILL)


def run(command: list[str]) -> str:
    """Run a command; return the output of a failed command, else ""."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603  # ours
    return json.dumps(done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""


def main() -> None:
    """Run the commands, as many at once as asked for."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    with ThreadPoolExecutor(int(sys.argv[1])) as pool:
        lock = threading.Lock()

        def report(command: list[str]) -> None:
            failure = run(command)
            with lock:
                sys.stdout.write(failure + "\n")
                sys.stdout.flush()

        list(pool.map(report, json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
