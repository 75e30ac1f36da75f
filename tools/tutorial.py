"""Writes the figures of docs/tutorial.md anew: `python -m tools.tutorial` runs the page's commands on this machine.

Each block of output keeps the lines that it has, as the commands before it print them now. `--model NAME` asks another
model and prints the page.
"""

import argparse
import contextlib
import datetime
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from tools.screens import ROOT, shim

PAGE = ROOT / "docs" / "tutorial.md"
MODEL = "smollm2"
_FENCE = re.compile(r"^```(sh)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TTFT = re.compile(r"TTFT ([\d.]+) s")
READY_S = 1800.0
"""How long a start may take, with a download."""


class Shell:
    """Runs commands of the page in a folder of its own; those that serve go on behind the others."""

    def __init__(self, folder: Path) -> None:
        shim(folder)
        self._folder = folder
        self._environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "COLUMNS": "120"}

    def run(self, command: str) -> str:
        """What a command has said when it has ended, or serves."""
        how = {"cwd": self._folder, "env": self._environment, "stdin": subprocess.DEVNULL}
        if not command.startswith("moonpool serve "):
            done = subprocess.run(["bash", "-ec", command], **how, capture_output=True, text=True, check=False)  # type: ignore[call-overload]
            if done.returncode:
                raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
            return str(done.stdout + done.stderr)
        log = self._folder / "serve.log"
        with log.open("w") as said:
            process = subprocess.Popen(["bash", "-ec", f"exec {command}"], **how, stdout=said, stderr=said)  # type: ignore[call-overload]
        end = time.monotonic() + READY_S
        while "ready" not in log.read_text():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command} is not ready:\n{log.read_text()}")
            time.sleep(0.5)
        return ""


def excerpt(shown: str, said: str) -> str:
    """The lines of `said` that are the same lines as those of `shown`, but for their figures."""
    left, kept = said.splitlines(), []
    for line in shown.splitlines():
        for at, other in enumerate(left):
            if _words(other) == _words(line):
                kept.append(other.rstrip())
                del left[: at + 1]
                break
    return "".join(f"{line}\n" for line in kept)


def _words(line: str) -> list[str]:
    """The first words of a line, without its reason to end."""
    return re.findall(r"[a-z]+", re.sub(r"^\[\w+\]", "", line))[:2]


def anew(page: str, shell: Shell, model: str) -> str:
    """The page with the figures of its commands run now."""
    said, first_tokens, parts, at = "", [], [], 0
    for fence in _FENCE.finditer(page):
        parts.append(page[at : fence.start(2)])
        at = fence.end(2)
        if fence[1]:
            said = ""
            for command in fence[2].strip().split("\n"):
                said += shell.run(command.replace(MODEL, model))
            parts.append(fence[2])
            first_tokens += map(float, _TTFT.findall(said))
        else:
            parts.append(excerpt(fence[2], said))
    text = "".join([*parts, page[at:]])
    text = re.sub(r"came \d+ times sooner", f"came {first_tokens[0] / first_tokens[1]:.0f} times sooner", text)
    return re.sub(r"(?<=, )\d{4}-\d\d-\d\d", str(datetime.date.today()), text, count=1)


def main() -> None:
    """Run the page's commands, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.tutorial", description=__doc__)
    parser.add_argument("--model", default=MODEL, help="another model; the page is printed")
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory(prefix="tutorial-") as name:
        shell = Shell(Path(name))
        try:
            text = anew(PAGE.read_text(encoding="utf-8"), shell, model)
        finally:
            with contextlib.suppress(RuntimeError):
                shell.run("moonpool stop")
    if model == MODEL:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
