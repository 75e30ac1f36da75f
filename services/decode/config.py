"""Flags of a decode instance."""

from typing import Literal

from pydantic import Field

from moonpool.engine.instance import EngineConfig


class DecodeConfig(EngineConfig):
    """Settings of a decode instance: receives prompts' KV and generates tokens in a continuous batch."""

    max_batch: int = Field(64, ge=1, description="sequences in one step at most")
    lease_s: float = Field(60.0, gt=0, description="seconds without news after which a promise or transfer ends")
    promise_s: float = Field(
        600.0,
        gt=0,
        description="seconds for which a promise is renewed at most while its conductor is there and nothing comes",
    )
    preemption: Literal["auto", "cache", "recompute", "swap", "store"] = Field(
        "auto",
        description="what becomes of a sequence's KV when blocks run out: it stays as cache until it is needed, is "
        "computed again, is copied to DRAM and back, or is read back from the kvstore; auto = as is predicted to be "
        "quickest",
    )
    swap_bytes: int = Field(256 << 20, ge=0, description="bytes of DRAM for KV that is copied out of the pool")
    load_timeout_s: float = Field(
        5.0, gt=0, description="seconds a load from a kvstore may take beyond what is predicted; then it is computed"
    )
    watermark: float = Field(0.01, ge=0, lt=1, description="share of the pool that admitting a request leaves free")
    step_tokens: int = Field(256, ge=1, description="tokens that are computed again in one step at most")
    assumed_answer_tokens: int = Field(
        256, ge=1, description="length that answers are expected to have until some have been seen"
    )
    grace_s: float = Field(
        5.0,
        ge=0,
        description="seconds for which a sequence runs on when its conductor is lost; then it gives up its KV. Room "
        "promised to a conductor that was lost before is kept as long",
    )
    log_ttl_s: float = Field(
        60.0,
        ge=0,
        description="seconds for which the tokens of such a sequence, and of sequences that have ended, are kept for "
        "clients that resume their streams",
    )
    log_bytes: int = Field(16 << 20, ge=0, description="bytes of all tokens that are kept; the oldest go first")
    preempt_every: int = Field(
        0,
        ge=0,
        description="diagnosis: preempt a running sequence in every so many steps; 0 = only when blocks run out",
    )

    @property
    def most_step_tokens(self) -> int:
        """See `EngineConfig`."""
        return self.max_batch + self.step_tokens
