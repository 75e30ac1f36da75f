"""Calls of a prefill instance, and what surrounds it in tests: promises of decode, a store with blocks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from moonpool.base.kv.keys import block_keys
from moonpool.base.rpc.messages import END_OF_STREAM
from moonpool.v1 import decode_pb2, kv_pb2, prefill_pb2
from tests.unit.base.transport.fakes import LAYOUT, ROOT, STORE, FakeStore, served
from tests.unit.fakes.engine import slice_of_tokens
from tests.unit.instances import BLOCK, WAIT_S, Decode, Prefill


class PrefillCall:
    """One Prefill call and the events that came."""

    def __init__(self, prefill: Prefill, request: prefill_pb2.PrefillRequest) -> None:
        self.call: Any = prefill.stub.Prefill(request, timeout=WAIT_S)
        self.token: prefill_pb2.FirstToken | None = None
        self.finished: prefill_pb2.PrefillFinished | None = None

    async def read(self) -> str:
        """The next event's name; "" at the end."""
        event = await self.call.read()
        if event is END_OF_STREAM:
            return ""
        name: str = event.WhichOneof("event")
        if name == "first_token":
            self.token = event.first_token
        elif name == "finished":
            self.finished = event.finished
        return name

    async def accepted(self) -> "PrefillCall":
        assert await self.read() == "accepted"
        return self

    async def first_token(self) -> prefill_pb2.FirstToken:
        assert await self.read() == "first_token"
        assert self.token is not None
        return self.token

    async def to_the_end(self) -> prefill_pb2.FirstToken:
        while await self.read():
            pass
        assert self.token is not None
        assert self.finished is not None
        return self.token


async def begin(prefill: Prefill, sequence: kv_pb2.SequenceSpec, **fields: Any) -> PrefillCall:
    return await PrefillCall(prefill, prefill_pb2.PrefillRequest(sequence=sequence, **fields)).accepted()


async def promised(decode: Decode, sequence: kv_pb2.SequenceSpec) -> kv_pb2.TransferTarget:
    answer: decode_pb2.ReserveResponse = await decode.stub.Reserve(decode_pb2.ReserveRequest(sequence=sequence))
    return answer.target


def assert_arrived(decode: Decode, tokens: list[int]) -> None:
    """The one request's blocks hold exactly the prompt's KV."""
    (request,) = decode.service.executor
    assert request.complete
    for index in range(LAYOUT.blocks_for(len(tokens))):
        for layer in range(LAYOUT.layers):
            assert bytes(decode.engine.pool.slice(layer, request.table[index])) == bytes(
                slice_of_tokens(tokens, index, layer)
            ), (layer, index)


def dismiss(decode: Decode) -> None:
    for request in decode.service.executor:
        decode.service.executor.abort(request, "not wanted")


@asynccontextmanager
async def storing(tokens: list[int] | None = None, **options: Any) -> AsyncIterator[tuple[FakeStore, kv_pb2.Instance]]:
    """A store that holds all full blocks of some tokens."""
    store = FakeStore(**options)
    if tokens is not None:
        for index, key in enumerate(block_keys(ROOT, tokens, BLOCK)):
            store.blocks[key] = {n: bytes(slice_of_tokens(tokens, index, n)) for n in range(LAYOUT.layers)}
    async with served((STORE, store)) as (_, address):
        yield store, kv_pb2.Instance(id="store", epoch=1, kind=kv_pb2.INSTANCE_KIND_KVSTORE, address=address)


def source(place: kv_pb2.Instance, blocks: int) -> prefill_pb2.PrefixSource:
    return prefill_pb2.PrefixSource(instance=place, blocks=blocks)
