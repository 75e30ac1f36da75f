"""A cluster of the release before is upgraded under load, one service after the other: no token is lost or doubled.

The release before is the newest tag; without a tag it is the commit of a day before the newest one. Its services say
that they are one minor version behind, as far as they tell a version. Kinds are upgraded in the order that
docs/deploy.md names and in the opposite one, so that of any two kinds each is once the newer one. Afterwards the
kvstore, which has read the folder of the release before, still has what was asked before the first upgrade.
"""

import contextlib
import datetime
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
import pytest

from moonpool.base.bundled import model_dir
from moonpool.client import Client

ROOT = Path(__file__).parents[2]
ORDER = ("decode", "prefill", "kvstore", "conductor", "gateway")
VERSIONS = {"old": "0.1.0", "new": "0.2.0"}
EMULATED = ("--engine", "emulated:llama-70b-a800", "--set", "time_scale=4")
"""An emulated token is a hash of all before: a text is the same only where no token is lost, doubled or swapped."""
UNKNOWN_BEFORE = ("MOONPOOL_JOURNAL_DIR",)
"""Variables of the tests; journals of an earlier release are not read."""
TOKENS, STREAMS = 96, 4
START_S, DRAIN_S = 300.0, 30.0
EARLY = "what was asked before the first upgrade " * 16
PROMPTS = [f"{number} ships lie still, and every rope hangs down " * (2 + 3 * number) for number in range(STREAMS)]


def git(*arguments: str) -> str:
    """What git says."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def release_before() -> str:
    """The newest tag before this commit, or a commit of a day before."""
    tag = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0", "HEAD^"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    if tag.returncode == 0:
        return tag.stdout.strip()
    newest = datetime.datetime.fromisoformat(git("log", "-1", "--format=%cI"))
    return git("rev-list", "-1", f"--before={(newest - datetime.timedelta(days=1)).isoformat()}", "HEAD")


def checkout(folder: Path) -> None:
    """The code of the release before."""
    try:
        commit = release_before()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the history of this checkout is not there")
    if not commit:
        pytest.skip("the history of this checkout is too short")
    folder.mkdir()
    with subprocess.Popen(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=True)


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
    """Two of each kind that holds answers under way, one kvstore, one gateway."""

    members: list[Member]
    conductors: list[str]
    url: str

    @classmethod
    def planned(cls, folder: Path) -> "Cluster":
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
                    for kind in ("prefill", "decode") for number in range(2)]  # fmt: skip
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

    def run(self, number: int) -> None:
        """One thread's streams. A gateway that restarts refuses connections; nothing else may fail."""
        while not self.over.is_set() and len(self.faults) < 5:
            try:
                text = stream(self.url, PROMPTS[number])
            except httpx2.ConnectError:
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
    text, usage = "", {}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=120.0) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line.removeprefix("data: "))
                assert "error" not in piece, piece
                text += "".join([choice["text"] for choice in piece["choices"]])
                usage = piece.get("usage") or usage
    assert usage.get("completion_tokens") == TOKENS, usage
    return text


def cached_tokens(url: str) -> int:
    """How much of the early prompt need not be computed."""
    body = {"model": "tiny", "prompt": EARLY, "max_tokens": 1, "temperature": 0}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=120.0)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def paths(folder: Path) -> dict[str, str]:
    """`PYTHONPATH` of both releases, each with the version that it tells."""
    found = {}
    for name, code in (("old", folder / "old"), ("new", ROOT)):
        info = folder / f"version-{name}" / f"moonpool-{VERSIONS[name]}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: moonpool\nVersion: {VERSIONS[name]}\n")
        found[name] = f"{info.parent}{os.pathsep}{code}"
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", [ORDER, ORDER[::-1]], ids=["engines first", "gateway first"])
def test_services_are_upgraded_one_by_one_under_load(tmp_path: Path, order: Sequence[str]) -> None:
    checkout(tmp_path / "old")
    path = paths(tmp_path)
    cluster = Cluster.planned(tmp_path)
    with cluster.running(path["old"]):
        cached_tokens(cluster.url)
        load = Load(cluster.url, [stream(cluster.url, prompt) for prompt in PROMPTS])
        threads = [threading.Thread(target=load.run, args=(number,)) for number in range(STREAMS)]
        for thread in threads:
            thread.start()
        try:
            for kind in order:
                for member in [member for member in cluster.members if member.kind == kind]:
                    before = load.whole
                    member.stop()
                    member.start(path["new"])
                    cluster.wait_complete()
                    while load.whole < before + STREAMS and not load.faults:
                        time.sleep(0.05)
                    assert not load.faults, f"{member.name}: {load.faults}"
        finally:
            load.over.set()
            for thread in threads:
                thread.join()
        assert load.faults == []
        assert cached_tokens(cluster.url) > 0, "nothing of what the release before had stored was found"
        with Client(cluster.conductors) as client:
            versions = {instance.id: instance.version for instance in client.cluster_state().instances}
    assert set(versions.values()) == {VERSIONS["new"]}, versions
