"""What the conductor reports about requests.

Placement decisions, prediction accuracy, recent figures, queue lengths, recorded traces.
"""

from __future__ import annotations

import json
import secrets
import threading
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from blake3 import blake3

from moonpool.errors import ConfigError, NotFound
from moonpool.telemetry.logs import get_logger
from moonpool.telemetry.metrics import Metrics
from moonpool.v1 import conductor_pb2
from services.conductor.core.events import AnnouncePlacement
from services.conductor.core.latency_model import PrefillChoice
from services.conductor.core.scheduler import RequestScheduler
from services.conductor.session import Session


class DecisionLog:
    """The last `limit` requests' decisions, by request id; all are those of one policy."""

    def __init__(self, limit: int, policy: str) -> None:
        self._limit = limit
        self._policy = policy
        self._records: OrderedDict[str, conductor_pb2.ExplainResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def placed(
        self,
        request_id: str,
        placement: conductor_pb2.Placement,
        candidates: Iterable[PrefillChoice],
        waited_s: float = 0.0,
    ) -> None:
        """Note where a request was placed; a later placement of the same request replaces an earlier one.

        It has looked for a place in vain for `waited_s`.
        """
        explained = map(_candidate_proto, candidates)
        record = conductor_pb2.ExplainResponse(placement=placement, candidates=explained, waited_s=waited_s)
        earlier = self._records.get(request_id)
        if earlier is not None:
            record.measured_ttft_s, record.lane = earlier.measured_ttft_s, earlier.lane
        self._keep(request_id, record)

    def refused(self, request_id: str, reason: str, candidates: Iterable[PrefillChoice] = ()) -> None:
        """Note why a request was refused; without new candidates, those of an earlier decision are kept."""
        record = conductor_pb2.ExplainResponse(refused=reason, candidates=map(_candidate_proto, candidates))
        earlier = self._records.get(request_id)
        if earlier is not None and not record.candidates:
            record.candidates.extend(earlier.candidates)
        self._keep(request_id, record)

    def first_token(self, request_id: str, ttft_s: float, lane: str) -> None:
        """Note the measured time to first token, once, and the lane on which the prompt's KV goes to decode."""
        record = self._records.get(request_id)
        if record is not None and not record.measured_ttft_s:
            record.measured_ttft_s = ttft_s
            record.lane = lane

    def complete(self, request_id: str, tpot_s: float) -> None:
        """Note the measured mean time between tokens."""
        record = self._records.get(request_id)
        if record is not None:
            record.measured_tpot_s = tpot_s

    def ended(self, request_id: str, timeline: conductor_pb2.Timeline) -> None:
        """Note what a request that is over has gone through."""
        record = self._records.get(request_id)
        if record is not None:
            record.timeline.CopyFrom(timeline)

    def get(self, request_id: str) -> conductor_pb2.ExplainResponse:
        """Return a decision.

        Raises:
            NotFound: no such request, or it is forgotten.
        """
        record = self._records.get(request_id)
        if record is None:
            raise NotFound(f"no decision about request {request_id!r} is known (the last {self._limit} are kept)")
        return record

    def _keep(self, request_id: str, record: conductor_pb2.ExplainResponse) -> None:
        record.policy = self._policy
        self._records[request_id] = record
        self._records.move_to_end(request_id)
        while len(self._records) > self._limit:
            self._records.popitem(last=False)


def placement(told: AnnouncePlacement) -> conductor_pb2.Placement:
    """The contract's form of where a request is placed."""
    plan = told.plan
    return conductor_pb2.Placement(
        prefill=plan.prefill.id,
        decode=told.target.decode if told.target is not None else "",
        kvstore=plan.prefill.source,
        predicted_cached_blocks=plan.prefill.used_blocks,
        predicted_ttft_s=told.waited_s + plan.prefill.ttft_s,
        emulated=plan.emulated,
        predicted_tbt_s=told.pace.tbt_s,
        predicted_tpot_s=told.pace.tpot_s,
    )


def _candidate_proto(choice: PrefillChoice) -> conductor_pb2.CandidateExplanation:
    return conductor_pb2.CandidateExplanation(
        instance=choice.id,
        local_blocks=choice.local_blocks,
        used_blocks=choice.used_blocks,
        queue_s=choice.queue_s + choice.later_s,
        load_s=choice.load_s,
        prefill_s=choice.prefill_s,
        excluded=choice.excluded,
        overhead_s=choice.overhead_s,
        source=choice.source,
        cold_blocks=choice.cold_blocks,
    )


RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 4.0, 8.0)
"""Bucket bounds, finest around 1: the share within 15 % is that between 0.85 and 1.15."""


class PredictionMetrics:
    """Observes requests that were placed once: what a second placement foretold began after the request did."""

    def __init__(self, metrics: Metrics) -> None:
        """Registers the histograms."""
        ratio = "measured / predicted, of requests placed once"
        self._ttft = metrics.histogram("ttft_over_predicted", f"time to first token, {ratio}", RATIO_BUCKETS)
        self._tpot = metrics.histogram("tpot_over_predicted", f"mean time between tokens, {ratio}", RATIO_BUCKETS)

    def first_token(self, serving: Session) -> None:
        """The first token is here."""
        predicted_s = serving.placement.predicted_ttft_s
        if serving.placements == 1 and predicted_s > 0:
            self._ttft.observe(serving.answer.ttft_s / predicted_s)

    def complete(self, serving: Session) -> None:
        """The answer is complete; one of a single token has no time between tokens."""
        predicted_s, measured_s = serving.placement.predicted_tpot_s, serving.answer.tpot_s
        if serving.placements == 1 and predicted_s > 0 and measured_s > 0:
            self._tpot.observe(measured_s / predicted_s)


RECENT_WINDOW_S = 60.0


MAX_REMEMBERED = 1024


MAX_LISTED = 32
"""Requests that are told one by one."""


_Figures = tuple[float, int, int, int, float, float]
"""Of a request: when it ended; tokens of its prompt, those cached and its answer's; TTFT and TPOT."""


class RecentRequests:
    """Requests in the order of their ends; `clock` gives seconds.

    Their figures are plain numbers, which are quickly added up: others wait for that.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._ended: deque[_Figures] = deque(maxlen=MAX_REMEMBERED)
        self._last: deque[conductor_pb2.EndedRequest] = deque(maxlen=MAX_LISTED)

    def add(self, request_id: str, timeline: conductor_pb2.Timeline) -> None:
        """A request was answered."""
        usage, timing = timeline.usage, timeline.timing
        counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        self._ended.append((self._clock(), *counts, timing.ttft_s, timing.tpot_s))
        self._last.append(
            conductor_pb2.EndedRequest(request_id=request_id, tenant=timeline.tenant, usage=usage, timing=timing)
        )

    def state(self) -> conductor_pb2.RecentState:
        """What the contract tells of them."""
        now = self._clock()
        state = conductor_pb2.RecentState(window_s=min(RECENT_WINDOW_S, now - self._began), last=list(self._last)[::-1])
        while self._ended and now - self._ended[0][0] > RECENT_WINDOW_S:
            self._ended.popleft()
        state.requests = len(self._ended)
        if self._ended:
            _, prompts, cached, answers, ttfts, tpots = zip(*self._ended, strict=True)
            usage = (sum(prompts), sum(cached), sum(answers))
            state.usage.prompt_tokens, state.usage.cached_tokens, state.usage.completion_tokens = usage
            state.ttft_s.CopyFrom(quantiles(ttfts))
            state.tpot_s.CopyFrom(quantiles([tpot for tpot in tpots if tpot]))
        return state


def quantiles(values: Sequence[float]) -> conductor_pb2.Quantiles:
    """Those of some values, each of them a value; 0 of none."""
    if not values:
        return conductor_pb2.Quantiles()
    ranked = sorted(values)
    p50, p99 = (ranked[min(len(ranked) - 1, int(share * len(ranked)))] for share in (0.5, 0.99))
    return conductor_pb2.Quantiles(p50=p50, p99=p99)


MAX_LISTED_TENANTS = 100
"""Tenants that are told of."""


def queue_state(
    requests: RequestScheduler, tenants: Counter[str], weight_of: Callable[[str], float]
) -> conductor_pb2.QueueState:
    """The state of the queues.

    Args:
        requests: that the core serves.
        tenants: of all requests that have not ended, with their number.
        weight_of: a tenant's share.
    """
    waiting = Counter(requests.rooms.count()) + Counter(requests.line.count())
    told = sorted(tenants)[:MAX_LISTED_TENANTS]
    return conductor_pb2.QueueState(
        for_limits=len(requests.line),
        for_room=len(requests.rooms),
        prompt_bytes=requests.line.nbytes,
        tenants=[
            conductor_pb2.TenantState(
                tenant=tenant, weight=weight_of(tenant), requests=tenants[tenant], waiting=waiting[tenant]
            )
            for tenant in told
        ],
    )


KEY_BYTES = 32


NUMBER_BYTES = 8
"""Of a block's number and of a tenant's name."""


MAX_UNHASHED = 1024
"""Requests that the thread has not looked at yet; more are left out."""


MAX_BLOCKS = 1 << 22


log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request has come.

    Attributes:
        number: names it.
        at: when, seconds of any clock.
        prompt_tokens: length of its prompt.
        block_tokens: tokens of a block.
        keys: of the prompt's full blocks, each of which says what came before it.
        prompt_key: hash of the whole prompt.
        tenant: "" = none.
        choices: sequences that decode runs for it.
    """

    number: int
    at: float
    prompt_tokens: int
    block_tokens: int
    keys: Sequence[bytes]
    prompt_key: bytes
    tenant: str = ""
    choices: int = 1


@dataclass(slots=True)
class _TraceLine:
    timestamp: float
    prompt_tokens: int
    numbers: array[int]
    tenant: str
    choices: int
    tokens: int | None = None

    def to_json(self, tokens: int) -> Mapping[str, object]:
        line = {
            "timestamp": self.timestamp,
            "input_length": self.prompt_tokens,
            "output_length": tokens,
            "hash_ids": self.numbers.tolist(),
        }
        tenant = {"tenant": self.tenant} if self.tenant else {}
        return line | tenant | ({"n": self.choices} if self.choices > 1 else {})


class TraceRecording:
    """A recording that goes on until `close`.

    An earlier file of that name is kept with `.old` behind it. Requests that end without a token, and those that do not
    fit into the bounds, are left out.

    Args:
        path: the file.
        max_blocks: blocks of requests that wait for their line, 8 bytes each; beyond it the oldest request is left out.

    Raises:
        ConfigError: naming `record_trace`: the file cannot be written.
    """

    def __init__(self, path: Path, max_blocks: int = MAX_BLOCKS) -> None:
        try:
            if path.is_file():
                path.replace(path.with_name(f"{path.name}.old"))
            file = path.open("wb", buffering=0)  # each line is one write, so a crash cuts none
        except OSError as error:
            raise ConfigError("record_trace", f"cannot write {path}: {error.strerror or error}") from error
        self._queue: SimpleQueue[RecordedRequest | tuple[int, int] | None] = SimpleQueue()
        self._known: set[int] = set()
        self._overrun = 0
        self._writer = _TraceWriter(file, max_blocks)
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> int:
        """Requests that have no line, and will have none."""
        return self._overrun + self._writer.left_out

    def opened(self, request: RecordedRequest) -> None:
        """Notes a request; waits for nothing."""
        if self._queue.qsize() >= MAX_UNHASHED:
            self._overrun += 1
            return
        self._known.add(request.number)
        self._queue.put(request)

    def ended(self, number: int, tokens: int) -> None:
        """Notes that a request has ended, with so many tokens of each answer."""
        if number in self._known:
            self._known.remove(number)
            self._queue.put((number, tokens))

    def close(self) -> None:
        """Writes what has ended and closes the file; waits for the thread."""
        self._queue.put(None)
        self._thread.join()
        if self.left_out:
            log.warning("requests are missing in the recording", requests=self.left_out)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            if isinstance(event, RecordedRequest):
                self._writer.opened(event)
            else:
                self._writer.ended(*event)
        self._writer.close()


class _TraceWriter:
    """What the thread knows: lines in order of arrival, those that wait among them."""

    def __init__(self, file: BinaryIO, max_blocks: int) -> None:
        self.left_out = 0
        self._file = file
        self._max_blocks = max_blocks
        self._broken = False
        self._key = secrets.token_bytes(KEY_BYTES)
        self._lines: OrderedDict[int, _TraceLine] = OrderedDict()
        self._blocks = 0
        self._block_tokens = 0
        self._began: float | None = None
        self._last_ms = 0.0

    def opened(self, request: RecordedRequest) -> None:
        if not self._block_tokens:
            self._block_tokens = request.block_tokens
            self._write({"block_tokens": request.block_tokens})
        if request.block_tokens != self._block_tokens:  # the cluster was set up anew; a trace has one size of block
            self.left_out += 1
            return
        tenant, numbers = self._name(request.tenant), self._numbers(request)
        line = _TraceLine(self._timestamp(request.at), request.prompt_tokens, numbers, tenant, request.choices)
        self._lines[request.number] = line
        self._blocks += len(line.numbers)
        while self._blocks > self._max_blocks:
            self._take(next(iter(self._lines)))
            self.left_out += 1
            self._write_ended()

    def ended(self, number: int, tokens: int) -> None:
        if number in self._lines:
            self._lines[number].tokens = tokens
            self._write_ended()

    def close(self) -> None:
        """Writes what has ended; the rest is left out."""
        for number in [number for number, line in self._lines.items() if line.tokens is None]:
            self._take(number)
            self.left_out += 1
        self._write_ended()
        self._file.close()

    def _timestamp(self, at: float) -> float:
        """Milliseconds since the first request. One that overtook another while tokenised does not come before it."""
        if self._began is None:
            self._began = at
        self._last_ms = max(self._last_ms, round(1e3 * (at - self._began), 3))
        return self._last_ms

    def _numbers(self, request: RecordedRequest) -> array[int]:
        """A number per block; the last block, if it is not full, is known by the whole prompt."""
        keys = list(request.keys)
        if request.prompt_tokens > len(keys) * request.block_tokens:
            keys.append(b"rest" + request.prompt_key)
        digests = (blake3(key, key=self._key).digest(length=NUMBER_BYTES) for key in keys)
        return array("Q", (int.from_bytes(digest, "big") >> 1 for digest in digests))

    def _name(self, tenant: str) -> str:
        """Stands for a tenant in this recording alone."""
        return blake3(b"tenant" + tenant.encode(), key=self._key).hexdigest(length=NUMBER_BYTES) if tenant else ""

    def _write_ended(self) -> None:
        while self._lines:
            number, line = next(iter(self._lines.items()))
            if line.tokens is None:
                return
            self._take(number)
            if not line.tokens or not self._write(line.to_json(line.tokens)):
                self.left_out += 1

    def _take(self, number: int) -> None:
        self._blocks -= len(self._lines.pop(number).numbers)

    def _write(self, data: Mapping[str, object]) -> bool:
        """Whether it was written; after the first failure nothing is, as the file may end within a line."""
        if self._broken:
            return False
        try:
            self._file.write(json.dumps(data).encode() + b"\n")
        except OSError as error:
            log.error("the recording ends early", error=str(error))
            self._broken = True
        return not self._broken
