"""Programs that tests run to their end, forked where fork servers are in use: the imports are done once."""

import os
import subprocess
import tempfile
from collections.abc import Mapping

from moonpool.base.fork_server import Program, start_service

ENGINES = ("moonpool.engine.prefill", "moonpool.engine.decode")
"""Programs that start an engine."""


def run(
    module: str, *arguments: str, timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m MODULE ARGUMENTS`, with standard input from nowhere; returns status and output.

    Raises:
        TimeoutExpired: the program did not end in time; it was killed.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        own = dict(os.environ if environment is None else environment)
        program = Program(module, arguments, own, out.fileno(), err.fileno(), starts_engine=module in ENGINES)
        child = start_service(program)
        try:
            status = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess([module, *arguments], status, *said)
