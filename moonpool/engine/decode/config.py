"""Flags of a decode instance."""

from typing import ClassVar, Literal

from pydantic import Field

from moonpool.base.config import ByteSize, stated
from moonpool.engine.config import EngineConfig
from moonpool.engine.decode.core.settings import DecodeSettings, Preemption
from moonpool.engine.interface import Engine

CHUNK_ON_CPU, CHUNK_ON_GPU = 64, 512
"""Tokens of whole prompts beside answers in a step: on a CPU, larger chunks make answers stutter and save nothing."""


class DecodeConfig(EngineConfig):
    """Receives prompts' KV and generates tokens in a continuous batch."""

    flag_groups: ClassVar = {
        "compute": (
            "max_num_seqs",
            "computes_prompts",
            "max_num_batched_tokens",
            "speculative",
            "draft_model",
            "num_speculative_tokens",
        )
    }
    max_num_seqs: int = stated(DecodeSettings, "max_num_seqs")
    lease_s: float = stated(DecodeSettings, "lease_s")
    preemption: Preemption = stated(DecodeSettings, "preemption")
    swap_bytes: ByteSize = Field(256 << 20, ge=0, description="bytes of DRAM for KV that is copied out of the pool")
    computes_prompts: bool = stated(DecodeSettings, "computes_prompts")
    max_num_batched_tokens: int = Field(
        0,
        ge=0,
        description="with --computes-prompts: tokens computed in one step without answers at most; 0 = 512; on a GPU "
        "up to 8192, by its memory and size",
    )
    num_continuous_decode_steps: int = stated(DecodeSettings, "num_continuous_decode_steps")
    chunked_prefill_size: int = stated(DecodeSettings, "chunked_prefill_size")
    load_timeout_s: float = stated(DecodeSettings, "load_timeout_s")
    assumed_answer_tokens: int = stated(DecodeSettings, "assumed_answer_tokens")
    grace_s: float = stated(DecodeSettings, "grace_s")
    log_ttl_s: float = stated(DecodeSettings, "log_ttl_s")
    log_bytes: ByteSize = stated(DecodeSettings, "log_bytes")
    speculative: Literal["auto", "ngram", "suffix", "draft", "off"] = Field(
        "auto",
        description=(
            "whether steps check guesses of the next tokens, taken from what followed the same tokens earlier in the "
            "prompt or answer, or in the tenant's recent answers, or made by --draft-model: auto = where guesses were "
            "right often enough to pay; ngram = every guess from the text; suffix = also from recent answers; draft = "
            "every guess of the draft model; off = none. Answers are the same"
        ),
    )
    draft_model: str = Field(
        "",
        description="a small model of the same vocabulary that guesses next tokens, given as --model is; on CPUs",
    )
    num_speculative_tokens: int = Field(8, ge=1, le=64, description="guessed tokens of one sequence in a step at most")
    suffix_decoding_max_cached_tokens: int = Field(
        1 << 18,
        ge=0,
        le=1 << 26,
        description="with --speculative auto or suffix: tokens of ended answers that are kept to guess from, at most; "
        "about 40 bytes of memory each; the oldest go first; 0 = none are kept",
    )
    preempt_every: int = stated(DecodeSettings, "preempt_every")

    @property
    def recent_tokens(self) -> int:
        """Tokens of recent answers that are looked in for guesses, at most; 0 = none."""
        return self.suffix_decoding_max_cached_tokens if self.speculative in ("auto", "suffix") else 0

    @property
    def most_step_tokens(self) -> int:
        """See `EngineConfig`."""
        given = self.max_num_batched_tokens
        if not self.computes_prompts or given:
            return max(given * self.computes_prompts, self.least_step_tokens)
        return 0

    @property
    def least_step_tokens(self) -> int:
        """See `EngineConfig`."""
        chunk = CHUNK_ON_CPU if self._chunk_suits_device else self.chunked_prefill_size
        return self.max_num_seqs + chunk

    @property
    def _chunk_suits_device(self) -> bool:
        """Whether the device decides how many tokens of prompts are computed beside answers."""
        return self.computes_prompts and "chunked_prefill_size" not in self.model_fields_set

    def chunk_tokens(self, step_tokens: int) -> int:
        """Return `chunked_prefill_size`, with a default for whole prompts; steps have at most `step_tokens` tokens."""
        if not self._chunk_suits_device:
            return self.chunked_prefill_size
        suits = CHUNK_ON_CPU if self.device.startswith("cpu") and self.engine == "real" else CHUNK_ON_GPU
        return min(suits, step_tokens - self.max_num_seqs)

    def told_step_tokens(self, engine: Engine) -> int:
        """Return the most tokens in a step with prompts, for the conductor; 0 where no whole prompts are computed."""
        return engine.max_num_batched_tokens if self.computes_prompts else 0

    @property
    def takes_prompts(self) -> bool:
        """See `EngineConfig`."""
        return self.computes_prompts

    @property
    def most_decoded(self) -> int:
        """See `EngineConfig`."""
        return self.max_num_seqs
