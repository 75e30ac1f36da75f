"""Flags of a prefill instance."""

from typing import ClassVar

from pydantic import Field

from moonpool.base.config import stated
from moonpool.engine.config import EngineConfig
from moonpool.engine.prefill.core.settings import PrefillSettings


class PrefillConfig(EngineConfig):
    """Computes prompts and streams their KV to decode instances."""

    flag_groups: ClassVar = {"compute": ("pipeline_parallel_size", "max_num_batched_tokens")}
    pipeline_parallel_size: int = Field(1, ge=1, description="pipeline stages, an engine process each")
    max_num_batched_tokens: int = Field(
        0,
        ge=0,
        description="prompt tokens computed in one step at most; 0 = 512; on a GPU up to 8192, by its memory and size",
    )
    max_queue: int = stated(PrefillSettings, "max_queue")
    load_timeout_s: float = stated(PrefillSettings, "load_timeout_s")
    verdict_timeout_s: float = stated(PrefillSettings, "verdict_timeout_s")

    @property
    def most_step_tokens(self) -> int:
        """See `EngineConfig`."""
        return self.max_num_batched_tokens
