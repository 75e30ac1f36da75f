"""A prefill job: the request, its progress, and a bounded queue of events for the conductor."""

import asyncio
import dataclasses
from collections.abc import Sequence

from moonpool.cluster.instances import check_instance
from moonpool.engine.incoming import IncomingRequest
from moonpool.errors import InvalidRequest, MoonpoolError
from moonpool.sched.prefill_scheduler import PrefillSequence
from moonpool.v1 import kv_pb2, prefill_pb2
from services.prefill.kv_sender import KVSender

MAX_EVENTS = 8
MAX_STORES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A kvstore that blocks are written to; `held`: leading blocks it is believed to hold, None = unknown."""

    store: kv_pb2.Instance
    held: int | None

    def first(self, computed: int) -> int:
        """The first block to offer, when the blocks from `computed` on were computed here.

        Computed blocks are always offered: a store that could not provide them does not hold them.
        """
        return computed if self.held is None else min(self.held, computed)


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """One prompt.

    Attributes:
        incoming: what was asked for.
        sequence: its progress; `sequence.request_id` is the job's own key, because an earlier attempt of the same
            request may still be leaving.
        target: the decode instance's transfer that takes the KV; None = none.
        sources: kvstores to load a prefix from, the best first.
        stores: kvstores to write blocks to.
        sender: sends the KV to `target`.
        expected_tokens: leading tokens that need not be computed, as it looked when the job came.
        load_blocks: pool blocks that a prefix is loaded into; empty when nothing is loaded.
        layers_ready: leading layers of that prefix that are in the pool.
        misses: blocks that a source was believed to hold and did not.
        gated_step: id of the step that follows the load layer by layer.
        stale_step: id of an aborted step; its layers are not sent.
        started: set when blocks are bound.
        computed: set when the first token is known.
        task: runs the job.
    """

    incoming: IncomingRequest
    sequence: PrefillSequence
    target: kv_pb2.TransferTarget | None
    sources: list[prefill_pb2.PrefixSource]
    stores: list[Target]
    sender: KVSender | None = None
    expected_tokens: int = 0
    load_blocks: list[int] = dataclasses.field(default_factory=list)
    layers_ready: int = 0
    misses: list[prefill_pb2.StoreMiss] = dataclasses.field(default_factory=list)
    gated_step: int | None = None
    stale_step: int | None = None
    token_at: float = 0.0
    started: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    computed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None
    _events: "asyncio.Queue[prefill_pb2.PrefillResponse | MoonpoolError | None]" = dataclasses.field(
        default_factory=lambda: asyncio.Queue(MAX_EVENTS)
    )
    _ended: bool = False

    @classmethod
    def from_proto(cls, request: prefill_pb2.PrefillRequest, incoming: IncomingRequest, key: str, now: float) -> "Job":
        """From the contract.

        Args:
            request: as it was received.
            incoming: its sequence, checked.
            key: id of the job in the scheduler.
            now: time.monotonic().

        Raises:
            InvalidRequest: naming the field at fault.
        """
        if request.HasField("target"):
            check_instance(request.target.decode, "target.decode")
            if request.target.held_blocks > len(incoming.keys):
                raise InvalidRequest("target.held_blocks", f"must be at most {len(incoming.keys)}")
        if request.HasField("source"):
            check_instance(request.source.instance, "source.instance")
        if request.HasField("write_back"):
            check_instance(request.write_back, "write_back")
        _check_stores("other_sources", request.other_sources)
        _check_stores("replicas", request.replicas)
        return cls(
            incoming,
            PrefillSequence(
                key, incoming.token_ids, incoming.keys, incoming.sampling, added_at=now, history=incoming.history()
            ),
            request.target if request.HasField("target") else None,
            [*([request.source] if request.HasField("source") else []), *request.other_sources],
            _targets(request),
        )

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.incoming.request_id

    @property
    def key(self) -> str:
        """Id in the scheduler."""
        return self.sequence.request_id

    @property
    def ended(self) -> bool:
        """Whether the last event was reported."""
        return self._ended

    def report(self, event: prefill_pb2.PrefillResponse) -> None:
        """Queues an event for the conductor."""
        if not self._ended:
            self._events.put_nowait(event)

    def end(self, error: MoonpoolError | None = None) -> None:
        """Ends the events, with an error if one is given; only the first call counts."""
        if not self._ended:
            self._ended = True
            self._events.put_nowait(error)

    async def next(self) -> prefill_pb2.PrefillResponse | None:
        """The next event, None after the last; raises the error that `end` was given."""
        event = await self._events.get()
        if isinstance(event, MoonpoolError):
            raise event
        return event


def _check_stores(field: str, stores: Sequence[prefill_pb2.PrefixSource | prefill_pb2.StoreReplica]) -> None:
    if len(stores) > MAX_STORES:
        raise InvalidRequest(field, f"at most {MAX_STORES} kvstores")
    for index, store in enumerate(stores):
        check_instance(store.instance, f"{field}[{index}].instance")


def _targets(request: prefill_pb2.PrefillRequest) -> list[Target]:
    targets = []
    if request.HasField("write_back"):
        held = request.write_back_held if request.HasField("write_back_held") else None
        targets.append(Target(request.write_back, held))
    return targets + [Target(replica.instance, replica.held_blocks) for replica in request.replicas]
