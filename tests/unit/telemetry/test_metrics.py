"""Metrics: what a scrape shows, and that the endpoint comes and goes."""

import asyncio
import socket
import urllib.request

import pytest

from moonpool.errors import ConfigError
from moonpool.telemetry.gauges import Gauges
from moonpool.telemetry.metrics import Metrics, split_labels


async def scrape(address: str) -> list[str]:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    return [line for line in (await asyncio.to_thread(get)).splitlines() if not line.startswith("#")]


async def test_gauges_counters_labels_and_histograms() -> None:
    metrics = Metrics("kvstore")
    gauges = Gauges(
        [
            ("dram_bytes", lambda: 5.0, None),
            ("hits_total", lambda: 7.0, None),
            ('tenant_bytes{tenant="a \\"b\\""}', lambda: 1.0, None),
            ('tenant_bytes{tenant="*"}', lambda: 2.0, None),
        ]
    )
    latency = metrics.histogram("get_seconds", "of a get", (0.1, 1.0), ["tier"])
    latency.labels(tier="dram").observe(0.5)
    metrics.watch(gauges)
    async with metrics.served("127.0.0.1:0") as address:
        lines = await scrape(address)
    assert "moonpool_kvstore_dram_bytes 5.0" in lines
    assert "moonpool_kvstore_hits_total 7.0" in lines
    assert 'moonpool_kvstore_tenant_bytes{tenant="a \\"b\\""} 1.0' in lines
    assert 'moonpool_kvstore_tenant_bytes{tenant="*"} 2.0' in lines
    assert 'moonpool_kvstore_get_seconds_bucket{le="0.1",tier="dram"} 0.0' in lines
    assert 'moonpool_kvstore_get_seconds_bucket{le="1.0",tier="dram"} 1.0' in lines
    with pytest.raises(OSError, match="refused"):
        await scrape(address)


async def test_gauges_are_read_on_the_event_loop() -> None:
    metrics = Metrics("decode")
    metrics.watch(Gauges([("tasks", lambda: len(asyncio.all_tasks()), None)]))
    async with metrics.served("127.0.0.1:0") as address:
        (line,) = [line for line in await scrape(address) if line.startswith("moonpool_decode_tasks")]
    assert float(line.split()[1]) >= 1


async def test_no_address_serves_nothing() -> None:
    async with Metrics("prefill").served("") as address:
        assert address == ""


async def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="metrics_listen"):
            async with Metrics("conductor").served(f"127.0.0.1:{taken.getsockname()[1]}"):
                pytest.fail("it listened")


@pytest.mark.parametrize(("name", "split"), [("a_b", ("a_b", {})), ('a{t="x"}', ("a", {"t": "x"}))])
def test_labels(name: str, split: tuple[str, dict[str, str]]) -> None:
    assert split_labels(name) == split
