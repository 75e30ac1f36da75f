"""Many who ask for metrics, without a key, take little from others."""

import asyncio
import threading
import time

import pytest
from prometheus_client import CollectorRegistry, Counter

from moonpool.gateway.serving import scrapes
from moonpool.gateway.serving.scrapes import Scrapes


async def test_all_who_wait_get_one_text_and_later_figures_come_later() -> None:
    registry = CollectorRegistry()
    counter = Counter("asked", "how often", registry=registry)
    shown = Scrapes(registry)
    assert b"asked_total 0.0" in (await shown.text(""))[0]
    counter.inc()
    both = await asyncio.gather(shown.text(""), shown.text("application/openmetrics-text"))
    assert all(b"asked_total 1.0" in text for text, _ in both)
    assert [kind.partition(";")[0] for _, kind in both] == ["text/plain", "application/openmetrics-text"]


async def test_a_flood_costs_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, at_once, most = 0, 0, 0
    lock = threading.Lock()

    def slow(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
        nonlocal texts, at_once, most
        with lock:
            texts, at_once = texts + 1, at_once + 1
            most = max(most, at_once)
        time.sleep(0.02)
        with lock:
            at_once -= 1
        return b"%d" % texts, "text/plain"

    monkeypatch.setattr(scrapes, "exposition", slow)
    shown = Scrapes(CollectorRegistry())
    began = asyncio.get_running_loop().time()
    for _ in range(3):
        waiting = [asyncio.create_task(shown.text("")) for _ in range(100)]
        waiting[0].cancel()
        told = await asyncio.gather(*waiting[1:])
        assert len(set(told)) == 1
    assert (texts, most) == (3, 1)
    assert asyncio.get_running_loop().time() - began >= 2 * 0.02 / scrapes.SHARE
