"""What the conductor reports about requests: decisions, prediction accuracy, recent figures, queues, recorded traces.

`RequestReports` gets the events of each request's life and feeds the other classes.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from blake3 import blake3

from moonpool.base import world
from moonpool.base.errors import ConfigError, NotFound
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.conductor.core.hindsight import Hindsight
from moonpool.conductor.core.scheduler import RequestScheduler
from moonpool.conductor.generate_stream import GenerateStream
from moonpool.conductor.placement.base import PrefillChoice
from moonpool.conductor.proto_conversion import candidate_proto
from moonpool.conductor.request import ValidRequest
from moonpool.v1 import conductor_pb2


class DecisionLog:
    """Placement decisions of the last `limit` requests, by request id. All decisions come from one policy."""

    def __init__(self, limit: int, policy: str) -> None:
        self._limit = limit
        self._policy = policy
        self._records: OrderedDict[str, conductor_pb2.ExplainResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def placed(
        self,
        request_id: str,
        attempt: conductor_pb2.Attempt,
    ) -> None:
        """Note where a request was placed; the record tells of the last placement."""
        record = conductor_pb2.ExplainResponse(
            placement=attempt.placement, candidates=attempt.candidates, waited_s=attempt.waited_s
        )
        earlier = self._records.get(request_id)
        if earlier is not None:
            record.measured_ttft_s, record.transport = earlier.measured_ttft_s, earlier.transport
        self._keep(request_id, record)

    def refused(self, request_id: str, tenant: str, reason: str, candidates: Iterable[PrefillChoice] = ()) -> None:
        """Note why a request was refused. Without candidates, those of an earlier decision are kept."""
        record = conductor_pb2.ExplainResponse(
            refused=reason,
            candidates=map(candidate_proto, candidates),
            timeline=conductor_pb2.Timeline(tenant=tenant, arrived_at=world.unix_time()),
        )
        earlier = self._records.get(request_id)
        if earlier is not None and not record.candidates:
            record.candidates.extend(earlier.candidates)
        self._keep(request_id, record)

    def first_token(self, request_id: str, ttft_s: float, transport: str) -> None:
        """Note the first measured time to first token, and the transport of the prompt's KV to decode."""
        record = self._records.get(request_id)
        if record is not None and not record.measured_ttft_s:
            record.measured_ttft_s = ttft_s
            record.transport = transport

    def complete(self, request_id: str, tpot_s: float) -> None:
        """Note the measured mean time between tokens."""
        record = self._records.get(request_id)
        if record is not None:
            record.measured_tpot_s = tpot_s

    def unanswered(self, request_id: str, *, failed: str = "", cancelled: bool = False) -> None:
        """Note why a request that was not refused has no whole answer. The request may never have been placed."""
        if request_id not in self._records:
            self._keep(request_id, conductor_pb2.ExplainResponse())
        record = self._records[request_id]
        record.failed, record.cancelled = failed, cancelled

    def ended(
        self, request_id: str, timeline: conductor_pb2.Timeline, attempts: Iterable[conductor_pb2.Attempt]
    ) -> None:
        """Note timeline and placements of a request that is over."""
        record = self._records.get(request_id)
        if record is not None:
            record.timeline.CopyFrom(timeline)
            del record.attempts[:]
            record.attempts.extend(attempts)

    def regretted(self, request_id: str, number: int, hindsight: Hindsight) -> None:
        """Note what the placement of a request, by number, has lost."""
        record = self._records.get(request_id)
        if record is None:
            return
        if (regret := hindsight.prefill.of(number)) is not None:
            record.regret_s, record.better = regret.lost_s, regret.better
        if (regret := hindsight.decode.of(number)) is not None:
            record.decode_regret_s, record.better_decode = regret.lost_s, regret.better

    def has_ended(self, request_id: str) -> bool:
        """Whether the timeline of a request is known."""
        record = self._records.get(request_id)
        return record is not None and record.HasField("timeline")

    def get(self, request_id: str) -> conductor_pb2.ExplainResponse:
        """The decision about a request.

        Raises:
            NotFound: the request is not known, or no longer.
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


RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 4.0, 8.0)
"""Bucket bounds, finest around 1: the share within 15 % is that between 0.85 and 1.15."""


class PredictionMetrics:
    """Histograms of measured over predicted latency, for requests placed once.

    A second placement's prediction begins after the request's arrival, so the prediction is not comparable.
    """

    def __init__(self, metrics: PrometheusMetrics) -> None:
        """Registers the histograms."""
        ratio = "measured / predicted, of requests that were placed once."
        self._ttft = metrics.histogram("ttft_over_predicted", f"Time to first token, {ratio}", RATIO_BUCKETS)
        self._tpot = metrics.histogram("tpot_over_predicted", f"Time per output token, {ratio}", RATIO_BUCKETS)

    def first_token(self, session: GenerateStream) -> None:
        """Observe the time to first token."""
        predicted_s = session.placement.predicted_ttft_s
        if session.placements == 1 and predicted_s > 0:
            self._ttft.observe(session.ttft_s / predicted_s)

    def complete(self, session: GenerateStream) -> None:
        """Observe the mean time between tokens, if there are two tokens."""
        predicted_s, measured_s = session.placement.predicted_tpot_s, session.tpot_s
        if session.placements == 1 and predicted_s > 0 and measured_s > 0:
            self._tpot.observe(measured_s / predicted_s)


RECENT_WINDOW_S = 60.0
MAX_REMEMBERED = 1024
MAX_LISTED = 32
"""Requests listed individually."""
_Figures = tuple[float, int, int, int, float, float]
"""Of a request: end, seconds; tokens of prompt, cached prompt and answer; TTFT and TPOT, seconds."""


class RecentRequests:
    """Figures about the last answered requests, and a list of the last requests, however they ended.

    `clock` gives seconds.
    The figures are plain numbers because the event loop waits while they are added up.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._ended: deque[_Figures] = deque(maxlen=MAX_REMEMBERED)
        self._last: deque[conductor_pb2.EndedRequest] = deque(maxlen=MAX_LISTED)

    def add(self, request_id: str, timeline: conductor_pb2.Timeline) -> None:
        """Add an answered request."""
        usage, timing = timeline.usage, timeline.timing
        counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        self._ended.append((self._clock(), *counts, timing.ttft_s, timing.tpot_s))
        self._last.append(
            conductor_pb2.EndedRequest(request_id=request_id, tenant=timeline.tenant, usage=usage, timing=timing)
        )

    def add_refused(self, request_id: str, tenant: str, reason: str) -> None:
        """List a refused request; the request's figures count nowhere."""
        self._last.append(conductor_pb2.EndedRequest(request_id=request_id, tenant=tenant, refused=reason))

    def add_unanswered(
        self, request_id: str, timeline: conductor_pb2.Timeline, *, failed: str = "", cancelled: bool = False
    ) -> None:
        """List a request without a whole answer; the request's figures count nowhere."""
        self._last.append(
            conductor_pb2.EndedRequest(
                request_id=request_id,
                tenant=timeline.tenant,
                usage=timeline.usage,
                timing=timeline.timing,
                failed=failed,
                cancelled=cancelled,
            )
        )

    def state(self) -> conductor_pb2.RecentState:
        """Sums and quantiles of the last `RECENT_WINDOW_S` seconds."""
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
    """p50 and p99 among some values, each an actual value; 0 without values."""
    if not values:
        return conductor_pb2.Quantiles()
    ranked = sorted(values)
    p50, p99 = (ranked[min(len(ranked) - 1, int(share * len(ranked)))] for share in (0.5, 0.99))
    return conductor_pb2.Quantiles(p50=p50, p99=p99)


MAX_LISTED_TENANTS = 100
"""Tenants that are listed."""


def queue_state(
    requests: RequestScheduler, tenants: Counter[str], weight_of: Callable[[str], float]
) -> conductor_pb2.QueueState:
    """Lengths of the wait queues, and requests by tenant.

    Args:
        requests: the core's requests.
        tenants: number of open requests, by tenant.
        weight_of: a tenant's weight in fair sharing.
    """
    waiting = Counter(requests.memory_queue.count()) + Counter(requests.slo_queue.count())
    listed = sorted(tenants)[:MAX_LISTED_TENANTS]
    return conductor_pb2.QueueState(
        for_limits=len(requests.slo_queue),
        for_room=len(requests.memory_queue),
        prompt_bytes=requests.slo_queue.nbytes,
        tenants=[
            conductor_pb2.TenantState(
                tenant=tenant, weight=weight_of(tenant), requests=tenants[tenant], waiting=waiting[tenant]
            )
            for tenant in listed
        ],
    )


KEY_BYTES = 32
NUMBER_BYTES = 8
"""Bytes for a block's number and for a tenant's hashed name."""
MAX_UNHASHED = 1024
"""Requests that wait for the writer thread; more are left out."""
MAX_BLOCKS = 1 << 22
log = get_logger(__name__)


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
    """Records a trace with all requests until `close`, on a separate thread.

    An earlier file of the same name is kept with the suffix `.old`. Requests without a token, and requests beyond the
    bounds, are left out.

    Args:
        path: the file.
        max_blocks: most blocks in requests with unwritten lines, 8 bytes each; beyond that number the oldest request is
            left out.

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
        self._queue: SimpleQueue[ValidRequest | tuple[int, int] | None] = SimpleQueue()
        self._known: set[int] = set()
        self._overrun = 0
        self._writer = _TraceWriter(file, max_blocks)
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> int:
        """Requests that have no line in the trace."""
        return self._overrun + self._writer.left_out

    def opened(self, request: ValidRequest) -> None:
        """Record a request. Does not block."""
        if self._queue.qsize() >= MAX_UNHASHED:
            self._overrun += 1
            return
        self._known.add(request.spec.number)
        self._queue.put(request)

    def ended(self, number: int, tokens: int) -> None:
        """Record a request's end; `tokens` counts the tokens of each choice."""
        if number in self._known:
            self._known.remove(number)
            self._queue.put((number, tokens))

    def close(self) -> None:
        """Write the requests that have ended and close the file. Blocks until the thread is done."""
        self._queue.put(None)
        self._thread.join()
        if self.left_out:
            log.warning("requests are missing in the recording", requests=self.left_out)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            if isinstance(event, ValidRequest):
                self._writer.opened(event)
            else:
                self._writer.ended(*event)
        self._writer.close()


class _TraceWriter:
    """The trace's lines in the order of arrival.

    A line waits until the line's request and all earlier requests have ended.
    """

    def __init__(self, file: BinaryIO, max_blocks: int) -> None:
        self.left_out = 0
        self._file = file
        self._max_blocks = max_blocks
        self._broken = False
        self._key = world.random_bytes(KEY_BYTES)
        self._lines: OrderedDict[int, _TraceLine] = OrderedDict()
        self._blocks = 0
        self._block_size = 0
        self._began: float | None = None
        self._last_ms = 0.0

    def opened(self, request: ValidRequest) -> None:
        if not self._block_size:
            self._block_size = request.block_size
            self._write({"block_size": request.block_size})
        if request.block_size != self._block_size:  # the cluster was set up anew; a trace has one block size
            self.left_out += 1
            return
        spec, numbers = request.spec, self._numbers(request)
        line = _TraceLine(
            self._timestamp(spec.arrived), spec.prompt_tokens, numbers, self._tenant_hash(spec.tenant), spec.choices
        )
        self._lines[spec.number] = line
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
        """Write the requests that have ended; the others are left out."""
        for number in [number for number, line in self._lines.items() if line.tokens is None]:
            self._take(number)
            self.left_out += 1
        self._write_ended()
        self._file.close()

    def _timestamp(self, at: float) -> float:
        """Milliseconds since the first request, never decreasing: requests may overtake each other while tokenised."""
        if self._began is None:
            self._began = at
        self._last_ms = max(self._last_ms, round(1e3 * (at - self._began), 3))
        return self._last_ms

    def _numbers(self, request: ValidRequest) -> array[int]:
        """A number per block. A last block that is not full gets a number from the whole prompt."""
        keys: list[bytes] = list(request.prompt_keys)
        if request.spec.prompt_tokens > len(keys) * request.block_size:
            keys.append(b"rest" + request.spec.prompt_key)
        digests = (blake3(key, key=self._key).digest(length=NUMBER_BYTES) for key in keys)
        return array("Q", (int.from_bytes(digest, "big") >> 1 for digest in digests))

    def _tenant_hash(self, tenant: str) -> str:
        """Stands for a tenant in this trace alone."""
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
        """Write a line; returns whether writing worked.

        After a failure no line is written: the file may end in a line.
        """
        if self._broken:
            return False
        try:
            self._file.write(json.dumps(data).encode() + b"\n")
        except OSError as error:
            log.error("the recording ends early", error=str(error))
            self._broken = True
        return not self._broken


@dataclass(frozen=True, slots=True)
class RequestReports:
    """Reports the events of each request's life.

    Attributes:
        decisions: for `Explain`.
        predictions: for the metrics.
        recent: for the cluster's state.
        recording: the trace recording; None if none is wanted.
        hindsight: what placements have lost.
    """

    decisions: DecisionLog
    predictions: PredictionMetrics
    recent: RecentRequests
    recording: TraceRecording | None
    hindsight: Hindsight

    def opened(self, session: GenerateStream) -> None:
        """The core gets a request."""
        if self.recording is not None and session.request.resume is None:
            self.recording.opened(session.request)

    def first_token(self, session: GenerateStream) -> None:
        """The first new token has come."""
        self.decisions.first_token(session.spec.id, session.ttft_s, session.transport)
        if not session.spec.deferred:  # their first tokens come with the last ones
            self.predictions.first_token(session)

    def delivered(self, session: GenerateStream) -> None:
        """The KV has arrived at decode: a short answer may have ended before."""
        if self.decisions.has_ended(session.spec.id):
            self.decisions.ended(session.spec.id, session.timeline(over=True), session.attempts)

    def refused(self, request_id: str, tenant: str, reason: str, candidates: Iterable[PrefillChoice] = ()) -> None:
        """The request is refused, by the core or before reaching the core."""
        log.info("refused", request=request_id, tenant=tenant, reason=reason)
        self.decisions.refused(request_id, tenant, reason, candidates)
        self.recent.add_refused(request_id, tenant, reason)

    def completed(self, session: GenerateStream) -> None:
        """The request is answered; `ended` follows."""
        self.decisions.complete(session.spec.id, session.tpot_s)
        self.predictions.complete(session)
        self.recent.add(session.spec.id, session.timeline(over=True))

    def failed(self, session: GenerateStream, reason: str) -> None:
        """The request has no whole answer, and was neither refused nor cancelled; `ended` follows."""
        self.decisions.unanswered(session.spec.id, failed=reason)
        self.recent.add_unanswered(session.spec.id, session.timeline(over=True), failed=reason)

    def cancelled(self, session: GenerateStream) -> None:
        """The client stopped the request, or left, before the answer was whole; `ended` follows."""
        self.decisions.unanswered(session.spec.id, cancelled=True)
        self.recent.add_unanswered(session.spec.id, session.timeline(over=True), cancelled=True)

    def ended(self, session: GenerateStream) -> None:
        """The core has ended the request."""
        self.decisions.ended(session.spec.id, session.timeline(over=True), session.attempts)
        self.decisions.regretted(session.spec.id, session.number, self.hindsight)
        if self.recording is not None:
            self.recording.ended(session.number, -(-session.tokens // len(session.choices)))
