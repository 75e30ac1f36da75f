"""Writes deploy/monitoring/grafana-dashboard.json: `python -m tools.gen_dashboard`. A test compares the two."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "deploy/monitoring/grafana-dashboard.json"
WIDTH, HEIGHT = 8, 7
"""Of a panel, in Grafana's grid of 24 columns."""
RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph.

    Attributes:
        title: what the graph shows.
        unit: Grafana's name of the unit.
        queries: PromQL by legend.
    """

    title: str
    unit: str
    queries: dict[str, str]


def quantiles(name: str) -> dict[str, str]:
    """Quantiles of a histogram over all sources."""
    return {f"p{q}": f"histogram_quantile(0.{q}, sum by (le) (rate({name}_bucket{RATE})))" for q in (50, 90, 99)}


def rate(name: str, by: str = "") -> dict[str, str]:
    """Rate of a counter, over all sources or by a label."""
    return {f"{{{{{by}}}}}" if by else "all": f"sum{f' by ({by})' if by else ''} (rate({name}{RATE}))"}


ROWS: dict[str, Sequence[Panel]] = {
    "Clients": (
        Panel("Requests by path", "reqps", rate("http_requests_total", "handler")),
        Panel("Responses by status", "reqps", rate("http_requests_total", "status")),
        Panel("Errors by code", "reqps", rate("moonpool_gateway_refused_total", "code")),
        Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
        Panel("End to end", "s", quantiles("vllm:e2e_request_latency_seconds")),
        Panel(
            "Running and waiting",
            "short",
            {"running": "sum(vllm:num_requests_running)", "waiting": "sum(vllm:num_requests_waiting)"},
        ),
        Panel(
            "Tokens",
            "short",
            {
                "prompt": f"sum(rate(vllm:prompt_tokens_total{RATE}))",
                "generated": f"sum(rate(vllm:generation_tokens_total{RATE}))",
            },
        ),
        Panel("Open connections", "short", {"{{instance}}": "moonpool_gateway_connections"}),
    ),
    "Conductor": (
        Panel("Waiting", "short", {
            "for limits": "sum(moonpool_conductor_waiting_for_limits)",
            "for decode memory": "sum(moonpool_conductor_waiting_for_room)",
        }),
        Panel("Refused by reason", "reqps", rate("moonpool_conductor_refused_total", "reason")),
        Panel("Failed by kind", "reqps", rate("moonpool_conductor_failed_total", "kind")),
        Panel("Prompt tokens by source of KV", "short", rate("moonpool_conductor_prompt_tokens_total", "source")),
        Panel("First token, measured over predicted", "short", quantiles("moonpool_conductor_ttft_over_predicted")),
        Panel("Queue", "s", quantiles("moonpool_conductor_queue_seconds")),
        Panel("Wanted instances", "short", {
            "prefill": "max(moonpool_conductor_prefill_wanted)",
            "decode": "max(moonpool_conductor_decode_wanted)",
        }),
        Panel("Pressure", "percentunit", {
            "prefill": "max(moonpool_conductor_prefill_pressure)",
            "decode": "max(moonpool_conductor_decode_pressure)",
        }),
        Panel("Members", "short", {"{{instance}}": "moonpool_conductor_instances"}),
        Panel("Processor", "percentunit", {
            "{{job}} {{instance}}": f'rate(process_cpu_seconds_total{{job=~"moonpool-.*"}}{RATE})'
        }),
        Panel("Memory", "bytes", {"{{job}} {{instance}}": 'process_resident_memory_bytes{job=~"moonpool-.*"}'}),
    ),
    "Prefill": (
        Panel("Queued tokens", "short", {"{{instance}}": "moonpool_prefill_queued_tokens"}),
        Panel("Backlog", "s", {"{{instance}}": "moonpool_prefill_drain_seconds"}),
        Panel("Step", "s", quantiles("moonpool_prefill_step_seconds")),
        Panel("Load of KV", "s", quantiles("moonpool_prefill_load_seconds")),
        Panel("Send of KV", "s", quantiles("moonpool_prefill_send_seconds")),
        Panel("KV used", "percentunit", {
            "{{instance}}": "moonpool_prefill_blocks_used / moonpool_prefill_pool_blocks"
        }),
    ),
    "Decode": (
        Panel("KV used", "percentunit", {"{{instance}}": "moonpool_decode_blocks_used / moonpool_decode_pool_blocks"}),
        Panel("Step", "s", quantiles("moonpool_decode_step_seconds")),
        Panel("Sequences in a step", "short", quantiles("moonpool_decode_step_sequences")),
        Panel("Preemptions", "ops", rate("moonpool_decode_preemptions_total", "instance")),
        Panel("Answers", "short", {
            "running": "sum(moonpool_decode_sequences_running)",
            "waiting": "sum(moonpool_decode_sequences_waiting)",
        }),
        Panel("Transfer tail", "s", quantiles("moonpool_conductor_transfer_tail_seconds")),
    ),
    "KV store": (
        Panel("Blocks read", "ops", {
            "memory": f"sum(rate(moonpool_kvstore_dram_hits_total{RATE}))",
            "SSD": f"sum(rate(moonpool_kvstore_ssd_hits_total{RATE}))",
            "misses": f"sum(rate(moonpool_kvstore_misses_total{RATE}))",
        }),
        Panel("Memory used", "percentunit", {
            "{{instance}}": "moonpool_kvstore_dram_bytes / moonpool_kvstore_dram_capacity_bytes"
        }),
        Panel("SSD used", "percentunit", {
            "{{instance}}": "moonpool_kvstore_ssd_bytes / moonpool_kvstore_ssd_capacity_bytes"
        }),
        Panel("Commit", "s", quantiles("moonpool_kvstore_commit_seconds")),
        Panel("Written to SSD", "Bps", rate("moonpool_kvstore_ssd_written_bytes_total", "instance")),
        Panel("Damaged blocks", "short", {"{{instance}}": "moonpool_kvstore_damaged_blocks_total"}),
    ),
}  # fmt: skip


def queries() -> Iterator[str]:
    """All queries of the dashboard."""
    for panels in ROWS.values():
        for panel in panels:
            yield from panel.queries.values()


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports dashboards."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []})
        y += 1
        for index, panel in enumerate(row):
            place = {"x": index % 3 * WIDTH, "y": y + index // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(panel, place))
        y += -(-len(row) // 3) * HEIGHT
    for number, panel_json in enumerate(panels, 1):
        panel_json["id"] = number
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "title": "Moonpool",
        "uid": "moonpool",
        "tags": ["moonpool", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": source}
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": targets,
    }


def text() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
