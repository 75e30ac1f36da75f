"""Ctrl-C while a stack starts or ends: answered at once with a word; again, the services end at once."""

import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType

from moonpool.cli.stack import ServiceProcess

STOPPING = "stopping; Ctrl-C again stops at once"
STOPPING_NOW = "stopping now"


class StopFlag:
    """Set by signal handlers of a thread, and waited for by that thread.

    `threading.Event` holds its lock within `wait` and `set`: a handler that runs inside a `wait` would never return.
    """

    def __init__(self) -> None:
        self._set = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may interrupt any other call

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._set

    def set(self) -> None:
        """Set the flag and wake the thread that waits."""
        self._set = True
        self._wakes.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set, at most `timeout_s` seconds; return whether it is set."""
        if not self._set:
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=timeout_s)
        return self._set


class StackInterrupts:
    """Ctrl-C of a command that starts a stack.

    Attributes:
        services: the stack's, by id; the second Ctrl-C ends them without a drain.
        answers: whether Ctrl-C comes here. A shell's background job ignores it.
    """

    def __init__(self) -> None:
        self.services: Mapping[str, ServiceProcess] = {}
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        self.answers = threading.current_thread() is threading.main_thread() and not ignored
        self._stopping = False

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: the first ends the start, and what ends the stack is not broken off by others."""
        tell(STOPPING_NOW if self._stopping else STOPPING)
        if not self._stopping:
            self._stopping = True
            signal.default_int_handler(number, frame)
        for service in list(self.services.values()):
            service.signal(signal.SIGTERM)

    @contextlib.contextmanager
    def left_to_body(self) -> Iterator[None]:
        """Leave Ctrl-C to the body. Behind the body, the stack is ending."""
        if not self.answers:
            yield
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        except KeyboardInterrupt:
            tell(STOPPING)
            raise
        finally:
            self._stopping = True
            signal.signal(signal.SIGINT, self.interrupted)


@contextlib.contextmanager
def answered_interrupts() -> Iterator[StackInterrupts]:
    """Answer Ctrl-C while the body runs: in the main thread, which alone has signals, unless Ctrl-C is ignored."""
    interrupts = StackInterrupts()
    if not interrupts.answers:
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupts.interrupted)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def tell(text: str) -> None:
    """Print on standard error, if anybody reads there; on a terminal below the line that has `^C`.

    A handler that interrupted another print says nothing: the stream is not reentrant.
    """
    with contextlib.suppress(OSError, RuntimeError):
        print(f"\n{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)
