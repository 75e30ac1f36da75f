"""Flags of a prefill instance."""

from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from moonpool.base.config import stated
from moonpool.base.errors import ConfigError
from moonpool.engine.config import EngineConfig
from moonpool.engine.prefill.core.settings import PrefillSettings


class PrefillConfig(EngineConfig):
    """Computes prompts and streams their KV to decode instances."""

    flag_groups: ClassVar = {"compute": ("pipeline_parallel_size", "max_num_batched_tokens")}
    max_num_batched_tokens: int = Field(
        0,
        ge=0,
        description="prompt tokens computed in one step at most; auto or 0 = 512; on a GPU up to 8192, by its memory "
        "and size; a prompt alone in a pipeline is divided further, by the measured cost of a step",
    )
    max_queue: int = stated(PrefillSettings, "max_queue")
    load_timeout_s: float = stated(PrefillSettings, "load_timeout_s")
    verdict_timeout_s: float = stated(PrefillSettings, "verdict_timeout_s")

    @field_validator("max_num_batched_tokens", mode="before")
    @classmethod
    def _auto(cls, given: object) -> object:
        return 0 if given == "auto" else given

    @model_validator(mode="after")
    def _check_step(self) -> Self:
        if 0 < self.prefill_step_tokens < self.block_size:
            reason = f"must be at least one block ({self.block_size} tokens), not {self.prefill_step_tokens}"
            raise ConfigError("max_num_batched_tokens", reason)
        return self

    @property
    def prefill_step_tokens(self) -> int:
        """Tokens of the largest step of prefill; 0 = as many as suit the device."""
        return self.max_num_batched_tokens

    @property
    def most_step_tokens(self) -> int:
        """See `EngineConfig`."""
        return self.max_num_batched_tokens
