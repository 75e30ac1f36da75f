"""An event loop in a background thread, on which blocking clients drive asyncio clients."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from moonpool.base.errors import Unavailable

T = TypeVar("T")
P = ParamSpec("P")
TargetT = TypeVar("TargetT")
STOP_TIMEOUT_S = 10.0
SIGNAL_CHECK_S = 0.5
"""Longest wait before Python gets to handle a signal that came just before the wait, and so could not end the wait."""


@dataclass(frozen=True, slots=True)
class _LoopThread:
    """A running thread with an event loop; setting `stop` ends the loop."""

    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    thread: threading.Thread
    pid: int

    @classmethod
    def start(cls, pid: int) -> _LoopThread:
        started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = (
            concurrent.futures.Future()
        )

        async def serve() -> None:
            stop = asyncio.Event()
            started.set_result((asyncio.get_running_loop(), stop))
            await stop.wait()

        thread = threading.Thread(target=asyncio.run, args=(serve(),), name="moonpool-client", daemon=True)
        thread.start()
        return cls(*started.result(), thread, pid)

    def end(self) -> None:
        """Cancel the loop's tasks, and wait for the thread unless this is the thread (in the garbage collector)."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(self.stop.set)
        if threading.current_thread() is not self.thread:
            self.thread.join(STOP_TIMEOUT_S)


class BackgroundLoop:
    """Runs coroutines for blocking callers on any thread. The background thread starts with the first call."""

    def __init__(self, process_id: Callable[[], int] = os.getpid) -> None:
        self._process_id = process_id
        self._lock = threading.Lock()
        self._running: _LoopThread | None = None
        self._finalize: Callable[[], object] = lambda: None
        self._closed = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result.

        An exception in the waiting thread, such as KeyboardInterrupt, cancels the coroutine.

        Raises:
            RuntimeError: the loop is closed, belongs to another process, or is the caller's own.
            Unavailable: the loop was closed during the call.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()  # before the start: cancels whatever started
        try:
            self._begin(coroutine, future)
            while not future.done():
                with contextlib.suppress(TimeoutError):
                    return future.result(SIGNAL_CHECK_S)
            return future.result()
        except concurrent.futures.CancelledError:
            raise Unavailable("the client was closed during the call") from None
        finally:
            future.cancel()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine; the future has the result. Raises RuntimeError as `run`."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._begin(coroutine, future)
        return future

    def check(self) -> None:
        """Raise RuntimeError as `run` does, for a caller that may not need the loop."""
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._running is not None:
            self._check_caller(self._running)

    def post(self, callback: Callable[[], object]) -> None:
        """Call `callback` soon on the loop; ignored if the loop has stopped."""
        running = self._running
        if running is not None:
            with contextlib.suppress(RuntimeError):  # closed
                running.loop.call_soon_threadsafe(callback)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last` if the loop was ever used, then end the thread. Idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
            running = self._running
        if closed or running is None or running.pid != self._process_id():
            return
        try:
            self._check_caller(running)
            asyncio.run_coroutine_threadsafe(last(), running.loop).result(STOP_TIMEOUT_S)
        finally:
            self._finalize()

    def _begin(self, coroutine: Coroutine[Any, Any, T], future: concurrent.futures.Future[T]) -> None:
        """Start a coroutine whose result goes to `future`. Cancelling `future`, at any time, cancels the coroutine."""
        try:
            loop = self._start().loop
        except BaseException:
            coroutine.close()
            raise

        def begin() -> None:
            task = loop.create_task(coroutine)
            task.add_done_callback(partial(_settle, future))
            future.add_done_callback(lambda _: self.post(task.cancel))  # no effect on a task that has ended

        loop.call_soon_threadsafe(begin)

    def _start(self) -> _LoopThread:
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._running is None:
                self._running = _LoopThread.start(self._process_id())
                self._finalize = weakref.finalize(self, self._running.end)
            self._check_caller(self._running)
            return self._running

    def _check_caller(self, running: _LoopThread) -> None:
        if running.pid != self._process_id():
            raise RuntimeError("the client was used before this process was forked; make a new one here")
        if threading.current_thread() is running.thread:
            raise RuntimeError("a blocking client cannot be used on its own event loop; use AsyncClient there")


def _settle(future: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    """Hand a task's end to a future that is not cancelled."""
    if task.cancelled():
        future.cancel()
    elif future.set_running_or_notify_cancel():
        error = task.exception()
        if error is None:
            future.set_result(task.result())
        else:
            future.set_exception(error)


class BlockingFacade(Generic[TargetT]):
    """Base class for blocking classes that run an asyncio object's coroutines on a background loop."""

    def __init__(self, target: TargetT, loop: BackgroundLoop) -> None:
        self._target = target
        self._loop = loop


def blocking(
    method: Callable[Concatenate[TargetT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingFacade[TargetT], P], T]:
    """The blocking version of a coroutine method: same arguments, result, errors and docstring."""

    @wraps(method)
    def call(self: BlockingFacade[TargetT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(method(self._target, *args, **kwargs))

    return call


def same_arguments(
    init: Callable[Concatenate[TargetT, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Decorate a blocking class's `__init__`, which takes the arguments of the asyncio class's `init`."""

    def decorate(blocking_init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        @wraps(init)
        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            blocking_init(self, *args, **kwargs)

        return call

    return decorate
