"""The conductor's settings."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from moonpool.config import ListenAddress, read_mapping
from moonpool.drive.config import CoreServiceConfig
from moonpool.errors import ConfigError, InvalidRequest
from moonpool.kv.selection import check_ttls
from moonpool.rpc.client_port import ClientPortConfig
from services.conductor.core.admission import Admission
from services.conductor.core.policies import DEFAULT, POLICIES
from services.conductor.core.roles import RoleLimits
from services.conductor.core.stores import MAX_REPLICAS


def _positive(ttl_s: dict[str, float]) -> dict[str, float]:
    try:
        return check_ttls(ttl_s, "")
    except InvalidRequest as error:
        raise ValueError(str(error)) from None


class ConductorConfig(CoreServiceConfig, ClientPortConfig):
    """Takes requests, places them on instances, and keeps the state of the cluster."""

    listen: ListenAddress = Field(
        "127.0.0.1:50051",
        description="HOST:PORT to listen at; port 0 takes any free port, which `ready: HOST:PORT` tells",
    )
    model: str = Field(
        description="checkpoint folder, GGUF file or Hugging Face hub id whose tokenizer and configuration are used; "
        "the name of folder or file is the model's name"
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="sampling of requests that do not say it: auto = what the checkpoint's generation_config.json "
        "suggests, if anything; none = everything neutral (temperature 1); docs/sampling.md",
    )
    policy: str = Field(
        DEFAULT,
        description=f"how the prefill instance of a request is chosen: one of {', '.join(POLICIES)}, the name of an "
        "installed policy, or MODULE:OBJECT; docs/policies.md",
    )
    policy_seed: int | None = Field(
        None,
        ge=0,
        description="seed of the policy's draws; default: made of the conductor's name, so those side by side differ",
    )
    decode_prompt_tokens: int = Field(
        0,
        ge=0,
        description="where a decode instance holds all of a prompt but so many tokens at most, it computes them itself "
        "when that is predicted to be quicker, what it costs others counted; 0 = never; docs/placement.md",
    )
    balancing_threshold: float = Field(
        1.0,
        ge=0,
        description="a prefix elsewhere is considered when it is this many times longer than the prefill "
        "instance's own (the paper's kvcache_balancing_threshold); it is used when loading is predicted cheaper",
    )
    peers: bool = Field(
        True,
        description="prefixes are loaded from the pools of other prefill and decode instances too, not only from "
        "kvstores; docs/placement.md",
    )
    copy_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of an instance's link that copies of hot prefixes may take, out of it and into it; "
        "0 = none are ordered, and prefixes spread by being loaded alone",
    )
    kvstore_replicas: int = Field(
        1,
        ge=1,
        le=MAX_REPLICAS,
        description="kvstores that hold a copy of each prefix, if there are so many; with 2, the loss of one "
        "loses no KV and a hot prefix is read from two",
    )
    max_queue: int = Field(
        1024,
        ge=1,
        description="requests served at once; further ones are refused as overloaded, but for those of tenants that "
        "have less than their share of them, up to twice as many",
    )
    heartbeat_s: float = Field(
        1.0,
        gt=0,
        le=60,
        description="an instance that is silent for three times so many seconds is lost, and one that is silent for "
        "0.4 of it and does not answer within another 0.4 either; four load reports come in it",
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="seconds a request may take when the client sets no deadline"
    )
    reserve_timeout_s: float = Field(5.0, gt=0, description="seconds a decode instance may take to promise room")
    slow_factor: float = Field(
        6.0,
        ge=0,
        description="an engine that has become so many times slower than usual, by what it measures itself, gets "
        "nothing new and is rid of what it has, as long as another one is well; 0 = it is used as it is",
    )
    retries: int = Field(
        3,
        ge=0,
        description="times a request is placed again after an instance or a transfer failed; where frames were "
        "damaged also more often, within --recovery-s of the first",
    )
    recovery_s: float = Field(
        15.0, ge=0, description="seconds a request whose instance failed waits for another one to appear"
    )
    admission: Admission = Field(
        Admission.PREDICTIVE,
        description="requests that are refused before anything is computed for them: `predictive` those that will miss "
        "their TTFT or TBT limit by the load that decode is expected to have when their prompt is computed, `early` by "
        "the load of now, `none` none; docs/overload.md",
    )
    room_wait_s: float = Field(
        30.0,
        ge=0,
        description="seconds a request may wait for room at decode, within its TTFT limit, before it is refused",
    )
    queue_deadline_s: float = Field(
        0.0,
        ge=0,
        le=86400,
        description="seconds a request waits for a placement that keeps its limits, instead of being refused at once; "
        "they do not count in its TTFT limit, and also limit waiting for room. 0 = it is refused; a request may say "
        "otherwise (slo.queue_s)",
    )
    max_queued: int = Field(1024, ge=1, description="requests that wait so at once; of more, some are refused")
    max_queued_bytes: int = Field(64 << 20, ge=1 << 10, description="bytes of their prompts' tokens, 4 each")
    tenant_weights: Annotated[dict[str, float], BeforeValidator(read_mapping)] = Field(
        default_factory=dict,
        description="shares of tenants where several wait for the same, as YAML or JSON: {NAME: WEIGHT}; NAME '*' is "
        "for each tenant without one, whose weight is 1 otherwise",
    )
    adopt_wait_s: float = Field(
        5.0,
        ge=0,
        description="seconds a resumed request waits for the decode instance where it ran to join this conductor, "
        "before it is placed anew",
    )
    swap_roles: bool = Field(
        False,
        description="engine instances that can (--either-role) change between prefill and decode by the pressure of "
        "the two; docs/roles.md",
    )
    role_ttft_s: float = Field(
        10.0, gt=0, description="seconds of waiting prompts that count as much as prefill that is busy all the time"
    )
    role_tbt_s: float = Field(0.1, gt=0, description="seconds of a step at which a decode instance counts as full")
    role_ratio: float = Field(
        1.5, gt=1, description="an instance changes its role where the other pool's pressure is so many times as high"
    )
    role_hold_s: float = Field(60.0, gt=0, description="seconds for which it must have been so")
    role_dwell_s: float = Field(300.0, ge=0, description="seconds for which an instance stays what it has become")
    tenant_ttl_s: Annotated[dict[str, float], BeforeValidator(read_mapping), AfterValidator(_positive)] = Field(
        default_factory=dict,
        description="seconds for which KV may stay in any one place, by tenant, as YAML or JSON: {NAME: SECONDS}; NAME "
        "'*' is for each tenant that is not named; default: as long as there is room",
    )
    record_trace: Path | None = Field(
        None,
        description="file for a trace of all requests that the simulator reads: times, lengths and keyed hashes of "
        "blocks, no text; default: none is written",
    )
    max_index_keys: int = Field(
        4_000_000, ge=1, description="KV blocks remembered of all instances together; about 250 bytes of memory each"
    )
    explain_history: int = Field(4096, ge=1, description="requests whose placement `Explain` remembers")
    tokenizer_threads: int = Field(2, ge=1, description="threads that tokenise prompts")

    @model_validator(mode="after")
    def _weights_are_shares(self) -> Self:
        for name, weight in self.tenant_weights.items():
            if not (isfinite(weight) and weight > 0):
                raise ConfigError(f"tenant_weights.{name}", f"must be above 0, is {weight}")
        return self

    @property
    def role_limits(self) -> RoleLimits:
        """When instances change their roles."""
        return RoleLimits(
            self.swap_roles, self.role_ttft_s, self.role_tbt_s, self.role_ratio, self.role_hold_s, self.role_dwell_s
        )
