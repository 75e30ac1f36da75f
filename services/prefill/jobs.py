"""Jobs: one prompt at a prefill instance, from the request to the last thing its conductor is told.

Owns what was asked for and the bounded story that goes back. Knows nothing of steps, streams or stores.
"""

import asyncio
import dataclasses

from moonpool.cluster.instances import check_instance
from moonpool.engine.arrival import Arrival
from moonpool.errors import InvalidRequest, MoonpoolError
from moonpool.sched.prefill_scheduler import PrefillSequence
from moonpool.v1 import kv_pb2, prefill_pb2
from services.prefill.outbound import Delivery

MAX_EVENTS = 8


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """One prompt.

    Attributes:
        arrival: what was asked for.
        sequence: its progress; `sequence.request_id` is the job's own key, because a request may come back while an
            earlier attempt is still leaving.
        target: where the KV goes, None for nowhere.
        source: where a prefix may be loaded from, None for nowhere.
        store: where new blocks are stored, None for nowhere.
        delivery: the sending to `target`.
        load_blocks: pool blocks that a prefix is loaded into; empty when nothing is loaded.
        layers_ready: leading layers of that prefix that are there.
        gated_step: id of the step that follows the load layer by layer.
        stale_step: id of a step that counts for nothing; its layers are not to be sent.
        started: blocks are bound.
        computed: the first token is known.
        task: the job's life.
    """

    arrival: Arrival
    sequence: PrefillSequence
    target: kv_pb2.TransferTarget | None
    source: prefill_pb2.PrefixSource | None
    store: kv_pb2.Instance | None
    delivery: Delivery | None = None
    load_blocks: list[int] = dataclasses.field(default_factory=list)
    layers_ready: int = 0
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
        return cls(
            arrival,
            PrefillSequence(
                key, arrival.token_ids, arrival.keys, arrival.sampling, added_at=now, history=arrival.history()
            ),
            request.target if request.HasField("target") else None,
            request.source if request.HasField("source") else None,
            request.write_back if request.HasField("write_back") else None,
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
