"""The thread that makes calls behind a device's work, one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


class CallbackThread:
    """A thread that makes calls, one after the other.

    Args:
        on_failure: called once, with the error of a call.
        enter: called first, by the thread itself: `Device.enter_thread` if the calls wait for a device.
    """

    def __init__(self, on_failure: Callable[[BaseException], None], enter: Callable[[], None] = lambda: None) -> None:
        self._calls: queue.SimpleQueue[_Callback | None] = queue.SimpleQueue()
        self.on_failure, self._enter = on_failure, enter
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)
        self._thread.start()

    def send(self, work: Callable[[], None]) -> _Callback:
        """Call `work` after all that was sent before."""
        call = _Callback(self, work)
        self._calls.put(call)
        return call

    def close(self) -> None:
        """End the thread after all calls."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._do(self._enter)
        while (call := self._calls.get()) is not None:
            if self.failed is None:
                self._do(call.work)
            call.over.set()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failed = error
            self.on_failure(error)


@dataclass(slots=True, eq=False)
class _Callback:
    """A call that a `CallbackThread` makes. A `DeviceEvent`."""

    thread: CallbackThread
    work: Callable[[], None]
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Wait until the call is made.

        Raises:
            BaseException: an earlier call's error, or this call's. No further call is made.
        """
        self.over.wait()
        if self.thread.failed is not None:
            raise self.thread.failed
