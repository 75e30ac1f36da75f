"""Runs pytest in forks of this process, which has imported what tests import from elsewhere: that saves seconds a run.

`prepare` imports once; what is in this repository stays out, as each run imports it from the folder that it is told.
This process must have one thread when it forks, and must not have used torch.
"""

import gc
import importlib
import os
import resource
import select
import signal
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import NoReturn

import pytest

OURS = ("benchmarks", "moonpool", "tests", "tools")
"""Packages that each run imports anew."""
ELSEWHERE = (
    "coverage",
    "cryptography.hazmat.primitives.ciphers.aead",
    "cryptography.x509",
    "google.protobuf.json_format",
    "grpc.aio",
    "grpc_health.v1.health_pb2",
    "grpc_reflection.v1alpha.reflection",
    "hypothesis.strategies",
    "jinja2.sandbox",
    "llguidance",
    "lmdb",
    "numpy",
    "prometheus_client",
    "pydantic_settings",
    "safetensors",
    "structlog",
    "tokenizers",
    "torch",
    "typer",
    "xxhash",
    "yaml",
)
"""What `prepare` imports; what is not installed is left out."""
SET_BY_TESTS = {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
"""Variables that `tests/conftest.py` sets before the libraries that read them are imported."""

_QUIETLY = ["--collect-only", "-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function"]


def prepare() -> None:
    """Import what tests need, pytest's plugins first: so pytest sees that it has imported them itself."""
    os.environ.update(SET_BY_TESTS)
    with tempfile.TemporaryDirectory() as empty, redirect_stdout(StringIO()):
        pytest.main([*_QUIETLY, "--rootdir", empty, empty])
    for name in ELSEWHERE:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the forks share these pages


def start(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], limits: Mapping[int, int]) -> int:
    """Start pytest in a folder, in a session of its own, and say nothing; return the process's number.

    Args:
        arguments: of pytest.
        folder: working folder, from which this repository's packages are imported.
        environment: all variables.
        limits: by resource (`resource.RLIMIT_CPU`, ...), the most.
    """
    if child := os.fork():
        return child
    try:
        _run(arguments, folder, environment, limits)
    finally:  # nothing of the caller's runs in the fork
        os._exit(70)


def wait(process: int, seconds: float) -> int | None:
    """Wait for a process's end, then end its group: what tests leave behind.

    Returns:
        The exit status, negative for a signal; None = the process was killed after `seconds`.
    """
    descriptor = os.pidfd_open(process)
    try:
        ends = select.poll()
        ends.register(descriptor, select.POLLIN)
        in_time = bool(ends.poll(1e3 * seconds))
        os.kill(process, signal.SIGKILL)
        with suppress(ProcessLookupError):  # the process was killed before it had a group
            os.killpg(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(status) if in_time else None


def _run(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], limits: Mapping[int, int]) -> NoReturn:
    os.setsid()
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({**environment, **SET_BY_TESTS})
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    tempfile.tempdir = None  # as the environment says
    for name in [module for module in sys.modules if module.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")  # which processes that tests spawn would import
    sys.path[:] = [
        str(folder),
        *(entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parents[1]),
    ]
    sys.argv[:] = ["pytest", *arguments]
    status = pytest.main(list(arguments))
    os._exit(status)  # what the caller wants done at its own end is not the fork's
