"""Writes docs/metrics.md from the tables of metrics: `python -m tools.gen_metrics`. A test compares the two."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric as MetricFamily

from moonpool.base import world
from moonpool.base.kv_transfer.write_back import WRITE_BACK_METRICS
from moonpool.base.telemetry.metrics import PROCESS_METRICS, Metric
from moonpool.base.telemetry.process_info import CertificateExpiry, register_process
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.base.transport.dialer import DIALER_METRICS
from moonpool.base.transport.listener import LISTENER_METRICS
from moonpool.conductor.request_metrics import EndedRequests
from moonpool.conductor.servicer import CONDUCTOR_METRICS
from moonpool.engine.decode.run_loop import SOURCE_METRICS
from moonpool.engine.decode.service import DECODE_METRICS
from moonpool.engine.emulated.engine import EMULATED_METRICS
from moonpool.engine.histograms import EngineHistograms
from moonpool.engine.instance import INSTANCE_METRICS
from moonpool.engine.kv_service import LENDING_METRICS, READ_METRICS
from moonpool.engine.loras import LORA_METRICS
from moonpool.engine.picture_rows import PICTURE_METRICS
from moonpool.engine.prefill.service import PREFILL_METRICS
from moonpool.gateway.service import BODY_METRICS, RESPONSE_METRICS, SERVER_METRICS
from moonpool.gateway.serving.metrics import EngineCollector, GatewayMetrics
from moonpool.interop.adapter.adapter import ADAPTER_METRICS
from moonpool.interop.indexer.service import INDEXER_METRICS
from moonpool.kvstore.metrics import SSD_METRICS, STORE_METRICS, TENANT_DRAM, TENANT_PINNED, TENANT_SSD, StoreObserver

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

`python -m tools.gen_metrics` writes this page from the code.

Every service reports metrics in two ways:

- With `--metrics-listen HOST:PORT`, `http://HOST:PORT/metrics` serves metrics to Prometheus, as text or as OpenMetrics.
  The gateway serves the same at `/metrics` of its HTTP port.
  For orchestrators, `/livez` answers 200 while the service's event loop answers, and `/readyz` while the service takes
  new requests; else 503 and a line that says why.
- `moonpool check --json` and `moonpool kvstore stat` show gauges and counters of a service by name, without the prefix
  `moonpool_<service>_`.

Names that end in `_total` are counters, which only grow, and start at 0 when the service starts. Others are gauges
where the text says no other kind. "At rest" is the value that a gauge must have when no request runs; `moonpool check`
fails if the value is another one. To add a metric, see [extend/metric.md](extend/metric.md).
"""

Table = Sequence[Metric[Any]]
_INSTANCE = (
    WRITE_BACK_METRICS,
    READ_METRICS,
    LENDING_METRICS,
    LORA_METRICS,
    PICTURE_METRICS,
    DIALER_METRICS,
    LISTENER_METRICS,
    INSTANCE_METRICS,
)
SERVICES: dict[str, Sequence[Table]] = {
    "conductor": (CONDUCTOR_METRICS, PROCESS_METRICS),
    "prefill": (PREFILL_METRICS, *_INSTANCE, EMULATED_METRICS, PROCESS_METRICS),
    "decode": (DECODE_METRICS, SOURCE_METRICS, *_INSTANCE, EMULATED_METRICS, PROCESS_METRICS),
    "kvstore": (STORE_METRICS, SSD_METRICS, TENANT_DRAM, TENANT_PINNED, TENANT_SSD, LISTENER_METRICS, PROCESS_METRICS),
    "gateway": (SERVER_METRICS, RESPONSE_METRICS, BODY_METRICS, PROCESS_METRICS),
    "adapter": (ADAPTER_METRICS, PROCESS_METRICS),
    "indexer": (INDEXER_METRICS, PROCESS_METRICS),
}


def page() -> str:
    """The text of docs/metrics.md: metrics that services have in common stand in a section of these services."""
    sections: dict[tuple[str, ...], list[str]] = {tuple(SERVICES): []}
    common: dict[tuple[str, str], list[str]] = {}
    for service, tables in SERVICES.items():
        for name, said in _rows(service, tables):
            common.setdefault((name, said), []).append(service)
    for (name, said), services in sorted(common.items()):
        names = dict.fromkeys(f"`{name.format(service=service)}`" for service in services)
        sections.setdefault(tuple(services), []).append(f"| {', '.join(names)} | {said} |\n")
    parts = [HEAD]
    for kinds in sorted(sections, key=lambda kinds: (-len(kinds), [*SERVICES].index(kinds[0]))):
        title = "every service" if len(kinds) == len(SERVICES) else ", ".join(kinds)
        parts += [f"\n## {title}\n\n| metric | meaning |\n|---|---|\n", *sections[kinds]]
    return "".join(parts)


def _rows(service: str, tables: Iterable[Table]) -> Iterator[tuple[str, str]]:
    """A service's metrics: the name, with `{service}` in place of the service, and what the page says."""
    for metric in itertools.chain.from_iterable(tables):
        name = f"moonpool_{{service}}_{metric.name}"
        at_rest = "" if metric.at_rest is None else f" At rest: {metric.at_rest:g}."
        yield name, f"{_kind(name, metric.kind.value)}{metric.help}{at_rest}"
    for family in _families(service):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        name = re.sub(f"^moonpool_{service}_", "moonpool_{service}_", name)
        yield name, f"{_kind(name, family.type)}{family.documentation}"


def _kind(name: str, kind: str) -> str:
    """The kind of a metric, where the name does not say it."""
    return "" if kind == ("counter" if name.endswith("_total") else "gauge") else f"{kind.capitalize()}: "


def _families(service: str) -> Iterable[MetricFamily]:
    """Metrics that a service registers with Prometheus itself: histograms, and the gateway's request metrics."""
    metrics = PrometheusMetrics(service)
    register_process(metrics.registry, service)
    metrics.registry.register(CertificateExpiry({}))
    match service:
        case "conductor":
            EndedRequests(metrics)
        case "prefill" | "decode":
            EngineHistograms(metrics, service)
        case "kvstore":
            StoreObserver(metrics)
        case "gateway":
            GatewayMetrics(metrics, world.monotonic)
            metrics.registry.register(EngineCollector(lambda: None, lambda _: ""))
    return metrics.registry.collect()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
