"""Restarts a stack's services that end unasked, with pauses, until one keeps failing."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from moonpool.base.errors import Unavailable

FIRST_RESTART_PAUSE_S = 0.5
MAX_RESTART_PAUSE_S = 30.0
MAX_FAILURES = 5
"""Ends in a row after which a service is given up."""
STABLE_S = 60.0
"""A service that ran for so long has not failed in a row."""


class SupervisedProcess(Protocol):
    """A stack's process, as the supervisor sees the process."""

    @property
    def returncode(self) -> int | None:
        """Exit status, None while running."""
        ...

    @property
    def address(self) -> str:
        """The process's address, "" until ready."""
        ...

    def log_tail(self) -> str:
        """The log's last lines."""
        ...


@dataclass(slots=True)
class _RestartHistory:
    """Attributes: ends in a row; time of the last start; time of the next start, None while the process runs."""

    failures: int = 0
    started_at: float = 0.0
    due_at: float | None = None
    starting: bool = False


class Supervisor:
    """Looks after one stack's services; call `look` often.

    Args:
        services: the stack's services by id, as they are now.
        restart: starts a service anew, without waiting.
        on_end: called with a service's id, exit status and the seconds until the restart.
        on_ready: called with a service that is ready again.
        clock: seconds.
    """

    def __init__(
        self,
        services: Mapping[str, SupervisedProcess],
        restart: Callable[[str], object],
        on_end: Callable[[str, int, float], None],
        on_ready: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._services = services
        self._restart = restart
        self._on_end = on_end
        self._on_ready = on_ready
        self._clock = clock
        self._histories = {name: _RestartHistory(started_at=clock()) for name in services}

    def look(self) -> None:
        """Note which services have ended, and start services whose pause is over.

        Raises:
            Unavailable: a service ended `MAX_FAILURES` times in a row; the message ends with the log.
        """
        for name, history in self._histories.items():
            service = self._services[name]
            if history.due_at is not None:
                self._start_if_due(name, history, history.due_at)
            elif service.returncode is not None:
                self._ended(name, service, service.returncode, history)
            elif history.starting and service.address:
                history.starting = False
                self._on_ready(name)

    def _ended(self, name: str, service: SupervisedProcess, status: int, history: _RestartHistory) -> None:
        now = self._clock()
        history.failures = 1 if now - history.started_at >= STABLE_S else history.failures + 1
        if history.failures >= MAX_FAILURES:
            raise Unavailable(
                f"{name} ended {history.failures} times in a row, last with status {status}; giving up\n"
                + service.log_tail()
            )
        pause_s = min(FIRST_RESTART_PAUSE_S * 2 ** (history.failures - 1), MAX_RESTART_PAUSE_S)
        history.due_at = now + pause_s
        self._on_end(name, status, pause_s)

    def _start_if_due(self, name: str, history: _RestartHistory, due_at: float) -> None:
        now = self._clock()
        if now >= due_at:
            history.due_at, history.started_at, history.starting = None, now, True
            self._restart(name)
