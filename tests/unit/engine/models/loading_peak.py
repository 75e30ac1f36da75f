"""Tells how much memory loading takes at most: `python -m tests.unit.engine.models.loading_peak FOLDER MAPPED`.

Prints what a stage in memory, then one in a file of the folder MAPPED, took beside what the process had, in bytes of
resident memory. Status 3 if the system does not forget a peak.
"""

import sys
from pathlib import Path

import torch

from moonpool.base.checkpoint import load_config
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.tensor_reader import KeptWeights

CANNOT = 3


def resident(key: str) -> int:
    """Bytes of the process, by a key of the system."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def main(path: str, mapped: str) -> int:
    """Load twice; returns the status."""
    torch.set_num_threads(1)
    config = load_config(path)
    load_stage(path, config, torch.bfloat16, 0, 1)  # takes what the first use of libraries takes
    for kept in (KeptWeights(), KeptWeights(file=Path(mapped) / "a")):
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return CANNOT
        before = resident("VmRSS")
        stage = load_stage(path, config, torch.bfloat16, 0, config.num_layers, kept=kept)
        print(resident("VmHWM") - before)
        del stage
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
