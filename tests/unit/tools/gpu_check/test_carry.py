"""What is carried to a machine without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu_check.carry import LINES, WHEELS, command, pins
from tools.gpu_check.test_runs import ROOT


def test_every_wheel_has_an_exact_version() -> None:
    wanted = pins(WHEELS, (ROOT / "constraints.txt").read_text())
    assert len(wanted) == len(WHEELS)
    assert all("==" in package for package in wanted)


def test_a_package_without_a_version_is_named() -> None:
    with pytest.raises(ValueError, match=r"no exact version of torch, absent"):
        pins(["Pydantic_Core", "torch", "absent"], "torch>=2.11,<2.14\npydantic-core==2.5\n")
    assert pins(["Pydantic_Core"], "pydantic-core==2.5\n") == ["Pydantic_Core==2.5"]


def test_wheels_are_those_of_the_machine(tmp_path: Path) -> None:
    """For Python 3.12, and nothing that must be built or that is not named."""
    call = command(tmp_path, ["lmdb==3.0.0"])
    assert "--no-deps" in call
    assert "--only-binary=:all:" in call
    assert call[call.index("--python-version") + 1] == "3.12"
    assert "manylinux_2_31_x86_64" in call
    assert call[-1] == "lmdb==3.0.0"
    assert not any("://" in part for part in call), "the registry is pip's own setting"


MACHINE = os.environ.get("GPU_CHECK_PYTHON", "")
"""A Python 3.12 with the packages that a machine with a GPU has, and no others (docs/gpu_check.md)."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not MACHINE, reason="GPU_CHECK_PYTHON names no Python with the packages of a GPU machine")
def test_the_check_runs_without_a_network_on_what_is_carried(tmp_path: Path) -> None:
    """Wheels are fetched, installed by the lines that the command prints, and imported by every stage."""
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    fetch = [sys.executable, "-m", "tools.gpu_check.carry", "--into", str(wheels)]
    subprocess.run(fetch, cwd=ROOT, check=True, timeout=600)
    lines = LINES.format(folder=wheels).replace("/tmp/site", str(tmp_path / "site"))
    alone = subprocess.run(["unshare", "-n", "true"], check=False).returncode == 0
    if not alone:
        print("no network namespace may be made here: the network is not off")
    script = tmp_path / "machine.sh"
    check = f"python3 -m tools.gpu_check --device staged --tiny --out {out}"
    script.write_text("\n".join(["set -eu", *[_LOOPBACK] * alone, lines, check]))
    environment = {**os.environ, "PATH": f"{Path(MACHINE).parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    run = [*["unshare", "-n"] * alone, "bash", str(script)]
    done = subprocess.run(run, cwd=ROOT, env=environment, timeout=1500, check=False)
    assert done.returncode == 0, (out / "results.md").read_text()


_LOOPBACK = """python3 -c 'import fcntl, socket, struct
up = struct.pack("16sh", b"lo", 0x41)
fcntl.ioctl(socket.socket(), 0x8914, up)'"""
"""Services of one machine still speak to each other: SIOCSIFFLAGS, up and running."""
