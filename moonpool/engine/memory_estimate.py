"""What an engine process will hold in memory, from a checkpoint's headers alone: told before anything is loaded."""

import os
from dataclasses import dataclass

from moonpool.checkpoint import ModelConfig
from moonpool.checkpoint.tensor_info import Quantization
from moonpool.engine.footprint import lora_bytes, work_bytes
from moonpool.engine.messages import EngineSpec
from moonpool.kv.layout import KVLayout

PROGRAM_BYTES = 250 << 20
"""Python, torch and native kernels, once they have been used."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """One engine's bytes, in all its stages together."""

    program: int
    """Program and libraries of each stage."""
    weights: int
    kv: int
    work: int
    """At most, for the largest step."""
    loras: int = 0
    """As many and as large LoRA adapters as may be loaded."""

    @property
    def beside_kv(self) -> int:
        """All but the KV pool."""
        return self.program + self.weights + self.work + self.loras

    @property
    def idle(self) -> int:
        """What is held between steps."""
        return self.program + self.weights + self.kv + self.loras

    @property
    def all(self) -> int:
        """Everything, at most."""
        return self.idle + self.work

    def fits(self, free: int | None, engines: int = 1) -> bool:
        """Whether so many engines find room between steps in `free` bytes; None = any number of bytes."""
        return free is None or engines * self.idle <= free


def estimated_memory(
    model: ModelConfig,
    layout: KVLayout,
    blocks: int,
    dtype: str,
    *,
    weights: int,
    quantization: Quantization = "auto",
    threads: int = 0,
    loras: tuple[int, int] = (0, 0),
) -> MemoryEstimate:
    """Return what an engine of one stage on a CPU will hold.

    Args:
        model: the checkpoint's configuration.
        layout: arrangement of KV.
        blocks: blocks in the KV pool.
        dtype: element type for weights and computing.
        weights: bytes of the weights as they are held.
        quantization: how the weights are held.
        threads: compute threads; 0: all cores.
        loras: LoRA adapters that the engine holds at most, and their largest rank.
    """
    longest = model.max_position_embeddings
    engine = EngineSpec(
        "", dtype, layout, blocks,
        quantization=quantization, max_tokens=longest, max_loras=loras[0], max_lora_rank=loras[1],
    )  # fmt: skip
    work = work_bytes(model, engine, native=not model.decoder.not_plain, threads=threads or os.cpu_count() or 1)
    kv, adapters = layout.pool_bytes(blocks, engine.slots), lora_bytes(model, engine, 0, model.num_layers)
    return MemoryEstimate(PROGRAM_BYTES, weights, kv, work, adapters)
