"""`kill -9` of every part under load: no answer is lost, and no prompt is promised too much."""

import asyncio
import dataclasses
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
from tokenizers import Tokenizer

from moonpool.base.checkpoint.resolve import model_name
from moonpool.base.errors import Unavailable
from moonpool.base.kv.keys import block_keys, chain_root, unpack_keys
from moonpool.base.rpc.channels import Channels
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import StackPlan
from moonpool.client import AsyncClient
from moonpool.v1 import conductor_pb2
from moonpool.v1.conductor_pb2_grpc import ConductorServiceStub
from tests.engines.servers import BLOCK_SIZE, NIXL, PYTHON, ROOT, Vllm, free_port, pooled, vllm
from tests.integration.reference import Reference
from tests.integration.stack import CheckedStack
from tests.unit.conductor.stack import TINY
from tests.unit.interop.adapter.test_adapter import prompts

ANSWER = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
VOCAB, AT_ONCE, WAIT_S = 400, 4, 120.0
EXACT_S = 2.0
"""Seconds after a part is back, within which the index is exact."""
Strike = Callable[[], Awaitable[None]]
Ask = Callable[[list[int]], Awaitable[tuple[Any, str]]]
"""Gives the answer to a prompt, and who computed the prompt."""
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(480),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: `make test-engines` installs it"),
]


@asynccontextmanager
async def service(module: str, log: Path, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A service in a process of its own."""
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, "--model", str(TINY), *flags, stdout=file, stderr=file, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@dataclasses.dataclass
class Part:
    """An engine and its adapter, which are killed and started again.

    Attributes:
        folder: for logs and sockets.
        conductors: addresses.
        name: of the engine.
        settings: the adapter's further flags.
        transfer: the engine's way to move KV.
    """

    folder: Path
    conductors: list[str]
    name: str = "vllm-0"
    settings: tuple[str, ...] = ()
    transfer: dict[str, Any] | None = None
    ends: AsyncExitStack = dataclasses.field(default_factory=AsyncExitStack)
    port: int = dataclasses.field(default_factory=free_port)
    engine: Vllm = dataclasses.field(init=False)
    adapter: asyncio.subprocess.Process = dataclasses.field(init=False)

    async def start_engine(self) -> None:
        self.engine = await self.ends.enter_async_context(
            vllm(self.folder / self.name, 64, self.transfer, port=self.port)
        )

    async def start_adapter(self) -> None:
        flags = ["--engine", f"http://127.0.0.1:{self.port}", "--id", self.name, "--listen", "127.0.0.1:0"]
        flags += ["--conductor", ",".join(self.conductors), "--dtype", "float32", "--set", "drain_s=1", *self.settings]
        log = self.folder / f"{self.name}.adapter.log"
        self.adapter = await self.ends.enter_async_context(service("moonpool.interop.adapter", log, *flags))

    async def kill_adapter(self) -> None:
        self.adapter.kill()
        await self.adapter.wait()

    async def kill_engine(self) -> None:
        await self.engine.kill()


@asynccontextmanager
async def parts(*found: Part) -> AsyncIterator[None]:
    """Engines and adapters, started at once."""
    async with AsyncExitStack() as stack:
        for part in found:
            stack.push_async_callback(part.ends.aclose)
            await part.start_adapter()
        await asyncio.gather(*[part.start_engine() for part in found])
        yield


def plan(folder: Path) -> StackPlan:
    """Two conductors, and Moonpool's own engines beside the vLLM."""
    return StackPlan(
        model=str(TINY), data_dir=folder, dtype="float32", threads=1, block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=64 << 20, dram_bytes=16 << 20, conductors=2,
        http_port=0, extra={"conductor": ["--policy", "round_robin"]},  # all engines have work when a part is killed
    )  # fmt: skip


async def joined(client: AsyncClient, *names: str, there: bool = True) -> None:
    """Waits until the conductor knows instances, or knows no more of them."""
    async with asyncio.timeout(WAIT_S):
        while True:
            known = {instance.id for instance in (await client.cluster_state()).instances}
            if known.issuperset(names) if there else known.isdisjoint(names):
                return
            await asyncio.sleep(0.2)


async def load(ask: Ask, asked: list[list[int]], strike: Strike | None = None) -> tuple[Any, ...]:
    """Asks all prompts, and strikes when a third of them are answered. Returns answers, and who computed prompts."""
    places, answered, struck = asyncio.Semaphore(AT_ONCE), 0, asyncio.Event()

    async def answered_by(prompt: list[int]) -> tuple[Any, str]:
        nonlocal answered
        async with places:
            answer = await ask(prompt)
        answered += 1
        if answered == len(asked) // 3:
            struck.set()
        return answer

    async def striking() -> None:
        await struck.wait()
        if strike is not None:
            await strike()

    strikes = asyncio.create_task(striking())
    found = await asyncio.gather(*map(answered_by, asked))
    await strikes
    return tuple(zip(*found, strict=True))


@asynccontextmanager
async def asking(addresses: list[str]) -> AsyncIterator[Ask]:
    """Asks conductors for tokens."""
    async with AsyncClient(addresses) as client:

        async def ask(prompt: list[int]) -> tuple[list[int], str]:
            result = await client.generate(token_ids=prompt, sampling=ANSWER)
            return result.token_ids, result.placement.prefill

        yield ask


@asynccontextmanager
async def asking_for_text(url: str, model: str) -> AsyncIterator[Ask]:
    """Asks a gateway for text; whoever loses the gateway asks again."""
    async with aiohttp.ClientSession() as session:

        async def ask(prompt: list[int]) -> tuple[str, str]:
            body = {"model": model, "prompt": prompt, "max_tokens": ANSWER.max_tokens, "ignore_eos": True}
            while True:
                try:
                    async with session.post(f"{url}/v1/completions", json=body | {"temperature": 0}) as response:
                        told = await response.json()
                        assert response.status == 200, told
                        return told["choices"][0]["text"], ""
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)

        yield ask


def check(reference: Reference, asked: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
    """All answers are whole, and those of a plain forward pass."""
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer) == ANSWER.max_tokens
        reference.assert_greedy(prompt, answer)


async def test_engines_of_both_makes_answer_and_no_answer_is_lost_when_a_part_is_killed(tmp_path: Path) -> None:
    asked, reference, engines = prompts(340, VOCAB, seed=17), Reference(TINY), ("vllm-0-prefill", "vllm-0-decode")
    with CheckedStack(plan(tmp_path / "stack")) as own:
        part = Part(tmp_path, own.addresses, transfer=pooled([own.services["kvstore-0"].address]))
        async with (
            parts(part),
            AsyncClient(own.addresses) as client,
            asking(own.addresses) as ask,
            asking_for_text(f"http://{own.http_address}", model_name(str(TINY))) as ask_for_text,
        ):
            await joined(client, *engines)
            answers, places = await load(ask, asked[:100])
            check(reference, asked[:100], answers)
            by_vllm = places.count(engines[0])
            print(f"{by_vllm} of 100 prompts at vLLM, the others at Moonpool's engines")
            assert 10 < by_vllm < 90

            def killed(name: str) -> Strike:
                async def strike() -> None:
                    own.services[name].signal(signal.SIGKILL)

                return strike

            strikes: list[tuple[str, Strike]] = [
                ("adapter", part.kill_adapter), ("engine", part.kill_engine),
                *[(name, killed(name)) for name in ("conductor", "prefill-0", "decode-0", "kvstore-0")],
            ]  # fmt: skip
            for at, (name, strike) in enumerate(strikes):
                now = asked[100 + 40 * at : 140 + 40 * at]
                answers, places = await load(ask, now, strike)
                check(reference, now, answers)
                print(f"kill -9 of {name}: {places.count(engines[0])} of {len(now)} prompts at vLLM")
                assert engines[0] in places
                if name == "adapter":  # its engine still holds what it computed
                    await part.start_adapter()
                elif name == "engine":
                    await joined(client, *engines, there=False)
                    await part.start_engine()
                else:
                    await asyncio.to_thread(own.restart, name)
                await joined(client, *engines)
            again = await load(ask, asked[:40])
            assert own.gauge("vllm-0-prefill", "prompts_recomputed_total") == 0

            async def kill_gateway() -> None:
                await killed("gateway-0")()
                await asyncio.to_thread(own.restart, "gateway-0")

            texts, _ = await load(ask_for_text, asked[:40], kill_gateway)
            tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
            assert list(texts) == [tokenizer.decode(answer) for answer in again[0]]


async def test_no_answer_is_lost_when_an_engine_of_a_pair_is_killed(tmp_path: Path) -> None:
    asked, reference = prompts(200, VOCAB, seed=18), Reference(TINY)
    with CheckedStack(plan(tmp_path / "stack")) as own:
        p, d = [
            Part(tmp_path, own.addresses, role[0], ("--role", role, "--kv-domain", "nixl"), NIXL)
            for role in ("prefill", "decode")
        ]
        async with parts(p, d), AsyncClient(own.addresses) as client, asking(own.addresses) as ask:
            for at, part in enumerate((p, d)):
                await joined(client, "p-prefill", "d-decode")
                now = asked[100 * at : 100 * at + 100]
                answers, places = await load(ask, now, part.kill_engine)
                check(reference, now, answers)
                print(f"kill -9 of {part.name}: {places.count('p-prefill')} of {len(now)} prompts at the pair")
                assert "p-prefill" in places
                if part is p:
                    await joined(client, "p-prefill", there=False)
                    await p.start_engine()


class HeldView:
    """What a conductor's index says that instances hold."""

    def __init__(self) -> None:
        self.keys: dict[str, set[bytes]] = {}
        self.root = b""
        self._changed = asyncio.Event()

    async def follow(self, address: str) -> None:
        """Follows a conductor until cancelled, also a restarted one."""
        async with Channels() as channels:
            while True:
                stub: Any = ConductorServiceStub(channels.get(address))
                self.keys.clear()
                self._changed.set()
                try:
                    async for message in stub.WatchKV(conductor_pb2.WatchKVRequest()):
                        self._take(message)
                except (grpc.aio.AioRpcError, Unavailable):
                    await asyncio.sleep(0.05)

    def _take(self, message: conductor_pb2.WatchKVResponse) -> None:
        match message.WhichOneof("message"):
            case "joined":
                self.keys[message.joined.instance.id] = set()
                self.root = chain_root(message.joined.model.namespace, "")
            case "left":
                self.keys.pop(message.left, None)
            case "changed":
                held, events = self.keys[message.changed.instance_id], message.changed.events
                if events.snapshot_begin:
                    held.clear()
                held.update(unpack_keys(events.stored_keys))
                held.difference_update(unpack_keys(events.removed_keys))
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until something is known."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def promised(self, prompt: Sequence[int]) -> int:
        """Leading tokens of a prompt that are promised at the vLLM; the last token is computed in any case."""
        keys, held = block_keys(self.root, prompt, BLOCK_SIZE), self.keys["vllm-0-prefill"]
        most = (len(prompt) - 1) // BLOCK_SIZE
        return next((at for at in range(most) if keys[at] not in held), most) * BLOCK_SIZE


async def test_after_a_kill_nothing_is_promised_too_much_and_all_is_exact_soon(tmp_path: Path) -> None:
    asked, port, clock = prompts(200, VOCAB, seed=19), free_port(), asyncio.get_running_loop().time
    address = f"127.0.0.1:{port}"
    part, view, draw = Part(tmp_path, [address]), HeldView(), random.Random(3)
    prefill = "vllm-0-prefill"
    async with AsyncExitStack() as ends, AsyncClient(address) as client:

        async def start_conductor() -> asyncio.subprocess.Process:
            return await ends.enter_async_context(
                service("moonpool.conductor", tmp_path / "conductor.log", "--listen", address)
            )

        conductor = await start_conductor()
        await ends.enter_async_context(parts(part))
        following = asyncio.create_task(view.follow(address))
        ends.callback(following.cancel)
        await view.until(lambda: prefill in view.keys)
        for prompt in asked:
            await client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=1, temperature=0.0))
        for name in ("adapter", "conductor", "engine"):
            if name == "adapter":
                await part.kill_adapter()
                await view.until(lambda: prefill not in view.keys)
                await part.start_adapter()
            elif name == "conductor":
                conductor.kill()
                await conductor.wait()
                await view.until(lambda: prefill not in view.keys)
                conductor = await start_conductor()
            else:
                await part.kill_engine()
                await view.until(lambda: prefill not in view.keys)
                await part.start_engine()
            await view.until(lambda: prefill in view.keys)
            back, less, late, hits = clock(), 0, 0, 0
            for prompt in draw.sample(asked, 70):
                promised, began = view.promised(prompt), clock()
                _, cached = await part.engine.answer(prompt)
                assert promised <= cached
                less += promised < cached
                late += promised < cached and began > back + EXACT_S
                hits += cached
                whole = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
                await view.until(lambda prompt=prompt, whole=whole: view.promised(prompt) == whole)  # type: ignore[misc]
            print(f"kill -9 of {name}: 70 probes hit {hits} tokens, {less} were promised less, {late} of them late")
            assert late == 0
            assert hits > 0
