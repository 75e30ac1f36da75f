"""Metrics: what a service reports over RPC, what a scrape shows, and that the endpoint comes and goes."""

import asyncio
import socket
import threading
import urllib.request
from collections import Counter

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_text

from moonpool.base.errors import ConfigError
from moonpool.base.telemetry import metrics_server
from moonpool.base.telemetry.metrics import PROCESS_METRICS, Metric, MetricKind, MetricSet, counter, restless
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.gateway.serving.metrics import AskedFor, GatewayMetrics
from tools.gen_metrics import PAGE, page

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.6,"
    "text/plain;version=1.0.0;escaping=underscores;q=0.3,*/*;q=0.1"
)
"""What Prometheus 2 asks for, and Prometheus 3 with names limited to ASCII."""

Held = Counter[str]
HELD: tuple[Metric[Held], ...] = (
    Metric("blocks_used", "Blocks that requests hold.", lambda held: held["blocks"], 0),
    counter("steps_total", "Steps computed.", lambda held: held["steps"]),
)
TENANT: tuple[Metric[Held]] = (Metric("tenant_bytes", "Bytes of a tenant.", lambda held: held["bytes"]),)


async def scrape(address: str, accept: str = "") -> str:
    def get() -> str:
        request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept} if accept else {})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(get)


def test_a_metric_that_is_not_at_rest_is_found() -> None:
    held = Held(blocks=2, steps=7)
    metrics = MetricSet().add(HELD, held)
    used, steps = metrics.read()
    assert (used.name, used.value, used.at_rest) == ("blocks_used", 2.0, 0.0)
    assert (steps.name, steps.value, steps.HasField("at_rest")) == ("steps_total", 7.0, False)
    assert restless(metrics.read()) == {"blocks_used": (2.0, 0.0)}
    held.clear()
    assert restless(metrics.read()) == {}
    with pytest.raises(ValueError, match="blocks_used"):
        metrics.add(HELD, held)


def test_labels_stand_in_the_name() -> None:
    metrics = MetricSet().add(TENANT, Held(bytes=1), tenant='a "b"').add(TENANT, Held(bytes=2), tenant="*")
    assert {gauge.name: gauge.value for gauge in metrics.read()} == {
        'tenant_bytes{tenant="a \\"b\\""}': 1.0,
        'tenant_bytes{tenant="*"}': 2.0,
    }


@pytest.mark.parametrize(("name", "kind"), [("blocks_total", MetricKind.GAUGE), ("blocks", MetricKind.COUNTER)])
def test_names_of_counters_only_end_in_total(name: str, kind: MetricKind) -> None:
    with pytest.raises(ValueError, match=name):
        Metric(name, "Blocks.", len, kind=kind)


async def test_a_scrape_shows_kinds_help_labels_and_histograms() -> None:
    metrics = PrometheusMetrics("kvstore")
    held = MetricSet().add(HELD, Held(blocks=5, steps=7))
    metrics.watch(held.add(TENANT, Held(bytes=1), tenant='a "b"').add(TENANT, Held(bytes=2), tenant="*"))
    latency = metrics.histogram("get_seconds", "Seconds of a get.", (0.1, 1.0), ["tier"])
    latency.labels(tier="dram").observe(0.5)
    async with metrics.served("127.0.0.1:0") as address:
        lines = (await scrape(address)).splitlines()
    for expected in (
        "# HELP moonpool_kvstore_blocks_used Blocks that requests hold.",
        "# TYPE moonpool_kvstore_blocks_used gauge",
        "moonpool_kvstore_blocks_used 5.0",
        "# TYPE moonpool_kvstore_steps_total counter",
        "moonpool_kvstore_steps_total 7.0",
        'moonpool_kvstore_tenant_bytes{tenant="a \\"b\\""} 1.0',
        'moonpool_kvstore_tenant_bytes{tenant="*"} 2.0',
        'moonpool_kvstore_get_seconds_bucket{le="0.1",tier="dram"} 0.0',
        'moonpool_kvstore_get_seconds_bucket{le="1.0",tier="dram"} 1.0',
    ):
        assert expected in lines
    with pytest.raises(OSError, match="refused"):
        await scrape(address)


async def test_what_is_no_longer_watched_is_not_exported() -> None:
    """An engine that changes roles exports under the name of the role that it has."""
    metrics, held = PrometheusMetrics("prefill"), MetricSet().add(HELD, Held(blocks=5))
    end = metrics.watch(held, "prefill")
    async with metrics.served("127.0.0.1:0") as address:
        assert "moonpool_prefill_blocks_used 5.0" in await scrape(address)
        end()
        metrics.watch(held, "decode")
        text = await scrape(address)
    assert "moonpool_prefill_blocks_used" not in text
    assert "moonpool_decode_blocks_used 5.0" in text


@pytest.mark.parametrize("accept", ["", PROMETHEUS_2, PROMETHEUS_3])
async def test_vllm_s_names_keep_their_colons_in_every_format(accept: str) -> None:
    metrics = PrometheusMetrics("gateway")
    requests = GatewayMetrics(metrics, lambda: 0.0)
    metrics.watch(MetricSet().add(HELD, Held(steps=3)))
    async with metrics.served("127.0.0.1:0") as address:
        with requests.request(AskedFor("tiny")):
            text = await scrape(address, accept)
    parse = open_metrics if accept else plain_text
    families = {family.name: family for family in parse(text)}
    [sample] = families["vllm:num_requests_waiting"].samples
    assert (sample.name, sample.value) == ("vllm:num_requests_waiting", 1.0)
    names = {sample.name for sample in families["moonpool_gateway_steps"].samples}
    assert "moonpool_gateway_steps_total" in names
    assert "vllm_" not in text


async def test_metrics_are_read_on_the_event_loop() -> None:
    metrics = PrometheusMetrics("decode")
    metrics.watch(MetricSet().add(PROCESS_METRICS, None))
    async with metrics.served("127.0.0.1:0") as address:
        lines = (await scrape(address)).splitlines()
    (line,) = [line for line in lines if line.startswith("moonpool_decode_tasks")]
    assert float(line.split()[1]) >= 1


async def test_no_address_serves_nothing() -> None:
    async with PrometheusMetrics("prefill").served("") as address:
        assert address == ""


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
async def test_a_taken_port_is_named(family: socket.AddressFamily) -> None:
    with socket.socket(family) as taken:
        taken.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        taken.listen()
        host, port = taken.getsockname()[:2]
        listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with pytest.raises(ConfigError, match="metrics_listen"):
            async with PrometheusMetrics("conductor").served(listen):
                pytest.fail("it listened")


def test_the_page_of_metrics_is_that_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tools.gen_metrics writes the page"


async def test_probes_answer_beside_the_metrics_and_other_paths_are_404() -> None:
    metrics = PrometheusMetrics("decode")
    async with metrics.served("127.0.0.1:0") as address:
        assert await get(address, "/livez") == (200, "ok\n")
        assert await get(address, "/readyz") == (503, "the service starts\n")
        metrics.ready = lambda: ""
        assert await get(address, "/readyz?verbose=1") == (200, "ok\n")
        assert (await get(address, "/"))[0] == 404
        assert (await get(address, "/metrics/../x"))[0] == 404
        assert (await get(address, "/livez", "POST"))[0] == 405
        assert (await get(address, "/livez", "HEAD")) == (200, "")


async def get(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def test_silent_connections_are_bounded_and_scrapes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.5)
    metrics = PrometheusMetrics("decode")
    threads = threading.active_count()
    async with metrics.served("127.0.0.1:0") as address:
        host, port = address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
        assert threading.active_count() - threads <= 2
        # The oldest above the bound are closed for new ones, the others when their time is over.
        assert [await reader.read() for reader, _ in silent] == [b""] * 200
        monkeypatch.setattr(metrics_server, "REQUEST_S", 60.0)
        assert await get(address, "/livez") == (200, "ok\n")
        for _, writer in silent:
            writer.close()


async def test_the_end_waits_for_no_silent_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 3600.0)
    metrics = PrometheusMetrics("decode")
    async with metrics.served("127.0.0.1:0") as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await get(address, "/livez") == (200, "ok\n"), "so the first one is accepted"
    assert await reader.read() == b""
    writer.close()


async def test_silent_connections_keep_no_probe_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 3600.0)
    metrics = PrometheusMetrics("decode")
    async with metrics.served("127.0.0.1:0") as address:
        host, port = address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(metrics_server.MAX_CONNECTIONS + 9)]
        assert await get(address, "/livez") == (200, "ok\n"), "not after REQUEST_S"
        open_still = [reader for reader, _ in silent if not reader.at_eof()]
        assert len(open_still) >= metrics_server.MAX_CONNECTIONS - 1
        for _, writer in silent:
            writer.close()


async def test_connections_that_have_ended_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(metrics_server, "REQUEST_S", 3600.0)
    metrics = PrometheusMetrics("decode")
    async with metrics.served("127.0.0.1:0") as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(5):
            assert await get(address, "/livez") == (200, "ok\n")
        writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_head_that_never_ends_is_refused() -> None:
    metrics = PrometheusMetrics("decode")
    async with metrics.served("127.0.0.1:0") as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 10_000)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
