"""What is carried to a machine without a network."""

from pathlib import Path

import pytest

from tools.gpu_check.carry import WHEELS, command, pins
from tools.gpu_check.test_runs import ROOT


def test_every_wheel_has_an_exact_version() -> None:
    wanted = pins(WHEELS, (ROOT / "constraints.txt").read_text())
    assert len(wanted) == len(WHEELS)
    assert all("==" in it for it in wanted)


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
