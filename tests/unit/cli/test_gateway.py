"""The command line's side of the gateway: its health by HTTP, and a command that works when pasted."""

import http.server
import json
import shlex
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from moonpool.base.errors import InvalidRequest
from moonpool.cli.health import run_health
from moonpool.cli.running_stacks import recorded_stack
from moonpool.cli.serve import curl_line


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that answers everything with `status`; its "host:port"."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(b"because")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def health(address: str) -> int:
    return run_health(address, timeout_s=5.0, wait_s=0.0, joined=0)


def test_health_by_http(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200) as address:
        assert health(f"http://{address}") == 0
        assert health(f"http://{address}/") == 0
    with answering(503) as address:
        assert health(f"http://{address}") == 1
    assert "not serving: because" in capsys.readouterr().err
    for wrong in (f"http://{address}", "http://", "http://x y:1", "http://127.0.0.1:99999"):
        assert health(wrong) == 1
    assert capsys.readouterr().err.count("does not answer") == 4


def test_health_of_the_stack_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an address, the conductor of the one stack that runs is asked, at whatever port; names choose."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with recorded_stack(tmp_path / "a", "m") as record:
            record.write(address, "")
            assert health("") == 0
            assert capsys.readouterr().out == f"{address} serves\n"
            with recorded_stack(tmp_path / "b", "m") as second:
                second.write(f"{address},{address}", "")
                with pytest.raises(InvalidRequest, match="several stacks run; name one with --address: m, m-2"):
                    health("")
                assert health("m-2") == 0
                assert capsys.readouterr().out == f"{address}, {address} serve\n"
    finally:
        server.stop(None)


def test_curl_line() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000/", needs_key=False))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["max_tokens"] == 64
    assert "Bearer $KEY" in curl_line("http://127.0.0.1:8000/", needs_key=True)
