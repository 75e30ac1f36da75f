"""Pairs of engines: one computes prompts, the other answers; KV goes from one to the other without the adapters."""

import asyncio
import io
import socket
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from moonpool.base.errors import ConfigError, TransferFailed
from moonpool.base.kv.keys import block_keys, chain_root, pack_keys
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.process import ProcessContext
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.telemetry.spans import Recorder
from moonpool.interop.adapter.service import serve
from moonpool.v1 import adapter_pb2, decode_pb2, kv_pb2, prefill_pb2
from moonpool.v1.adapter_pb2_grpc import AdapterServiceStub
from moonpool.v1.decode_pb2_grpc import DecodeServiceStub
from moonpool.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.unit.conductor.fakes import WAIT_S
from tests.unit.conductor.stack import Stack, stack
from tests.unit.interop.adapter.fake_vllm import BLOCK_SIZE, FakeVllm, answer_to, fake_vllm
from tests.unit.interop.adapter.test_adapter import GREEDY, adapter, configured, prompts


@asynccontextmanager
async def pairs(
    folder: Path, prefills: int = 1, decodes: int = 1
) -> AsyncIterator[tuple[Stack, list[FakeVllm], list[FakeVllm]]]:
    """A conductor, and engines that work in pairs."""
    async with stack() as running:
        engines: dict[str, list[FakeVllm]] = {"prefill": [], "decode": []}
        for role, count in (("prefill", prefills), ("decode", decodes)):
            for number in range(count):
                name = f"{role[0]}{number}"
                vocab = running.checkpoint.config.vocab_size
                engine = await running.exit.enter_async_context(fake_vllm(folder, name, vocab))
                settings: dict[str, Any] = {"role": role, "kv_domain": "nixl"}
                await running.exit.enter_async_context(adapter(engine.url, running.address, name, **settings))
                await running.until(lambda instance=f"{name}-{role}": running.cluster.find(instance) is not None)  # type: ignore[misc]
                engine.requests.clear()
                engine.hits.clear()
                engines[role].append(engine)
        for decode in engines["decode"]:
            decode.peers = engines["prefill"]
        yield running, engines["prefill"], engines["decode"]


async def recomputed(running: Stack) -> float:
    """Tokens that the decode side computed again."""
    member = running.cluster.find("d0-decode")
    assert member is not None
    async with Channels() as channels:
        stub: Any = DecodeServiceStub(channels.get(member.address))
        told = await stub.DecodeStats(decode_pb2.DecodeStatsRequest(), timeout=10)
    [found] = [gauge for gauge in told.gauges if gauge.name == "transfer_tokens_recomputed_total"]
    return float(found.value)


async def test_a_prompt_is_computed_at_one_engine_and_answered_at_the_other(tmp_path: Path) -> None:
    async with pairs(tmp_path) as (running, [prefill], [decode]):
        vocab = running.checkpoint.config.vocab_size
        asked = [*prompts(30, vocab), list(range(2 * BLOCK_SIZE))]
        for prompt in asked:
            result = await running.client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=5, **GREEDY))
            assert result.token_ids == answer_to(prompt, 5, vocab)
            assert result.placement.prefill == "p0-prefill"
            assert result.placement.decode == "d0-decode"
        assert [body["token_ids"] for body in prefill.requests] == asked
        whole = [len(prompt) % BLOCK_SIZE == 0 for prompt in asked]  # then the first token is drawn again
        assert sum(whole) > 0
        assert [len(body["token_ids"]) for body in decode.requests] == [
            len(prompt) + (not exact) for prompt, exact in zip(asked, whole, strict=True)
        ]
        assert decode.hits == [len(prompt) // BLOCK_SIZE for prompt in asked]  # all KV came over
        assert prefill.kept == {}
        polled = decode.polls
        await running.until(lambda: decode.polls > polled + 1)
        assert await recomputed(running) == 0
        await running.rest()


async def test_several_answers_have_their_kv_each(tmp_path: Path) -> None:
    async with pairs(tmp_path) as (running, [prefill], [decode]):
        sampling = SamplingParams(max_tokens=4, n=3, **GREEDY)
        result = await running.client.generate(token_ids=list(range(40)), sampling=sampling)
        expected = answer_to(list(range(40)), 4, running.checkpoint.config.vocab_size)
        assert [choice.token_ids for choice in result.choices] == [expected] * 3
        names = [body["kv_transfer_params"]["remote_request_id"] for body in decode.requests]
        assert len(set(names)) == len(prefill.requests) == 3
        await running.rest()


async def test_a_transfer_that_did_not_happen_is_counted_also_after_others_that_did(tmp_path: Path) -> None:
    async with pairs(tmp_path) as (running, _, [decode]):
        for at in range(60):
            sampling = SamplingParams(max_tokens=2, **GREEDY)
            await running.client.generate(token_ids=[at, *range(20)], sampling=sampling)
        decode.peers = []
        prompt, vocab = list(range(50)), running.checkpoint.config.vocab_size
        result = await running.client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=4, **GREEDY))
        assert result.token_ids == answer_to(prompt, 4, vocab)
        await running.rest()
        async with asyncio.timeout(WAIT_S):
            while not await recomputed(running):  # seen with the next look at the engine's load
                pass
        assert await recomputed(running) == len(prompt) + 1  # with the first token


async def test_kv_that_nobody_awaits_is_refused(tmp_path: Path) -> None:
    """Also if the message names another request of the engine, or comes a second time."""
    async with pairs(tmp_path) as (running, _, [decode]):
        member = running.cluster.find("d0-decode")
        assert member is not None
        sampling = SamplingParams(max_tokens=4, **GREEDY)
        async with Channels() as channels:
            stub: Any = AdapterServiceStub(channels.get(member.address))
            for number in range(3):
                target = kv_pb2.TransferTarget(transfer_id=number, generation=number)
                with pytest.raises(TransferFailed, match="there is no transfer"):
                    await stub.HandOver(adapter_pb2.HandOverRequest(target=target, transfers=["{"]), timeout=10)
                result = await running.client.generate(token_ids=list(range(40)), sampling=sampling)
                assert result.token_ids == answer_to(list(range(40)), 4, running.checkpoint.config.vocab_size)
        assert len(decode.requests) == 3
        await running.rest()


async def test_a_decode_side_that_cannot_be_told_of_kv_is_named(tmp_path: Path) -> None:
    async with pairs(tmp_path) as (running, _, _):
        member = running.cluster.find("p0-prefill")
        assert member is not None
        with socket.create_server(("127.0.0.1", 0)) as free:
            nobody = kv_pb2.Instance(id="d9", epoch=1, address=f"127.0.0.1:{free.getsockname()[1]}")
        tokens, model = array("i", range(20)), running.cluster.registry.model
        assert model is not None
        root = chain_root(model.namespace, "")
        sequence = kv_pb2.SequenceSpec(
            request_id="r", token_ids=tokens.tobytes(), prompt_tokens=20, chain_root=root,
            block_keys=pack_keys(block_keys(root, tokens, BLOCK_SIZE)), sampling=kv_pb2.Sampling(max_tokens=4),
        )  # fmt: skip
        target = kv_pb2.TransferTarget(decode=nobody, transfer_id=1, generation=1)
        asked = prefill_pb2.PrefillRequest(sequence=sequence, target=target)
        async with Channels() as channels:
            stub: Any = PrefillServiceStub(channels.get(member.address))
            with pytest.raises(TransferFailed, match="d9 was not told of the KV"):
                async for _ in stub.Prefill(asked, timeout=20):
                    pass


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_other_engines_go_on_when_one_dies(tmp_path: Path, role: str) -> None:
    async with pairs(tmp_path, 2, 2) as (running, prefills, decodes):
        vocab, sampling = running.checkpoint.config.vocab_size, SamplingParams(max_tokens=6, **GREEDY)
        for engine in decodes:
            engine.gate.clear()
        asked = [list(range(number, number + 40)) for number in range(4)]
        asking = [asyncio.create_task(running.client.generate(token_ids=prompt, sampling=sampling)) for prompt in asked]
        await running.until(lambda: sum(engine.running for engine in decodes) == 4)
        chosen = prefills if role == "prefill" else decodes
        next(engine for engine in chosen if engine.requests).dying = True
        for engine in decodes:
            engine.gate.set()
        for prompt, task in zip(asked, asking, strict=True):
            assert (await task).token_ids == answer_to(prompt, 6, vocab)
        later = await running.client.generate(token_ids=[7] * 30, sampling=sampling)
        assert later.token_ids == answer_to([7] * 30, 6, vocab)
        await running.rest()


async def test_an_engine_that_moves_no_kv_is_refused(tmp_path: Path) -> None:
    async with stack() as running, fake_vllm(tmp_path, "one", 100) as engine:
        engine.moves_kv = False
        with pytest.raises(ConfigError) as error:
            await serve(
                ProcessContext("one", Recorder("one", None), io.StringIO()),
                configured(engine.url, running.address, "one", role="prefill", kv_domain="nixl"),
            )
        assert error.value.field == "role"


async def test_one_token_needs_no_pair(tmp_path: Path) -> None:
    async with pairs(tmp_path) as (running, [prefill], [decode]):
        result = await running.client.generate(token_ids=[5, 6], sampling=SamplingParams(max_tokens=1, **GREEDY))
        assert result.token_ids == answer_to([5, 6], 1, running.checkpoint.config.vocab_size)
        assert (len(prefill.requests), len(decode.requests)) == (1, 0)
        await running.rest()


def test_a_pair_needs_a_domain() -> None:
    with pytest.raises(ValidationError, match="kv_domain"):
        configured("http://127.0.0.1:1", "127.0.0.1:2", "one", role="prefill")
