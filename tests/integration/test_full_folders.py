"""Services whose logs nobody can keep."""

import signal
from pathlib import Path

import pytest

from moonpool.base.bundled import model_dir
from moonpool.base.fork_server import start_service
from moonpool.cli.stack import ServiceProcess

READY_S = 60.0


@pytest.mark.parametrize(
    ("kind", "flags"), [("kvstore", ["--data-dir", "data"]), ("conductor", ["--model", str(model_dir())])]
)
def test_a_service_whose_log_cannot_be_written_serves_and_ends_well(
    kind: str, flags: list[str], tmp_path: Path
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    flags = [str(tmp_path / flag) if flag == "data" else flag for flag in flags]
    arguments = ["--id", f"{kind}-0", "--listen", "127.0.0.1:0", "--log-level", "debug", *flags]
    service = ServiceProcess(kind, f"{kind}-0", arguments, full, launcher=start_service)
    try:
        service.wait_ready(READY_S)
        service.signal(signal.SIGTERM)
        assert service.wait(READY_S) == 0
    finally:
        service.signal(signal.SIGKILL)
