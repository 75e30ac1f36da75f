"""Jobs: one prompt at a prefill instance, from the request to the last thing its conductor is told.

Owns what was asked for and the bounded story that goes back. Knows nothing of steps, streams or stores.
"""

import asyncio
import dataclasses
from collections.abc import Sequence

from moonpool.cluster.instances import check_instance
from moonpool.engine.arrival import Arrival
from moonpool.errors import InvalidRequest, MoonpoolError
from moonpool.sched.prefill_scheduler import PrefillSequence
from moonpool.v1 import kv_pb2, prefill_pb2
from services.prefill.outbound import Delivery

MAX_EVENTS = 8
MAX_STORES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A kvstore that blocks go to; `held` are the leading ones it is believed to hold, None when nothing is known."""

    store: kv_pb2.Instance
    held: int | None

    def first(self, computed: int) -> int:
        """The first block it is offered, when those from `computed` on were computed here.

        What was computed here is offered in any case: a store that could not give it does not hold it, whatever is
        believed.
        """
        return computed if self.held is None else min(self.held, computed)


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """One prompt.

    Attributes:
        arrival: what was asked for.
        sequence: its progress; `sequence.request_id` is the job's own key, because a request may come back while an
            earlier attempt is still leaving.
        target: where the KV goes, None for nowhere.
        sources: where a prefix may be loaded from, the best first.
        stores: where blocks are stored.
        delivery: the sending to `target`.
        load_blocks: pool blocks that a prefix is loaded into; empty when nothing is loaded.
        layers_ready: leading layers of that prefix that are there.
        misses: blocks that a source was believed to hold and did not.
        gated_step: id of the step that follows the load layer by layer.
        stale_step: id of a step that counts for nothing; its layers are not to be sent.
        started: blocks are bound.
        computed: the first token is known.
        task: the job's life.
    """

    arrival: Arrival
    sequence: PrefillSequence
    target: kv_pb2.TransferTarget | None
    sources: list[prefill_pb2.PrefixSource]
    stores: list[Target]
    delivery: Delivery | None = None
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
    def from_proto(cls, request: prefill_pb2.PrefillRequest, arrival: Arrival, key: str, now: float) -> "Job":
        """From the contract; `arrival` is the request's sequence, checked.

        Raises:
            InvalidRequest: naming the field at fault.
        """
        if request.HasField("target"):
            check_instance(request.target.decode, "target.decode")
            if request.target.held_blocks > len(arrival.keys):
                raise InvalidRequest("target.held_blocks", f"must be at most {len(arrival.keys)}")
        if request.HasField("source"):
            check_instance(request.source.instance, "source.instance")
        if request.HasField("write_back"):
            check_instance(request.write_back, "write_back")
        _check_others("other_sources", [source.instance for source in request.other_sources])
        _check_others("replicas", [replica.instance for replica in request.replicas])
        return cls(
            arrival,
            PrefillSequence(
                key, arrival.token_ids, arrival.keys, arrival.sampling, added_at=now, history=arrival.history()
            ),
            request.target if request.HasField("target") else None,
            [*([request.source] if request.HasField("source") else []), *request.other_sources],
            _targets(request),
        )

    @property
    def request_id(self) -> str:
        """Of the request."""
        return self.arrival.request_id

    @property
    def key(self) -> str:
        """Name in the scheduler."""
        return self.sequence.request_id

    @property
    def ended(self) -> bool:
        """Whether the story is told to its end."""
        return self._ended

    def tell(self, event: prefill_pb2.PrefillResponse) -> None:
        """The next piece of the story."""
        if not self._ended:
            self._events.put_nowait(event)

    def end(self, error: MoonpoolError | None = None) -> None:
        """The story is over; the first end counts."""
        if not self._ended:
            self._ended = True
            self._events.put_nowait(error)

    async def next(self) -> prefill_pb2.PrefillResponse | None:
        """The next piece, None after the last; raises how it ended badly."""
        event = await self._events.get()
        if isinstance(event, MoonpoolError):
            raise event
        return event


def _check_others(field: str, others: Sequence[kv_pb2.Instance]) -> None:
    if len(others) > MAX_STORES:
        raise InvalidRequest(field, f"at most {MAX_STORES} kvstores")
    for index, other in enumerate(others):
        check_instance(other, f"{field}[{index}].instance")


def _targets(request: prefill_pb2.PrefillRequest) -> list[Target]:
    targets = []
    if request.HasField("write_back"):
        held = request.write_back_held if request.HasField("write_back_held") else None
        targets.append(Target(request.write_back, held))
    return targets + [Target(replica.instance, replica.held_blocks) for replica in request.replicas]
