"""Commands in documents: found in their fences, and run as a reader runs them, on hosts of their own.

A fence of `sh` is a reader's terminal. Its first line may name the machine (`# on b`). A comment before the fence,
`<!-- not run: REASON -->`, says why nobody runs the fence. A command that serves goes on until `moonpool stop`, or to
the page's end.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.integration.namespaces import Network

ROOT = Path(__file__).parents[2]
PAGES = tuple(
    f"docs/{name}.md"
    for name in ("tutorial", "start", "install", "memory", "restarts", "machines", "sharing", "errors")
)
"""Pages of a new user, with the README; each command in them runs, or its fence says why not."""
HOST = "a"
"""Where commands run whose fence names no machine."""
SERVES = re.compile(r"(?:\S*/)?moonpool (serve|conductor|prefill|decode|gateway|kvstore(?= --))\b")
STOPS = re.compile(r"(?:\S*/)?moonpool stop\b")
REPLACED = {
    r"\bsmollm2\b": "bundled",
    r"/path/to/Qwen2\.5-0\.5B-Instruct": "bundled",
    r"\S*\.venv/bin/moonpool": "moonpool",
    r"--wait-s \d+": "--wait-s 500",
}
"""What has to be fetched -> what is here; and a limit for a machine with much else to do."""
LIMIT_S = 600.0
_FENCE = re.compile(r"(?:<!-- not run: (?P<reason>.+?) -->\n)?^```sh\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Command(NamedTuple):
    """A command of a page.

    Attributes:
        where: page and line.
        host: machine that runs it.
        text: as a shell takes it.
        reason: why it is not run; "" if it is.
    """

    where: str
    host: str
    text: str
    reason: str


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(text):
        host, number = HOST, text.count("\n", 0, fence.start("text")) + 1
        held = ""
        for line in fence["text"].splitlines():
            if found := re.fullmatch(r"# on (\w+)", line):
                host = found[1]
            elif not line.startswith("#") and (held or line.strip()):
                held += line + "\n"
                if not line.endswith("\\") and _is_whole(held):
                    yield Command(f"{page.relative_to(ROOT)}:{number}", host, held.strip(), fence["reason"] or "")
                    held = ""
            number += 1


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:  # a quotation goes on
        return False
    return True


@dataclass
class _Serving:
    text: str
    host: str
    process: subprocess.Popen[bytes]
    log: Path


class Reader:
    """Runs a page's commands, one after the other, in a folder of its own.

    Args:
        network: hosts.
        folder: empty.
        environment: variables of all commands.
    """

    def __init__(self, network: Network, folder: Path, environment: Mapping[str, str]) -> None:
        self._network, self._folder = network, folder
        programs = folder / "programs"
        programs.mkdir()
        (programs / "moonpool").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m moonpool.cli.main "$@"\n')
        (programs / "moonpool").chmod(0o755)
        self._environment = {**environment, "PATH": f"{programs}:{environment['PATH']}", "PYTHONPATH": str(ROOT)}
        self._serving: list[_Serving] = []
        self._pause = threading.Event()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        for each in reversed(self._serving):
            each.process.send_signal(signal.SIGTERM)
        for each in self._serving:
            try:
                each.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(each.process.pid, signal.SIGKILL)
                each.process.wait()

    def run(self, command: Command) -> str:
        """Run a command to its end, or until it serves; return what it said.

        What was started before must still serve.
        """
        self._assert_serving()
        text = command.text
        for pattern, instead in REPLACED.items():
            text = re.sub(pattern, instead, text)
        own = self._folder / command.host
        own.mkdir(mode=0o700, exist_ok=True)
        words = self._network.at(command.host, ["bash", "-ec", f"exec {text}" if SERVES.match(text) else text])
        environment = self._environment | {"XDG_RUNTIME_DIR": str(own)}
        if SERVES.match(text):
            return self._serve(command, words, environment, own)
        done = subprocess.run(
            words, cwd=own, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"{command.where}: {text}\n{said}\n{self._logs()}"
        if STOPS.match(text):
            self._await_stop(command.host)
        self._assert_serving()
        return said

    def _serve(self, command: Command, words: list[str], environment: Mapping[str, str], own: Path) -> str:
        log = self._folder / f"log-{len(self._serving)}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, cwd=own, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
            )
        self._serving.append(_Serving(command.text, command.host, process, log))
        began, whole_stack = time.monotonic(), " serve" in command.text
        while whole_stack and not re.search(r"^ready", log.read_text(), re.MULTILINE):
            assert process.poll() is None, f"{command.where}: {command.text}\n{log.read_text()}"
            assert time.monotonic() - began < LIMIT_S, f"{command.where}: not ready\n{log.read_text()}"
            self._pause.wait(0.1)
        return log.read_text()

    def _assert_serving(self) -> None:
        for each in self._serving:
            assert each.process.poll() is None, f"{each.text}\n{each.log.read_text()}"

    def _await_stop(self, host: str) -> None:
        for each in [each for each in self._serving if each.host == host]:
            assert each.process.wait(60) == 0, f"{each.text}\n{each.log.read_text()}"
            self._serving.remove(each)

    def _logs(self) -> str:
        return "\n".join(f"--- {each.text}\n{each.log.read_text()[-2000:]}" for each in self._serving)
