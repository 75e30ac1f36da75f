"""The scheduler's half of the connector for vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from moonpool.base.checkpoint import resolve, weights_fingerprint
from moonpool.base.telemetry.logs import get_logger
from moonpool.connectors.page_keys import TENANT_PARAM, PromptKeys, page_namespace, root_of
from moonpool.connectors.requests import BlockPlan, PooledRequest, RequestPlanner
from moonpool.connectors.stores import EngineStores, PageSettings
from moonpool.connectors.vllm_metrics import BREAKERS, NAMESPACE, ConnectorStats

log = get_logger(__name__)


class SchedulerHalf:
    """Looks blocks up, and plans what workers do."""

    def __init__(self, vllm_config: Any, settings: PageSettings) -> None:
        self._config, self._settings = vllm_config, settings
        self._block_size = vllm_config.cache_config.block_size
        self._stats: dict[str, Any] = {}
        self.namespace = b""
        self.planner: RequestPlanner
        self.stores: EngineStores

    def begin(self, layouts: Mapping[tuple[int, int], RankLayout]) -> None:
        """The workers have their caches."""
        model, cache, parallel = (
            self._config.model_config, self._config.cache_config, self._config.parallel_config
        )  # fmt: skip
        self.namespace = page_namespace({
            "engine": f"vllm {vllm_version}",
            "weights": self._settings.weights or weights_fingerprint(resolve(model.model)).hex(),
            "quantization": model.quantization,
            "dtype": str(model.dtype),
            "cache dtype": str(cache.cache_dtype),
            "block tokens": self._block_size,
            "ranks": (parallel.pipeline_parallel_size, parallel.tensor_parallel_size),
            "layouts": [(rank, layouts[rank].arrangement) for rank in sorted(layouts)],
        })  # fmt: skip
        self.stores = EngineStores(self._settings, self.namespace)
        limit_s = self._settings.lookup_limit_s
        self.planner = RequestPlanner(self._block_size, len(layouts), self.stores.look_up, limit_s)
        self._stats[NAMESPACE] = self.namespace.hex()
        log.info("keeps KV in kvstores", stores=self._settings.stores, namespace=self.namespace.hex())

    def arrived(self, request: Any) -> None:
        """A request has come. Those whose KV depends on more than tokens are left alone."""
        if request.mm_features or request.lora_request or request.prompt_embeds is not None:
            return
        if request.skip_reading_prefix_cache:
            return
        tenant = (request.kv_transfer_params or {}).get(TENANT_PARAM, "")
        root = root_of(self.namespace, tenant, request.cache_salt)
        keys = PromptKeys(root, self._block_size)
        self.planner.add(PooledRequest(request.request_id, tenant, keys, request.all_token_ids))

    def plan(self, output: Any) -> StepPlan:
        """What workers do in a step."""
        plan, cached = StepPlan(self.namespace, self.planner.take_loads()), output.scheduled_cached_reqs
        steps = [(new.req_id, new.block_ids[0], True, new.num_computed_tokens) for new in output.scheduled_new_reqs] + [
            (name, blocks[0] if blocks else (), name in cached.resumed_req_ids, computed)
            for name, blocks, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ]
        for name, blocks, whole, computed in steps:
            ready = (computed + output.num_scheduled_tokens[name]) // self._block_size
            save = self.planner.scheduled(name, blocks, ready, whole=whole)
            if save is not None:
                plan.saves.append(save)
        return plan

    def take_stats(self) -> ConnectorStats | None:
        """Return the counts since the last call."""
        stats, self._stats = self._stats | self.stores.take_counts(), {}
        if self.planner.lookups_late:
            stats["lookups_late"], self.planner.lookups_late = self.planner.lookups_late, 0
        return ConnectorStats(stats | {BREAKERS: self.stores.open_breakers}) if stats else None


@dataclass
class StepPlan(KVConnectorMetadata):
    """What workers do in a step: loads to begin, and blocks to save after the step."""

    namespace: bytes
    loads: list[BlockPlan] = field(default_factory=list)
    saves: list[BlockPlan] = field(default_factory=list)


@dataclass
class RankLayout(KVConnectorHandshakeMetadata):
    """How a rank's pages are arranged."""

    arrangement: str
