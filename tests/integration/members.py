"""Services as processes of their own, of this code or of another release, and streams that must come whole."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from moonpool.base.bundled import model_dir
from moonpool.client import Client

ROOT = Path(__file__).parents[2]
EMULATED = ("--engine", "emulated:llama-70b-a800", "--set", "time_scale=4")
"""An emulated token is a hash of all before: a text is the same only where no token is lost, doubled or swapped."""
UNKNOWN_BEFORE = ("MOONPOOL_JOURNAL_DIR",)
"""Variables of the tests; journals of an earlier release are not read."""
TOKENS, STREAMS = 96, 4
START_S, DRAIN_S = 300.0, 30.0
PROMPTS = [f"{number} ships lie still, and every rope hangs down " * (2 + 3 * number) for number in range(STREAMS)]


class Unanswered(Exception):
    """The connection ended before a byte of the answer, as of a connection that came while its server ended."""


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def program(path: str) -> str:
    """What the program `moonpool` of a release runs; releases move their modules."""
    code = Path(path.split(os.pathsep)[1])
    scripts = tomllib.loads((code / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["moonpool"].partition(":")
    return f"from {module} import {function}; {function}()"


@dataclass(slots=True)
class Member:
    """A service, as a process of the code in `PYTHONPATH`."""

    kind: str
    name: str
    flags: Sequence[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self, path: str) -> None:
        """Start, and wait until ready."""
        log = self.folder / f"{self.name}.log"
        begin = log.stat().st_size if log.exists() else 0
        command = [sys.executable, "-c", program(path), self.kind, "--id", self.name, *self.flags]
        variables = {name: value for name, value in os.environ.items() if name not in UNKNOWN_BEFORE}
        variables |= {"PYTHONPATH": path, "MOONPOOL_DIE_WITH_PARENT": "1"}
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, cwd=self.folder, env=variables, stdout=out, stderr=out)
        end = time.monotonic() + START_S
        while b"ready: " not in (said := log.read_bytes()[begin:]):
            assert self.process.poll() is None, said.decode()[-3000:]
            assert time.monotonic() < end, said.decode()[-3000:]
            time.sleep(0.1)

    def stop(self) -> None:
        """Drain and end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(2 * DRAIN_S) == 0, f"{self.name} ended with {self.process.returncode}"
        finally:
            self.process.kill()


@dataclass(slots=True)
class Cluster:
    """Two conductors, one kvstore, one gateway, and engines."""

    members: list[Member]
    conductors: list[str]
    url: str

    @classmethod
    def planned(cls, folder: Path, engines: int = 2) -> "Cluster":
        """A cluster with so many engines of each kind; starts nothing."""
        conductors = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        store, gateway = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        model = ("--model", str(model_dir()))
        usual = ("--set", f"drain_s={DRAIN_S:g}", "--log-level", "warning")
        join = tuple(part for address in conductors for part in ("--conductor", address))
        engine = (*model, *join, *usual, "--listen", "127.0.0.1:0", *EMULATED)
        members = [Member("conductor", f"conductor-{number}", (*model, *usual, "--listen", address), folder)
                   for number, address in enumerate(conductors)]  # fmt: skip
        data = ("--data-dir", str(folder / "kv"), "--dram-bytes", str(16 << 20), "--ssd-bytes", str(256 << 20))
        members.append(Member("kvstore", "kvstore-0", (*join, *usual, "--listen", store, *data), folder))
        members += [Member(kind, f"{kind}-{number}", engine, folder)
                    for kind in ("prefill", "decode") for number in range(engines)]  # fmt: skip
        members.append(Member("gateway", "gateway-0", (*model, *join, *usual, "--listen", gateway), folder))
        return cls(members, conductors, f"http://{gateway}")

    @contextlib.contextmanager
    def running(self, path: str) -> Iterator[None]:
        """All services, until the body ends."""
        try:
            for member in self.members:
                member.start(path)
            self.wait_complete()
            yield
        finally:
            for member in self.members:
                if member.process is not None:
                    member.process.kill()
                    member.process.wait()

    def wait_complete(self) -> None:
        """Wait until every conductor has every instance, and the gateway answers."""
        end, wanted = time.monotonic() + START_S, {member.name for member in self.members} - {"gateway-0"}
        for address in self.conductors:
            with Client(address) as client:
                while not wanted - {"conductor-0", "conductor-1"} <= (
                    there := {instance.id for instance in client.cluster_state().instances}
                ):
                    assert time.monotonic() < end, there
                    time.sleep(0.1)
        while httpx2.get(f"{self.url}/health", timeout=10).status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.1)


@dataclass(slots=True)
class Load:
    """Streams, one after the other in each thread, until `over`."""

    url: str
    wanted: list[str]
    over: threading.Event = field(default_factory=threading.Event)
    whole: int = 0
    faults: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Streams come until the body ends."""
        threads = [threading.Thread(target=self._run, args=(number,)) for number in range(STREAMS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            for thread in threads:
                thread.join()

    def wait_whole(self, more: int) -> None:
        """Wait for so many further answers, or a fault."""
        before = self.whole
        while self.whole < before + more and not self.faults:
            time.sleep(0.05)

    def _run(self, number: int) -> None:
        """One thread's streams. A gateway that ends refuses connections or answers nothing; nothing else may fail."""
        while not self.over.is_set() and len(self.faults) < 5:
            try:
                text = stream(self.url, PROMPTS[number])
            except (httpx2.ConnectError, Unanswered):
                time.sleep(0.05)
                continue
            except (httpx2.HTTPError, AssertionError) as error:
                self.faults.append(f"{type(error).__name__}: {error}")
                continue
            self.whole += 1
            if text != self.wanted[number]:
                self.faults.append(f"{text!r} in place of {self.wanted[number]!r}")


def stream(url: str, prompt: str) -> str:
    """A greedy answer's text; an answer that is not whole is an error."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    text: str = ""
    usage: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        try:
            response = stack.enter_context(httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=120.0))
        except (httpx2.RemoteProtocolError, httpx2.ReadError) as error:
            raise Unanswered from error
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line.removeprefix("data: "))
                assert "error" not in piece, piece
                text += "".join([choice["text"] for choice in piece["choices"]])
                usage = piece.get("usage") or usage
    assert usage.get("completion_tokens") == TOKENS, usage
    return text
