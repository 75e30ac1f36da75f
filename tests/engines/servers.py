"""Real vLLM and SGLang servers on the CPU, as `make test-engines` installs them."""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import aiohttp

from moonpool.base.fork_server import ChildProcess, ForkServer, Program
from moonpool.interop.adapter.vllm import read_samples
from tests.unit.conductor.stack import TINY

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".engines" / "vllm" / "bin" / "python"
SGLANG = ROOT / ".engines" / "sglang"
"""Folder with SGLang's packages, for vLLM's Python."""
BLOCK_SIZE, MAX_TOKENS = 32, 1024
START_S, WAIT_S, END_S = 240.0, 60.0, 5.0
SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(ROOT),
    "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    **{name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ},
}  # fmt: skip
"""What vLLM, SGLang and NIXL need on a machine without GPU and network."""


class Make:
    """Starts programs of a make by forking a process that has imported what they need, which takes 7 s of processor.

    Args:
        settings: variables, beside `SETTINGS`.
        modules: what is imported once.
    """

    def __init__(self, settings: Mapping[str, str], modules: Sequence[str]) -> None:
        self._settings = {**SETTINGS, **settings}
        self._forks = ForkServer(modules, python=[str(PYTHON)], environment=self._settings)

    def close(self) -> None:
        """Ends the process that is forked. Programs run on."""
        self._forks.close()

    async def start(
        self, path: Path, module: str, *arguments: str, settings: Mapping[str, str] = MappingProxyType({})
    ) -> ChildProcess:
        """Runs a module as a program that prints into a file."""
        with path.open("ab") as log:
            variables, number = {**self._settings, **settings}, log.fileno()
            program = Program(module, arguments, variables, number, number, folder=str(ROOT))
            return await asyncio.to_thread(self._forks.start, program)


VLLM = Make(
    {"PYTHONPATH": f"{Path(__file__).with_name('without_gpu')}:{ROOT}"},
    ("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core"),
)
SGLANG_CPU = Make(
    {
        "PYTHONPATH": f"{Path(__file__).with_name('without_kernels')}:{SGLANG}:{ROOT}",
        "SGLANG_USE_CPU_ENGINE": "1",
    },
    ("sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler"),
)
LMCACHE = Make(
    {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}, ("lmcache.v1.distributed.l2_adapters", "lmcache.cli.main")
)
MAKES = (VLLM, SGLANG_CPU, LMCACHE)


def pooled(stores: Sequence[str], **settings: Any) -> dict[str, Any]:
    """The setting by which vLLM keeps KV in kvstores."""
    return {
        "kv_connector": "MoonpoolConnector", "kv_connector_module_path": "moonpool.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"stores": list(stores), **settings},
    }  # fmt: skip


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"num_threads": 1}}
"""The setting by which KV moves between two servers. More of NIXL's threads would spin."""


S = TypeVar("S", bound="Server")


@dataclass
class Server:
    """A server in a process group of its own."""

    url: str
    process: ChildProcess
    log: Path

    async def is_up(self) -> bool:
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def post(self, path: str, body: Any) -> Any:
        """The answer to a request."""
        async with aiohttp.ClientSession() as session, session.post(self.url + path, json=body) as response:
            return await response.json()

    async def kill(self) -> None:
        """`kill -9`, of all its processes."""
        with shared_memory_removed(self.process.pid):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            await asyncio.to_thread(self.process.wait)


class Vllm(Server):
    """A vLLM server."""

    async def answer(self, tokens: Sequence[int], count: int = 1) -> tuple[list[int], int]:
        """Asks vLLM itself for tokens; with them, how many tokens of the prompt it had cached."""
        sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "detokenize": False}
        told = await self.post("/inference/v1/generate", {"token_ids": list(tokens), "sampling_params": sampling})
        return told["choices"][0]["token_ids"], told["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def metric(self, name: str, **labels: str) -> float:
        """A metric, added up over the other labels."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            samples = read_samples(await response.text()).get(name, [])
        return sum([value for found, value in samples if found.items() >= labels.items()])

    async def until(self, name: str, least: float) -> None:
        """Waits until a metric has grown so far."""
        async with asyncio.timeout(WAIT_S):
            while True:
                if await self.metric(name) >= least:
                    return
                await asyncio.sleep(0.1)


class Sglang(Server):
    """An SGLang server."""

    async def answer(self, tokens: Sequence[int], count: int = 1) -> tuple[list[int], int]:
        """As `Vllm.answer`."""
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        told = await self.post("/generate", {"input_ids": list(tokens), "sampling_params": sampling})
        return told["output_ids"], told["meta_info"]["cached_tokens"]


@contextlib.contextmanager
def shared_memory_removed(group: int) -> Iterator[None]:
    """Removes the shared memory of a process group that ends: vLLM and SGLang leave theirs behind."""
    mapped = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if os.getpgid(int(maps.parent.name)) == group:
                mapped.update(re.findall(r"/dev/shm/(?:psm|sglang)_\S+", maps.read_text()))
    yield
    for path in mapped:
        Path(path).unlink(missing_ok=True)


class Valve:
    """Passes bytes between clients and a store.

    Attributes:
        address: for clients.
        left: bytes that the store may still send.
    """

    def __init__(self) -> None:
        self.address, self.left = "", math.inf
        self._changed = asyncio.Condition()

    async def set(self, left: float) -> None:
        """Lets the store send so many bytes from now on."""
        async with self._changed:
            self.left = left
            self._changed.notify_all()

    async def passes(self, count: int) -> None:
        """Waits until so many bytes of the store may pass."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.left >= count)
            self.left -= count


@asynccontextmanager
async def valve(store: str) -> AsyncIterator[Valve]:
    """A valve before a store."""
    found, open_ends = Valve(), set[asyncio.StreamWriter]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if counts:
                    await found.passes(len(data))
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = store.rpartition(":")
        try:
            store_reader, store_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        open_ends.update((writer, store_writer))
        both = pump(reader, store_writer, counts=False), pump(store_reader, writer, counts=True)
        await asyncio.gather(*both)
        open_ends.difference_update((writer, store_writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    found.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()
        await found.set(math.inf)
        for end in list(open_ends):
            end.close()


def free_port() -> int:
    """vLLM takes no port 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@asynccontextmanager
async def vllm(
    folder: Path, blocks: int, transfer: dict[str, Any] | None = None, *, port: int = 0, model: Path = TINY
) -> AsyncIterator[Vllm]:
    """A vLLM with so many KV blocks; `transfer` is its --kv-transfer-config. It keeps no pictures of its own."""
    os.makedirs(folder, exist_ok=True)
    port = port or free_port()
    events = {
        "enable_kv_cache_events": True, "publisher": "zmq",
        "endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replays",
    }  # fmt: skip
    flags = {
        "model": model, "served-model-name": "tiny", "host": "127.0.0.1", "port": port, "dtype": "float32",
        "block-size": BLOCK_SIZE, "num-gpu-blocks-override": blocks, "kv-cache-memory-bytes": 1 << 26,
        "max-model-len": MAX_TOKENS, "max-num-seqs": 4, "max-num-batched-tokens": 1024,
        "kv-events-config": json.dumps(events), "mm-processor-cache-gb": 0,
    }  # fmt: skip
    if transfer is not None:
        flags["kv-transfer-config"] = json.dumps(transfer)
    arguments = options(flags)
    arguments += ["--enforce-eager", "--enable-prefix-caching", "--enable-scale-out", "--enable-prompt-tokens-details"]
    settings, log = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}, folder / "vllm.log"
    process = await VLLM.start(log, "tests.engines.launch_vllm", *arguments, settings=settings)
    async with ready(Vllm(f"http://127.0.0.1:{port}", process, log)) as server:
        yield server


@asynccontextmanager
async def sglang(folder: Path, blocks: int, role: str = "") -> AsyncIterator[Sglang]:
    """An SGLang with so many KV blocks; `role`: "prefill" or "decode" of a pair whose KV moves over NIXL."""
    os.makedirs(folder, exist_ok=True)
    port, log = free_port(), folder / "sglang.log"
    events = {"publisher": "zmq", "endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replays"}
    flags = {
        "model-path": TINY, "host": "127.0.0.1", "port": port, "device": "cpu", "dtype": "float32",
        "page-size": BLOCK_SIZE, "max-total-tokens": blocks * BLOCK_SIZE, "mem-fraction-static": 0.05,
        "context-length": MAX_TOKENS, "attention-backend": "torch_native", "kv-events-config": json.dumps(events),
    }  # fmt: skip
    if role:
        flags |= {"disaggregation-mode": role, "disaggregation-transfer-backend": "nixl"}
        flags["disaggregation-bootstrap-port"] = free_port()
    arguments = [*options(flags), "--disable-overlap-schedule", "--skip-server-warmup"]
    process = await SGLANG_CPU.start(log, "tests.engines.launch_sglang", *arguments)
    async with ready(Sglang(f"http://127.0.0.1:{port}", process, log)) as server:
        yield server


def options(flags: Mapping[str, Any]) -> list[str]:
    """Flags as arguments of a program."""
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


@asynccontextmanager
async def ready(server: S) -> AsyncIterator[S]:
    """A server once it answers, and its end."""
    try:
        async with asyncio.timeout(START_S):
            while not await server.is_up():
                assert server.process.poll() is None, server.log.read_text()[-4000:]
                await asyncio.sleep(0.1)
        yield server
    finally:
        with shared_memory_removed(server.process.pid):
            server.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(server.process.wait, END_S)
            except subprocess.TimeoutExpired:  # SGLang's threads of NIXL do not end soon
                await server.kill()
