"""CPU cores that a host's engines share: a computing process takes the cores of idle processes.

All engine processes of a user, or of a stack with a separate page, map one small file. Each has a slot there: process,
share, a number for the usable cores, and last computing time. Native kernels read the page before each parallel region
(`kernels/engine/cpu_sharing.cpp`). The cores of a dead process are free within 0.1 s.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.steps import MAX_WAIT_STEPS, longest_wait_s

SLOTS = 64
SLOT = struct.Struct("qqqq")
"""Process (`process_epoch`, 0 = free), share, number for the cores, last computing time: ns on the monotonic clock."""
_BEAT = 24
POLL_S = 0.0005
"""Between two looks at whether others compute."""
_PROCESS_BITS = 22  # Linux has no larger process numbers
_LONGEST_NUMBER = (1 << 63) - 1


def default_core_page() -> Path:
    """Where this user's page is, in memory."""
    return Path(f"/dev/shm/moonpool-lent-cores-{os.getuid()}")  # noqa: S108  # `claim` checks the owner


def cpu_set_id(cores: Sequence[int]) -> int:
    """Return a number that is equal for equal sets of cores."""
    return hash(tuple(sorted(cores))) & _LONGEST_NUMBER


@dataclass(slots=True)
class CpuSlot:
    """This process's slot in the page; made by `claim`.

    Attributes:
        page: all slots.
        own: index of ours.
    """

    page: mmap.mmap
    own: int

    @classmethod
    def claim(cls, path: Path, share: int) -> "CpuSlot":
        """Take a free slot of a page, which is made when there is none; slots of dead processes are free.

        Args:
            path: the page's path.
            share: share of the cores when others compute too, relative to theirs.

        Raises:
            ConfigError: the page cannot be used (`core_page`), or all slots are taken.
        """
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError("core_page", f"{path}: {error.strerror}") from error
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise ConfigError("core_page", f"{path}: must be a file of this user that others cannot write")
            fcntl.flock(handle, fcntl.LOCK_EX)
            size = SLOTS * SLOT.size
            os.posix_fallocate(handle, 0, size)  # what is mapped but cannot be had would end the process
            page = mmap.mmap(handle, size)
            own = next((index for index in range(SLOTS) if not _alive(_read_slot(page, index)[0])), None)
            if own is None:
                raise ConfigError("core_page", f"{path}: all of its {SLOTS} slots are taken")
            SLOT.pack_into(
                page, own * SLOT.size, process_epoch(os.getpid()), share, cpu_set_id([*os.sched_getaffinity(0)]), 0
            )
        except OSError as error:
            raise ConfigError("core_page", f"{path}: {error.strerror}") from error
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone does not: the mapping has a separate descriptor
            os.close(handle)
        return cls(page, own)

    @property
    def address(self) -> int:
        """The page's address in this process, while the process runs."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.page))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Others take back what they lend when the body ends."""
        try:
            yield
        finally:
            struct.pack_into("q", self.page, self.own * SLOT.size + _BEAT, 0)

    def fixed_split(self) -> int:
        """Cores of this process when all that are alive compute: for kernels that do not look into the page."""
        _, share, cores, _ = _read_slot(self.page, self.own)
        others = [_read_slot(self.page, index) for index in range(SLOTS) if index != self.own]
        shares = share + sum(slot[1] for slot in others if slot[2] == cores and _alive(slot[0]))
        return max(1, len(os.sched_getaffinity(0)) * share // shares)


@dataclass(slots=True)
class StepTurns:
    """Lets patient steps of an engine wait while other processes compute on the same cores.

    A small batch's step takes almost as long as a large batch's. So if no client waits for single tokens,
    prompts of the same host go first: the batch grows sooner, and each token costs less. A step may wait
    `MAX_WAIT_STEPS` times the step's duration, and may save some of that time for later (`longest_wait_s`). So a
    burst's prompts go first, and decode keeps a share over time.

    Attributes:
        others_compute: whether another process computes on our cores.
        had: returns the fraction of the requested CPU time that this process got since the last call.
        clock: seconds.
        nap: sleeps for so many seconds.
    """

    others_compute: Callable[[], bool]
    had: Callable[[], float]
    clock: Callable[[], float] = time.monotonic
    nap: Callable[[float], None] = time.sleep
    _saved_s: float = 0.0
    _began: float = 0.0

    def give_way(self, urgent: Callable[[], bool]) -> None:
        """Wait until no other process computes, at most for the time that this step may wait.

        Args:
            urgent: whether the next step was aborted or must begin at once; then the step does not wait.
        """
        arrived = now = self.clock()
        while not urgent() and self.others_compute() and now < arrived + self._saved_s:
            self.nap(POLL_S)
            now = self.clock()
        self._saved_s = max(0.0, self._saved_s - (now - arrived))
        self._began = 0.0 if urgent() else now  # an aborted step's duration is no measure

    def cpu_share(self, steps: int = 1) -> float:
        """Return the fraction of requested CPU time that the last `steps` steps got, without the wait before them."""
        if self._began:
            took_s, self._began = self.clock() - self._began, 0.0
            self._saved_s = min(self._saved_s + MAX_WAIT_STEPS * took_s, longest_wait_s(took_s / steps))
        return self.had()


def _read_slot(page: mmap.mmap, index: int) -> tuple[int, int, int, int]:
    owner, share, cores, beat = SLOT.unpack_from(page, index * SLOT.size)
    return owner, share, cores, beat


def process_epoch(process: int) -> int:
    """Return a number for a process and the process's start time, as process numbers are reused; 0: ended."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0
    return 0 if state in "ZX" else int(fields[18]) << _PROCESS_BITS | process


def _alive(life: int) -> bool:
    return life != 0 and life == process_epoch(life & (1 << _PROCESS_BITS) - 1)
