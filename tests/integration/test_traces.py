"""One request, one trace: gateway, conductor, prefill, kvstore and decode send their spans to a collector by OTLP."""

import gzip
import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from moonpool.base.bundled import model_dir
from moonpool.cli.stack import StackPlan
from moonpool.client import Client
from tests.integration.stack import CheckedStack

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
pytestmark = pytest.mark.slow
KINDS = ("gateway", "conductor", "prefill", "decode", "kvstore")
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
WRITTEN = "0af7651916cd43dd8448eb211c80319c"
WAIT_S = 60.0


@dataclass(frozen=True)
class Received:
    """A span as the collector has it."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


@contextmanager
def collector() -> Iterator[tuple[str, list[Received]]]:
    """A collector of traces in this process: its URL, and the spans that have come."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found: list[Received] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                for span in [span for scope in resource.scope_spans for span in scope.spans]:
                    told = {item.key: item.value for item in span.attributes}
                    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                    times = span.start_time_unix_nano, span.end_time_unix_nano
                    found.append(Received(names["service.name"], span.name, *ids, *times, told))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def until(what: str, true: Any) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_a_request_is_one_trace_over_five_processes(tmp_path: Path) -> None:
    prompt = "the tide of a moon pool turns when ships lie still " * 20
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with collector() as (url, found):
        extra = {kind: ["--set", f"otlp_traces_endpoint={url}"] for kind in KINDS}
        extra["conductor"] += ["--set", "peers=false"]
        plan = StackPlan(
            model=str(model_dir()), data_dir=tmp_path, engine="emulated:llama-70b-a800", time_scale=20.0, http_port=0,
            log_level="warning", extra=extra,
        )  # fmt: skip
        with CheckedStack(plan) as stack, httpx2.Client(base_url=f"http://{stack.http_address}", timeout=60) as http:
            assert http.post("/v1/completions", json=body).status_code == 200
            with Client(stack.address) as client:
                stored = lambda: any(  # noqa: E731
                    instance.indexed_blocks >= 6
                    for instance in client.cluster_state().instances
                    if instance.kind == "kvstore"
                )
                until("the kvstore has the prompt", stored)
                stack.restart_all(["prefill-0", "decode-0"])
                until("the engines are back, with empty pools", lambda: client.cluster_state().ready)
            other = {"prompt": "every rope hangs down", "max_tokens": 2}
            assert http.post("/v1/completions", json=other).status_code == 200, "the new engines are connected"
            before = time.time_ns()
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
            answer = http.post("/v1/completions", json=body | {"stream": True}, headers=headers)
            assert answer.status_code == 200
            after = time.time_ns()
            untraced = http.post("/v1/completions", json=body, headers={"traceparent": f"00-{'1' * 32}-{SPAN}-00"})
            assert untraced.status_code == 200
            new = {"prompt": "what nobody has asked before " * 20, "max_tokens": 2}
            headers = {"traceparent": f"00-{WRITTEN}-{SPAN}-01"}
            assert http.post("/v1/completions", json=new, headers=headers).status_code == 200
    spans = [span for span in found if span.trace == TRACE]
    services = {span.service.removeprefix("moonpool-") for span in spans}
    assert services == set(KINDS), f"all spans are sent before a process ends: {spans}"
    assert len(spans) >= 6
    by_id = {span.span: span for span in spans}
    roots = [span for span in spans if span.parent not in by_id]
    assert [(root.service, root.parent) for root in roots] == [("moonpool-gateway", SPAN)]
    names = {span.name: span for span in spans}
    assert by_id[names["generate"].parent] is roots[0]
    assert {by_id[names[name].parent].name for name in ("prefill", "decode")} == {"generate"}
    assert by_id[names["kvstore.get"].parent].name == "prefill"
    assert all(before <= span.start_ns <= span.end_ns <= after + 10**9 for span in spans), "on the wall clock"
    assert roots[0].attributes["gen_ai.request.max_tokens"].int_value == 4
    assert roots[0].attributes["gen_ai.usage.output_tokens"].int_value == 4
    written = {span.name: span for span in found if span.trace == WRITTEN}
    assert written["kv.write_back"].parent == written["prefill"].span
    assert written["kvstore.put"].parent == written["kv.write_back"].span
    assert written["kvstore.put"].service == "moonpool-kvstore"
    assert not [span for span in found if span.trace == "1" * 32], "the client does not want this trace"
