"""A thread that waits for a device's marks, or a CPU's layers, and then does what depends on them, in order."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Errand:
    """Something to do. A `Mark`."""

    courier: "Courier"
    work: Callable[[], None]
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Waits until it is done.

        Raises:
            BaseException: what an errand has raised; those after it are not done.
        """
        self.over.wait()
        if self.courier.failed is not None:
            raise self.courier.failed


class Courier:
    """Does errands.

    Args:
        on_failure: called, once, with what an errand has raised.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._errands: queue.SimpleQueue[_Errand | None] = queue.SimpleQueue()
        self._on_failure = on_failure
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    def send(self, work: Callable[[], None]) -> _Errand:
        """Does something after all that was sent before."""
        errand = _Errand(self, work)
        self._errands.put(errand)
        return errand

    def close(self) -> None:
        """Ends the thread when all errands are done."""
        self._errands.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            if self.failed is None:
                self._do(errand.work)
            errand.over.set()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failed = error
            self._on_failure(error)
