"""Where a stage runs, what the stage reports, and how the stage's process reports."""

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICES = ("cuda", "staged")
Figure = str | int | float | bool
Figures = MutableMapping[str, Figure]
"""A stage's findings, by name with unit; "skipped: WHY" for what did not run. Text of several lines is a table."""


class CheckError(Exception):
    """What a stage proves does not hold."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where a stage runs.

    Attributes:
        device: "cuda", or "staged": a CPU that behaves like a GPU.
        tiny: shapes and times as small as possible, so that each stage takes seconds on a CPU.
        out: folder for models and other files of this run. All stages share the folder; deleted at the end.
        limit_s: seconds after which this stage is ended.
    """

    device: str
    tiny: bool
    out: Path
    limit_s: float

    @property
    def on_gpu(self) -> bool:
        """Whether there is a real GPU."""
        return self.device == "cuda"

    @property
    def torch_device(self) -> "torch.device":
        """Torch's device of tensors."""
        import torch

        return torch.device("cuda" if self.on_gpu else "cpu")


Check = Callable[[Where, Figures], None]


def expect(holds: bool, what: str) -> None:
    """Fail the stage unless `holds`.

    Raises:
        CheckError: says `what`.
    """
    if not holds:
        raise CheckError(what)


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise CheckError("reached its limit")


def stage_main(name: str, check: Check) -> None:
    """Run a stage as a process: reads flags, prints one JSON line, exits with 1 if the check failed.

    All other output goes to stderr, also what processes of the stage print. Figures found before a failure are told.
    SIGTERM ends the check by an error, so that the stage cleans up.
    """
    parser = argparse.ArgumentParser(prog=f"tools.gpu_check.stages.{name}")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that take seconds on a CPU")
    parser.add_argument("--out", type=Path, required=True, help="folder for models and other files")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that the stage may take")
    options = parser.parse_args()
    told = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, _out_of_time)
    result = run_check(name, check, Where(options.device, options.tiny, options.out, options.limit))
    with os.fdopen(told, "w") as out:
        out.write(json.dumps(result) + "\n")
    sys.exit(0 if result["ok"] else 1)


def run_check(name: str, check: Check, where: Where) -> dict[str, object]:
    """Run a check and return the line: stage, ok, seconds, figures, error."""
    figures: dict[str, Figure] = {}
    began, error = time.monotonic(), None
    try:
        check(where, figures)
    except CheckError as failed:
        error = str(failed)
    except Exception as failed:
        traceback.print_exc()
        error = f"{type(failed).__name__}: {failed}"
    seconds = round(time.monotonic() - began, 2)
    return {"stage": name, "ok": error is None, "seconds": seconds, "figures": figures, "error": error}
