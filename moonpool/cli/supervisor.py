"""Restarts services of a local stack that end by themselves, and gives up on one that keeps failing."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from moonpool.errors import Unavailable
from moonpool.rpc.process import EXIT_ROLE

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 30.0
MAX_FAILURES = 5
"""Ends in a row after which a service is given up."""
STABLE_S = 60.0
"""A service that ran for so long has not failed in a row."""


class Service(Protocol):
    """A process of the stack, as the supervisor sees it."""

    @property
    def returncode(self) -> int | None:
        """Exit status, None while it runs."""
        ...

    @property
    def address(self) -> str:
        """Its address, "" until it is ready."""
        ...

    def log_tail(self) -> str:
        """The last lines of its log."""
        ...


@dataclass(slots=True)
class _History:
    """Attributes: ends in a row; when it was last started; when it is due to be started, None while it runs."""

    failures: int = 0
    started_at: float = 0.0
    due_at: float | None = None
    starting: bool = False


class Supervisor:
    """Looks after the services of one stack; call `look` often.

    Args:
        services: the stack's services by id, as they are now.
        restart: starts a service anew, without waiting for it; in its other role if it ended for that.
        on_end: told of a service's id, its exit status and the seconds until its restart.
        on_ready: told of a service that is ready again.
        clock: seconds.
    """

    def __init__(
        self,
        services: Mapping[str, Service],
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
        self._histories = {name: _History(started_at=clock()) for name in services}

    def look(self) -> None:
        """Note which services have ended, and start those whose pause is over.

        Raises:
            Unavailable: a service ended `MAX_FAILURES` times in a row; the message has the end of its log.
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

    def _ended(self, name: str, service: Service, status: int, history: _History) -> None:
        now = self._clock()
        if status == EXIT_ROLE:  # it was ordered to: no failure
            history.due_at = now
            self._on_end(name, status, 0.0)
            return
        history.failures = 1 if now - history.started_at >= STABLE_S else history.failures + 1
        if history.failures >= MAX_FAILURES:
            raise Unavailable(
                f"{name} ended {history.failures} times in a row, last with status {status}; giving up\n"
                + service.log_tail()
            )
        pause_s = min(FIRST_PAUSE_S * 2 ** (history.failures - 1), LAST_PAUSE_S)
        history.due_at = now + pause_s
        self._on_end(name, status, pause_s)

    def _start_if_due(self, name: str, history: _History, due_at: float) -> None:
        now = self._clock()
        if now >= due_at:
            history.due_at, history.started_at, history.starting = None, now, True
            self._restart(name)
