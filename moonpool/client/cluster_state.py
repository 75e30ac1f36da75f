"""What a conductor reports about the cluster: instances, queues, recent requests and gauges."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.client.types import Timing, Usage


@dataclass(frozen=True, slots=True)
class TierInfo:
    """A kvstore's tier, "dram" or "ssd"."""

    name: str
    blocks: int
    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """An instance according to the conductor. A kvstore alone has `tiers`.

    Decode alone counts `preemptions`, and guesses of tokens that were checked (`draft_tokens`) and accepted. A decode
    instance in the role both has `computes_prompts`. `version` and `commit` are the program's; "" if not told.
    """

    id: str
    kind: str
    address: str
    epoch: int
    running: int
    waiting: int
    queued_tokens: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    promised_blocks: int
    indexed_blocks: int
    draining: bool
    tiers: tuple[TierInfo, ...] = ()
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    computes_prompts: bool = False
    version: str = ""
    commit: str = ""

    @property
    def role(self) -> str:
        """The kind, or "both" for an engine that computes prompts and answers."""
        return "both" if self.computes_prompts else self.kind


@dataclass(frozen=True, slots=True)
class LoraInfo:
    """A LoRA adapter that requests may ask for as model.

    Attributes:
        name: the adapter's name.
        path: folder with the adapter's files.
        rank: largest rank.
        base_model: the model that the adapter was made for, as the adapter says; "" if the adapter does not say.
    """

    name: str
    path: str
    rank: int
    base_model: str


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """A tenant's requests at the conductors: all, and those waiting. `weight` is the tenant's share."""

    tenant: str
    weight: float
    requests: int
    waiting: int


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """Requests that wait at the conductors.

    Attributes:
        for_limits: requests that wait for a placement that keeps their SLO.
        for_room: requests that wait for KV memory at a decode instance.
        prompt_bytes: prompts' size in `for_limits`.
        tenants: at most 100 tenants of each conductor with requests there, waiting or not.
    """

    for_limits: int = 0
    for_room: int = 0
    prompt_bytes: int = 0
    tenants: tuple[TenantInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 99th percentile over requests."""

    p50: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended.

    Attributes:
        request_id: id.
        tenant: the request's owner.
        usage: tokens counted.
        timing: times measured.
        refused: why the request was refused; "" if not refused.
        failed: why the request ended without a whole answer, though neither refused nor cancelled; "" if not failed.
        cancelled: the client stopped the request, or left, before the answer was whole.
        ended_ago_s: seconds since the request's end.
    """

    request_id: str
    tenant: str
    usage: Usage
    timing: Timing
    refused: str = ""
    failed: str = ""
    cancelled: bool = False
    ended_ago_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RecentInfo:
    """Requests that ended in the last `window_s` seconds, at all conductors that the client knows.

    Of several conductors, `p50` is the mean of the conductors' medians, by requests, and `p99` the largest.

    Attributes:
        window_s: 60, or less if the conductor is younger.
        requests: number of requests, at most 1,024 of each conductor.
        usage: tokens in all requests.
        ttft_s: time to first token, in seconds.
        tpot_s: mean time per token, in seconds, over answers with more than one token.
        last: at most 32 requests, newest first; they may have ended before the window.
    """

    window_s: float = 0.0
    requests: int = 0
    usage: Usage = Usage()  # noqa: RUF009  # frozen
    ttft_s: Quantiles = Quantiles()
    tpot_s: Quantiles = Quantiles()
    last: tuple[EndedRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """What the instances of one role have to do, as the conductor sees it.

    Attributes:
        kind: "prefill" or "decode".
        instances: instances that take requests.
        pressure: offered work as a share of what these can do within the limits; 1 = full.
        backlog_s: mean predicted seconds until the prompts that wait are computed (prefill).
        free_share: share of the KV blocks that hold nothing that a request needs (decode).
        wanted: instances at which the pressure would be 0.8, of prefill 1 if TTFT limits are above 10 s; at least 1.
    """

    kind: str
    instances: int
    pressure: float
    backlog_s: float
    free_share: float
    wanted: float


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The cluster according to the conductor.

    Attributes:
        ready: whether requests can be served.
        model: the model's name; "" before the first engine instance has joined.
        max_tokens: most tokens in a sequence.
        block_size: tokens in a KV block.
        conductor: the conductor's address.
        instances: all instances.
        emulated: name of the profile if compute is emulated; "" for real compute.
        queue: requests that wait.
        recent: requests that ended.
        loras: LoRA adapters that requests may ask for.
        pools: what prefill and decode have to do.
    """

    ready: bool
    model: str
    max_tokens: int
    block_size: int
    conductor: str
    instances: tuple[InstanceInfo, ...]
    emulated: str = ""
    queue: QueueInfo = QueueInfo()
    recent: RecentInfo = RecentInfo()
    loras: tuple[LoraInfo, ...] = ()
    pools: tuple[PoolInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class GaugeValue:
    """A gauge. `at_rest` is the value while no request runs; None if any value is possible then."""

    name: str
    value: float
    at_rest: float | None
