"""The connector for vLLM (0.32): full KV blocks live on in Moonpool's kvstores, beyond an engine's memory and life.

    --kv-transfer-config '{"kv_connector": "MoonpoolConnector", "kv_connector_module_path": "moonpool.connectors.vllm",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"stores": ["127.0.0.1:50060"]}}'

The scheduler's half looks blocks up and plans; each worker's half moves the pages of its rank. See docs/engines.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from moonpool.base.checkpoint import resolve, weights_fingerprint
from moonpool.base.telemetry.logs import get_logger
from moonpool.connectors.pages import TENANT_PARAM, PromptKeys, page_namespace, rank_key, root_of
from moonpool.connectors.requests import BlockPlan, PooledRequest, RequestPlanner
from moonpool.connectors.stores import EngineStores, Page, PageSettings

FLUSH_S = 5.0
"""At the end, saves have so long."""
COUNTERS = {
    "lookups": "Look-ups in kvstores.",
    "lookup_seconds": "Seconds of look-ups.",
    "lookups_failed": "Look-ups that failed or took too long.",
    "lookups_skipped": "Look-ups that were not made, as no store answers.",
    "lookups_late": "Requests that did not wait longer for a look-up.",
    "blocks_loaded": "Pages loaded.",
    "bytes_loaded": "Bytes loaded.",
    "load_seconds": "Seconds of loads.",
    "load_misses": "Pages that were found but could not be loaded; vLLM computes them.",
    "blocks_saved": "New pages in the stores.",
    "bytes_saved": "Bytes sent to the stores.",
    "save_seconds": "Seconds of saves.",
    "blocks_not_saved": "Pages that were not saved: too many at once, no store, or deleted.",
    "store_errors": "Calls to stores that failed.",
}
"""Metrics "moonpool_kv_NAME_total"."""
NAMESPACE = "namespace"
BREAKERS = "open_breakers"
log = get_logger(__name__)


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


class ConnectorStats(KVConnectorStats):
    """Counts since the last report; the namespace in hex, and stores without calls."""

    def reset(self) -> None:
        """Begins anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Adds another process's counts."""
        for name, value in other.data.items():
            if name in COUNTERS:
                self.data[name] = self.data.get(name, 0) + value
            elif name == BREAKERS:
                self.data[name] = max(self.data.get(name, 0), value)
            else:
                self.data[name] = value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        return {name: value for name, value in self.data.items() if name in COUNTERS}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """The counts in vLLM's /metrics."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: list[str], per_engine: dict[int, list[object]]):
        super().__init__(vllm_config, metric_types, labels, per_engine)
        self._counters = {
            name: self._counter_cls(name=f"moonpool_kv_{name}", documentation=text, labelnames=labels)
            for name, text in COUNTERS.items()
        }
        self._breakers = self._gauge_cls(
            name=f"moonpool_kv_{BREAKERS}", documentation="Stores that get no calls.", labelnames=labels
        )
        self._info = self._gauge_cls(
            name="moonpool_kv_info", documentation="The pages' namespace.", labelnames=[*labels, NAMESPACE]
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes counts."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in COUNTERS:
                self._counters[name].labels(*values).inc(value)
            elif name == BREAKERS:
                self._breakers.labels(*values).set(value)
            elif name == NAMESPACE:
                self._info.labels(*values, value).set(1)


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
        """Counts since the last call."""
        stats, self._stats = self._stats | self.stores.take_counts(), {}
        if self.planner.lookups_late:
            stats["lookups_late"], self.planner.lookups_late = self.planner.lookups_late, 0
        return ConnectorStats(stats | {BREAKERS: self.stores.open_breakers}) if stats else None


class WorkerHalf:
    """Moves the pages of one rank."""

    def __init__(self, kv_cache_config: Any, settings: PageSettings) -> None:
        self._cache_config, self._settings = kv_cache_config, settings
        self._stores: EngineStores | None = None
        self._regions: list[torch.Tensor] = []
        self._rank = 0
        self._arrangement = ""
        self._copier = ThreadPoolExecutor(1, "moonpool-kv")
        self._lock = threading.Lock()
        self._loaded: set[str] = set()
        self._failed: set[int] = set()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """The engine has allocated its KV."""
        group = get_tp_group()
        self._rank = get_pp_group().rank_in_group * group.world_size + group.rank_in_group
        self._regions = regions_of(self._cache_config, caches)
        self._arrangement = arrangement_of(self._cache_config.num_blocks, caches, self._regions)

    def layout(self) -> RankLayout:
        """For the scheduler's half."""
        return RankLayout(self._arrangement)

    def _stores_of(self, plan: StepPlan) -> EngineStores:
        if self._stores is None:
            self._stores = EngineStores(self._settings, plan.namespace)
        return self._stores

    def begin_loads(self, plan: StepPlan) -> None:
        """Begins a step's loads."""
        for load in plan.loads:
            pages = {rank_key(key, self._rank): self._new_page() for key in load.keys}
            stores = self._stores_of(plan)
            read = stores.load(load.tenant, load.chain, {key: _bytes_of(page) for key, page in pages.items()})
            read.add_done_callback(partial(self._read, load, list(pages.values())))

    def _read(self, load: BlockPlan, pages: Sequence[torch.Tensor], done: Future[list[bool]]) -> None:
        """Pages have come; copying them does not hold up the next ones."""
        self._copier.submit(self._take, load, pages, done)

    def _take(self, load: BlockPlan, pages: Sequence[torch.Tensor], done: Future[list[bool]]) -> None:
        """Copies what has come into the engine's blocks."""
        failed = set(load.blocks)
        try:
            whole = done.result()
            for block, page, there in zip(load.blocks, pages, whole, strict=True):
                if there:
                    self._fill(block, page)
                    failed.discard(block)
            if self._regions[0].is_cuda:
                torch.cuda.current_stream(self._regions[0].device).synchronize()
        except Exception:
            log.exception("a load has failed", request=load.request)
        finally:
            with self._lock:
                self._failed |= failed
                self._loaded.add(load.request)

    def save(self, plan: StepPlan) -> None:
        """Copies a step's new blocks, and sends the copies in the background."""
        for save in plan.saves:
            stores = self._stores_of(plan)
            if not stores.accepts(len(save.blocks) * self._page_bytes):
                continue
            pages = [
                Page(rank_key(key, self._rank), rank_key(parent, self._rank), _bytes_of(self._page(block)))
                for key, parent, block in zip(save.keys, save.parents, save.blocks, strict=True)
            ]
            stores.save(save.tenant, save.chain, pages, save.asked_at)

    def take_loaded(self) -> set[str]:
        """Requests whose loads are over."""
        with self._lock:
            loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed(self) -> set[int]:
        """Blocks that could not be loaded."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def take_stats(self) -> ConnectorStats | None:
        """Counts since the last call."""
        counts = self._stores.take_counts() if self._stores is not None else {}
        return ConnectorStats(counts) if counts else None

    def close(self) -> None:
        """Finishes saves, for a limited time."""
        if self._stores is not None:
            self._stores.flush(FLUSH_S)
            self._stores.close()
        self._copier.shutdown()

    @property
    def _page_bytes(self) -> int:
        return sum([region.shape[1] for region in self._regions])

    def _new_page(self) -> torch.Tensor:
        return torch.empty(self._page_bytes, dtype=torch.uint8, pin_memory=self._regions[0].is_cuda)

    def _page(self, block: int) -> torch.Tensor:
        """A copy of a block's bytes."""
        return torch.cat([region[block] for region in self._regions]).cpu()

    def _fill(self, block: int, page: torch.Tensor) -> None:
        at = 0
        for region in self._regions:
            region[block].copy_(page[at : at + region.shape[1]])
            at += region.shape[1]


def _bytes_of(page: torch.Tensor) -> memoryview:
    array: Any = page.numpy()
    return memoryview(array)


def regions_of(kv_cache_config: Any, caches: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Views [blocks, bytes of a block] that cover all layers' KV once, in the order of the layers."""
    regions: list[torch.Tensor] = []
    seen: set[int] = set()
    for place in kv_cache_config.kv_cache_tensors:
        name = next((layer for layer in place.layers if layer in caches), None)
        if name is None:
            continue
        span, start = kv_cache_config.num_blocks * place.block_stride, 0
        if place.layer_stride >= span:  # layers lie one after the other
            span, start = len(place.layers) * place.layer_stride, place.offset
        storage = caches[name].untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8, device=caches[name].device).set_(storage)
        for region in raw[start : start + span].view(-1, kv_cache_config.num_blocks, place.block_stride):
            if region.data_ptr() not in seen:
                seen.add(region.data_ptr())
                regions.append(region)
    return regions


def arrangement_of(blocks: int, caches: Mapping[str, torch.Tensor], regions: Sequence[torch.Tensor]) -> str:
    """Describes what pages consist of; does not depend on how many blocks there are."""
    layers = []
    for name, cache in caches.items():
        at = list(cache.shape).index(blocks)
        inner = [dim for dim in range(cache.dim()) if dim != at]
        order = sorted(inner, key=lambda dim, cache=cache: -cache.stride(dim))  # type: ignore[misc]
        layers.append((name, [cache.shape[dim] for dim in order], order, str(cache.dtype)))
    return repr((layers, [region.shape[1] for region in regions]))


class MoonpoolConnector(KVConnectorBase_V1, SupportsHMA):
    """Full KV blocks in Moonpool's kvstores."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("MoonpoolConnector serves models with one group of full attention")
        if not vllm_config.cache_config.enable_prefix_caching:
            raise ValueError("MoonpoolConnector needs --enable-prefix-caching")
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError('MoonpoolConnector needs "kv_load_failure_policy": "recompute"')
        settings = PageSettings.read(transfer.kv_connector_extra_config)
        self._scheduler = SchedulerHalf(vllm_config, settings)
        self._worker = WorkerHalf(kv_cache_config, settings)

    # --- scheduler ---------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Takes the workers' layouts."""
        self._scheduler.begin(metadata)

    def on_new_request(self, request: Any) -> None:
        """Begins a look-up."""
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind the engine's own; None = not known yet."""
        size = self._vllm_config.cache_config.block_size
        count = self._scheduler.planner.matched_blocks(request.request_id, num_computed_tokens // size)
        return (None, False) if count is None else (count * size, count > 0)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plans a load."""
        count = num_external_tokens // self._vllm_config.cache_config.block_size
        self._scheduler.planner.allocated(request.request_id, blocks.get_block_ids()[0], count)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Plans a step."""
        return self._scheduler.plan(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forgets a request; pages on their way are copies."""
        self._scheduler.planner.remove(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self.request_finished(request, [])

    # --- worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes the engine's memory."""
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The rank's layout."""
        return self._worker.layout()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins loads; other requests compute meanwhile."""
        self._worker.begin_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before their requests are scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved with all layers."""

    def wait_for_save(self) -> None:
        """Copies new blocks; the copies are sent in the background."""
        self._worker.save(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads are over."""
        return None, self._worker.take_loaded() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute, as they could not be loaded."""
        return self._worker.take_failed()

    def shutdown(self) -> None:
        """Finishes saves, for a limited time."""
        self._worker.close()

    # --- both --------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counts since the last call."""
        scheduler = self.role == KVConnectorRole.SCHEDULER
        return self._scheduler.take_stats() if scheduler else self._worker.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Counts of another process."""
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        """The connector's metrics."""
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> Iterable[Any]:
        """None: stores tell what they hold."""
        return ()

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan
