"""How a decode pool is filled: room for the longest answer at once, growing tables, shared prompts, preemption."""

import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field, replace

from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.layout import DEFAULT_BLOCK_SIZE
from moonpool.base.scheduling.state_machine import draw_unit
from moonpool.conductor.core.events import ReserveGranted
from moonpool.conductor.core.failures import Failure
from moonpool.engine.decode.core.settings import Preemption
from moonpool.engine.emulated.profile import Profile
from moonpool.simulator.clock import PS, SimulatedWorld
from moonpool.simulator.cluster.config import ClusterConfig, DecodeMemory
from moonpool.simulator.cluster.decode import DecodeListener, SimulatedDecode
from moonpool.simulator.cluster.requests import PlacedSequence, Request, SequenceReport, TokenTimes
from moonpool.simulator.experiments.frame import Progress, Result
from moonpool.simulator.experiments.report import Chart, digits
from moonpool.simulator.network import SimulatedNetwork

_ANSWERS = 7
"""Counter for draws of answer lengths."""
STREAM = 1
"""On which the answers come."""
CONDUCTOR = "conductor"


@dataclass(frozen=True, slots=True)
class MemoryLoad:
    """What the instance gets, all at once.

    Attributes:
        requests: all alike.
        prompt_tokens: per request.
        answer_tokens: mean answer length; exponential, cut at `max_tokens`.
        max_tokens: what a request may ask for.
        samples: answers per request.
        pool_blocks: blocks in the instance's pool.
        block_size: tokens per block.
        seed: for the answers' lengths.
    """

    requests: int = 1000
    prompt_tokens: int = 200
    answer_tokens: int = 200
    max_tokens: int = 4096
    samples: int = 1
    pool_blocks: int = 2000
    block_size: int = DEFAULT_BLOCK_SIZE
    seed: int = 1

    def answer(self, number: int) -> int:
        """Tokens in a request's answer."""
        drawn = -math.log(1.0 - draw_unit(self.seed, number, _ANSWERS)) * self.answer_tokens
        return max(2, min(self.max_tokens, round(drawn)))


@dataclass(frozen=True, slots=True)
class FillPolicy:
    """A way of filling the pool.

    Attributes:
        memory: the instance's.
        longest_life: admits a request only if all fit at their greatest length, and counts these blocks as taken;
            decode instances no longer do this.
        sharing: a request's samples answer one prompt, share the prompt's blocks, and run together.
    """

    memory: DecodeMemory = field(default_factory=DecodeMemory)
    longest_life: bool = False
    sharing: bool = True


Group = tuple[Request, ...]
"""Samples that begin with one prompt and run together."""


class WaitingRequests:
    """Requests that all want room on one decode instance, in order of arrival; their KV is there at once.

    Args:
        at_once: most sequences at a time; 0 = as many as the core lets in.
    """

    def __init__(self, config: ClusterConfig, groups: Listed[Group], at_once: int) -> None:
        self.world = SimulatedWorld()
        ears = DecodeListener(self._tokens, _failed, _ignore, lambda: None)
        self.instance = SimulatedDecode(SimulatedNetwork(self.world), config, "d0", (), ears)
        self.instance.stream_opened(STREAM, CONDUCTOR)
        self._waiting, self._at_once = deque(groups), at_once
        self._running: dict[int, Request] = {}
        self.tokens = self.ended_at = 0

    def run(self) -> None:
        """Until all answers are complete."""
        self._go_on()
        self.world.run()
        self.instance.check_at_rest()
        assert not self._waiting

    def _go_on(self, _: object = None) -> None:
        """Admit requests until a refusal, and again after a request has left."""
        while self._waiting and not 0 < self._at_once <= len(self._running):
            group = self._waiting[0]
            first, width = group[0], len(group)
            sequence = PlacedSequence(first, f"r{first.number}", first.tokens, first.answer, width=width)
            answer = self.instance.reserve(sequence, CONDUCTOR)
            if not isinstance(answer, ReserveGranted):
                return
            self._waiting.popleft()
            self._start(group, answer.target.transfer_id)

    def _start(self, group: Group, transfer: int) -> None:
        for place, request in enumerate(group):
            self._running[transfer + place] = request
            request.take(TokenTimes(self.world.now, [], self.world.now))  # the first token comes from prefill
        self.instance.open(transfer)
        self.instance.kv_whole(transfer)
        self.instance.start(STREAM, transfer)

    def _tokens(self, stream: int, news: Listed[SequenceReport]) -> None:
        for told in news:
            if told.made is not None:
                self._running[told.number].take(told.made)
            if told.over:
                self._end(self._running.pop(told.number))

    def _end(self, request: Request) -> None:
        self.ended_at = self.world.now
        self.tokens += request.made
        self.world.after(0, self._go_on)


def _failed(stream: int, transfer: int, failure: Failure) -> None:
    raise AssertionError(f"transfer {transfer} was given up: {failure}")


def _ignore(changes: KeyChanges) -> None:
    """Drop changes: the instance's content is not tracked."""


def groups_of(load: MemoryLoad, *, sharing: bool) -> list[Group]:
    """All samples from all requests: one request's samples together if they share the prompt, else each alone."""
    found: list[Group] = []
    for number in range(load.requests):
        samples = range(number * load.samples, (number + 1) * load.samples)
        if sharing:
            found.append(tuple(_sample(load, number, sample, samples[0]) for sample in samples))
        else:
            found += [(_sample(load, number, sample, sample),) for sample in samples]
    return found


def _sample(load: MemoryLoad, number: int, sample: int, prompt: int) -> Request:
    blocks = range(load.prompt_tokens // load.block_size)
    keys = tuple(BlockKey((prompt << 32 | block).to_bytes(32, "little")) for block in blocks)
    return Request(sample, 0, load.prompt_tokens, load.answer(number), keys, max_tokens=load.max_tokens)


def run_pool(profile: Profile, load: MemoryLoad, way: FillPolicy) -> WaitingRequests:
    """Serve the load on one decode instance."""
    config = ClusterConfig(
        profile=profile, prefill=1, decode=1, kvstore=0, block_size=load.block_size, memory=way.memory,
        pool_blocks=load.pool_blocks, max_num_seqs=1_000_000,
    )  # fmt: skip
    longest = config.blocks_for(load.prompt_tokens + load.max_tokens)
    waiting = WaitingRequests(
        config, groups_of(load, sharing=way.sharing), load.pool_blocks // longest if way.longest_life else 0
    )
    waiting.run()
    return waiting


def _row(name: str, load: MemoryLoad, way: FillPolicy, waiting: WaitingRequests) -> dict[str, object]:
    use, core, seconds = waiting.instance.use, waiting.instance.core, waiting.ended_at / PS
    longest = -(-(load.prompt_tokens + load.max_tokens) // load.block_size) * load.block_size
    slots = use.sequences_time * longest if way.longest_life else use.slots_time
    return {
        "mode": name,
        "samples": load.samples,
        "most_sequences": use.most_sequences,
        "mean_sequences": digits(use.sequence_steps / max(1, use.steps)),
        "slots_without_token": digits(1 - use.tokens_time / slots),
        "tokens_per_s": digits(waiting.tokens / seconds),
        "preempted": core.preempted.preemptions,
        "swapped": core.preempted.swaps,
        "recomputed_tokens": core.planner.recomputed_tokens,
    }


def fill_policies(load: MemoryLoad) -> Mapping[str, tuple[MemoryLoad, FillPolicy]]:
    """Variants to compare. "tight" variants expect short answers, so too many requests come and some are preempted."""
    several = replace(load, samples=8, requests=max(1, load.requests // 8))
    tight = DecodeMemory(watermark=0.0, assumed_answer_tokens=1)
    return {
        "preallocation": (load, FillPolicy(longest_life=True)),
        "on demand": (load, FillPolicy()),
        "tight, auto": (load, FillPolicy(tight)),
        "tight, swap": (load, FillPolicy(replace(tight, preemption=Preemption.SWAP))),
        "tight, recompute": (load, FillPolicy(replace(tight, preemption=Preemption.RECOMPUTE))),
        "n = 8, each its own prompt": (several, FillPolicy(sharing=False)),
        "n = 8, prompt shared": (several, FillPolicy()),
        "uncrowded": (replace(load, pool_blocks=load.pool_blocks * 1000), FillPolicy()),
    }


def memory(profile: Profile, load: MemoryLoad, progress: Progress) -> Result:
    """A row for each way to fill the pool."""
    rows: Listed[dict[str, object]] = []
    for name, (wanted, way) in fill_policies(load).items():
        rows = [*rows, _row(name, wanted, way, run_pool(profile, wanted, way))]
        progress(f"{name}: {rows[-1]['most_sequences']} sequences at most")
    names = tuple(str(row["mode"]) for row in rows[:-1])
    points = [(place, float(str(row["mean_sequences"]))) for place, row in enumerate(rows[:-1])]
    short = tuple(name.replace("n = 8, ", "8: ") for name in names)
    chart = Chart("Sequences at once in a fixed pool, mean", "", "sequences", {"sequences": points}, names=short)
    facts: dict[str, object] = {
        "profile": profile.name,
        "pool": f"{load.pool_blocks} blocks of {load.block_size} tokens",
        "requests": f"{load.requests} at once, prompts of {load.prompt_tokens}, answers of {load.answer_tokens} "
        f"(exponential, seed {load.seed}), at most {load.max_tokens}",
    }
    return Result("memory", facts, rows, chart)
