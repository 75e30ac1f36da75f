"""One address per service on one machine: network namespaces on a bridge that is in a namespace of its own.

Nothing is left in the machine's own namespace: all goes when the namespaces go, and those of a run that was killed go
at the next one. Names are resolved through a hosts file that only the processes in the namespaces see.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

NAME = "moonpool-test"
SUBNET = "10.231.77"
# `ip netns exec` gives the process its own mounts: what is mounted there is seen by it and its children alone.
_SEE = 'mount --bind "$1/hosts" /etc/hosts && mount --bind "$1/resolv.conf" /etc/resolv.conf && shift && exec "$@"'


def missing() -> str:
    """Why there can be no namespaces here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the ip command (iproute2)"
    probe = f"{NAME}-{os.getpid()}-probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"no network namespaces here: {done.stderr.strip()}"
    try:
        bridge = subprocess.run(
            ["ip", "-n", probe, "link", "add", "bridge0", "type", "bridge"], capture_output=True, text=True, check=False
        )
        return "" if bridge.returncode == 0 else f"no bridge between network namespaces here: {bridge.stderr.strip()}"
    finally:
        _delete(probe)


class Network:
    """Hosts by name, each in a namespace with an address of its own."""

    def __init__(self, folder: Path, hosts: Sequence[str]) -> None:
        self._folder = folder
        self._hosts = {host: f"{SUBNET}.{number}" for number, host in enumerate(hosts, start=1)}

    def __enter__(self) -> "Network":
        _sweep()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in ("switch", *self._hosts):
            _delete(_namespace(host))

    def _build(self) -> None:
        known = [f"{address} {host}\n" for host, address in self._hosts.items()]
        (self._folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(known))
        (self._folder / "resolv.conf").write_text("")
        switch = _namespace("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for number, (host, address) in enumerate(self._hosts.items()):
            own, port = _namespace(host), f"port{number}"
            _ip("netns", "add", own)
            _ip("link", "add", "eth0", "netns", own, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", own, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", own, "link", "set", "eth0", "up")
            _ip("-n", own, "link", "set", "lo", "up")

    def address(self, host: str) -> str:
        """A host's address."""
        return self._hosts[host]

    def at(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` at a host; it replaces itself, so that its process is the command's."""
        return ["ip", "netns", "exec", _namespace(host), "sh", "-c", _SEE, "sh", str(self._folder), *command]

    def run(
        self, host: str, command: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command at a host to its end."""
        return subprocess.run(
            self.at(host, command), capture_output=True, text=True, env=environment, timeout=timeout_s, check=False
        )

    @contextlib.contextmanager
    def process(
        self, host: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A process at a host; killed at the latest when the body ends."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.at(host, command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def namespaces() -> list[str]:
    """Names of the namespaces that are ours, of this run and of others."""
    lines = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[0] for line in lines if line.startswith(f"{NAME}-")]


def _namespace(host: str) -> str:
    return f"{NAME}-{os.getpid()}-{host}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _delete(name: str) -> None:
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _sweep() -> None:
    """Removes the namespaces of runs that are no more."""
    for name in namespaces():
        owner = name.removeprefix(f"{NAME}-").partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            _delete(name)
