"""Drives a core on an asyncio event loop: events in, actions performed, ticks when due. Also the journal's flags."""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from pydantic import Field, field_validator

from moonpool.base import world
from moonpool.base.config import ByteSize, ServiceConfig
from moonpool.base.errors import Internal
from moonpool.base.runtime.journal import JournalWriter
from moonpool.base.scheduling.state_machine import Core, Tick
from moonpool.base.telemetry.logs import get_logger

E = TypeVar("E")
A = TypeVar("A")
MAX_TURN_S = 0.01
"""Longest time in which events are handled before the loop's other tasks run, seconds."""


class CoreServiceConfig(ServiceConfig):
    """Settings for every service with a core."""

    journal_dir: Path | None = Field(
        None,
        description="folder for a journal of all decisions, for `moonpool rerun`; an earlier one there is overwritten;"
        " {pid} stands for the process's number; default: none is kept",
    )
    journal_bytes: ByteSize = Field(64 << 20, ge=1 << 16, description="size of the journal's two files together")

    @field_validator("journal_dir", mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        return None if value in ("", None) else str(value).replace("{pid}", str(os.getpid()))

    def journal(self) -> JournalWriter | None:
        """Return a new journal, named after the instance; None if no journal is kept."""
        if self.journal_dir is None:
            return None
        return JournalWriter(self.journal_dir, self.id, self.journal_bytes)


log = get_logger(__name__)


class Driver(Generic[E, A]):
    """Owns one core. Only the loop's own thread may use a driver.

    An exception from the core or an action stops the core if the exception reaches no caller (from `tell`, a tick, or
    deferred events). The core then gets no further event, and `failure` raises, so that the process ends and other
    instances take over.

    Args:
        core: the state machine.
        perform: performs one action. `perform` must not wait: long work becomes a task that posts the end. `perform`
            may post. An exception is raised to the poster, after the event's other actions.
        clock: seconds; never goes back.
        journal: records events and actions; None = no recording.
    """

    def __init__(
        self,
        core: Core[E, A],
        perform: Callable[[A], None],
        *,
        clock: Callable[[], float] = world.monotonic,
        journal: JournalWriter | None = None,
    ) -> None:
        self.core = core
        self._perform = perform
        self._clock = clock
        self._journal = journal
        self._events: deque[E | Tick] = deque()
        self._draining = False
        self._now = clock()
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None  # of the timer
        self._turn: asyncio.Handle | None = None
        self._closed = False
        self._failed = asyncio.Event()
        self._defect: Exception | None = None

    async def failure(self) -> NoReturn:
        """Wait for an exception that reaches no caller.

        Raises:
            Internal: caused by the first such exception.
        """
        await self._failed.wait()
        raise Internal(f"a defect: {self._defect!r}; the state of the core is not certain any more") from self._defect

    def tell(self, event: E) -> None:
        """Post an event; an exception fails the driver."""
        try:
            self.post(event)
        except Exception as defect:
            self._fail(defect)

    def post(self, event: E) -> None:
        """Hand an event to the core, after events posted before; perform the event's actions before returning.

        An exception from the core or an action is raised here: only a caller that knows the event's origin may
        continue.

        A post from within `perform` is handled after the action's own event. If many events wait, the rest are handled
        in the loop's next turns, where an exception fails the driver. After `close` a post has no effect.
        """
        if self._closed:
            return
        self._events.append(event)
        if not self._draining and self._turn is None:
            self._drain()

    def ask(self, event: E) -> None:
        """Handle all waiting events, then post this event, so that the event is not deferred.

        Only this event's exception is raised here; an exception from another event fails the driver.
        """
        self.settle()
        self.post(event)

    def settle(self) -> None:
        """Handle all waiting events, even if that takes longer than a turn. Return at once within `perform`.

        An exception fails the driver.
        """
        while self._events and not self._draining:
            if self._turn is not None:
                self._turn.cancel()
            self._drain_unheard()

    def close(self) -> None:
        """Stop ticks and events; the core stays unchanged."""
        self._closed = True
        self._events.clear()
        for handle in (self._timer, self._turn):
            if handle is not None:
                handle.cancel()
        if self._journal is not None:
            self._journal.close()

    def _drain(self) -> None:
        self._turn = None
        self._draining = True
        until = self._clock() + MAX_TURN_S
        try:
            while self._events:
                self._handle(self._events.popleft())
                if self._events and self._clock() >= until:
                    break
        finally:
            self._draining = False
            if self._events:  # the turn is over, or an action has failed
                self._turn = asyncio.get_running_loop().call_soon(self._drain_unheard)
            self._arm()

    def _drain_unheard(self) -> None:
        try:
            self._drain()
        except Exception as defect:
            self._fail(defect)

    def _fail(self, defect: Exception) -> None:
        if self._defect is None:
            log.error("the core has failed: it gets no further event", exc_info=defect)
            self._defect = defect
            self.close()
            self._failed.set()

    def _handle(self, event: E | Tick) -> None:
        self._now = now = max(self._now, self._clock())
        actions: list[A] = []
        failed: Exception | None = None
        if self._journal is not None:
            self._journal.before(self.core)
        try:
            self.core.handle(now, event, actions)
        except Exception as defect:
            failed = defect
        if self._journal is not None:
            self._journal.record(now, event, actions)
        self._do(actions, failed)

    def _do(self, actions: list[A], failed: Exception | None) -> None:
        """Perform all actions, also after an exception: each I/O must end."""
        for action in actions:
            try:
                self._perform(action)
            except Exception as defect:
                if failed is not None:
                    log.error("an action failed", exc_info=defect)
                failed = failed or defect
        if failed is not None:
            raise failed

    def _arm(self) -> None:
        due = None if self._closed else self.core.due()
        if due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = due
        if due is not None:
            delay = max(0.0, due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = self._due = None
        if not self._closed:
            self._events.append(Tick())
            if self._turn is None:
                self._drain_unheard()
