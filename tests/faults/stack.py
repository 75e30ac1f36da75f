"""A local stack behind fault proxies, and the ways to hurt one of its services.

Every service listens at a fixed port of a loopback address of its own stack and tells others the address of a proxy in
front of it, so that its connections can be reset or held up, and a restarted conductor is found again.
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from moonpool.cli.stack import LocalStack, ServiceProcess, StackPlan
from tests.faults.proxy import FaultProxies
from tests.faults.schedule import Fault

FIRST_PORT = 20_000
JOIN_TIMEOUT_S = 120.0
SHOWN_LINES = 60
TROUBLE = (
    "Traceback (most recent call last)",
    "never retrieved",
    "was never awaited",
    "was destroyed but it is pending",
    "Exception ignored",
    "Unhandled",
    "[critical",
)
"""What no fault may bring into a service's log."""
_stacks = itertools.count(1)


class StormStack(LocalStack):
    """A stack whose services can be hit; a context manager. `proxies` must be entered before and left after it."""

    def __init__(self, plan: StackPlan, proxies: FaultProxies) -> None:
        super().__init__(plan)
        self._proxies = proxies
        number = next(_stacks)
        # An address of the 127/8 net that no other test process uses: fixed ports cannot be taken by anybody.
        self._host = f"127.{64 + os.getpid() // 250 % 128}.{os.getpid() % 250 + 1}.{number % 250 + 1}"
        self._ports: dict[str, int] = {}
        self._changing = threading.Lock()
        self.pids: set[int] = set()
        """Every process that was ever seen."""

    def _spawn(self, kind: str, service_id: str, arguments: Sequence[str]) -> ServiceProcess:
        if service_id not in self._ports:
            port = self._ports[service_id] = FIRST_PORT + len(self._ports)
            seen_at = self._proxies.open(service_id, self._host, port)
            arguments = [*arguments, "--listen", f"{self._host}:{port}", "--advertise", seen_at]
        return super()._spawn(kind, service_id, arguments)

    def revive(self, service_id: str, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Starts a service that has ended, and waits until it says that it is ready."""
        with self._changing:
            old = self.services[service_id]
            old.wait(timeout_s)
            new = self._spawn(old.kind, service_id, old.arguments)
        new.wait_ready(timeout_s)
        self.look_around()

    def look_around(self) -> None:
        """Notes which processes there are."""
        for service in list(self.services.values()):
            self.pids |= {service.pid, *descendants(service.pid)}

    def hit(self, fault: Fault, healed: threading.Event) -> None:
        """Does what the fault says, and undoes it after its time or when `healed` is set; returns then."""
        service = self.services[fault.target]
        self.look_around()
        match fault.kind:
            case "kill":
                service.signal(signal.SIGKILL)
                healed.wait(fault.lasts_s)
                self.revive(fault.target)
            case "terminate":
                service.signal(signal.SIGTERM)
                self.revive(fault.target)
            case "kill-engine":
                # An emulated engine has no process of its own: it dies with its service.
                os.kill((children(service.pid) or [service.pid])[0], signal.SIGKILL)
                self.revive(fault.target)
            case "stop":
                service.signal(signal.SIGSTOP)
                healed.wait(fault.lasts_s)
                service.signal(signal.SIGCONT)
            case "stop-engine":
                pids = children(service.pid)
                _signal_all(pids, signal.SIGSTOP)
                healed.wait(fault.lasts_s)
                _signal_all(pids, signal.SIGCONT)
            case "reset":
                self._proxies.reset(fault.target)
            case "partition":
                self._proxies.partition(fault.target, parted=True)
                healed.wait(fault.lasts_s)
                self._proxies.partition(fault.target, parted=False)

    def dead(self) -> list[str]:
        """Services that have ended and were not started anew."""
        return [name for name, service in self.services.items() if service.returncode is not None]

    def trouble(self) -> list[str]:
        """Lines of the services' logs that tell of a defect, each with some lines around it."""
        found = []
        for path in sorted((self.plan.data_dir / "logs").glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            told = 0
            for number, line in enumerate(lines):
                if number >= told and any(word in line for word in TROUBLE):
                    told = number + SHOWN_LINES
                    shown = lines[max(0, number - 3) : told]
                    found.append("\n".join(f"{path.stem}:{number + 1}| {text}" for text in shown))
        return found


def children(pid: int) -> list[int]:
    """Living children of a process."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in path.read_text().split()]
        except OSError:
            continue
    return sorted(found)


def descendants(pid: int) -> list[int]:
    """All living processes below a process."""
    own = children(pid)
    return own + [far for near in own for far in descendants(near)]


def wait_gone(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Waits until processes are gone; returns those that are not."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while (left := [pid for pid in pids if _alive(pid)]) and time.monotonic() < deadline:
        pause.wait(0.05)
    return left


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
