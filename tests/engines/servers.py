"""Real vLLM servers on the CPU, as `make test-engines` installs vLLM."""

import asyncio
import json
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from services.adapter.vllm import read_samples
from tests.unit.conductor.stack import TINY

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".engines" / "vllm" / "bin" / "python"
BLOCK_TOKENS, MAX_TOKENS = 32, 1024
START_S = 240.0
SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": f"{ROOT}:{ROOT / 'packages' / 'moonpool_kv'}",
    "UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}  # fmt: skip
"""What vLLM and NIXL need on a machine without GPU and network."""


def pooled(stores: Sequence[str], **settings: Any) -> dict[str, Any]:
    """The setting by which vLLM keeps KV in kvstores."""
    return {
        "kv_connector": "MoonpoolConnector", "kv_connector_module_path": "moonpool_kv.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"stores": list(stores), **settings},
    }  # fmt: skip


@dataclass
class Vllm:
    """A vLLM server."""

    url: str
    process: Process
    log: Path

    async def is_up(self) -> bool:
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def answer(self, tokens: Sequence[int], count: int = 1) -> tuple[list[int], int]:
        """Asks vLLM itself for tokens; with them, how many tokens of the prompt it had cached."""
        sampling = {"max_tokens": count, "temperature": 0, "detokenize": False}
        body = {"token_ids": list(tokens), "sampling_params": sampling}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/inference/v1/generate", json=body) as response,
        ):
            told: dict[str, Any] = await response.json()
        return told["choices"][0]["token_ids"], told["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def metric(self, name: str) -> float:
        """A metric, added up over its labels."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            return sum([value for _, value in read_samples(await response.text()).get(name, [])])

    async def kill(self) -> None:
        """`kill -9`, of all its processes."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


def free_port() -> int:
    """vLLM takes no port 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@asynccontextmanager
async def vllm(
    folder: Path, blocks: int, transfer: dict[str, Any] | None = None, *, port: int = 0
) -> AsyncIterator[Vllm]:
    """A vLLM with so many KV blocks; `transfer` is its --kv-transfer-config."""
    os.makedirs(folder, exist_ok=True)
    port = port or free_port()
    events = {
        "enable_kv_cache_events": True, "publisher": "zmq",
        "endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replays",
    }  # fmt: skip
    flags = {
        "model": TINY, "served-model-name": "tiny", "host": "127.0.0.1", "port": port, "dtype": "float32",
        "block-size": BLOCK_TOKENS, "num-gpu-blocks-override": blocks, "kv-cache-memory-bytes": 1 << 26,
        "max-model-len": MAX_TOKENS, "max-num-seqs": 4, "max-num-batched-tokens": 1024,
        "kv-events-config": json.dumps(events),
    }  # fmt: skip
    if transfer is not None:
        flags["kv-transfer-config"] = json.dumps(transfer)
    command = [str(PYTHON), str(Path(__file__).with_name("launch_vllm.py"))]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    command += ["--enforce-eager", "--enable-prefix-caching", "--enable-scale-out", "--enable-prompt-tokens-details"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    path = folder / "vllm.log"
    with path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, start_new_session=True,
            env={**kept, **SETTINGS, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        )  # fmt: skip
    server = Vllm(f"http://127.0.0.1:{port}", process, path)
    try:
        async with asyncio.timeout(START_S):
            while not await server.is_up():
                assert process.returncode is None, path.read_text()[-4000:]
                await asyncio.sleep(0.5)
        yield server
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
