"""What the connector for vLLM counts."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

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


class ConnectorStats(KVConnectorStats):
    """Counts since the last report; the namespace in hex, and stores without calls."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
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
        values = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in COUNTERS:
                self._counters[name].labels(*values).inc(value)
            elif name == BREAKERS:
                self._breakers.labels(*values).set(value)
            elif name == NAMESPACE:
                self._info.labels(*values, value).set(1)
