"""Prometheus metrics over HTTP: a service's gauges as they are, and histograms of what its gauges cannot say.

The endpoint has an address of its own, so that scraping never competes with the service's RPCs for a listener. Names
are `moonpool_<service>_<gauge>`; a gauge whose name ends in `_total` is a counter, and one named `what{tenant="a"}` has
these labels.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.config import format_address, parse_address
from moonpool.errors import ConfigError
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import kv_pb2

SCRAPE_TIMEOUT_S = 5.0
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bucket bounds of latencies."""
AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)
"""Bucket bounds of lifetimes and gaps, from seconds to a week."""

_LABELLED = re.compile(r"(?P<name>[a-z0-9_]+)\{(?P<label>[a-z_]+)=(?P<value>.*)\}", re.DOTALL)

log = get_logger(__name__)


class Metrics:
    """The metrics of one process.

    Attributes:
        registry: what is exported; independent of the library's global one, so that tests can have many.
    """

    def __init__(self, service: str) -> None:
        """Metrics of the service of that name, as in `moonpool_<service>_...`."""
        self.registry = CollectorRegistry()
        self._prefix = f"moonpool_{service}_"

    def histogram(self, name: str, text: str, buckets: Sequence[float], labels: Iterable[str] = ()) -> Histogram:
        """A histogram; observing costs about a microsecond."""
        return Histogram(self._prefix + name, text, tuple(labels), registry=self.registry, buckets=tuple(buckets))

    def watch(self, read: Callable[[], list[kv_pb2.Gauge]]) -> None:
        """Exports what `read` gives at each scrape; it is called on the event loop that runs now."""
        self.registry.register(_GaugeCollector(self._prefix, read, asyncio.get_running_loop()))

    @asynccontextmanager
    async def served(self, listen: str) -> AsyncIterator[str]:
        """Serves `GET /metrics` at "host:port" (port 0 = any free one), from threads of its own; "" serves nothing.

        Yields:
            The address it is served at, "" for none.

        Raises:
            ConfigError: naming `metrics_listen`: the address cannot be used.
        """
        if not listen:
            yield ""
            return
        host, port = parse_address(listen)
        try:
            server, thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ConfigError("metrics_listen", f"cannot listen at {listen}: {error.strerror or error}") from error
        address = format_address(host, server.server_port)
        log.info("serving metrics", address=address)
        try:
            yield address
        finally:
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            await asyncio.to_thread(thread.join)


class _GaugeCollector(Collector):
    """Reads gauges on their event loop, from the thread of a scrape."""

    def __init__(self, prefix: str, read: Callable[[], list[kv_pb2.Gauge]], loop: asyncio.AbstractEventLoop) -> None:
        self._prefix = prefix
        self._read = read
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known only by reading, which must wait for the event loop."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All gauges now."""

        async def read() -> list[kv_pb2.Gauge]:
            return self._read()

        gauges = asyncio.run_coroutine_threadsafe(read(), self._loop).result(SCRAPE_TIMEOUT_S)
        families: dict[str, Metric] = {}
        for gauge in gauges:
            name, labels = split_labels(gauge.name)
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families[name] = kind(self._prefix + name, name.replace("_", " "), labels=list(labels))
            family.add_metric(list(labels.values()), gauge.value)  # type: ignore[attr-defined]
        return families.values()


def split_labels(name: str) -> tuple[str, dict[str, str]]:
    """`what{tenant="a"}` as ("what", {"tenant": "a"}); the value is a JSON string."""
    found = _LABELLED.fullmatch(name)
    if found is None:
        return name, {}
    return found["name"], {found["label"]: str(json.loads(found["value"]))}
