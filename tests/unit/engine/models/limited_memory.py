"""Loads a checkpoint where the system gives little memory: `python -m tests.unit.engine.models.limited_memory`.

Arguments: the checkpoint, bytes that the process may take beside what it has, a file for the logits, and a folder for
mapped weights, or none. Status 3 if there is no room.
"""

import resource
import sys
from array import array
from pathlib import Path

import torch
from torch import Tensor

from moonpool.base.checkpoint import kv_layout, load_config
from moonpool.engine.models.batch import PackedBatch
from moonpool.engine.models.loader import load_stage
from moonpool.engine.models.stage import StageModel
from moonpool.engine.models.tensor_reader import KeptWeights

NO_ROOM, BLOCK = 3, 16


def logits_of(stage: StageModel) -> Tensor:
    """Return the logits of a short prompt."""
    group = kv_layout(stage.config, "float32", BLOCK).group(0)
    pool = torch.zeros(stage.config.num_layers, 2, group.kv_heads, group.planes, BLOCK, group.head_dim)
    batch = PackedBatch.build([(array("i", range(5, 25)).tobytes(), 0, [0, 1])], BLOCK)
    return stage.logits(stage.forward(batch.token_ids, batch, pool))


def main(path: str, room: str, out: str, *folder: str) -> int:
    """Load, compute, and write the logits; returns the status."""
    torch.set_num_threads(1)
    config = load_config(path)
    load_stage(path, config, torch.float32, 0, 1)  # takes what the first use of libraries takes
    status = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + int(room), taken + int(room)))
    kept = KeptWeights(file=Path(folder[0]) / "a" if folder else None)
    try:
        stage = load_stage(path, config, torch.float32, 0, config.num_layers, kept=kept)
    except (OSError, MemoryError, RuntimeError) as error:
        print(error)
        return NO_ROOM
    torch.save(logits_of(stage), out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
