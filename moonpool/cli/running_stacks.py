"""Records of stacks run by `moonpool serve` on this machine: one file per data folder.

A record names a process by number and start time, because the kernel reuses numbers. The records lie in a folder that
only this user can write, so no other user can make `moonpool stop` end a process.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import select
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from moonpool.base.checkpoint import model_name
from moonpool.base.errors import ConfigError, InvalidRequest
from moonpool.base.json_parts import parse_json
from moonpool.cli.tables import RecordTable, age_text, stdout_console
from moonpool.cli.whole_words import say
from moonpool.engine.cpu_sharing import process_epoch

LOCAL_CONDUCTOR = "127.0.0.1:50051"
"""Where a conductor is asked for if this user runs no stack: a stack of containers has its conductor there."""
STOP_TIMEOUT_S = 60.0
ENDING_S, POLL_S = 2.0, 0.05
"""How long the processes of a stack that was killed may hold a data folder, and how often it is tried."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A `moonpool serve` that runs.

    Attributes:
        pid: the process id.
        epoch: `process_epoch` of that process.
        boot_id: the machine's boot id, new at each boot.
        data_dir: data folder, an absolute path without links.
        model: the model, as the services are told.
        address: the conductors' addresses, separated by commas; "" until the stack is ready.
        http_address: the gateway's, likewise.
        engines: "one" = one engine in both roles, "split" = prefill and decode instances, "" until they are started.
        name: the stack's name, unique among this user's stacks that run.
        ports: ports of the stack that starts, before its services listen.
        started: when the stack was started, seconds since 1970.
    """

    pid: int
    epoch: int
    boot_id: str
    data_dir: str
    model: str
    address: str = ""
    http_address: str = ""
    engines: str = ""
    name: str = ""
    ports: Sequence[int] = ()
    started: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether the process that wrote the record still runs."""
        return self.boot_id == _boot_id() and self.epoch == process_epoch(self.pid) != 0

    def __str__(self) -> str:
        where = f"http://{self.http_address}" if self.http_address else self.address or "starting"
        return f"{self.name or self.data_dir} ({where}, {self.model})"


def state_folder() -> Path:
    """The folder of this user's records, made if need be.

    Raises:
        ConfigError: another user owns the folder or can write there, or the folder cannot be made.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"moonpool-stacks-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # a link may lead into another user's folder
    except OSError as error:
        raise ConfigError("XDG_RUNTIME_DIR", f"{folder} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            "XDG_RUNTIME_DIR", f"{folder} must be a folder of this user with mode 0700; name another base folder"
        )
    return folder


@contextlib.contextmanager
def recorded_stack(
    data_dir: Path,
    model: str,
    name: str = "",
    choose_ports: Callable[[Collection[int]], tuple[int, ...]] = lambda taken: (),
) -> Iterator["StackRecord"]:
    """Record a stack of this process while the body runs.

    Args:
        data_dir: the stack's data folder.
        model: the model, as the services are told.
        name: the wanted name; another stack of the name makes it NAME-2.
        choose_ports: returns the stack's ports, given those of stacks that run.

    Raises:
        ConfigError: naming `data_dir`: another stack that runs uses the folder, or the folder cannot be made.
    """
    folder = state_folder()
    with _locked(folder):  # two stacks that start at once choose different ports and names
        others = _running(folder)
        for other in others:
            if other.data_dir == str(data_dir.resolve()):
                raise ConfigError("data_dir", f"another stack uses it: {other}")
        taken = {other.name for other in others}
        wanted = name or Path(model).name
        free = next(each for number in itertools.count(1) if (each := _numbered(wanted, number)) not in taken)
        ports = choose_ports([port for other in others for port in other.ports])
        record = StackRecord(folder, data_dir, model, free, ports)
        record.write("", "")
    try:
        with _sole_use(data_dir):
            yield record
    finally:
        record.path.unlink(missing_ok=True)


@contextlib.contextmanager
def _sole_use(data_dir: Path) -> Iterator[None]:
    """Hold a data folder, also against stacks of other users and of containers that have the folder."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError("data_dir", f"{data_dir} cannot be used: {error.strerror}") from None
    try:
        until = time.monotonic() + ENDING_S
        while not _try_lock(descriptor):
            if time.monotonic() > until:
                raise ConfigError("data_dir", f"another stack uses {data_dir}, of another user or another container")
            time.sleep(POLL_S)  # a stack that was killed ends
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Whether the lock is held; true as well where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel frees when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class StackRecord:
    """The file about one stack of this process; `name` is the stack's, `ports` are those that were chosen."""

    def __init__(self, folder: Path, data_dir: Path, model: str, name: str, ports: tuple[int, ...]) -> None:
        self.name = name
        self.ports = ports
        self._model = model
        self._data_dir = str(data_dir.resolve())
        self._started = time.time()
        self.path = folder / f"{hashlib.blake2s(self._data_dir.encode(), digest_size=8).hexdigest()}.json"

    def write(self, address: str, http_address: str, engines: str = "") -> None:
        """Write the record with what `RunningStack` says of a stack that is ready; "" while the stack starts."""
        pid = os.getpid()
        record = RunningStack(
            pid, process_epoch(pid), _boot_id(), self._data_dir, self._model, address, http_address, engines,
            self.name, self.ports, self._started,
        )  # fmt: skip
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps(dataclasses.asdict(record)))
        written.replace(self.path)


def running_stacks() -> list[RunningStack]:
    """The stacks of this user that run, by data folder."""
    return _running(state_folder())


def found_address(name: str = "") -> str:
    """Conductors of a stack of this user: the one that runs, or the one of that name; `LOCAL_CONDUCTOR` if none runs.

    Raises:
        InvalidRequest: naming `address`: several stacks run, or none has the name.
    """
    ready = [stack for stack in running_stacks() if stack.address]
    wanted = [stack for stack in ready if name in ("", stack.name)]
    if len(wanted) == 1:
        return wanted[0].address
    names = ", ".join(stack.name for stack in ready)
    if name:
        known = f"the stacks that run are {names}" if ready else "no stack is running"
        raise InvalidRequest("address", f"must be HOST:PORT or the name of a stack, is {name!r}; {known}")
    if wanted:
        raise InvalidRequest("address", f"several stacks run; name one with --address: {names}")
    return LOCAL_CONDUCTOR


def run_ps(*, as_json: bool) -> None:
    """Print the stacks that run."""
    running = running_stacks()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(stack) for stack in running]))
        return
    if not running:
        say("no stack is running: `moonpool serve MODEL` starts one", err=True)
        return
    table = RecordTable("name", "model", "address", "engines", "up", "process", right=("process",))
    for stack in running:
        address = f"http://{stack.http_address}" if stack.http_address else stack.address or "starting"
        engines = {"one": "one, both roles", "split": "prefill, decode"}.get(stack.engines, "")
        up = age_text(time.time() - stack.started)
        table.add_row(stack.name, model_name(stack.model), address, engines, up, str(stack.pid))
    stdout_console().print(table)


def run_stop(name: str = "", data_dir: Path | None = None) -> int:
    """Stop a stack that `moonpool serve` runs, and wait until all processes have ended.

    Args:
        name: the stack's name, or its process number; "" = the only stack of this user.
        data_dir: the stack's data folder; None = as `name` says.

    Returns:
        0 if the stack has ended or none ran; 1 if the stack did not end, or no stack is named so.
    """
    running = _running(state_folder())
    if not running:
        say("no stack is running")
        return 0
    wanted = [
        stack
        for stack in running
        if name in ("", stack.name, str(stack.pid)) and data_dir in (None, Path(stack.data_dir))
    ]
    if len(wanted) != 1:
        what = "several stacks are" if len(running) > 1 else "another stack is"
        say(f"{what} running; choose one by name:", err=True)
        for stack in running:
            say(f"  {stack}", err=True)
        return 1
    return _stop(wanted[0])


def _stop(stack: RunningStack) -> int:
    try:
        descriptor = os.pidfd_open(stack.pid)
    except ProcessLookupError:  # the process has just ended
        say(f"stopped {stack.name}")
        return 0
    try:
        # The descriptor keeps naming the same process. Only now can the check not be overtaken by a new process.
        if stack.alive:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            if not poller.poll(1e3 * STOP_TIMEOUT_S):
                say(f"process {stack.pid} still runs after {STOP_TIMEOUT_S:g} s", err=True)
                return 1
    finally:
        os.close(descriptor)
    say(f"stopped {stack.name}")
    return 0


def _running(folder: Path) -> list[RunningStack]:
    """The stacks that run, by data folder; removes the records of others and says so."""
    found = []
    for path in folder.glob("*.json"):
        try:
            stack = RunningStack(**parse_json(path.read_text()))
        except FileNotFoundError:  # the stack has just ended
            continue
        except (OSError, ValueError, TypeError):
            stack = None
        if stack is not None and stack.alive:
            found.append(stack)
            continue
        path.unlink(missing_ok=True)
        what = f"of a stack that ended without removing it: {stack}" if stack else f"that cannot be read: {path}"
        say(f"removed a record {what}", err=True)
    return sorted(found, key=lambda stack: stack.data_dir)


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
