"""The connector for vLLM (0.32): full KV blocks live on in Moonpool's kvstores, beyond an engine's memory and life.

    --kv-transfer-config '{"kv_connector": "MoonpoolConnector", "kv_connector_module_path": "moonpool.connectors.vllm",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"stores": ["127.0.0.1:50060"]}}'

The scheduler's half looks blocks up and plans; each worker's half moves the pages of its rank. See docs/engines.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from moonpool.connectors.stores import PageSettings
from moonpool.connectors.vllm_metrics import ConnectorMetrics, ConnectorStats
from moonpool.connectors.vllm_scheduler import SchedulerHalf, StepPlan
from moonpool.connectors.vllm_worker import WorkerHalf


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
        self._scheduler.begin(metadata)

    def on_new_request(self, request: Any) -> None:
        """Begin a look-up."""
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind the engine's own; None = not known yet."""
        size = self._vllm_config.cache_config.block_size
        count = self._scheduler.planner.matched_blocks(request.request_id, num_computed_tokens // size)
        return (None, False) if count is None else (count * size, count > 0)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan a load."""
        count = num_external_tokens // self._vllm_config.cache_config.block_size
        self._scheduler.planner.allocated(request.request_id, blocks.get_block_ids()[0], count)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.plan(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; pages on their way are copies."""
        self._scheduler.planner.remove(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # --- worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The rank's layout."""
        return self._worker.layout()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin loads; other requests compute meanwhile."""
        self._worker.begin_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are over before their requests are scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved with all layers."""

    def wait_for_save(self) -> None:
        """Copy new blocks; the copies are sent in the background."""
        self._worker.save(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads are over."""
        return None, self._worker.take_loaded() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute, as they could not be loaded."""
        return self._worker.take_failed()

    def shutdown(self) -> None:
        """Finish saves, for a limited time."""
        self._worker.close()

    # --- both --------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counts since the last call."""
        scheduler = self.role == KVConnectorRole.SCHEDULER
        return self._scheduler.take_stats() if scheduler else self._worker.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return the counts of another process."""
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> Iterable[Any]:
        """None: stores tell what they hold."""
        return ()

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan
