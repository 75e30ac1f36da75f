"""Routers of other makes in front of vLLM servers: installed once, started, ended."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.programs import HOST, free_port, listening

PACKAGES = {"vllm_router": ("vllm-router==0.1.17",), "sglang_router": ("sglang-router==0.3.2",)}


@dataclass(frozen=True, slots=True)
class Router:
    """A router with a policy.

    Attributes:
        name: as it is shown.
        package: module, and name in `PACKAGES`.
        policy: the router's flag.
        flags: further ones.
        reads_tokens: matches token ids, which the client then sends; else text.
    """

    name: str
    package: str
    policy: str
    flags: tuple[str, ...] = ()
    reads_tokens: bool = False


ROUTERS = (
    Router("round robin", "vllm_router", "round_robin"),
    Router("vLLM router, cache_aware", "vllm_router", "cache_aware"),
    Router("vLLM router, kv_aware", "vllm_router", "kv_aware", ("--kv-event-block-size", "16"), reads_tokens=True),
    Router("sglang-router, cache_aware", "sglang_router", "cache_aware"),
)


@contextlib.contextmanager
def running(router: Router, python: Path, engines: Sequence[str]) -> Iterator[str]:
    """A router in front of servers, for as long as the body runs; gives its URL."""
    port, metrics = free_port(), free_port()
    command = [
        *(str(python), "-m", f"{router.package}.launch_router", "--host", HOST, "--port", str(port)),
        *("--policy", router.policy, "--prometheus-port", str(metrics), "--log-level", "error", *router.flags),
        *("--worker-urls", *engines),
    ]
    with listening(command, port, {**os.environ, "PYTHONPATH": ""}):
        yield f"http://{HOST}:{port}"
