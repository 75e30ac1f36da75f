"""The compose files' own commands, variables and health checks, each service at an address of its own.

What containers would show of addresses and names, without containers: a service that listens at the loopback address
only, or advertises what others cannot reach, fails here as it would there. Compute is emulated: it has no address.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.integration.namespaces import Network, missing, namespaces
from tests.unit.deploy.compose import Service, compose_files, replaced, services

COMPOSE = compose_files()
SMALL = {
    "MOONPOOL_ENGINE": "emulated:llama-70b-a800",
    "MOONPOOL_TIME_SCALE": "20",
    "MOONPOOL_BLOCK_SIZE": "16",
    "MOONPOOL_DRAM_BYTES": str(16 << 20),
    "MOONPOOL_SSD_BYTES": str(64 << 20),
}
BARE = {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}", "HOME": "/", "TERM": "dumb"}
PROMPT = "the tide of a moon pool rises and falls with the sea below the ship " * 3


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    """Skips, saying why, where there are no network namespaces."""
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """A host for each service of the file, and one for a client; nothing is left of them."""
    with Network(tmp_path, [*services(COMPOSE), "client"]) as running:
        yield running
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name]


class Stack:
    """The services of a compose file as processes, started and judged as an engine does it."""

    def __init__(self, network: Network, files: Mapping[str, str], checkpoint: Path, folder: Path) -> None:
        self.network = network
        self.services = services(files, SMALL | {"MOONPOOL_MODEL": str(checkpoint)})
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = folder
        self._healthy: set[str] = set()

    @contextlib.contextmanager
    def started(self, *names: str) -> Iterator[None]:
        """Starts services in the order of their dependencies; waits for health where the file says so."""
        with contextlib.ExitStack() as stack:
            for name in names:
                for needed, how in self.services[name].rest.get("depends_on", {}).items():
                    if how["condition"] == "service_healthy":
                        self.wait_healthy(needed)
                stack.enter_context(self._process(self.services[name]))
            yield

    @contextlib.contextmanager
    def _process(self, service: Service) -> Iterator[None]:
        ours = {
            "MOONPOOL_DIE_WITH_PARENT": str(os.getpid()),
            "MOONPOOL_JOURNAL_DIR": os.environ["MOONPOOL_JOURNAL_DIR"],
        }
        environment = BARE | service.environment | ours
        command = ["moonpool", *(self._here(service, word) for word in service.command)]
        with self.network.process(service.name, command, environment, self.log(service.name)) as process:
            self.running[service.name] = process
            yield

    def _here(self, service: Service, word: str) -> str:
        """A word of a command with this machine's folders in the volumes' places."""
        for _, inside, _ in service.volumes:
            word = word.replace(inside, str(self._folder / inside.strip("/").replace("/", "-")))
        return word

    def log(self, name: str) -> Path:
        """What a service prints."""
        return self._folder / f"{name}.log"

    def health(self, name: str) -> subprocess.CompletedProcess[str]:
        """The file's own health check of a service, once."""
        return self.network.run(name, self.services[name].health, BARE, timeout_s=30)

    def wait_healthy(self, name: str) -> None:
        """Waits until the health check has succeeded once; the first one comes when the service says it is ready."""
        if name not in self._healthy:
            self.wait_ready(name)
            self._wait(name, lambda: self.health(name).returncode == 0, "healthy")
            self._healthy.add(name)

    def wait_ready(self, name: str) -> None:
        """Waits until the service itself says that it is ready."""
        said = re.compile(rb'ready: |"event": "ready"')
        self._wait(name, lambda: bool(said.search(self.log(name).read_bytes())), "ready")

    def _wait(self, name: str, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 90
        pause = threading.Event()
        while not reached():
            log = self.log(name).read_text(errors="replace")
            assert self.running[name].poll() is None, f"{name} ended\n{log}"
            assert time.monotonic() < deadline, f"{name} is not {what}\n{log}"
            pause.wait(0.1)

    def moonpool(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of a client, at a host where nothing else runs."""
        return self.network.run("client", ["moonpool", *arguments], BARE, timeout_s=90)

    def stop(self) -> dict[str, int]:
        """Ends all as `compose down` does, with the file's grace period; the exit codes."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        return {
            name: process.wait(self.services[name].seconds("stop_grace_period"))
            for name, process in self.running.items()
        }


@pytest.mark.timeout(400)
def test_compose_stack_serves(network: Network, checkpoint: Path, tmp_path: Path) -> None:
    """All get healthy and join; a client elsewhere is served, the second time from cached KV; all end well."""
    stack = Stack(network, COMPOSE, checkpoint, tmp_path)
    names = sorted(stack.services, key=lambda name: "depends_on" in stack.services[name].rest)
    with stack.started(*names):
        for name in names:
            stack.wait_healthy(name)
        joined = stack.moonpool("health", "--address", "conductor:50051", "--joined", "3", "--wait-s", "60")
        assert joined.returncode == 0, joined.stderr
        request = ("generate", "--address", "conductor:50051", PROMPT, "--max-tokens", "8", "--json")
        first, second = (_result(stack.moonpool(*request)) for _ in range(2))
        assert second["token_ids"] == first["token_ids"]
        assert second["usage"]["cached_tokens"] >= 16
        gateway = stack.moonpool("health", "--address", "http://gateway:8000")
        assert gateway.returncode == 0, gateway.stderr
        check = stack.moonpool("check", "--address", "conductor:50051", "--wait-s", "60")
        assert check.returncode == 0, check.stdout + check.stderr
        assert stack.stop() == dict.fromkeys(names, 0)


@pytest.mark.parametrize(
    ("victim", "old", "new"),
    [
        ("conductor", '"--listen=0.0.0.0:50051"', '"--listen=127.0.0.1:50051"'),
        pytest.param(
            *(
                "conductor",
                '"--listen=0.0.0.0:50051", "--advertise=${MOONPOOL_STACK_HOST:-conductor}"',
                '"--listen=localhost:50051"',
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(*("kvstore", '"--listen=0.0.0.0:50052"', '"--listen=127.0.0.1:50052"'), marks=pytest.mark.slow),
    ],
)
def test_loopback_address_fails(
    network: Network, checkpoint: Path, tmp_path: Path, victim: str, old: str, new: str
) -> None:
    """A service that only its own host reaches runs, but is never healthy, and no other host reaches it."""
    stack = Stack(network, replaced(COMPOSE, old, new), checkpoint, tmp_path)
    with stack.started(*dict.fromkeys(("conductor", victim))):
        stack.wait_ready(victim)
        answer = stack.health(victim)
        assert answer.returncode == 1
        assert "does not answer" in answer.stderr
        address = stack.services[victim].health[-1].removeprefix("--address=")
        assert stack.moonpool("health", "--address", address).returncode == 1


def _result(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, int]]:
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, int]] = json.loads(done.stdout)
    return result
