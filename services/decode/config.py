"""Flags of a decode instance."""

from pydantic import Field

from moonpool.engine.instance import EngineConfig


class DecodeConfig(EngineConfig):
    """Settings of a decode instance: receives prompts' KV and generates tokens in a continuous batch."""

    max_batch: int = Field(64, ge=1, description="sequences in one step at most")
    lease_s: float = Field(60.0, gt=0, description="seconds without news after which a promise or transfer ends")
