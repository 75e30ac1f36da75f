"""The processes of a local stack."""

import os
from pathlib import Path

import pytest

from moonpool.cli.stack import ServiceProcess


def test_a_service_is_in_our_session_and_in_a_group_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that cores are shared fairly between services, and Ctrl-C reaches none of them."""
    package = tmp_path / "services"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "fake.py").write_text("import os\nprint('ready:', os.getsid(0), os.getpgrp(), flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    service = ServiceProcess("fake", "fake-0", [], tmp_path / "log")
    assert service.wait_ready(60) == f"{os.getsid(0)} {service.pid}"
    assert service.wait(60) == 0
