"""What instances tell of themselves: facts on joining, and load reports."""

from __future__ import annotations

from dataclasses import field, replace
from enum import Enum

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import Speeds
from moonpool.conductor.core.kv_shape import KVShape
from moonpool.conductor.core.tenant_activity import ConductorActivity


class InstanceKind(Enum):
    """What an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"


@frozen
class InstanceFacts:
    """An instance's facts on joining.

    Attributes:
        id: stable name.
        epoch: changes at every start.
        kind: the instance's kind.
        total_blocks: blocks in the pool.
        shape: an engine's KV shape; None for a kvstore.
        speeds: first ones.
        stages: a prefill instance's pipeline stages; so many steps overlap.
        max_num_batched_tokens: a prefill step computes at most; 0 = a whole prompt.
        capacity_bytes: a kvstore's capacity; 0 = not known.
        switches_role: an engine that comes back in the other role on order.
        reports_ssd: a kvstore that reports which blocks are on SSD only.
        kv_domain: KV goes only to and comes only from instances in this domain. Kvstores are in the domain "".
        unsupported: sampling options that the instance lacks.
        loras: options of the LoRA adapters (`lora_option`) that the instance serves if it lacks LORA.
        uses_kvstores: an engine in a domain that reads and writes kvstores by itself.
        arrival_order: a prefill instance that computes prompts as they come, whatever their place in the queue.
        computes_prompts: a decode instance in the role both: whole prompts are computed where their answers run.
        in_place_role: with `switches_role`, the engine joins in the other role under the same id.
    """

    id: str
    epoch: int
    kind: InstanceKind
    total_blocks: int
    shape: KVShape | None = None
    speeds: Speeds = field(default_factory=Speeds)
    stages: int = 1
    max_num_batched_tokens: int = 0
    capacity_bytes: int = 0
    switches_role: bool = False
    reports_ssd: bool = False
    kv_domain: str = ""
    unsupported: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    uses_kvstores: bool = False
    arrival_order: bool = False
    computes_prompts: bool = False
    in_place_role: bool = False

    def lacks(self, option: str) -> bool:
        """Return whether the instance cannot serve requests with an option of a request."""
        return option.partition(":")[0] in self.unsupported and option not in self.loras

    @property
    def takes_copies(self) -> bool:
        """Whether blocks can be ordered into the pool: not in a KV domain of its own, and not at decode."""
        return self.kind is InstanceKind.PREFILL and not self.kv_domain

    @property
    def loads(self) -> bool:
        """Whether the instance loads prefixes that it lacks."""
        return not self.kv_domain or self.uses_kvstores


@frozen
class LoadFacts:
    """A load report.

    Attributes:
        running, waiting: requests, or transfers of a kvstore.
        free_blocks, cached_blocks, promised_blocks: of the pool; `promised_blocks` are free or cached and spoken for.
        context_tokens: total over all running sequences (decode).
        drain_s: predicted seconds until all prompts there are computed; None = not reported.
        speeds: measured; None = as before.
        draining: takes no new requests.
        taken: prompts or promises so far: numbers up to `taken` are included (`ClusterView.acknowledged`).
        answer_tokens: expected length of a new answer, for which memory is kept (decode); 0 = not reported.
        queued_tokens: prompt tokens without KV.
        conductors: to which the instance reports; 0 = not told.
        activities: what other conductors have told the instance of their tenants.
    """

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    promised_blocks: int = 0
    context_tokens: int = 0
    drain_s: float | None = None
    speeds: Speeds | None = None
    draining: bool = False
    taken: int = 0
    answer_tokens: int = 0
    queued_tokens: int = 0
    conductors: int = 0
    activities: tuple[ConductorActivity, ...] = ()

    @property
    def of_prompts(self) -> LoadFacts:
        """The same report without the answers: load of a decode instance's prompts alone."""
        return replace(self, running=0, waiting=int(self.queued_tokens > 0))
