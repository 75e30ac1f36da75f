"""Flags of a decode instance."""

from typing import ClassVar, Literal

from pydantic import Field

from moonpool.base.config import ByteSize, stated
from moonpool.engine.config import EngineConfig
from moonpool.engine.decode.core.settings import DecodeSettings, Preemption


class DecodeConfig(EngineConfig):
    """Receives prompts' KV and generates tokens in a continuous batch."""

    flag_groups: ClassVar = {"compute": ("max_num_seqs", "speculative", "draft_model", "num_speculative_tokens")}
    max_num_seqs: int = stated(DecodeSettings, "max_num_seqs")
    lease_s: float = stated(DecodeSettings, "lease_s")
    preemption: Preemption = stated(DecodeSettings, "preemption")
    swap_bytes: ByteSize = Field(256 << 20, ge=0, description="bytes of DRAM for KV that is copied out of the pool")
    chunked_prefill_size: int = stated(DecodeSettings, "chunked_prefill_size")
    assumed_answer_tokens: int = stated(DecodeSettings, "assumed_answer_tokens")
    grace_s: float = stated(DecodeSettings, "grace_s")
    log_ttl_s: float = stated(DecodeSettings, "log_ttl_s")
    log_bytes: ByteSize = stated(DecodeSettings, "log_bytes")
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
    preempt_every: int = stated(DecodeSettings, "preempt_every")

    @property
    def most_step_tokens(self) -> int:
        """See `EngineConfig`."""
        return self.max_num_seqs + self.chunked_prefill_size

    @property
    def most_decoded(self) -> int:
        """See `EngineConfig`."""
        return self.max_num_seqs
