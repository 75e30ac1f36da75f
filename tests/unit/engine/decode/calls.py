"""Calls of a decode instance: promises, transfers from a prefill instance, and a conductor's Steps stream."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from moonpool.base.kv.frames import Slice
from moonpool.base.kv_transfer.endpoint import KVEndpoint
from moonpool.base.kv_transfer.sender import TransferSender
from moonpool.base.transport.dialer import TransportDialer
from moonpool.base.transport.stream_spec import StreamSettings
from moonpool.v1 import decode_pb2, kv_pb2, prefill_pb2
from tests.slices import slice_to_send
from tests.unit.base.transport.fakes import HELLO, LAYOUT
from tests.unit.fakes.engine import slice_of_tokens
from tests.unit.instances import WAIT_S, Decode


class Served(Protocol):
    """A decode instance that can be called."""

    @property
    def stub(self) -> Any: ...


async def reserve(served: Served, sequence: kv_pb2.SequenceSpec, **fields: Any) -> kv_pb2.TransferTarget:
    answer: decode_pb2.ReserveResponse = await served.stub.Reserve(
        decode_pb2.ReserveRequest(sequence=sequence, **fields), timeout=WAIT_S
    )
    return answer.target


@asynccontextmanager
async def sending(decode: Decode, transports: TransportDialer | None = None) -> AsyncIterator[TransferSender]:
    sender = TransferSender(
        KVEndpoint(decode.channels, decode.instance.address, HELLO, LAYOUT, StreamSettings(transports))
    )
    try:
        yield sender
    finally:
        await sender.aclose()


def slices(tokens: list[int], held: int = 0, layers: range = range(LAYOUT.layers)) -> list[Slice]:
    blocks = range(held, LAYOUT.blocks_for(len(tokens)))
    return [
        slice_to_send(LAYOUT, layer, b, slice_of_tokens(tokens, b, layer), LAYOUT.valid_tokens(len(tokens), b))
        for layer in layers
        for b in blocks
    ]


async def transfer(decode: Decode, target: kv_pb2.TransferTarget, tokens: list[int]) -> None:
    """A whole transfer."""
    async with sending(decode) as sender, await sender.open(target) as outbound:
        await outbound.send(slices(tokens, target.held_blocks))
        outbound.close(aborted=False)
        await outbound.verdict(WAIT_S)


class Conductor:
    """One Steps stream and what came on it."""

    def __init__(self, served: Served) -> None:
        self.call = served.stub.Steps()
        self.tokens: dict[str, list[int]] = {}  # by request, "request/choice" for further answers
        self.reasons: dict[str, int] = {}
        self.scores: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.outcomes: dict[str, int] = {}
        self.fenced: list[str] = []
        self.prompts: dict[str, prefill_pb2.FirstToken] = {}
        self._first: dict[str, int] = {}
        self.messages = 0

    def expect(self, request_id: str, *positions: int) -> None:
        """The first token of each answer that comes is to be at this position."""
        for choice, position in enumerate(positions):
            self._first[f"{request_id}/{choice}" if choice else request_id] = position

    async def start(
        self,
        request_id: str,
        target: kv_pb2.TransferTarget,
        token: int,
        *further: int,
        scores: Sequence[float] = (),
        known: Sequence[Sequence[int]] = (),
        gather: bool = False,
    ) -> None:
        """Starts a request with its first tokens; perhaps with those behind, too."""
        if not scores:
            self.expect(request_id, *(1 + len(tokens) for tokens in known or ((),)))
        started = decode_pb2.StartSequence(
            request_id=request_id,
            transfer_id=target.transfer_id,
            generation=target.generation,
            first_token_id=token,
            further_token_ids=further,
            log_probabilities=scores,
            known_token_ids=known[0] if known else (),
            further_known=[decode_pb2.KnownTokens(token_ids=tokens) for tokens in known[1:]],
            gather=gather,
        )
        await self.call.write(decode_pb2.StepsRequest(start=started))

    async def compute(
        self,
        request_id: str,
        target: kv_pb2.TransferTarget,
        answers: int = 1,
        *,
        known: Sequence[Sequence[int]] = (),
        **fields: Any,
    ) -> None:
        """Starts a request whose prompt is computed there; perhaps tokens behind the first ones are known."""
        self.expect(request_id, *(1 + len(tokens) for tokens in known) if known else [0] * answers)
        started = decode_pb2.StartSequence(
            request_id=request_id,
            transfer_id=target.transfer_id,
            generation=target.generation,
            compute_prompt=True,
            known_token_ids=known[0] if known else (),
            further_known=[decode_pb2.KnownTokens(token_ids=tokens) for tokens in known[1:]],
            **fields,
        )
        await self.call.write(decode_pb2.StepsRequest(start=started))

    async def cancel(self, request_id: str, target: kv_pb2.TransferTarget, choice: int | None = None) -> None:
        cancel = decode_pb2.CancelSequence(
            request_id=request_id, transfer_id=target.transfer_id, generation=target.generation, choice=choice
        )
        await self.call.write(decode_pb2.StepsRequest(cancel=cancel))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                message = await self.call.read()
                assert isinstance(message, decode_pb2.StepsResponse), "the stream ended"
                self.messages += 1
                for new in message.tokens:
                    name = f"{new.request_id}/{new.choice}" if new.choice else new.request_id
                    have = self.tokens.setdefault(name, [])
                    # the first token comes from prefill, a hypothesis whole
                    told = self._first.get(name, 0 if new.HasField("score") else 1)
                    assert new.position == len(have) + told, "tokens come in order, none twice"
                    have.extend(new.token_ids)
                    if new.HasField("prompt"):
                        assert name not in self.prompts, "a prompt is told once"
                        self.prompts[name] = new.prompt
                    if new.finish_reason:
                        self.reasons[name] = new.finish_reason
                        self.scores[name] = new.score
                self.failed |= {f.request_id: f.reason for f in message.failed}
                self.fenced += [f.request_id for f in message.fenced]
                self.outcomes |= {c.request_id: c.outcome for c in message.cancelled}


@asynccontextmanager
async def conducting(served: Served, name: str = "conductor") -> AsyncIterator[Conductor]:
    conductor = Conductor(served)
    hello = decode_pb2.StepsHello(conductor=kv_pb2.Instance(id=name))
    await conductor.call.write(decode_pb2.StepsRequest(hello=hello))
    try:
        yield conductor
    finally:
        conductor.call.cancel()
