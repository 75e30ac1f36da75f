"""A local stack behind fault proxies, and the faults that can be injected into its services.

Every service listens at a fixed port of a loopback address of its own stack and advertises the address of a proxy in
front of it, so that its connections can be reset or held back, and a restarted conductor is found again.
"""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from moonpool.cli.stack import ServiceProcess, StackPlan
from tests.faults.proxy import FaultProxies
from tests.faults.schedule import CUTS, Fault
from tests.journals import JournaledStack

FIRST_PORT = 20_000
JOIN_TIMEOUT_S = 120.0
SHOWN_LINES = 60
STOP_TIMEOUT_S = 1.0
"""A process that was sent SIGSTOP stops within this time."""
LOOK_S = 1.0
"""An engine that was stopped too long is killed within this time after it goes on."""
TROUBLE = (
    "Traceback (most recent call last)",
    "never retrieved",
    "was never awaited",
    "was destroyed but it is pending",
    "Exception ignored",
    "Unhandled",
    "[critical",
)
"""What must not stand in a service's log, whatever the fault."""
_stacks = itertools.count(1)


class StormStack(JournaledStack):
    """A stack with its services behind proxies, which can be hit; a context manager.

    Args:
        plan: of the stack.
        proxies: get one for each service, by its id; must be entered before the stack and left after it.
    """

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
        self.restarted = 0
        """Services that were started anew after their end."""

    def spawn(self, kind: str, service_id: str, arguments: Sequence[str]) -> ServiceProcess:
        if service_id not in self._ports:
            port = self._ports[service_id] = FIRST_PORT + len(self._ports)
            seen_at = self._proxies.open(service_id, self._host, port)
            arguments = [*arguments, "--listen", f"{self._host}:{port}", "--advertise", seen_at]
        return super().spawn(kind, service_id, arguments)

    def revive(self, service_id: str, timeout_s: float = JOIN_TIMEOUT_S) -> int:
        """Starts a service that has ended, waits until it is ready, and returns the old one's exit status."""
        with self._changing:
            old = self.services[service_id]
            status = old.wait(timeout_s)
            new = self.spawn(old.kind, service_id, old.arguments)
        new.wait_ready(timeout_s)
        self.look_around()
        self.restarted += 1
        return status

    def look_around(self) -> None:
        """Notes which processes there are."""
        for service in list(self.services.values()):
            self.pids |= {service.pid, *descendants(service.pid)}

    def hit(self, fault: Fault, healed: threading.Event) -> bool:
        """Injects the fault and undoes it after its time or when `healed` is set.

        Returns:
            Whether its effect was seen: a process killed, ended or stopped, connections reset, bytes held back.
        """
        service = self.services[fault.target]
        self.look_around()
        match fault.kind:
            case "kill":
                service.signal(signal.SIGKILL)
                healed.wait(fault.lasts_s)
                return self.revive(fault.target) == -signal.SIGKILL
            case "terminate":
                service.signal(signal.SIGTERM)
                return self.revive(fault.target) != -signal.SIGKILL
            case "kill-engine":
                engines = children(service.pid)
                engine = engines[int(1000 * fault.at_s) % len(engines)]  # one of several ranks and stages
                os.kill(engine, signal.SIGKILL)
                self.revive(fault.target)
                return not _alive(engine)
            case "stop":
                return _stopped([service.pid], fault, healed)
            case "stop-engine":
                engines = children(service.pid)
                seen = _stopped(engines, fault, healed)
                if len(wait_gone(engines, LOOK_S)) < len(engines):  # stopped for so long that the instance ends
                    self.revive(fault.target)
                return seen
            case "reset":
                return self._proxies.reset(fault.target) > 0
            case "partition" | "deaf" | "mute":
                self._proxies.part(fault.target, ways=CUTS[fault.kind])
                healed.wait(fault.lasts_s)
                return self._proxies.join(fault.target) > 0

    def dead(self) -> list[str]:
        """Services that have ended and were not started anew."""
        return [name for name, service in self.services.items() if service.returncode is not None]

    def count_in_logs(self, event: str) -> int:
        """Lines with an event, over the logs of all services that ever ran."""
        texts = (path.read_text(errors="replace") for path in self._logs())
        return sum(event in line for text in texts for line in text.splitlines())

    def _logs(self) -> list[Path]:
        return sorted((self.plan.data_dir / "logs").glob("*.log"))

    def trouble(self) -> list[str]:
        """Lines of the services' logs that tell of a defect, each with some lines around it."""
        found = []
        for path in self._logs():
            lines = path.read_text(errors="replace").splitlines()
            told = 0
            for number, line in enumerate(lines):
                if number >= told and any(word in line for word in TROUBLE):
                    told = number + SHOWN_LINES
                    shown = lines[max(0, number - 3) : told]
                    found.append("\n".join(f"{path.stem}:{number + 1}| {text}" for text in shown))
        return found


def children(pid: int) -> list[int]:
    """Living children of a process, the oldest first: a new process may have a smaller number."""
    found = list[tuple[int, int]]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                with contextlib.suppress(OSError):
                    found.append((_started(int(child)), int(child)))
    return [child for _, child in sorted(found, key=itemgetter(0))]  # Linux lists those of one moment in their order


def _started(pid: int) -> int:
    """When a process started, in ticks since the machine did."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


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


def _state(pid: int) -> str:
    """The state letter of /proc/PID/stat; "Z" for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def _alive(pid: int) -> bool:
    return _state(pid) != "Z"


def _stopped(pids: Sequence[int], fault: Fault, healed: threading.Event) -> bool:
    """Stops processes for the fault's time; returns whether one of them was seen stopped."""
    _signal_all(pids, signal.SIGSTOP)
    deadline, pause = time.monotonic() + STOP_TIMEOUT_S, threading.Event()
    while not (seen := any(_state(pid) == "T" for pid in pids)) and time.monotonic() < deadline:
        pause.wait(0.001)
    healed.wait(fault.lasts_s)
    _signal_all(pids, signal.SIGCONT)
    return seen


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
