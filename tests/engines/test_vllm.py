"""A real vLLM on the CPU behind a conductor: answers of a plain forward pass, and an index that is its cache."""

import asyncio
import json
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from moonpool.kv.keys import block_keys, chain_root
from moonpool.sampling_params import SamplingParams
from tests.integration.reference import Reference
from tests.unit.adapter.test_adapter import adapter, prompts
from tests.unit.conductor.stack import TINY, stack

PYTHON = Path(__file__).parents[2] / ".engines" / "vllm" / "bin" / "python"
BLOCK_TOKENS, MAX_TOKENS = 32, 1024
START_S = 240.0
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(480),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: `make test-engines` installs it"),
]
SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


class Vllm:
    """A vLLM server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self._session = url, session

    async def is_up(self) -> bool:
        try:
            async with self._session.get(f"{self.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def cached_tokens(self, tokens: list[int]) -> int:
        """Asks vLLM itself for a token; what it had cached of the prompt."""
        body = {"token_ids": tokens, "sampling_params": {"max_tokens": 1, "temperature": 0, "detokenize": False}}
        async with self._session.post(f"{self.url}/inference/v1/generate", json=body) as response:
            answer: dict[str, Any] = await response.json()
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached


@asynccontextmanager
async def vllm(folder: Path, blocks: int) -> AsyncIterator[Vllm]:
    """A vLLM with so many KV blocks."""
    with socket.create_server(("127.0.0.1", 0)) as free:  # vLLM takes no port 0
        port = free.getsockname()[1]
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
    command = [str(PYTHON), str(Path(__file__).with_name("launch_vllm.py"))]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    command += ["--enforce-eager", "--enable-prefix-caching", "--enable-scale-out", "--enable-prompt-tokens-details"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    with (folder / "vllm.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, env={**kept, **SETTINGS}, start_new_session=True
        )
    try:
        async with aiohttp.ClientSession() as session:
            server = Vllm(f"http://127.0.0.1:{port}", session)
            async with asyncio.timeout(START_S):
                while not await server.is_up():
                    assert process.returncode is None, (folder / "vllm.log").read_text()[-4000:]
                    await asyncio.sleep(0.5)
            yield server
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_vllm_answers_as_a_plain_forward_pass_and_is_indexed_exactly(tmp_path: Path) -> None:
    async with vllm(tmp_path, blocks=64) as server, stack() as running, adapter(server.url, running.address, "vllm-0"):
        await running.until(lambda: running.cluster.find("vllm-0-decode") is not None)
        vocab, reference = running.checkpoint.config.vocab_size, Reference(TINY)
        asked = prompts(100, vocab)
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        for prompt in asked:
            result = await running.client.generate(token_ids=prompt, sampling=sampling)
            reference.assert_greedy(prompt, result.token_ids)
        await running.rest()
        model = running.cluster.registry.model
        assert model is not None
        root, index, draw = chain_root(model.namespace, ""), running.servicer.core.cluster.index, random.Random(11)
        hits = 0
        for prompt in draw.sample(asked, 40):
            keys, held = block_keys(root, prompt, BLOCK_TOKENS), 0
            while held < min(len(keys), (len(prompt) - 1) // BLOCK_TOKENS):
                if not index.holds("vllm-0-prefill", keys[held]):
                    break
                held += 1
            assert await server.cached_tokens(prompt) == held * BLOCK_TOKENS
            hits += held
            if held < len(keys):  # the events of the probe
                await running.until(lambda key=keys[held]: index.holds("vllm-0-prefill", key))  # type: ignore[misc]
        assert hits > 40
