"""Python programs, started by forking a process that has imported what they need.

To import torch and gRPC costs seconds of processor in each process. A fork server imports them once; each fork costs
some tens of milliseconds and shares the server's memory. Whoever asks gets a child process of its own, with its true
number, which it may wait for and kill: the server forks twice, and the asker adopts what the process between left.

A fork server has one thread, no event loop, no channel and no device, so nothing is copied that a fork breaks.
The server ends when its owner does, however that ends. Where no fork is possible, programs are started by `execute`:
on other systems than Linux, if variables differ that a process reads once, or if the server is lost.
docs/adr/0064-fork-server.md says what differs between a forked process and one that was executed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, Protocol

_MODULE = "moonpool.base.fork_server"
_TITLE = "moonpool: fork server"
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_AS_A_MODULE = ("-P", "-m")
"""Options of Python. `-P`: nothing is imported from the working folder, which may hold anybody's files."""
_ROOT = str(Path(__file__).parents[3])
_FROM_ITS_FOLDER = not sys.flags.safe_path and (sys.path[0] or os.getcwd()) == _ROOT
"""Somebody works in a checkout that is not installed: this process has Moonpool from there, and tells its programs."""
_LENGTH = struct.Struct("!I")
_MAX_FILES = 64
_ORPHANED = 70
"""Exit status of a child whose asker ended before it could adopt the child."""

READ_ONCE = (
    "PYTHON",
    "LD_",
    "GLIBC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "ATEN_",
    "PYTORCH_",
    "CUDA_",
    "MOONPOOL_FAULT_",
)
"""Beginnings of variables that are read once and before the fork: by interpreter, loader, libraries or at import."""
SET_BY_CODE = ("OMP_NUM_THREADS",)
"""The exception: an engine sets torch's threads itself."""
_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that spin while they wait would take the cores from other processes."""
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_ARENA_MAX": -8}
"""Variables that glibc reads when a process begins, and the number of each for `mallopt`."""


class ChildProcess(Protocol):
    """A child of this process, forked or executed; the methods are those of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the child runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status at the child's end. Raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send a signal, if the child still runs."""
        ...

    def kill(self) -> None:
        """Send SIGKILL, if the child still runs."""
        ...


@dataclass(frozen=True)
class Program:
    """A module to run as a program, in a process group of its own, with standard input from nowhere.

    Attributes:
        module: as for `python -P -m`: found where packages are installed or by PYTHONPATH, never in the working folder.
        arguments: of the program.
        environment: all variables.
        stdout, stderr: descriptors.
        pass_fds: descriptors that keep their numbers in the program.
        starts_engine: the program will start an engine: if forked, the program gets a fork server of its own.
        folder: working folder; None = this process's.
    """

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    stdout: int
    stderr: int
    pass_fds: Sequence[int] = ()
    starts_engine: bool = False
    folder: str | None = None


Launcher = Callable[[Program], ChildProcess]
"""Starts a program."""


def execute(program: Program, python: Sequence[str] = (sys.executable,)) -> subprocess.Popen[bytes]:
    """Start a program by a command that starts Python."""
    return subprocess.Popen(  # noqa: S603 - our own program
        [*python, *_AS_A_MODULE, program.module, *program.arguments],
        stdin=subprocess.DEVNULL,
        stdout=program.stdout,
        stderr=program.stderr,
        env=_variables(program.environment),
        pass_fds=program.pass_fds,
        cwd=program.folder,
        process_group=0,  # Ctrl-C is ours alone
    )


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a program's variables: with the folder of Moonpool, if the program would not find that."""
    folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if not _FROM_ITS_FOLDER or _ROOT in folders:
        return dict(environment)
    return {**environment, "PYTHONPATH": os.pathsep.join([_ROOT, *folders])}


class _ForkedChild:
    """See `ChildProcess`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        with self._reaping:
            if self._status is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has waited
                    self._status = 0
                else:
                    self._status = os.waitstatus_to_exitcode(status) if pid else None
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        with contextlib.suppress(ProcessLookupError):  # has been waited for
            descriptor = os.pidfd_open(self.pid)
            try:
                ends = select.poll()
                ends.register(descriptor, select.POLLIN)
                ends.poll(None if timeout is None else max(0.0, timeout) * 1000)
            finally:
                os.close(descriptor)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class _Request:
    """What a fork server is asked for: a `Program`, and what a child takes over from its asker."""

    parent: int
    module: str
    arguments: list[str]
    environment: dict[str, str]
    files: list[int]
    folder: str
    umask: int
    blocked: list[int]
    cores: list[int]
    starts_engine: bool


class ForkServer:
    """The owner's end of a fork server, which is started when it is first needed.

    Args:
        modules: what the server imports before it forks; what is not installed is left out.
        parent: the fork server that this one is forked from; None = it is executed.
        python: command that starts the server's Python, and that of programs that are not forked.
        environment: variables of the server; None = this process's.
    """

    def __init__(
        self,
        modules: Sequence[str],
        parent: ForkServer | None = None,
        *,
        python: Sequence[str] = (sys.executable,),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._modules = modules
        self._parent = parent
        self._python = python
        self._asking = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: ChildProcess | None = None
        self._owner, self._folder = os.getpid(), os.getcwd()
        self._environment = {**_DEFAULTS, **_variables(os.environ if environment is None else environment)}
        self._answered = self._given_up = False
        self.single = False
        """The server is there to start one engine."""

    @classmethod
    def of(cls, sock: socket.socket, process: ChildProcess) -> ForkServer:
        """Return the owner's end of a server that runs, and that starts one engine."""
        server = cls(())
        server._socket, server._process, server.single = sock, process, True
        return server

    def prepare(self) -> None:
        """Start the server, if need be, without waiting for its imports."""
        with self._asking:
            if not self._given_up:
                self._connected()

    def start(self, program: Program) -> ChildProcess:
        """Start a program: a fork where that is the same, else `execute`."""
        if (
            self._given_up
            or os.getpid() != self._owner
            or _read_once(_variables(program.environment)) != _read_once(self._environment)
        ):
            return execute(program, self._python)
        try:
            return self._fork(program)
        except (OSError, EOFError):  # the server has ended, or the system has no room for a process
            self._given_up = not self._answered  # it could not begin; one that began and was killed is started again
            self.close()
            return execute(program, self._python)
        except BaseException:  # its answer would be taken for the next one's
            self.close()
            raise

    def close(self) -> None:
        """End the server; programs that it has forked run on."""
        with self._asking:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None

    def _connected(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs, open(os.devnull, "wb") as null:
            program = Program(
                _MODULE,
                [str(theirs.fileno())],
                self._environment,
                stdout=null.fileno(),
                stderr=2,
                pass_fds=(theirs.fileno(),),
                folder=self._folder,
            )
            parent = self._parent
            self._process = execute(program, self._python) if parent is None else parent.start(program)
        _send(ours, json.dumps(list(self._modules)).encode())
        return ours

    def _fork(self, program: Program) -> ChildProcess:
        with self._asking, open(os.devnull, "rb") as null:
            sock = self._connected()
            request = _request(program)
            with _adopting():
                socket.send_fds(sock, [b"f"], [null.fileno(), program.stdout, program.stderr, *program.pass_fds])
                _send(sock, json.dumps(asdict(request)).encode())
                answer = _receive(sock)
        if answer is None:
            raise EOFError("the fork server has ended")
        if not (pid := int(answer)):
            raise OSError("no room for a process")
        self._answered = True
        return _ForkedChild(pid)


def _request(program: Program) -> _Request:
    status = Path("/proc/self/status").read_text()
    return _Request(
        os.getpid(),
        program.module,
        list(program.arguments),
        _variables(program.environment),
        [0, 1, 2, *program.pass_fds],
        program.folder or os.getcwd(),
        int(status.partition("Umask:")[2].split()[0], 8),
        [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        sorted(os.sched_getaffinity(0)),
        program.starts_engine,
    )


def _read_once(environment: Mapping[str, str]) -> dict[str, str]:
    return _DEFAULTS | {
        name: value for name, value in environment.items() if name.startswith(READ_ONCE) and name not in SET_BY_CODE
    }


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Adopt what the server forks within, when the process between ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int()
    if prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) or prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot adopt others")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


@dataclass
class ForkServers:
    """The fork servers that this process uses; None = programs are executed.

    Attributes:
        services: has no torch.
        engines: has torch; for engines, and for services that start an engine.
    """

    services: ForkServer | None = None
    engines: ForkServer | None = None

    def close(self) -> None:
        """End the servers."""
        for server in (self.engines, self.services):
            if server is not None:
                server.close()
        self.services = self.engines = None


IN_USE = ForkServers()
"""Of this process."""


def start_service(program: Program) -> ChildProcess:
    """Start a service by the fork server for it, if this process uses one."""
    server = IN_USE.engines if program.starts_engine else IN_USE.services
    return execute(program) if server is None else server.start(program)


def start_worker(program: Program) -> ChildProcess:
    """Start an engine's worker by the fork server for it, if this process uses one."""
    return execute(program) if IN_USE.engines is None else IN_USE.engines.start(program)


def engine_started() -> None:
    """End a fork server that was for one engine."""
    if IN_USE.engines is not None and IN_USE.engines.single:
        IN_USE.engines.close()
        IN_USE.engines = None


_preloaded_bytes = 0


def preloaded_bytes() -> int:
    """Return the resident memory of the fork server after its imports; 0 if this process was executed.

    A forked process counts pages of libraries only once it touches them.
    """
    return _preloaded_bytes


# --- the server's process --------------------------------------------------------------------------------------------


@dataclass
class _Ending:
    """How the process ends: without taking Python apart, which costs half a second where torch is loaded."""

    status: int = 0

    def leave(self) -> None:
        """End the process; called after all other exit handlers."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.status)


def main(arguments: Sequence[str]) -> NoReturn:
    """Serve the socket whose number is the argument, and in each child run what was asked for."""
    ending = _Ending()
    atexit.register(ending.leave)
    sock = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(sock.fileno(), False)
    _set_title(_TITLE)
    modules = _receive(sock)
    if modules is not None:
        _import(json.loads(modules))
    request = None if modules is None else _serve(sock)
    if request is not None:
        ending.status = _run(request)
    sys.exit(ending.status)


def _import(modules: Sequence[str]) -> None:
    """Import with the garbage collector off: importing makes no garbage. What is there is not looked at again."""
    global _preloaded_bytes
    gc.disable()
    for module in modules:
        with contextlib.suppress(ImportError):  # whoever needs the module says that it is not there
            importlib.import_module(module)
    gc.freeze()
    gc.enable()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            if int(file) > 2 and os.readlink(f"/proc/self/fd/{file}").startswith("/dev/"):
                sys.exit("no forks: a module opened a device when it was imported, and CUDA does not bear a fork")
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    _preloaded_bytes = pages * os.sysconf("SC_PAGE_SIZE")


def _serve(sock: socket.socket) -> _Request | None:
    """Fork until the owner ends; return what a child is to run, None in the server."""
    while True:
        files: list[int] = []
        try:
            kind, files, _, _ = socket.recv_fds(sock, 1, _MAX_FILES)
            text = _receive(sock) if kind else None
        except ConnectionError:
            text = None
        if text is None:
            return None
        request = _Request(**json.loads(text))
        pid = _fork_twice(request)
        if pid is None:
            sock.detach()
            _take_over(request, files)
            return _with_own_server(request)
        for file in files:
            os.close(file)
        with contextlib.suppress(ConnectionError):
            _send(sock, str(pid).encode())


def _fork_twice(request: _Request) -> int | None:
    """Return the new process's number, 0 if there is none, None in the new process once its asker has adopted it."""
    told, tell = os.pipe()
    adopted, adopt = os.pipe()  # its end comes when this process closes `adopt`
    between = os.fork()
    if between == 0:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(tell, str(pid).encode())
            os._exit(0)
        os.close(adopt)
        os.read(adopted, 1)
        if os.getppid() != request.parent:
            os._exit(_ORPHANED)
        return None
    os.close(tell)
    os.waitpid(between, 0)
    pid = int(os.read(told, 20) or b"0")
    for file in (told, adopted, adopt):
        os.close(file)
    return pid


def _take_over(request: _Request, files: Sequence[int]) -> None:
    """Make this process what `execute` would have made."""
    os.setpgid(0, 0)
    _place(files, request.files)
    os.chdir(request.folder)
    os.umask(request.umask)
    with contextlib.suppress(OSError):  # cores were taken away meanwhile
        os.sched_setaffinity(0, request.cores)
    os.environ.clear()
    os.environ.update(request.environment)
    _tune_malloc(request.environment)
    sys.argv = [request.module, *request.arguments]
    _set_title(" ".join([sys.executable, *_AS_A_MODULE, request.module, *request.arguments]))
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give files their numbers and close all others."""
    above = max(*files, *numbers) + 1
    kept = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file, number in zip(kept, numbers, strict=True):
        os.dup2(file, number)
    begin = 0
    for end in [*sorted(numbers), os.sysconf("SC_OPEN_MAX")]:
        if end > begin:  # an empty range that begins with 0 is taken for all
            os.closerange(begin, end)
        begin = end + 1


def _tune_malloc(environment: Mapping[str, str]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, number in _MALLOPT.items():
        value = environment.get(name, "")
        if mallopt is not None and value.isdecimal():
            mallopt(number, int(value))


def _set_title(title: str) -> None:
    """Set what `ps` shows; the name of the process's thread stays."""
    try:
        import setproctitle
    except ImportError:  # a machine that runs the tree with the packages at hand
        return
    setproctitle.setproctitle(title)
    setproctitle.setthreadtitle("python")


def _with_own_server(request: _Request) -> _Request | None:
    """Fork a server for the engine of a program that starts one. Return what a child of that server is to run."""
    if not request.starts_engine:
        return request
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        IN_USE.engines = ForkServer.of(ours, _ForkedChild(pid))
        return request
    ours.close()
    _set_title(_TITLE)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # whoever reads the program's output waits for its end
    os.close(null)
    return _serve(theirs)


def _run(request: _Request) -> int:
    """Run a module as the program; return the exit status."""
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


# --- messages ---------------------------------------------------------------------------------------------------------


def _send(sock: socket.socket, text: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(text)) + text)


def _receive(sock: socket.socket) -> bytes | None:
    """Return the next message; None when the other end has closed."""
    head = _receive_bytes(sock, _LENGTH.size)
    return None if head is None else _receive_bytes(sock, _LENGTH.unpack(head)[0])


def _receive_bytes(sock: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        piece = sock.recv(count - len(received))
        if not piece:
            return None
        received += piece
    return bytes(received)
