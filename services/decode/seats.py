"""Seats: one request's stay at a decode instance, from the promise of room to the return of everything.

Owns which transfer belongs to which request, their leases, and the way of blocks: promised -> bound -> given back.
Pure: time is an argument; knows nothing of gRPC, steps or engines.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

from moonpool.engine.arrival import Arrival
from moonpool.errors import InvalidRequest, Overloaded, TransferFailed
from moonpool.kv.keys import BlockKey, block_keys
from moonpool.kv.layout import KVLayout
from moonpool.sched.batch_scheduler import BatchScheduler, DecodeSequence, Reservation
from moonpool.streams.transfer import InboundTransfer, TransferState
from moonpool.v1 import kv_pb2
from services.decode.steps import Subscriber

MAX_GENERATION = (1 << 32) - 1


class Source(Protocol):
    """The stream that a transfer comes on."""

    def verdict(self, transfer: InboundTransfer) -> None:
        """Tells the sender how a transfer has ended."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Seat:
    """One request's stay.

    Attributes:
        arrival: what was asked for.
        stores: kvstores for the answer's full blocks.
        transfer: the KV that comes.
        reservation: the room.
        block_table: all blocks of its longest life; empty until bound.
        sequence: set when it was handed to the batch.
        first_token: set when the conductor has started it.
        reader: who is told of its tokens; set with `first_token`.
        source: the stream its KV comes on; set when it is bound.
    """

    arrival: Arrival
    stores: Sequence[kv_pb2.Instance]
    transfer: InboundTransfer
    reservation: Reservation
    block_table: list[int] = dataclasses.field(default_factory=list)
    sequence: DecodeSequence | None = None
    first_token: int | None = None
    reader: Subscriber | None = None
    source: Source | None = None

    @property
    def key(self) -> str:
        """Name in the batch; request ids may come back while an earlier attempt is still leaving."""
        return str(self.transfer.transfer_id)

    @property
    def complete(self) -> bool:
        """Whether all its KV has come."""
        return self.transfer.state is TransferState.COMPLETE


class Seats:
    """All seats of one instance.

    Args:
        scheduler: owns the promises and the pool's blocks.
        layout: arrangement of the KV.
        lease_s: seconds without news after which a seat ends that is not generating.
    """

    def __init__(self, scheduler: BatchScheduler, layout: KVLayout, lease_s: float) -> None:
        self._scheduler = scheduler
        self._layout = layout
        self.lease_s = lease_s
        self._seats: dict[int, Seat] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[Seat]:
        return iter(list(self._seats.values()))

    def reserve(self, arrival: Arrival, stores: Sequence[kv_pb2.Instance], now: float) -> Seat:
        """Promises room for the longest life of a request.

        Raises:
            Overloaded: there is no room now.
            InvalidRequest: it could never fit, or there is nothing to generate.
        """
        tokens, scheduler = len(arrival.token_ids), self._scheduler
        if arrival.sampling.total_tokens(scheduler.max_tokens) <= tokens:
            raise InvalidRequest("sequence.sampling.max_tokens", "leaves no token to generate")
        total = scheduler.blocks_for(arrival.sampling)
        if total > scheduler.blocks.num_blocks:
            raise InvalidRequest(
                "sequence.sampling.max_tokens", f"needs {total} blocks, this instance has {scheduler.blocks.num_blocks}"
            )
        reservation = scheduler.reserve(arrival.keys, total)
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
        seat = self._seats[number] = Seat(arrival, stores, transfer, reservation)
        return seat

    def get(self, transfer_id: int, generation: int) -> Seat | None:
        """The seat of a transfer, None when there is none (any more) under this generation."""
        seat = self._seats.get(transfer_id)
        return seat if seat is not None and seat.transfer.matches(generation) else None

    def bind(self, seat: Seat, now: float) -> None:
        """The promise becomes blocks: slices may come.

        Raises:
            TransferFailed: it is bound already, or over.
        """
        if seat.block_table or seat.transfer.done:
            raise TransferFailed(f"transfer {seat.transfer.transfer_id} was opened before")
        seat.block_table = self._scheduler.bind_reservation(seat.reservation)
        seat.transfer.bind(seat.block_table[: seat.transfer.num_blocks], now)
        if seat.complete:
            self.completed(seat)

    def completed(self, seat: Seat) -> None:
        """Gives the prompt's full blocks, all proven to be there, their identity."""
        for block, key in zip(seat.block_table, seat.arrival.keys, strict=False):
            self._scheduler.blocks.register(block, key)

    def leave(self, seat: Seat) -> None:
        """Ends a seat and gives everything back that it still holds. Its writers and readers must be quiet."""
        seat.transfer.fail("ended")
        del self._seats[seat.transfer.transfer_id]
        if seat.block_table:
            self._scheduler.blocks.release(seat.block_table)
            seat.block_table = []
        else:
            self._scheduler.cancel_reservation(seat.reservation)

    def register_answer(self, seat: Seat) -> tuple[list[BlockKey], list[BlockKey], list[int]]:
        """Gives the blocks that generation has filled their identity.

        Returns:
            Their keys, their parents' keys, and the blocks.
        """
        arrival, sequence = seat.arrival, seat.sequence
        if sequence is None:
            return [], [], []
        size = self._layout.block_tokens
        first, last = len(arrival.keys), sequence.num_computed // size
        parent = arrival.keys[-1] if arrival.keys else arrival.chain_root
        keys = block_keys(parent, sequence.token_ids[first * size : last * size], size)
        blocks = seat.block_table[first:last]
        for block, key in zip(blocks, keys, strict=True):
            self._scheduler.blocks.register(block, key)
        return keys, [parent, *keys[:-1]][: len(keys)], blocks

    def expired(self, now: float) -> list[Seat]:
        """Seats whose lease is over: nothing was heard, and they are not generating."""
        return [seat for seat in self if seat.sequence is None and now - seat.transfer.heard_at > self.lease_s]

    def next_expiry(self) -> float | None:
        """When the first lease ends if nothing is heard; None without leases."""
        heard = [seat.transfer.heard_at for seat in self if seat.sequence is None]
        return min(heard) + self.lease_s if heard else None

    def count(self, *states: TransferState) -> int:
        """Seats that are not generating and whose transfer is in one of these states."""
        return sum(seat.sequence is None and seat.transfer.state in states for seat in self)

    def check_invariants(self) -> None:
        """Asserts what must hold between any two calls."""
        self._scheduler.check_invariants()
        promised = 0
        for number, seat in self._seats.items():
            seat.transfer.check_invariants()
            assert number == seat.transfer.transfer_id
            assert bool(seat.block_table) != (seat.transfer.state is TransferState.PROMISED)
            assert seat.sequence is None or seat.complete, "a sequence generates before its KV is whole"
            promised += 0 if seat.block_table else seat.reservation.promised
        assert promised == self._scheduler.promised_blocks, "promises without a seat, or the other way round"
