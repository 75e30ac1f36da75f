"""Prefill's core alone in virtual time: when prompts of several tenants get their tokens, whatever the machine does."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.latency import Speeds, prefill_seconds
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.state_machine import IoEnded
from moonpool.engine.prefill.core.actions import Action, ReportFirstToken, RunStep
from moonpool.engine.prefill.core.events import AddRequest, IoResult, StepEnded
from moonpool.engine.prefill.core.scheduler import PrefillScheduler
from moonpool.engine.prefill.core.settings import PrefillSettings

BLOCK_SIZE = 64
SETTINGS = PrefillSettings(
    blocks=22_000, block_size=BLOCK_SIZE, layers=1, slice_bytes=1, max_num_batched_tokens=512, max_queue=1_000_000
)


@dataclass(frozen=True, slots=True, order=True)
class Coming:
    """A prompt: arrival in seconds, tokens and tenant."""

    at: float
    tokens: int
    tenant: str


def first_tokens(coming: Sequence[Coming], tenant: str, speeds: Speeds) -> list[float]:
    """TTFT for a tenant's prompts, seconds, in arrival order; they come sorted, and begin all unlike."""
    core = PrefillScheduler(SETTINGS, speeds)
    heap: list[tuple[float, int, AddRequest | IoEnded[IoResult]]] = [
        (it.at, number, _arrival(number, it)) for number, it in enumerate(coming, 1)
    ]
    heapify(heap)
    wanted = {number: it.at for number, it in enumerate(coming, 1) if it.tenant == tenant}
    found: dict[int, float] = {}
    while len(found) < len(wanted):
        now, order, event = heappop(heap)
        out: list[Action] = []
        core.handle(now, event, out)
        for action in out:
            match action:
                case RunStep(io=io):
                    seconds = _seconds(action, speeds)
                    ended: IoEnded[IoResult] = IoEnded(io, StepEnded(False, seconds))
                    heappush(heap, (now + seconds, order + len(coming), ended))
                case ReportFirstToken(id=number) if number in wanted:
                    found[number] = now - wanted[number]
    return [found[number] for number in wanted]


def _arrival(number: int, coming: Coming) -> AddRequest:
    keys = tuple(
        BlockKey(number.to_bytes(16, "big") + index.to_bytes(16, "big")) for index in range(coming.tokens // BLOCK_SIZE)
    )
    return AddRequest(number, EngineRequest(keys, coming.tokens, coming.tokens, tenant=coming.tenant), None)


def _seconds(step: RunStep, speeds: Speeds) -> float:
    chunks = [(it.end - it.start, it.start) for it in step.chunks]
    return speeds.prefill_base_s + sum(
        [prefill_seconds(speeds, new, start, steps=0, begins=not start) for new, start in chunks]
    )
