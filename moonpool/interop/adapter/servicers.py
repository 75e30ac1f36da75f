"""An adapter's gRPC services: the engine as a prefill and as a decode instance."""

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc.aio
import msgspec

from moonpool.base.errors import InvalidRequest, MoonpoolError, TransferFailed
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.stream_writes import bare_write
from moonpool.base.telemetry.metrics import MetricSet
from moonpool.engine.request import IncomingRequest
from moonpool.engine.subscriber import Order, SubscribedStream, Subscriber, conductor_identity, known_tokens
from moonpool.interop.adapter.adapter import Adapter
from moonpool.interop.adapter.engine_answer import first_token_message
from moonpool.interop.adapter.engine_life import EngineLife
from moonpool.interop.adapter.promised_request import PromisedRequest
from moonpool.v1 import adapter_pb2, decode_pb2, kv_pb2, prefill_pb2
from moonpool.v1.adapter_pb2_grpc import AdapterServiceStub

HAND_OVER_S = 5.0
Context = grpc.aio.ServicerContext[Any, Any]


class AdapterPrefillServicer:
    """The engine as a prefill instance."""

    def __init__(self, adapter: Adapter, gauges: MetricSet, channels: Channels) -> None:
        self._adapter, self._channels = adapter, channels
        self._gauges = gauges
        self._open: dict[PromisedRequest, None] = {}

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Have a prompt computed; the answer goes on at the engine, for the promise that is the target."""
        incoming = await self._adapter.reader.read(request.sequence)
        life = self._adapter.engine()
        live, delivered, met = self._promised(life, request, incoming), False, None
        self._open[live] = None
        try:
            cached, loaded = life.cached_tokens(incoming), life.loaded_tokens(incoming, request)
            # The time of a prompt that others slow down, or that waits for a load, says nothing of the engine's speed.
            alone = not life.running and not loaded
            live.held_tokens = max(cached + loaded, life.shared_tokens(incoming))
            # Another engine answers: this one computes the prompt alone, and keeps the KV.
            apart = request.HasField("target") and self._adapter.config.role == "prefill"
            if apart:
                met = live.part.meetings(live.width)
                if met is not None:  # both engines are asked at once
                    await self._hand_over(request.target, live, met)
                live.answers = [
                    live.part.answer(
                        choice,
                        (),
                        lambda _: live.wake.set(),
                        alone=True,
                        keep=True,
                        transfer=met[choice] if met is not None else None,
                    )
                    for choice in range(live.width)
                ]
            elif request.HasField("target"):
                live.compute()
            else:
                live.answers = [live.part.answer(0, (), lambda _: live.wake.set(), alone=True)]
            life.prompts_taken += 1  # a report with this number counts the prompt
            yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted(number=life.prompts_taken))
            await live.first_tokens()
            life.computed(live.answers[0], cached, alone=alone and len(live.answers) == 1)
            message = first_token_message(live.answers, cached, loaded)
            yield prefill_pb2.PrefillResponse(first_token=message)
            if apart and met is None:
                await self._hand_over(request.target, live, [answer.transfer for answer in live.answers])
            yield prefill_pb2.PrefillResponse(finished=prefill_pb2.PrefillFinished())
            delivered = request.HasField("target") and not apart
        finally:
            del self._open[live]
            if not delivered:
                live.end()

    async def _hand_over(
        self, target: kv_pb2.TransferTarget, live: PromisedRequest, transfers: Sequence[Mapping[str, Any] | None]
    ) -> None:
        """Tell the adapter of the decode side where the prompt's KV is, or will be."""
        if not all(transfers):
            raise TransferFailed("the engine names no KV: it runs without a connector that moves KV (docs/engines.md)")
        stub: Any = AdapterServiceStub(self._channels.get(target.decode.address))
        told = [msgspec.json.encode(transfer).decode() for transfer in transfers]
        message = adapter_pb2.HandOverRequest(target=target, request_id=live.request_id, transfers=told)
        try:
            await stub.HandOver(message, timeout=HAND_OVER_S)
        except MoonpoolError as error:
            raise TransferFailed(f"{target.decode.id} was not told of the KV: {error}") from error

    def _promised(
        self, life: EngineLife, request: prefill_pb2.PrefillRequest, incoming: IncomingRequest
    ) -> PromisedRequest:
        if not request.HasField("target") or self._adapter.config.role == "prefill":
            return life.take(incoming)
        target = request.target
        live = life.promised(target.transfer_id, target.generation, incoming.request_id)
        known = self._adapter.identities.get(target.decode.epoch)
        if known is None or known.id != target.decode.id:
            raise TransferFailed(f"the engine's KV does not go to {target.decode.id}")
        if live is None or live.answers:
            raise TransferFailed(f"there is no transfer {target.transfer_id} here (any more)")
        return live

    async def Cancel(  # noqa: N802
        self, request: prefill_pb2.CancelRequest, context: Context
    ) -> prefill_pb2.CancelResponse:
        found = [live for live in self._open if live.request_id == request.request_id]
        for live in found:
            live.end()
        outcome = kv_pb2.CANCEL_OUTCOME_IN_FLIGHT if found else kv_pb2.CANCEL_OUTCOME_UNKNOWN
        return prefill_pb2.CancelResponse(outcome=outcome)

    async def Forget(self, request: kv_pb2.ForgetRequest, context: Context) -> kv_pb2.ForgetResponse:  # noqa: N802
        return await self._adapter.engine().forget(request)

    async def PrefillStats(  # noqa: N802
        self, request: prefill_pb2.PrefillStatsRequest, context: Context
    ) -> prefill_pb2.PrefillStatsResponse:
        return prefill_pb2.PrefillStatsResponse(gauges=self._gauges.read())


class AdapterDecodeServicer:
    """The engine as a decode instance."""

    def __init__(self, adapter: Adapter, gauges: MetricSet) -> None:
        self._adapter = adapter
        self._gauges = gauges

    async def Reserve(  # noqa: N802
        self, request: decode_pb2.ReserveRequest, context: Context
    ) -> decode_pb2.ReserveResponse:
        if request.HasField("tbt_slo_s") and not request.tbt_slo_s > 0:
            raise InvalidRequest("tbt_slo_s", "must be above 0")
        if not 0 <= request.starts_in_s < math.inf:
            raise InvalidRequest("starts_in_s", "must be finite and not negative")
        incoming = await self._adapter.reader.read(request.sequence, conductor_identity(request.conductor))
        life = self._adapter.engine()
        live = life.reserve(incoming, request)
        self._adapter.watch(live)
        decode = self._adapter.identity(kv_pb2.INSTANCE_KIND_DECODE)
        held = life.cached_tokens(incoming) // life.facts.block_size
        return decode_pb2.ReserveResponse(
            target=kv_pb2.TransferTarget(
                decode=decode, transfer_id=live.number, generation=live.number, held_blocks=held
            ),
            lease_s=self._adapter.config.lease_s,
            predicted_tbt_s=life.tbt_s(),
            number=life.promises_taken,
        )

    async def Steps(self, requests: AsyncIterator[decode_pb2.StepsRequest], context: Context) -> None:  # noqa: N802
        """Start and cancel sequences; return tokens."""
        await _StepsStream(self._adapter).run(requests, bare_write(context))

    async def Forget(self, request: kv_pb2.ForgetRequest, context: Context) -> kv_pb2.ForgetResponse:  # noqa: N802
        return await self._adapter.engine().forget(request)

    async def DecodeStats(  # noqa: N802
        self, request: decode_pb2.DecodeStatsRequest, context: Context
    ) -> decode_pb2.DecodeStatsResponse:
        return decode_pb2.DecodeStatsResponse(gauges=self._gauges.read())


class AdapterServicer:
    """What another adapter tells this one."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    async def HandOver(  # noqa: N802
        self, request: adapter_pb2.HandOverRequest, context: Context
    ) -> adapter_pb2.HandOverResponse:
        """A prompt's KV is at another engine."""
        target, life = request.target, self._adapter.engine()
        live = life.promised(target.transfer_id, target.generation, request.request_id)
        if live is None or not live.awaits_kv or live.answers:
            raise TransferFailed(f"there is no transfer {target.transfer_id} here (any more)")
        try:
            transfers = [msgspec.json.decode(transfer, type=dict[str, Any]) for transfer in request.transfers]
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("transfers", str(error)) from error
        if len(transfers) != live.width:
            raise InvalidRequest("transfers", f"{live.width} answers are wanted, each has one")
        live.handed_over(transfers)
        return adapter_pb2.HandOverResponse()


class _StepsStream(SubscribedStream):
    """Starts and cancels from one conductor, tokens to the conductor."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter.closing)
        self._adapter = adapter

    async def on_hello(self, message: decode_pb2.StepsRequest) -> None:
        """Any conductor is served."""
        self._subscriber = Subscriber(message.hello.conductor)
        self._adapter.subscribers[self._subscriber] = None

    def carry_out(self, message: decode_pb2.StepsRequest) -> None:
        match message.WhichOneof("message"):
            case "start":
                self._start(message.start)
            case "cancel":
                self._cancel(message.cancel)
            case "resume":
                self._subscriber.failed(message.resume.request_id, "an adapter keeps no sequences for other conductors")

    def give_up(self, order: Order, reason: str) -> None:
        """End the requests of the order's id that are this conductor's."""
        life, who = self._adapter.life, conductor_identity(self._subscriber.conductor)
        for live in list(life.requests.values()) if life is not None else ():
            if live.request_id == order.request_id and live.conductor == who:
                live.subscriber = None
                live.end()
        self._subscriber.failed(order.request_id, reason)

    def _start(self, message: decode_pb2.StartSequence) -> None:
        life = self._adapter.life
        live = life.promised(message.transfer_id, message.generation, message.request_id) if life is not None else None
        if live is None or live.subscriber is not None:
            why = f"there is no transfer {message.transfer_id} here (any more)"
            self._subscriber.failed(message.request_id, why, transfer=True)
            return
        firsts = [message.first_token_id, *message.further_token_ids]
        known: list[Sequence[int]] = [
            [first, *behind] for first, behind in zip(firsts, known_tokens(message, len(firsts)), strict=True)
        ]
        if not message.compute_prompt and len(known) != live.width:
            self._subscriber.failed(message.request_id, f"{live.width} answers are wanted, each has a first token")
            live.end()
            return
        live.start(self._subscriber, [] if message.compute_prompt else known)

    def _cancel(self, message: decode_pb2.CancelSequence) -> None:
        life = self._adapter.life
        found = (
            [request for request in life.requests.values() if request.request_id == message.request_id]
            if life is not None
            else []
        )
        who = conductor_identity(self._subscriber.conductor)
        for live in found:
            named = live.number == message.transfer_id and live.number == message.generation
            unnamed = not message.transfer_id and live.conductor == who and live.subscriber is None
            if not named and not unnamed:
                continue
            if message.HasField("choice"):
                live.stop(message.choice)
                return
            live.subscriber = None
            live.end()
            self._subscriber.cancelled(message.request_id, kv_pb2.CANCEL_OUTCOME_IN_FLIGHT)
            return
        if not message.HasField("choice"):
            self._subscriber.cancelled(message.request_id, kv_pb2.CANCEL_OUTCOME_UNKNOWN)

    def end(self) -> None:
        """The conductor's requests end."""
        self._adapter.left(self._subscriber)
