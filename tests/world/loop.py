"""Virtual time: an asyncio event loop that never waits, and nodes whose callbacks it may drop or hold back.

A node is one life of a process. Each callback carries its node in its `contextvars` context. The callbacks of a dead
node are dropped, so that no `finally` runs, as after `kill -9`. Those of a stopped node wait, as after SIGSTOP.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import selectors
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import Context, ContextVar
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_S = 1000.0
"""The monotonic clock at the beginning."""
EPOCH_S = 1_700_000_000.0
"""The wall clock at the beginning, seconds since 1970."""
TURN_S = 1e-9
"""What a turn of the loop takes, so that no code can wait for ever within one moment."""


class VirtualTime:
    """Seconds that pass as soon as everybody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return START_S + self.now

    def monotonic_ns(self) -> int:
        return round(self.monotonic() * 1e9)


class Node:
    """One life of a process.

    Attributes:
        name: of the process, the same in all its lives.
        dead: its callbacks are dropped.
        held: its callbacks while it is stopped, or has no processor; None while it runs.
        skew_s: by how much its wall clock is ahead.
    """

    def __init__(self, name: str, life: int = 0, skew_s: float = 0.0) -> None:
        self.name, self.life, self.skew_s = name, life, skew_s
        self.dead = False
        self.held: list[asyncio.Handle] | None = None

    def __str__(self) -> str:
        return f"{self.name}#{self.life}"


NODE: ContextVar[Node | None] = ContextVar("node", default=None)
"""Whose code runs; None = the world's own."""


def _may_run(handle: asyncio.Handle, context: Context) -> bool:
    node = context.get(NODE)
    if node is None:
        return True
    if node.held is not None and not node.dead:
        node.held.append(handle)
        return False
    return not node.dead


class _NodeHandle(asyncio.Handle):
    __slots__ = ()

    _context: Context

    def _run(self) -> None:
        if _may_run(self, self._context):
            super()._run()


class _NodeTimer(asyncio.TimerHandle):
    """Of equal times the timer that was set first comes first."""

    __slots__ = ("order",)

    _context: Context

    def __init__(self, number: int, when: float, callback: Any, args: Any, loop: Any, context: Context | None) -> None:
        super().__init__(when, callback, args, loop, context)
        self.order = when, number
        self._scheduled = True

    def _run(self) -> None:
        if _may_run(self, self._context):
            super()._run()

    def __lt__(self, other: Any) -> bool:
        return bool(self.order < other.order)


class _NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on the layout of memory; `asyncio.TaskGroup` cancels from a set."""

    def __init__(self, number: int, coroutine: Any, **kwargs: Any) -> None:
        self._number = number
        super().__init__(coroutine, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Selector(selectors.SelectSelector):
    """Asks nobody and waits for nobody: the time that would have been waited passes at once."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__()
        self._time = time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits for ever")
        self._time.now += max(timeout, 0.0) + TURN_S
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time; what runs in threads elsewhere is done at once."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(_Selector(time))
        self._time = time
        self._clock_resolution = TURN_S
        self._timers = 0
        self._signals: dict[tuple[Node | None, int], asyncio.Handle] = {}
        numbers = itertools.count()
        self.set_task_factory(
            lambda loop, coroutine, **kwargs: _NumberedTask(next(numbers), coroutine, loop=loop, **kwargs)
        )

    def time(self) -> float:
        return self._time.monotonic()

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> asyncio.Handle:
        handle = _NodeHandle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._timers += 1
        timer = _NodeTimer(self._timers, when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        return timer

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def sock_accept(self, sock: Any) -> Any:
        return await sock.accept()

    def remove_reader(self, fd: Any) -> bool:
        """Nobody reads by a callback: a connection that comes stays with the listener until it is accepted."""
        return False

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await sock.connect(address)

    async def connect_accepted_socket(self, protocol_factory: Callable[[], Any], sock: Any, **_: Any) -> Any:
        return sock.attach(protocol_factory)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], *, sock: Any, **_: Any
    ) -> Any:
        return sock.attach(protocol_factory)

    def add_signal_handler(self, sig: int, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        """Of the node whose code runs: each is a process of its own."""
        self._signals[NODE.get(), sig] = _NodeHandle(callback, args, self, None)

    def remove_signal_handler(self, sig: int) -> bool:
        return self._signals.pop((NODE.get(), sig), None) is not None

    def signal(self, node: Node, sig: int) -> None:
        """Send a signal to a node."""
        self._ready.append(self._signals[node, sig])

    def resume(self, node: Node) -> None:
        """Let a stopped node go on."""
        held, node.held = node.held or [], None
        self._ready.extend(held)


class InlineExecutor(Executor):
    """Does each call at once, in the caller's thread."""

    def __init__(self, workers: int, name: str) -> None:
        """Take what a pool of threads takes."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def draws(seed: object) -> random.Random:
    """Random numbers that depend on `seed` alone, whatever the hash seed of the process."""
    return random.Random(str(seed))
