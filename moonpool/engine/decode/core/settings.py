"""Settings of the decode scheduler."""

from dataclasses import dataclass, field
from enum import Enum

from moonpool.base.scheduling.latency import Speeds
from moonpool.base.settings import setting
from moonpool.engine.scheduler.settings import PoolSettings

WATERMARK = 0.01
"""Share of the pool that an admission leaves free for the growth of running sequences (ADR 7)."""


class Preemption(Enum):
    """How a request gives up blocks when the pool is full."""

    AUTO = "auto"
    """The mode with the shorter predicted restore time."""
    RECOMPUTE = "recompute"
    """Full blocks stay in the pool as cache until they are needed; missing KV is computed again."""
    SWAP = "swap"
    """The blocks are copied to DRAM and back; as `RECOMPUTE` when there is no budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings(PoolSettings):
    """One decode instance's settings.

    Attributes:
        max_num_batched_tokens: most tokens in a step without answers.
        promise_s: seconds for which a promise is renewed at most, while the conductor is connected but no KV comes.
        speeds: the engine's speeds, as measured at the start.
        watermark_blocks: blocks left free by an admission.
        swap_blocks: most blocks swapped out.
        run_steps: most steps in a run (see `StartRun`).
        ahead_steps: sequences get surplus blocks for so many steps ahead, so a run need not end where a block does.
        draft_tokens: most guessed tokens that a step checks for a sequence; 0 = none.
        patience_steps: steps that a preempted request waits beside other tenants for a grant (`OverdueGrants`). A
            request that needs more than the tenant's block share waits longer.
        grant_steps: steps in a grant.
    """

    max_num_seqs: int = setting(64, "sequences in one step at most", ge=1)
    lease_s: float = setting(60.0, "seconds without news after which a promise or transfer ends", gt=0)
    promise_s: float = 600.0
    speeds: Speeds = field(default_factory=Speeds)
    preemption: Preemption = setting(  # noqa: RUF009  # a field
        Preemption.AUTO,
        "how a preempted sequence's KV comes back: recompute = computed again, where the pool has needed the blocks "
        "for others; swap = copied to DRAM and back; auto = the way predicted to be quicker",
    )
    watermark_blocks: int = 0
    chunked_prefill_size: int = setting(
        256,
        "most tokens of preempted sequences and of prompts computed in one step beside answers; with "
        "--computes-prompts the default is 64 on a CPU and 512 on a GPU",
        ge=1,
    )
    computes_prompts: bool = setting(
        False,
        "role both: also compute whole prompts, beside the answers; the conductor places prompts here that stay for "
        "their answers",
    )
    max_num_batched_tokens: int = 512
    num_continuous_decode_steps: int = setting(
        4,
        "with --computes-prompts: steps of answers between two steps that compute prompts beside answers; where a time "
        "between tokens was promised, the promise limits the prompts' part of each step instead",
        ge=0,
    )
    swap_blocks: int = 0
    assumed_answer_tokens: int = setting(
        256, "length that answers are expected to have, until some have been seen", ge=1
    )
    run_steps: int = 1
    ahead_steps: int = 0
    grace_s: float = setting(
        5.0,
        "seconds that a sequence runs on after the conductor was lost; then the sequence's KV is given up. "
        "Reservations of that conductor are kept as long",
        ge=0,
    )
    log_ttl_s: float = setting(
        60.0,
        "seconds that the tokens of such a sequence, and of ended ones, are kept for clients that resume their streams",
        ge=0,
    )
    log_bytes: int = setting(16 << 20, "bytes of all tokens kept for that; the oldest are dropped first", ge=0)
    preempt_every: int = setting(
        0, "for diagnosis: preempt a running sequence once in this many steps; 0 = only when blocks run out", ge=0
    )
    patience_steps: int = 64
    grant_steps: int = 64
    draft_tokens: int = 0
