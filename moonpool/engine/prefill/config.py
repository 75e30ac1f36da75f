"""Flags of a prefill instance."""

from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from moonpool.base.config import OptionalAddress, stated
from moonpool.base.errors import ConfigError
from moonpool.engine.config import EngineConfig
from moonpool.engine.prefill.core.settings import PrefillSettings


class PrefillConfig(EngineConfig):
    """Computes prompts and streams their KV to decode instances."""

    flag_groups: ClassVar = {"compute": ("pipeline_parallel_size", "max_num_batched_tokens")}
    pipeline_parallel_size: int = Field(1, ge=1, description="pipeline stages, an engine process each")
    nnodes: int = Field(
        1,
        ge=1,
        description="hosts of this instance: the last nnodes - 1 pipeline stages are on other hosts, where "
        "`moonpool stage` runs one each (docs/deploy.md)",
    )
    stages_listen: OptionalAddress = Field(
        "", description="HOST:PORT at which the stages of other hosts join; needed with nnodes"
    )
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

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.nnodes > 1:
            self.check_hosts()
        return self

    def check_hosts(self) -> None:
        """Raise ConfigError if the instance cannot have stages on other hosts."""
        if self.engine != "real":
            raise ConfigError("nnodes", f"must be 1 with engine={self.engine}: emulated compute is on one host")
        if not self.stages_listen:
            raise ConfigError("stages_listen", f"must be given with nnodes={self.nnodes}: HOST:PORT for other hosts")
        if self.pipeline_parallel_size < self.nnodes:
            raise ConfigError(
                "pipeline_parallel_size",
                f"must be at least nnodes ({self.nnodes}), a stage for each host, not {self.pipeline_parallel_size}",
            )
        if self.imatrix:  # nothing would tell that another host has another file, and other KV
            raise ConfigError("imatrix", f"not with nnodes={self.nnodes}: stages of other hosts have no such file")

    @property
    def prefill_step_tokens(self) -> int:
        """Tokens of the largest step of prefill; 0 = as many as suit the device."""
        return self.max_num_batched_tokens

    @property
    def most_step_tokens(self) -> int:
        """See `EngineConfig`."""
        return self.max_num_batched_tokens
