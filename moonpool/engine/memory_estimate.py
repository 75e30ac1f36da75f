"""What an engine process will hold in memory, from a checkpoint's headers alone: told before anything is loaded.

`python -m benchmarks.memory` compares this with processes.
"""

import os
from dataclasses import dataclass

from moonpool.base.checkpoint import CheckpointReport
from moonpool.base.pictures.limits import ROWS_BYTES
from moonpool.engine.footprint import lora_bytes, tokenizer_bytes, work_bytes
from moonpool.engine.messages import EngineSpec

PROGRAM_BYTES = 280 << 20
"""Python, torch and native kernels, once they have been used: 250 MiB after imports, 30 more by loading."""
ENCODER_CODE_BYTES = 200 << 20
"""transformers, which has the encoders of pictures."""
_BOUND_BYTES = 12
"""Of each output of a head in bytes: what bounds its error."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """One engine's bytes, in all its stages together."""

    program: int
    """Program and libraries of each stage."""
    tokenizer: int
    """For structured answers."""
    weights: int
    kv: int
    work: int
    """At most, for the largest step."""
    loras: int = 0
    """As many and as large LoRA adapters as may be loaded."""
    head: int = 0
    """The output head as bytes, with which answers are computed on a CPU that multiplies bytes."""
    pictures: int = 0
    """The encoder of pictures with its code, and the encoded pictures that are kept."""
    reading: int = 0
    """While loading: the largest tensor, which is read before it is arranged."""

    @property
    def beside_kv(self) -> int:
        """All but the KV pool."""
        return self.idle - self.kv + self.work

    @property
    def idle(self) -> int:
        """What is held between steps."""
        return self.program + self.tokenizer + self.weights + self.head + self.kv + self.loras + self.pictures

    @property
    def all(self) -> int:
        """Everything, at most."""
        return self.idle + self.work

    @property
    def loading(self) -> int:
        """What is held at most while loading."""
        return self.program + self.weights + max(self.reading, self.head + self.tokenizer)

    def fits(self, free: int | None, engines: int = 1, *, shared: bool = False) -> bool:
        """Tell whether so many engines find room between steps in `free` bytes; None = any number of bytes.

        `shared`: they hold the weights once.
        """
        saved = (engines - 1) * self.weights if shared else 0
        return free is None or engines * self.idle - saved <= free


def estimated_memory(found: CheckpointReport, engine: EngineSpec) -> MemoryEstimate:
    """Return what an engine of one stage on a CPU will hold.

    Args:
        found: the checkpoint's sizes, of weights as the engine holds them.
        engine: the engine; its `threads` 0: all cores.
    """
    model, threads = found.config, engine.threads or os.cpu_count() or 1
    native = [not model.decoder.not_native(layer) for layer in range(model.num_layers)]
    work = max(work_bytes(model, engine, native=whole, threads=threads) for whole in set(native))
    return MemoryEstimate(
        PROGRAM_BYTES,
        tokenizer_bytes(model),
        found.weight_bytes,
        engine.layout.pool_bytes(engine.blocks, engine.slots),
        work,
        lora_bytes(model, engine, 0, model.num_layers),
        model.vocab_size * (model.hidden_size + _BOUND_BYTES) if engine.int8_head and model.generates else 0,
        found.picture_bytes + ROWS_BYTES + ENCODER_CODE_BYTES if found.picture_bytes else 0,
        found.reading_bytes,
    )
