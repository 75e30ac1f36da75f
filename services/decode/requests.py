"""The requests at a decode instance: their transfers, leases and blocks, from the promise of room to their return.

Pure: time is an argument.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from moonpool.engine.incoming import IncomingRequest
from moonpool.errors import InvalidRequest, Overloaded, TransferFailed
from moonpool.kv.keys import BlockKey, block_keys
from moonpool.kv.layout import KVLayout
from moonpool.sched.batch_scheduler import BatchScheduler, DecodeSequence, Reservation
from moonpool.streams.transfer import InboundTransfer, TransferState
from moonpool.v1 import kv_pb2
from services.decode.subscriber import Subscriber

MAX_GENERATION = (1 << 32) - 1


@dataclasses.dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request at this instance.

    Attributes:
        incoming: what was asked for.
        stores: kvstores for the answer's full blocks.
        transfer: the KV that comes.
        reservation: the promised room.
        block_table: blocks for the longest possible sequence; empty until bound.
        sequence: set when it was handed to the batch.
        first_token: set when the conductor has started it.
        subscriber: gets its tokens; set with `first_token`.
        send_verdict: tells the sender of the KV how the transfer has ended; set when the blocks are bound.
    """

    incoming: IncomingRequest
    stores: Sequence[kv_pb2.Instance]
    transfer: InboundTransfer
    reservation: Reservation
    block_table: list[int] = dataclasses.field(default_factory=list)
    sequence: DecodeSequence | None = None
    first_token: int | None = None
    subscriber: Subscriber | None = None
    send_verdict: Callable[[InboundTransfer], None] | None = None

    @property
    def key(self) -> str:
        """Id in the batch: an earlier attempt of the same request may still be leaving."""
        return str(self.transfer.transfer_id)

    @property
    def complete(self) -> bool:
        """Whether all its KV has come."""
        return self.transfer.state is TransferState.COMPLETE


class RequestTable:
    """All requests of one instance, by transfer id.

    Args:
        scheduler: owns the promises and the pool's blocks.
        layout: arrangement of the KV.
        lease_s: a request that is not generating ends after so many seconds without a frame.
    """

    def __init__(self, scheduler: BatchScheduler, layout: KVLayout, lease_s: float) -> None:
        self._scheduler = scheduler
        self._layout = layout
        self.lease_s = lease_s
        self._requests: dict[int, DecodeRequest] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(list(self._requests.values()))

    def reserve(self, incoming: IncomingRequest, stores: Sequence[kv_pb2.Instance], now: float) -> DecodeRequest:
        """Promises room for the longest life of a request.

        Raises:
            Overloaded: there is no room now.
            InvalidRequest: it could never fit, or there is nothing to generate.
        """
        tokens, scheduler = len(incoming.token_ids), self._scheduler
        if incoming.sampling.total_tokens(scheduler.max_tokens) <= tokens:
            raise InvalidRequest("sequence.sampling.max_tokens", "leaves no token to generate")
        total = scheduler.blocks_for(incoming.sampling)
        if total > scheduler.blocks.num_blocks:
            raise InvalidRequest(
                "sequence.sampling.max_tokens", f"needs {total} blocks, this instance has {scheduler.blocks.num_blocks}"
            )
        reservation = scheduler.reserve(incoming.keys, total)
        if reservation is None:
            raise Overloaded(
                f"no room for {total} blocks, {scheduler.blocks.num_available} available, "
                f"{scheduler.promised_blocks} of them promised",
                reason="no_decode_room",
                retry_after_s=1.0,
            )
        number, layout = next(self._ids), self._layout
        blocks = layout.blocks_for(tokens)
        transfer = InboundTransfer(
            number,
            number % MAX_GENERATION + 1,
            layout,
            None,
            blocks,
            len(reservation.held),
            layout.valid_tokens(tokens, blocks - 1),
            self.lease_s,
            now,
        )
        request = self._requests[number] = DecodeRequest(incoming, stores, transfer, reservation)
        return request

    def get(self, transfer_id: int, generation: int) -> DecodeRequest | None:
        """The request of a transfer; None when it is unknown, has ended or has another generation."""
        request = self._requests.get(transfer_id)
        return request if request is not None and request.transfer.matches(generation) else None

    def bind(self, request: DecodeRequest, send_verdict: Callable[[InboundTransfer], None], now: float) -> None:
        """Turns the promise into blocks; from now on slices may come, and `send_verdict` says how that ended.

        Raises:
            TransferFailed: the request is bound already, or its transfer is over.
        """
        if request.block_table or request.transfer.done:
            raise TransferFailed(f"transfer {request.transfer.transfer_id} was opened before")
        request.block_table = self._scheduler.bind_reservation(request.reservation)
        request.send_verdict = send_verdict
        request.transfer.bind(request.block_table[: request.transfer.num_blocks], now)
        if request.complete:
            self.completed(request)

    def completed(self, request: DecodeRequest) -> None:
        """Registers the prompt's full blocks under their keys: all of their KV was received and verified."""
        for block, key in zip(request.block_table, request.incoming.keys, strict=False):
            self._scheduler.blocks.register(block, key)

    def remove(self, request: DecodeRequest) -> None:
        """Removes a request and frees its blocks or its promise. Nothing may write or read the blocks any more."""
        request.transfer.fail("ended")
        del self._requests[request.transfer.transfer_id]
        if request.block_table:
            self._scheduler.blocks.release(request.block_table)
            request.block_table = []
        else:
            self._scheduler.cancel_reservation(request.reservation)

    def register_answer(self, request: DecodeRequest) -> tuple[list[BlockKey], list[BlockKey], list[int]]:
        """Registers the full blocks that the answer has filled, alone or behind the prompt's last tokens.

        Returns:
            Their keys, their parents' keys, and the blocks.
        """
        incoming, sequence = request.incoming, request.sequence
        if sequence is None:
            return [], [], []
        size = self._layout.block_tokens
        first, last = len(incoming.keys), sequence.num_computed // size
        parent = incoming.keys[-1] if incoming.keys else incoming.chain_root
        keys = block_keys(parent, sequence.token_ids[first * size : last * size], size)
        blocks = request.block_table[first:last]
        for block, key in zip(blocks, keys, strict=True):
            self._scheduler.blocks.register(block, key)
        return keys, [parent, *keys[:-1]][: len(keys)], blocks

    def expired(self, now: float) -> list[DecodeRequest]:
        """Requests whose lease is over; one that generates has none."""
        return [
            request for request in self if request.sequence is None and now - request.transfer.heard_at > self.lease_s
        ]

    def next_expiry(self) -> float | None:
        """When the first lease ends if nothing is heard; None without leases."""
        heard = [request.transfer.heard_at for request in self if request.sequence is None]
        return min(heard) + self.lease_s if heard else None

    def count(self, *states: TransferState) -> int:
        """Requests that are not generating and whose transfer is in one of these states."""
        return sum(request.sequence is None and request.transfer.state in states for request in self)

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls."""
        self._scheduler.check_invariants()
        promised = 0
        for number, request in self._requests.items():
            request.transfer.check_invariants()
            assert number == request.transfer.transfer_id
            assert bool(request.block_table) != (request.transfer.state is TransferState.PROMISED)
            assert request.sequence is None or request.complete, "a sequence generates before its KV is whole"
            promised += 0 if request.block_table else request.reservation.promised
        assert promised == self._scheduler.promised_blocks, "promises without a request, or the other way round"
