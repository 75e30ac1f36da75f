"""What a process takes from outside: time, random numbers, threads, connections and its own machine use.

Services, streams, clients and stores take them from here alone. `CURRENT` is the real world unless the running
`contextvars` context has another: tests run the services on a virtual clock, in one process (`tests/world`).
A task, a timer and a callback have the world of the code that began them. A thread has the real world.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import grpc
    import grpc.aio

Options = Sequence[tuple[str, Any]]
"""gRPC's channel arguments."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Time.

    Attributes:
        monotonic: seconds since some point in the past; never goes back.
        monotonic_ns: the same in nanoseconds.
        unix_time: seconds since 1970; may be set back, and differs between hosts.
        thread_time: seconds of processor that the running thread has used.
    """

    monotonic: Callable[[], float] = time.monotonic
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    unix_time: Callable[[], float] = time.time
    thread_time: Callable[[], float] = time.thread_time


@dataclass(frozen=True, slots=True)
class Draws:
    """Unguessable random numbers.

    Attributes:
        bits: a number of so many random bits.
        bytes: so many random bytes.
    """

    bits: Callable[[int], int] = secrets.randbits
    bytes: Callable[[int], bytes] = secrets.token_bytes


def _resident_bytes() -> float:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0


def _open_files() -> float:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0.0


@cache
def _this_machine() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _this_process() -> str:
    try:
        return f"{_this_machine()} {os.getpid()}"
    except OSError:  # not Linux
        return ""


def _waited_s(process: str) -> float:
    machine, _, number = process.rpartition(" ")
    if not process or machine != _this_process().rpartition(" ")[0]:
        return 0.0
    try:
        return int(Path(f"/proc/{int(number)}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # the process has ended, or the kernel does not count
        return 0.0


@dataclass(frozen=True, slots=True)
class MachineUse:
    """What the process holds of the machine, known on Linux only and 0 elsewhere.

    Attributes:
        resident_bytes: resident memory.
        open_files: number of open files.
        processor_s: seconds of processor that the process has used.
    """

    resident_bytes: Callable[[], float] = _resident_bytes
    open_files: Callable[[], float] = _open_files
    processor_s: Callable[[], float] = time.process_time


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of this machine.

    Attributes:
        this: names this process, for the machine's other processes; "" where that is not possible.
        waited_s: seconds in which a process was ready to run but had no processor, since the process's start, by name;
            what counts is the thread that began the process. 0 for a process on another machine, or an ended process.
    """

    this: Callable[[], str] = _this_process
    waited_s: Callable[[str], float] = _waited_s


class Network(Protocol):
    """Both ends of connections. An `address` is "host:port"."""

    def server(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options) -> grpc.aio.Server:
        """Return a new server, which listens nowhere yet."""
        ...

    def channel(
        self, address: str, options: Options, credentials: grpc.ChannelCredentials | None = None
    ) -> grpc.aio.Channel:
        """Return a new channel, which connects on first use; in plaintext without `credentials`."""
        ...

    def tcp_socket(self, family: int) -> socket.socket:
        """Return a new socket for the running event loop; it does not block."""
        ...


class GrpcNetwork:
    """The real network. Engine processes need only the clock, so gRPC is imported on use."""

    def server(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options) -> grpc.aio.Server:
        import grpc.aio

        return grpc.aio.server(interceptors=interceptors, options=options)

    def channel(
        self, address: str, options: Options, credentials: grpc.ChannelCredentials | None = None
    ) -> grpc.aio.Channel:
        import grpc.aio

        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def tcp_socket(self, family: int) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        return sock


@dataclass(frozen=True, slots=True)
class World:
    """Where a process takes everything that the process's code does not decide.

    Attributes:
        clock: time.
        draws: random numbers.
        network: gRPC servers and channels.
        thread_pool: an executor of so many workers, named so, beside the event loop.
        usage: memory and files of the process.
        processes: this machine's.
    """

    clock: Clock = field(default_factory=Clock)
    draws: Draws = field(default_factory=Draws)
    network: Network = field(default_factory=GrpcNetwork)
    thread_pool: Callable[[int, str], Executor] = ThreadPoolExecutor
    usage: MachineUse = field(default_factory=MachineUse)
    processes: Processes = field(default_factory=Processes)


CURRENT: ContextVar[World] = ContextVar("world", default=World())  # noqa: B039 - a World never changes
"""The world of the running context. Only tests set another."""


def monotonic() -> float:
    """Seconds since some point in the past; never goes back."""
    return CURRENT.get().clock.monotonic()


def monotonic_ns() -> int:
    """Nanoseconds since some point in the past; never goes back."""
    return CURRENT.get().clock.monotonic_ns()


def unix_time() -> float:
    """Seconds since 1970."""
    return CURRENT.get().clock.unix_time()


def thread_time() -> float:
    """Seconds of processor that the running thread has used."""
    return CURRENT.get().clock.thread_time()


def random_bits(count: int) -> int:
    """A number of `count` random bits."""
    return CURRENT.get().draws.bits(count)


def random_bytes(count: int) -> bytes:
    """`count` random bytes."""
    return CURRENT.get().draws.bytes(count)


def random_hex(count: int) -> str:
    """`count` random bytes as hexadecimal digits."""
    return random_bytes(count).hex()


def this_process() -> str:
    """This process's name for the machine's other processes."""
    return CURRENT.get().processes.this()


def waited_s(process: str) -> float:
    """Seconds in which a process on this machine was ready to run but had no processor, by name."""
    return CURRENT.get().processes.waited_s(process)


def tcp_socket(family: int) -> socket.socket:
    """A new socket for the running event loop; it does not block."""
    return CURRENT.get().network.tcp_socket(family)


def thread_pool(workers: int, name: str) -> Executor:
    """An executor of so many workers beside the event loop; the caller shuts the executor down."""
    return CURRENT.get().thread_pool(workers, name)
