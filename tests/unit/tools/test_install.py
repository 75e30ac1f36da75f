"""Set-up: what pip says in few words, which build of torch is taken, and failures that are told."""

import importlib.util
import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tools import install

PIP_SAYS = """Collecting annotated-doc==0.0.7 (from -r requirements.lock (line 1))
  Using cached annotated_doc-0.0.7-py3-none-any.whl (5.3 kB)
Requirement already satisfied: anyio>=4 in ./lib (4.16.0)
Obtaining file:///moonpool/packages/moonpool-base
  Downloading torch-2.13.0-cp311.whl.metadata (29 kB)
  Downloading https://somewhere/torch-2.13.0-cp311.whl (190.1 MB)
Installing collected packages: annotated-doc, anyio, torch
"""


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_pip_is_told_in_few_words() -> None:
    said: list[str] = []
    reader = install.PipReader(said.append, of=66)
    for line in PIP_SAYS.splitlines():
        reader(line)
    assert list(dict.fromkeys(said)) == [
        "1 of 66, annotated-doc",
        "2 of 66, anyio",
        "3 of 66, moonpool-base",
        "torch (190.1 MB)",
        "unpacking 3",
    ]


def test_lines_of_a_pipe_and_of_a_terminal() -> None:
    """A pipe gets a line for each part and one now and then, a terminal one that is written over."""
    now = 0.0
    pipe, screen = io.StringIO(), Screen()
    displays = [install.Display(stream, lambda: now) for stream in (pipe, screen)]
    for second in range(40):
        now = float(second)
        for display in displays:
            display.show("packages" if second < 35 else "torch", str(second))
    for display in displays:
        display.say("ready")
    assert pipe.getvalue().splitlines() == ["packages: 0", "packages: 15", "packages: 30", "torch: 35", "ready"]
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().endswith("torch: 39, 4 s\r\x1b[Kready\n")


def test_a_failure_ends_with_what_the_command_said(tmp_path: Path) -> None:
    heard: list[str] = []
    with (tmp_path / "log").open("w") as log:
        program = "print('one'); print('two'); raise SystemExit(3)"
        with pytest.raises(install.InstallError, match=r"(?s)one\ntwo\nthe whole output: .*log"):
            install.follow([sys.executable, "-c", program], log, heard.append)
    assert (tmp_path / "log").read_text() == "one\ntwo\n"
    assert [line for line in heard if line] == ["one", "two"]


CPU, CUDA = {"torch": "2.13.0"}, {"torch": "2.13.0", "nvidia-cublas": "13.0"}
"""What pip would install: on AArch64, or where its index is PyTorch's; and elsewhere."""


@pytest.mark.parametrize(
    ("driver", "packages", "fails", "by"),
    [
        (True, CUDA, False, "pip"),
        (False, CPU, False, "pip"),
        (False, CUDA, False, "uv"),
        (False, CUDA, True, "pip"),
    ],
    ids=["a GPU", "pip has the build for CPUs", "pip has CUDA alone", "PyTorch's index cannot be reached"],
)
def test_which_torch_is_taken(
    driver: bool, packages: dict[str, str], fails: bool, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of our own stand for pip and uv, and note what they are asked for."""
    asked: list[Sequence[str]] = []

    def follow(command: Sequence[str], log: object, heard: Callable[[str], None]) -> None:
        asked.append(command)
        if fails and "--torch-backend" in command:
            raise install.InstallError("no network")

    report = json.dumps({"install": [{"metadata": {"name": n, "version": v}} for n, v in packages.items()]})
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\necho '{report}'\n")
    pip.chmod(0o755)
    driver_file = tmp_path / "version"
    if driver:
        driver_file.touch()
    monkeypatch.setattr(install, "DRIVERS", (driver_file,))
    monkeypatch.setattr(install, "PIP", (str(pip),))
    monkeypatch.setattr(install, "follow", follow)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = io.StringIO()
    install.install_torch(install.Display(told), io.StringIO())
    last = asked[-1]
    assert last[-1] == "torch"
    assert ("--torch-backend" in last) == (by == "uv")
    assert ("4 GB more" in told.getvalue()) == fails


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_full_disk_is_told_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(9, 9, 300_000_000))
    with pytest.raises(install.InstallError, match=r"has 0\.3 GB free, and 1\.0 GB are needed"):
        install.install("engine", install.Display(io.StringIO()), io.StringIO())
