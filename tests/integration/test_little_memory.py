"""Services whose processes may map little memory (`ulimit -v`): they serve and end well, or say what was refused."""

import shutil
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from moonpool.base.bundled import model_dir
from moonpool.base.fork_server import execute
from moonpool.cli.stack import ServiceProcess

READY_S = 120.0
MIB = 1 << 20
MODEL = ("--model", str(model_dir()))
SERVICES: Sequence[tuple[str, int, Sequence[str], str]] = (
    ("kvstore", 700, ("--data-dir", "data"), "no memory for the records' database"),
    ("conductor", 700, MODEL, ""),
    ("gateway", 700, (*MODEL, "--conductor", "127.0.0.1:1"), ""),
)
"""Kind, MiB of addresses that its process may have, flags, and what its log says."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mib", "flags", "said"), SERVICES, ids=[each[0] for each in SERVICES])
def test_a_service_with_little_memory_serves_and_ends_well(
    kind: str, mib: int, flags: Sequence[str], said: str, tmp_path: Path
) -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("limits need the prlimit command (util-linux)")
    limited = partial(execute, python=["prlimit", f"--as={mib * MIB}", sys.executable])
    flags = [str(tmp_path / flag) if flag == "data" else flag for flag in flags]
    log = tmp_path / "log"
    service = ServiceProcess(kind, "x-0", ["--id", "x-0", "--listen", "127.0.0.1:0", *flags], log, launcher=limited)
    try:
        service.wait_ready(READY_S)
        service.signal(signal.SIGTERM)
        assert service.wait(READY_S) == 0
    finally:
        service.signal(signal.SIGKILL)
    assert said in log.read_text()
    assert "Traceback" not in log.read_text()
