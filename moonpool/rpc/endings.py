"""What makes a process end: signals, and its parent's end."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator

_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def parent_watch(stopping: asyncio.Event, wanted: str) -> Iterator[None]:
    """Set `stopping` when the parent process ends; `wanted` as MOONPOOL_DIE_WITH_PARENT.

    A pidfd says so exactly. PR_SET_PDEATHSIG, the fallback, already fires when the *thread* that started us ends.
    """
    if wanted in ("", "0") or not sys.platform.startswith("linux"):
        yield
        return
    parent = os.getppid()
    try:
        descriptor = os.pidfd_open(parent)
    except OSError:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        yield
        return
    if os.getppid() != parent or (wanted.isdecimal() and int(wanted) > 1 and int(wanted) != parent):
        stopping.set()
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(descriptor)
        stopping.set()

    loop.add_reader(descriptor, ended)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def signal_counter(stopping: asyncio.Event, leave: Callable[[int], object]) -> Callable[[int], None]:
    """What a signal does.

    Counted per signal, because Ctrl-C reaches a whole process group and a parent then sends SIGTERM too.
    """
    seen: set[int] = set()

    def received(signum: int) -> None:
        if signum in seen:
            leave(128 + signum)
        seen.add(signum)
        stopping.set()

    return received
