"""Settings of the decode scheduler."""

from dataclasses import field
from enum import Enum

from moonpool.frozen import frozen
from moonpool.scheduling.latency import Speeds


class Preemption(Enum):
    """How a sequence gives its blocks up when they run out."""

    AUTO = "auto"
    """The way by which it is predicted to be back soonest."""
    CACHE = "cache"
    """Full blocks stay in the pool as cache as long as they are not needed; what is gone is computed again."""
    RECOMPUTE = "recompute"
    """Everything is computed again."""
    SWAP = "swap"
    """The blocks are copied to DRAM and back; as `CACHE` when there is no room."""
    STORE = "store"
    """Full blocks are read back from a kvstore, which is given those that it lacks; as `CACHE` without a store."""


@frozen
class DecodeSettings:
    """Settings of one decode instance.

    Attributes:
        num_blocks: blocks of the pool.
        block_tokens: tokens in a block.
        block_bytes: bytes of KV in a block, all layers.
        max_batch: sequences in one step at most.
        lease_s: seconds without news after which a promise or transfer ends.
        promise_s: seconds after which a promise that nobody took up ends, however often it was renewed.
        speeds: of the engine, as measured at its start.
        preemption: how blocks are taken back from sequences.
        watermark_blocks: blocks left free by an admission.
        load_timeout_s: seconds that a load from a kvstore may take beyond what is predicted.
        step_tokens: tokens computed again in one step at most.
        swap_blocks: blocks that may be swapped out.
        assumed_answer_tokens: length that answers are expected to have until some have ended.
        run_steps: steps that the engine may take in one run at most (see `Run`).
        ahead_steps: sequences get blocks for so many steps of a run that nobody is expected to need, so that runs need
            not end where blocks do.
        grace_s: seconds for which a sequence runs on without a conductor, and a promise is kept for one that has no
            stream.
        log_ttl_s: seconds for which it is kept then, as is what ended ones have said.
        log_bytes: bytes of all that is kept.
        preempt_every: a diagnosis: a member of the batch is preempted in every so many steps; 0 = never.
    """

    num_blocks: int
    block_tokens: int
    block_bytes: int
    max_batch: int
    lease_s: float
    promise_s: float = 600.0
    speeds: Speeds = field(default_factory=Speeds)
    preemption: Preemption = Preemption.AUTO
    watermark_blocks: int = 0
    load_timeout_s: float = 5.0
    step_tokens: int = 256
    swap_blocks: int = 0
    assumed_answer_tokens: int = 256
    run_steps: int = 1
    ahead_steps: int = 0
    grace_s: float = 5.0
    log_ttl_s: float = 60.0
    log_bytes: int = 16 << 20
    preempt_every: int = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-tokens // self.block_tokens)
