"""Flags of a decode instance."""

from typing import ClassVar, Literal

from pydantic import Field

from moonpool.base.config import ByteSize
from moonpool.engine.setup import EngineConfig


class DecodeConfig(EngineConfig):
    """Receives prompts' KV and generates tokens in a continuous batch."""

    flag_groups: ClassVar = {"compute": ("max_num_seqs", "speculative", "draft_model", "num_speculative_tokens")}
    max_num_seqs: int = Field(64, ge=1, description="sequences in one step at most")
    lease_s: float = Field(60.0, gt=0, description="seconds without news after which a promise or transfer ends")
    promise_s: float = Field(
        600.0,
        gt=0,
        description=(
            "longest time in seconds that a reservation is renewed, while the conductor is connected but no KV comes"
        ),
    )
    preemption: Literal["auto", "recompute", "swap"] = Field(
        "auto",
        description=(
            "how a preempted sequence's KV comes back: recompute = computed again, as far as the pool has needed the "
            "blocks for others; swap = copied to DRAM and back; auto = the way predicted to be quicker"
        ),
    )
    swap_bytes: ByteSize = Field(256 << 20, ge=0, description="bytes of DRAM for KV that is copied out of the pool")
    watermark: float = Field(0.01, ge=0, lt=1, description="share of the pool that admitting a request leaves free")
    chunked_prefill_size: int = Field(
        256,
        ge=1,
        description="most tokens of preempted sequences and of prompt suffixes computed in one step",
    )
    assumed_answer_tokens: int = Field(
        256, ge=1, description="length that answers are expected to have, until some have been seen"
    )
    grace_s: float = Field(
        5.0,
        ge=0,
        description=(
            "seconds that a sequence runs on after the conductor was lost; then the sequence's KV is given up. "
            "Reservations of that conductor are kept as long"
        ),
    )
    log_ttl_s: float = Field(
        60.0,
        ge=0,
        description="seconds that the tokens of such a sequence, and of ended ones, are kept for clients that resume "
        "their streams",
    )
    log_bytes: ByteSize = Field(
        16 << 20, ge=0, description="bytes of all tokens kept for that; the oldest are dropped first"
    )
    speculative: Literal["auto", "ngram", "draft", "off"] = Field(
        "auto",
        description=(
            "whether steps check guesses of the next tokens, taken from what followed the same tokens earlier in the "
            "prompt or answer, or made by --draft-model: auto = where guesses were right often enough to pay; ngram = "
            "every guess from the text; draft = every guess of the draft model; off = none. Answers are the same"
        ),
    )
    draft_model: str = Field(
        "",
        description="a small model of the same vocabulary that guesses next tokens, given as --model is; on CPUs",
    )
    num_speculative_tokens: int = Field(8, ge=1, le=64, description="guessed tokens of one sequence in a step at most")
    preempt_every: int = Field(
        0,
        ge=0,
        description="for diagnosis: preempt a running sequence once in this many steps; 0 = only when blocks run out",
    )

    @property
    def most_step_tokens(self) -> int:
        """See `EngineConfig`."""
        return self.max_num_seqs + self.chunked_prefill_size

    @property
    def most_decoded(self) -> int:
        """See `EngineConfig`."""
        return self.max_num_seqs
