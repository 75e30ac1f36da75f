"""A real Prometheus scrapes a stack under load: each query of dashboard and rules returns data."""

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import yaml

from moonpool.cli.stack import StackPlan
from tests.integration.stack import CheckedStack
from tools.gen_dashboard import FILE, queries

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]
KINDS = ("conductor", "prefill", "decode", "kvstore")
WAIT_S = 100.0
WINDOW = "30s"
ABSENT = ("moonpool_certificate_expiry", 'status="5xx"')
"""What a stack without certificates and without failures rightly lacks."""


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@contextmanager
def scraping(folder: Path, targets: dict[str, str]) -> Iterator[Callable[[str], list[object]]]:
    """A Prometheus with the rules that are shipped; yields what evaluates a query."""
    shutil.copy(FILE.parent / "rules.yaml", folder)
    scrapes = [
        {"job_name": f"moonpool-{kind}", "static_configs": [{"targets": [address]}]}
        for kind, address in targets.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": scrapes,
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )

    def ask(query: str) -> list[object]:
        url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found: list[object] = json.load(answer)["data"]["result"]
                return found
        except OSError:  # Prometheus starts
            return []

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def load(address: str) -> Iterator[None]:
    """Answers, refusals and wrong requests, one after the other, until the body ends."""
    over = threading.Event()

    def run() -> None:
        with httpx2.Client(base_url=f"http://{address}", timeout=60.0) as client:
            for number in range(1_000_000):
                if over.is_set():
                    return
                prompt = f"{'the same beginning ' * 20} {number % 7}"
                body = {"prompt": prompt, "max_tokens": 8, "stream": bool(number % 2)}
                client.post("/v1/completions", json=body)
                client.post("/v1/completions", json={**body, "slo": {"ttft_s": 1e-9}})
                client.post("/v1/completions", json={"prompt": 7.5})

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def wanted() -> set[str]:
    """All queries; of an alert what is compared, as alerts return nothing in a healthy cluster."""
    groups = yaml.safe_load((FILE.parent / "rules.yaml").read_text())["groups"]
    rules = [rule["expr"] for group in groups for rule in group["rules"]]
    parts = [part for rule in rules for part in re.split(r" (?:[<>]|==) ", rule)]
    compared = {part.removeprefix("0.01 * ").removeprefix("0.05 * ") for part in parts}
    shown = {query.replace("$__rate_interval", WINDOW) for query in queries()}
    found = {query.replace("[5m]", f"[{WINDOW}]") for query in compared | shown if not re.fullmatch(r"[\d. *]+", query)}
    return {query for query in found if not any(name in query for name in ABSENT)}


def without_data(ask: Callable[[str], list[object]], left: set[str]) -> set[str]:
    """The queries that have returned nothing within `WAIT_S`."""
    until = time.monotonic() + WAIT_S
    while left and time.monotonic() < until:
        left = {query for query in left if not ask(query)}
        time.sleep(1.0)  # a scrape
    return left


def test_every_query_returns_data_under_load(plan: StackPlan, tmp_path: Path) -> None:
    ports = {kind: f"127.0.0.1:{free_port()}" for kind in KINDS}
    extra = {kind: [*plan.extra.get(kind, ()), "--metrics-listen", ports[kind]] for kind in KINDS}
    folder = tmp_path / "prometheus"
    folder.mkdir()
    with CheckedStack(replace(plan, http_port=0, extra={**plan.extra, **extra})) as stack:
        gateway = stack.http_address
        with scraping(folder, {"gateway": gateway, **ports}) as ask, load(gateway):
            assert without_data(ask, wanted()) == set()
            checked = subprocess.run(
                ["promtool", "check", "metrics"],
                input=urllib.request.urlopen(f"http://{ports['conductor']}/metrics").read(),
                capture_output=True,
                check=False,
            )
            assert b"error" not in checked.stderr.lower(), checked.stderr
