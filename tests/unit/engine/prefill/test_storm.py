"""A storm of requests that leave, transfers that break and a store that lies: the answers are right, all comes back."""

import asyncio
import random
from collections import Counter

import pytest

from moonpool.base.errors import MoonpoolError
from moonpool.base.kv.keys import block_keys
from moonpool.v1 import decode_pb2, kv_pb2, prefill_pb2
from tests.unit.base.transport.fakes import ROOT, FakeStore
from tests.unit.engine.prefill.calls import PrefillCall, storing
from tests.unit.fakes.engine import next_token
from tests.unit.instances import BLOCK, WAIT_S, Decode, Prefill, decoding, prefilling, prompt, spec

REQUESTS = 60


class Storm:
    def __init__(self, seed: int, prefill: Prefill, decode: Decode, store: FakeStore, place: kv_pb2.Instance) -> None:
        self.random = random.Random(seed)
        self.prefill, self.decode, self.store, self.place = prefill, decode, store, place
        self.ends: Counter[str] = Counter()

    async def request(self, number: int) -> None:
        chance = self.random
        tokens = prompt(chance.randrange(1, 6 * BLOCK), chance.randrange(6))
        plan = chance.choice(
            ["stay", "stay", "leave at once", "leave", "leave after the token", "decode leaves", "alone"]
        )
        patience = chance.randrange(60)
        source = prefill_pb2.PrefixSource(instance=self.place, blocks=chance.randrange(6))
        self.store.lost_at = chance.choice([None, None, (chance.randrange(3), chance.randrange(2))])
        sequence = spec(f"r{number}", tokens, max_tokens=1 if plan == "alone" else 4)
        request = prefill_pb2.PrefillRequest(sequence=sequence, source=source, write_back=self.place)
        target = None
        if plan != "alone":
            answer = await self.decode.stub.Reserve(decode_pb2.ReserveRequest(sequence=sequence), timeout=WAIT_S)
            target = answer.target
            request.target.CopyFrom(target)
        story = PrefillCall(self.prefill, request)
        try:
            await self.live(story, plan, patience, target, tokens)
        finally:
            story.call.cancel()
            reserved = target and self.decode.service.executor.get(target.transfer_id, target.generation)
            if reserved:
                self.decode.service.executor.abort(reserved, "over")

    async def live(
        self, story: PrefillCall, plan: str, patience: int, target: kv_pb2.TransferTarget | None, tokens: list[int]
    ) -> None:
        if plan == "leave at once":
            return
        await story.accepted()
        if plan in ("leave", "decode leaves"):
            for _ in range(patience):
                await asyncio.sleep(0)
            assert target is not None
            request = self.decode.service.executor.get(target.transfer_id, target.generation)
            if plan == "leave":
                return
            if request is not None:
                self.decode.service.executor.abort(request, "changed its mind")
        first = await story.first_token()
        assert first.token_id == next_token(tokens)
        if plan != "leave after the token":
            await story.to_the_end()
            assert plan != "decode leaves" or target is None or story.finished is not None

    async def run(self) -> None:
        limit = asyncio.Semaphore(8)

        async def ask(number: int) -> None:
            async with limit:
                try:
                    await self.request(number)
                    self.ends["well"] += 1
                except MoonpoolError as error:
                    self.ends[type(error).__name__] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(REQUESTS):
                group.create_task(ask(number))


@pytest.mark.parametrize(
    ("seed", "stages"),
    [
        pytest.param(seed, stages, marks=() if (seed, stages) in ((0, 1), (1, 2)) else pytest.mark.slow)
        for seed in range(9)
        for stages in (1, 2)
    ],
)
async def test_storm(seed: int, stages: int) -> None:
    stored = prompt(5 * BLOCK, seed)
    async with (
        storing(stored) as (store, place),
        prefilling(blocks=20, stages=stages, load_timeout_s=1.0, write_back_blocks=6) as prefill,
        decoding(blocks=64) as decode,
    ):
        storm = Storm(seed, prefill, decode, store, place)
        await storm.run()
        await prefill.rest()
        await decode.rest()
        assert storm.ends["well"] > REQUESTS // 3, storm.ends
        assert set(block_keys(ROOT, stored, BLOCK)) <= set(store.blocks)
        assert prefill.engine.steps
