"""The conductor's settings."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moonpool.base.config import Assignments, ListenAddress, OptionalAddress, read_mapping, stated
from moonpool.base.errors import ConfigError, InvalidRequest
from moonpool.base.kv.delete_kv import check_ttls
from moonpool.base.rpc.api_keys import ClientPortConfig
from moonpool.base.runtime.driver import CoreServiceConfig
from moonpool.conductor.core.admission import AdmissionMode
from moonpool.conductor.core.routing import RoutingConfig
from moonpool.conductor.core.scheduler import SchedulerLimits
from moonpool.conductor.core.tenant_activity import TenantBudget
from moonpool.conductor.placement.decode_policies import DECODE_POLICIES, DEFAULT_DECODE_POLICY
from moonpool.conductor.placement.policies import DEFAULT_POLICY, POLICIES


def _positive(ttl_s: dict[str, float]) -> dict[str, float]:
    try:
        return check_ttls(ttl_s, "")
    except InvalidRequest as error:
        raise ValueError(str(error)) from None


class TenantBudgetSetting(BaseModel):
    """What a tenant may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    rpm: int | None = Field(None, ge=1)
    tpm: int | None = Field(None, ge=1)
    concurrent: int | None = Field(None, ge=1)


class ConductorConfig(CoreServiceConfig, ClientPortConfig):
    """Takes requests, places them on instances, and keeps the state of the cluster."""

    flag_groups: ClassVar = {
        "model": ("model", "chat_template", "generation_config", "lora_modules"),
        "placement": ("policy", "kvstore_replicas"),
        "overload": ("admission", "queue_deadline_s"),
    }
    listen: ListenAddress = Field(
        "127.0.0.1:50051",
        description="HOST:PORT to listen at; port 0 takes any free port, which `ready: HOST:PORT` tells",
    )
    model: str = Field(
        description=(
            "checkpoint folder, GGUF file or Hugging Face hub id for tokenizer and configuration; the folder's or "
            "file's name is the model's name"
        )
    )
    chat_template: Path | None = Field(
        None,
        description="file with a chat template (Jinja) in place of the checkpoint's; give the file to the gateway, too",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description=(
            "sampling for requests that do not set sampling: auto = as suggested in the checkpoint's "
            "generation_config.json, if present; none = neutral (temperature 1); docs/sampling.md"
        ),
    )
    lora_modules: Assignments = Field(
        (),
        description="LoRA adapters that requests may ask for as model, as NAME=FOLDER, in PEFT's format; the engines "
        "need max_loras (docs/lora.md)",
    )
    lora_folder: Path | None = Field(
        None,
        description="folder in which and below which LoRA adapters may be loaded at run time, the same on all "
        "machines; default: none may be loaded at run time",
    )
    policy: str = Field(
        DEFAULT_POLICY,
        description=f"how the prefill instance of a request is chosen: one of {', '.join(POLICIES)}, the name of an "
        "installed policy, or MODULE:OBJECT; docs/extend/placement_policy.md",
    )
    decode_policy: str = Field(
        DEFAULT_DECODE_POLICY,
        description=f"how the decode instance is chosen: one of {', '.join(DECODE_POLICIES)}, the name of an installed "
        "policy, or MODULE:OBJECT; docs/extend/placement_policy.md",
    )
    shadow_policy: str = Field(
        "",
        description="a policy for prefill that decides beside --policy without acting: metrics tell how often both "
        "agree, and the predicted difference; empty = none; docs/extend/placement_policy.md",
    )
    policy_seed: int | None = Field(
        None,
        ge=0,
        description="seed of the policy's random draws; default: derived from the conductor's name, so that "
        "conductors side by side draw differently",
    )
    decode_prompt_tokens: int = stated(RoutingConfig, "decode_prompt_tokens")
    peers: bool = stated(RoutingConfig, "peers")
    copy_share: float = stated(RoutingConfig, "copy_share")
    prefetch_share: float = stated(RoutingConfig, "prefetch_share")
    kvstore_replicas: int = stated(RoutingConfig, "kvstore_replicas")
    max_queue: int = Field(
        1024,
        ge=1,
        description=(
            "requests served at once; further ones are refused as overloaded. A tenant below the fair share is "
            "still served, up to twice this number in all"
        ),
    )
    heartbeat_s: float = stated(SchedulerLimits, "heartbeat_s")
    request_timeout_s: float = Field(
        600.0, gt=0, description="seconds a request may take when the client sets no deadline"
    )
    reserve_timeout_s: float = stated(SchedulerLimits, "reserve_timeout_s")
    slow_factor: float = stated(RoutingConfig, "slow_factor")
    retries: int = stated(SchedulerLimits, "retries")
    admission: AdmissionMode = stated(SchedulerLimits, "admission")
    queue_deadline_s: float = Field(
        0.0,
        ge=0,
        le=86400,
        description=(
            "seconds a request may wait for a placement that keeps the request's limits; not counted in the TTFT "
            "limit, and also the bound for waiting for memory. 0 = refused at once; a request may set slo.queue_s "
            "instead"
        ),
    )
    max_queued: int = stated(SchedulerLimits, "max_queued")
    tenant_weights: Annotated[dict[str, float], BeforeValidator(read_mapping)] = Field(
        default_factory=dict,
        description="weights by which tenants share what several of them wait for, as YAML or JSON: {NAME: WEIGHT}; "
        "NAME '*' is for each tenant that is not named (1 unless set)",
    )
    tenant_budgets: Annotated[dict[str, TenantBudgetSetting], BeforeValidator(read_mapping)] = Field(
        default_factory=dict,
        description="what tenants may use at all conductors together, as YAML or JSON: {NAME: {rpm: N, tpm: N, "
        "concurrent: N}}, requests and tokens a minute, and requests at once; NAME '*' is for each tenant that is not "
        "named; give all conductors the same; docs/overload.md",
    )
    adopt_wait_s: float = stated(SchedulerLimits, "adopt_wait_s")
    swap_roles: bool = Field(
        False,
        description=(
            "instances with `either_role` change between prefill and decode by the load on both; docs/roles.md"
        ),
    )
    tenant_ttl_s: Annotated[dict[str, float], BeforeValidator(read_mapping), AfterValidator(_positive)] = Field(
        default_factory=dict,
        description="seconds that a tenant's KV may stay in any one place, as YAML or JSON: {NAME: SECONDS}; NAME '*' "
        "is for each tenant that is not named; default: as long as there is room",
    )
    record_trace: Path | None = Field(
        None,
        description="file to which a trace of all requests is written, for the simulator: times, lengths and keyed "
        "hashes of blocks, no text; default: none",
    )
    picker_listen: OptionalAddress = Field(
        "",
        description="HOST:PORT at which proxies ask for engines, as an endpoint picker of the Gateway API inference "
        "extension (Envoy's ext_proc); default: none; docs/endpoint_picker.md",
    )
    picker_tls: Literal["auto", "none", "server", "mutual"] = Field(
        "auto",
        description="how proxies connect to `picker_listen`: none = in plaintext; server = within TLS, by `tls_cert`; "
        "mutual = proxies also show a certificate of `tls_ca`; auto = server with `tls_cert`, else none",
    )

    @model_validator(mode="after")
    def _weights_are_shares(self) -> Self:
        for name, weight in self.tenant_weights.items():
            if not (isfinite(weight) and weight > 0):
                raise ConfigError(f"tenant_weights.{name}", f"must be above 0, is {weight}")
        return self

    @property
    def budgets(self) -> dict[str, TenantBudget]:
        """What tenants may use."""
        return {
            name: TenantBudget(budget.rpm, budget.tpm, budget.concurrent)
            for name, budget in self.tenant_budgets.items()
        }
