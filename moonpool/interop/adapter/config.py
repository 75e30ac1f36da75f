"""Flags of an adapter."""

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from moonpool.base.config import PeerAddresses, ServiceConfig


class AdapterConfig(ServiceConfig):
    """Joins another make's engine, such as a vLLM server, to the cluster as a prefill and a decode instance."""

    flag_groups: ClassVar = {
        "cluster": ("conductor",),
        "engine": ("engine", "role", "kv_domain", "model", "dtype", "kvstores"),
    }
    conductor: PeerAddresses = Field(
        min_length=1, description="HOST:PORT of the conductor to join; of several conductors, all are joined"
    )
    kind: Literal["vllm", "sglang"] = Field("vllm", description="make of the engine")
    engine: str = Field(description="URL of the engine's HTTP server, http://HOST:PORT or https://HOST:PORT")
    role: Literal["both", "prefill", "decode"] = Field(
        "both", description="both = the engine computes prompts and answers; the others work in pairs"
    )
    kv_domain: str = Field(
        "", description="engines of one name move KV to each other; needed by the roles prefill and decode"
    )
    model: str = Field(
        description="checkpoint that the engine serves, the same as the conductor's: a folder, or an id on the Hugging "
        "Face hub"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="element type of the engine's weights and KV; auto = the checkpoint's own"
    )
    kvstores: bool = Field(
        False,
        description="the engine keeps KV in the cluster's kvstores by the connector of moonpool-kv, and what is there "
        "counts in placement; then all engines of the cluster do",
    )
    engine_api_key: str = Field("", description="API key that the engine's HTTP server wants; default: none")
    engine_ca: Path | None = Field(
        None, description="authorities that an https engine's certificate must come from (PEM); default: the system's"
    )
    lease_s: float = Field(
        10.0, gt=0, description="seconds for which memory is promised to a conductor that is not connected"
    )

    @model_validator(mode="after")
    def _check_domain(self) -> Self:
        if self.role != "both" and not self.kv_domain:
            raise ValueError("kv_domain: the roles prefill and decode need a name")
        return self

    @field_validator("engine")
    @classmethod
    def _check_url(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"must be http://HOST:PORT, got {value!r}")
        return value
