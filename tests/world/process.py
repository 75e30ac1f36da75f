"""Tests on virtual time, each in a process of its own: what a run leaves of killed nodes must not be destroyed."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.rpc.tuning import tune_gc
from moonpool.base.telemetry import logs
from tests.world.cluster import Simulation, leave

KEPT: list[Simulation] = []
ROOT = Path(__file__).parents[2]


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """An `async` test as one for pytest: its first parameter is a `Simulation`, further ones are fixtures."""

    def run(**fixtures: Any) -> None:
        def body() -> None:
            simulation = Simulation()
            KEPT.append(simulation)
            simulation.run(test(simulation, **fixtures))

        in_copy(body)

    return _like(test, run)


def in_new_process(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """As `on_virtual_time`, for tests that compute; fixtures are paths.

    Threads of torch and of grammars' library are not in a copy of a process that has used them, and are waited for.
    """

    def run(**fixtures: Any) -> None:
        given = [f"{name}={path}" for name, path in fixtures.items()]
        command = [sys.executable, "-m", __name__, test.__module__, test.__name__, *given]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.fail(done.stdout + done.stderr, pytrace=False)

    run.__wrapped__ = test  # type: ignore[attr-defined]
    return _like(test, run)


def _like(test: Callable[..., Any], run: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(test)
    run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    run.__name__, run.__qualname__, run.__module__ = test.__name__, test.__qualname__, test.__module__
    run.__doc__ = test.__doc__
    return run


def in_copy(body: Callable[[], Any]) -> Any:
    """What `body` returns in a copy of this process, which ends then."""
    failed, result = forked(body)
    if failed:
        pytest.fail(failed, pytrace=False)
    return result


def forked(body: Callable[[], Any]) -> tuple[str, Any]:
    """What `body` raises, "" for nothing, and what it returns, in a copy of this process, which ends then."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():  # of threads of this process: the copy has none, and needs none
        warnings.simplefilter("ignore", DeprecationWarning)
        copy = os.fork()
    if copy == 0:
        os.close(reading)
        _tell(body, writing)
    os.close(writing)
    try:
        with open(reading, "rb") as told:
            found: tuple[str, Any] = pickle.loads(told.read() or pickle.dumps(("the process has died", None)))
    except BaseException:
        os.kill(copy, signal.SIGKILL)
        raise
    finally:
        os.waitpid(copy, 0)
    return found


def _tell(body: Callable[[], Any], writing: int) -> None:
    logs.configure("error", "world", False)
    tune_gc()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # a copy has no threads of OpenMP's: a parallel region would wait for them without end
    try:
        told = "", body()
    except BaseException:
        told = traceback.format_exc(), None
    with open(writing, "wb") as out:
        pickle.dump(told, out)
    leave(0)


def _main(module: str, name: str, *given: str) -> None:
    fixtures = {key: Path(value) for key, _, value in (text.partition("=") for text in given)}
    logs.configure("error", "world", False)
    tune_gc()
    simulation = Simulation()
    try:
        simulation.run(getattr(importlib.import_module(module), name).__wrapped__(simulation, **fixtures))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
