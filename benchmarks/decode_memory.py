"""How many sequences a decode pool holds, and what overcommitting it costs: `python -m benchmarks.decode_memory`.

Drives the decode core alone, in virtual time: steps take the time of an emulated profile, copies to DRAM and back the
blocks' bytes over `SWAP_BYTES_PER_S`, to and from a kvstore over `STORE_BYTES_PER_S`, one after the other in each
direction, and KV arrives at once. So the figures are the same on every machine.
"""

import argparse
import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.frame import Absent, Progress, Row, bounded, run
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.latency import decode_step_seconds, prefill_seconds
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.state_machine import IoEnded
from moonpool.engine.decode.core.actions import (
    Action,
    LoadStoredBlocks,
    RequestFreed,
    ReservationGranted,
    StartRun,
    StopRun,
    StoreBlock,
    SwapIn,
    SwapOut,
)
from moonpool.engine.decode.core.events import (
    Event,
    LoadEnd,
    ReserveBlocks,
    RunDone,
    RunProgress,
    StartDecoding,
    StoreEnd,
    StreamOpened,
    SwapEnd,
    TransferComplete,
    TransferOpened,
)
from moonpool.engine.decode.core.scheduler import DecodeScheduler
from moonpool.engine.decode.core.settings import DecodeSettings, Preemption
from moonpool.engine.emulated.profile import load_profile
from moonpool.engine.process_engine import RUN_STEPS

BLOCK_SIZE = 64
POOL_BLOCKS = 2_000
MAX_TOKENS = 4_096
PROMPT = 100
ANSWER = 200
SWAP_BYTES_PER_S = 16e9
"""Assumed: one PCIe 4.0 x16 link at about two thirds of the link's rate."""
STORE_BYTES_PER_S = 8e9
"""Assumed: one 100 Gbit/s link at about two thirds of the link's rate."""
SEED = 20_26
OVERCOMMIT = 3
SAMPLES = 8
LONG_PROMPT = 4_100
STOPPED = 1
WANTED_AT_ONCE, WANTED_OF_UNCROWDED = 8.0, 0.7


@dataclass
class Answering:
    """A sequence: request, prompt, answer length, and place."""

    request: int
    prompt: int
    answer: int
    made: int = 0
    computed: int = 0


@dataclass
class Virtual:
    """A decode instance in virtual time.

    Attributes:
        core: decides.
        now: seconds.
        tokens: made so far.
        ended: sequences that ended with their whole answer.
        slot_steps, token_steps: slots of the sequences' blocks without a token, and tokens, added up over sequences and
            steps.
        steps, runs: steps so far, and the runs that they were taken in.
    """

    core: DecodeScheduler
    now: float = 0.0
    tokens: int = 0
    ended: int = 0
    slot_steps: int = 0
    token_steps: int = 0
    steps: int = 0
    runs: int = 0
    live: dict[int, Answering] = field(default_factory=dict)
    refused: bool = False
    _next: int = 1
    _run: StartRun | None = None
    _left: int = 0  # steps of the run that are not over
    _events: list[tuple[float, int, Event]] = field(default_factory=list)
    _count: int = 0
    _link_free: dict[type[Action], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.post(StreamOpened(1, "c"))

    def post(self, event: Event) -> None:
        """Hands an event to the core and carries the actions out."""
        out: list[Action] = []
        self.core.handle(self.now, event, out)
        for action in out:
            self._perform(action)

    def admit(self, prompt: int, answer: int, width: int = 1) -> bool:
        """Begins sequences, together, whose longest life is `MAX_TOKENS` more; False when they were refused."""
        number, self._next = self._next, self._next + width
        members = range(number, number + width)
        self.refused = True
        keys = _keys(number, 0, prompt)
        self.post(ReserveBlocks(number, EngineRequest(keys, prompt, prompt, width), prompt + MAX_TOKENS, stores=1))
        if self.refused:
            return False
        self.live |= {member: Answering(number, prompt, answer) for member in members}
        for event in (
            TransferOpened(number),
            TransferComplete(number),
            StartDecoding(number, 1, 0, (0,) * (width - 1)),
        ):
            self.post(event)
        for member in members:
            self.live[member].made = 1
        self.tokens += width
        return True

    def step(self) -> bool:
        """The next thing that happens: a step or a copy ends. False if no work is left."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        self.post(self._done() if isinstance(event, RunDone) else event)
        return True

    def _done(self) -> RunDone | RunProgress:
        """A step is over, and so is the run after the last step or after a sequence has ended."""
        run = self._run
        assert run is not None
        ended, filled = [], []
        sampled = [*run.batch, *(chunk.id for chunk in run.chunks if chunk.sample)]
        for number in sampled:
            it = self.live[number]
            tokens = it.prompt + it.made
            self.token_steps += tokens
            self.slot_steps += self._slots(number) - tokens
            if tokens % BLOCK_SIZE == 0 and tokens > it.computed:
                filled.append((number, _key(number, tokens)))
            it.computed = max(it.computed, tokens)
            it.made += 1
            self.tokens += 1
            if it.made == it.answer:
                ended.append((number, STOPPED))
                self.ended += 1
        self.steps, self._left = self.steps + 1, self._left - 1
        if self._left and not ended:
            self._at(self._step_s(run, 1), RunDone(run.step, False, 0.0))
            return RunProgress(run.step, 1, 0.0, tuple(filled))
        self._run = None
        return RunDone(run.step, False, 0.0, tuple(ended), tuple(filled))

    def _slots(self, number: int) -> int:
        """Other sequences that share blocks in a sequence's table."""
        member = self.core.requests[self.live[number].request].find(number)
        assert member is not None, "a sequence that was computed is in the batch"
        return len(member.table) * BLOCK_SIZE

    def _perform(self, action: Action) -> None:
        match action:
            case ReservationGranted():
                self.refused = False
            case StartRun():
                self._run, self._left, self.runs = action, action.steps, self.runs + 1
                self._at(self._step_s(action), RunDone(action.step, False, 0.0))
            case StopRun():
                self._left = 1
            case SwapOut(io, _, blocks) | SwapIn(io, _, _, blocks):
                seconds = len(blocks) * self.core.settings.block_bytes / SWAP_BYTES_PER_S
                self._at(self._after_others(type(action), seconds), IoEnded(io, SwapEnd(True, seconds)))
            case StoreBlock(io):
                seconds = self.core.settings.block_bytes / STORE_BYTES_PER_S
                self._at(self._after_others(StoreBlock, seconds), IoEnded(io, StoreEnd(True)))
            case LoadStoredBlocks(io, _, _, blocks):
                seconds = len(blocks) * self.core.settings.block_bytes / STORE_BYTES_PER_S
                seconds = self._after_others(LoadStoredBlocks, seconds)
                self._at(seconds, IoEnded(io, LoadEnd(len(blocks), seconds)))
            case RequestFreed(number):
                self.live = {member: it for member, it in self.live.items() if it.request != number}

    def _after_others(self, kind: type[Action], seconds: float) -> float:
        """Seconds until a copy has ended: each link direction makes one copy after the other."""
        self._link_free[kind] = max(self.now, self._link_free.get(kind, 0.0)) + seconds
        return self._link_free[kind] - self.now

    def _step_s(self, run: StartRun, over: int = 0) -> float:
        """Of the next step of a run, when so many are over of which the core has not heard."""
        speeds, sequences = self.core.settings.speeds, len(run.batch)
        seconds = decode_step_seconds(speeds, sequences, self.core.planner.batch.context + over * sequences)
        return seconds + sum(
            prefill_seconds(speeds, chunk.count, chunk.start, steps=0, begins=False) for chunk in run.chunks
        )

    def _at(self, seconds: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, event))


def _key(number: int, tokens: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big") + tokens.to_bytes(16, "big"))


def _keys(number: int, begin: int, tokens: int) -> tuple[BlockKey, ...]:
    return tuple(_key(number, end) for end in range(begin + BLOCK_SIZE, tokens + 1, BLOCK_SIZE))


def virtual(blocks: int, preemption: Preemption = Preemption.AUTO, run_steps: int = RUN_STEPS) -> Virtual:
    """An instance of LLaMA3-70B on 8 x A800 with a pool of so many blocks, and with runs as the service has them."""
    profile = load_profile("llama-70b-a800")
    config = DecodeSettings(
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        block_bytes=BLOCK_SIZE * profile.token_bytes,
        max_num_seqs=4_096,
        lease_s=60.0,
        speeds=replace(profile.speeds, load_bytes_per_s=STORE_BYTES_PER_S),
        preemption=preemption,
        watermark_blocks=blocks // 100,
        swap_blocks=blocks * 4,
        run_steps=run_steps,
        ahead_steps=run_steps if run_steps > 1 else 0,
    )
    return Virtual(DecodeScheduler(config))


def teach(it: Virtual, answer: int) -> None:
    """Lets some answers of a length end."""
    for _ in range(20):
        while not it.admit(PROMPT, answer):
            assert it.step(), "nothing goes on, and there is no room"
    while it.step():
        pass


@dataclass(frozen=True)
class Filled:
    """A pool that is always offered more.

    Attributes:
        sequences: mean per step.
        unused: slots of their blocks without a token, over tokens.
        tokens: mean per sequence in a step.
        run_steps: mean per run.
    """

    sequences: float
    unused: float
    tokens: float
    run_steps: float


def at_once(prompt: int, answer: int, ended: int, *, longest_life: bool = False) -> Filled:
    """Fills a pool until so many have ended; or takes only as many as fit if each has the longest life."""
    it, rng = virtual(POOL_BLOCKS), random.Random(SEED)
    teach(it, answer)
    counts: list[int] = []
    before, it.slot_steps, it.token_steps, it.steps, it.runs = it.tokens, 0, 0, 0, 0
    most = POOL_BLOCKS // -(-(prompt + BLOCK_SIZE // 2 + MAX_TOKENS) // BLOCK_SIZE) if longest_life else POOL_BLOCKS
    begun = it.ended
    while it.ended - begun < ended:
        while len(it.live) < most and it.admit(prompt + rng.randrange(BLOCK_SIZE), answer):
            pass
        counts.append(len(it.live))
        it.step()
    steady = counts[len(counts) // 3 :]
    tokens = it.token_steps / (it.tokens - before)
    return Filled(sum(steady) / len(steady), it.slot_steps / it.token_steps, tokens, it.steps / it.runs)


@dataclass(frozen=True)
class Crowd:
    """What a crowd of sequences came to."""

    tokens_per_s: float
    ended: int
    preemptions: int
    swaps: int
    loaded: int
    recomputed: int


def crowd(blocks: int, count: int, answer: int, preemption: Preemption) -> Crowd:
    """So many sequences at once, admitted while short answers were expected."""
    it = virtual(blocks, preemption)
    teach(it, 2)
    begun, tokens, ended, left = it.now, it.tokens, it.ended, count
    while left and it.admit(PROMPT, answer):
        left -= 1
    while it.step():
        while left and it.admit(PROMPT, answer):
            left -= 1
    it.core.check_invariants()
    assert it.core.blocks.num_available == blocks, "blocks are lost"
    preempted, seconds = it.core.preempted, it.now - begun
    return Crowd(
        (it.tokens - tokens) / seconds,
        it.ended - ended,
        preempted.preemptions,
        preempted.swaps,
        it.core.stored_blocks.loaded_blocks,
        it.core.planner.recomputed_tokens,
    )


def most_blocks(prompt: int, answer: int, width: int) -> int:
    """Most blocks for answers with one length to one prompt; none are given ahead, as none are to a group."""
    it, most = virtual(POOL_BLOCKS, run_steps=1), 0
    assert it.admit(prompt, answer, width), "the pool is large enough"
    while it.step():
        most = max(most, it.core.blocks.num_used)
    assert it.ended == width, "an answer is missing"
    return most


def measure(options: argparse.Namespace, progress: Progress) -> Sequence[Row | Absent]:
    """All figures: virtual time is the same in every run, so there is one."""
    return [*_full(progress), *_shared(progress), *_overcommitted(progress)]


def _full(progress: Progress) -> Iterator[Row]:
    """What is in a pool that is always offered more."""
    name = f"{POOL_BLOCKS} blocks, max_tokens {MAX_TOKENS}, answers of {ANSWER}"
    full, life = at_once(PROMPT, ANSWER, 3_000), at_once(PROMPT, ANSWER, 300, longest_life=True)
    progress(f"sequences at once; a run has {full.run_steps:.2f} steps")
    ratio = full.sequences / life.sequences
    reference = "each one's longest life kept free"
    yield Row(
        f"sequences at once, {name}",
        full.sequences,
        "sequences",
        None,
        reference,
        life.sequences,
        ratio,
        WANTED_AT_ONCE,
    )
    allowed = (BLOCK_SIZE - 1) / 2 / full.tokens + 0.01
    limit = "half a block over the mean length + 1 %"
    yield bounded(f"slots without a token over tokens, {name}", "share", [full.unused], limit, allowed)


def _shared(progress: Progress) -> Iterator[Row]:
    """Several answers to one prompt, against one answer and the blocks of the others' tokens."""
    one, several = (most_blocks(LONG_PROMPT, ANSWER, width) for width in (1, SAMPLES))
    needed = one + (SAMPLES - 1) * -(-ANSWER // BLOCK_SIZE)
    progress(f"shared prompts: {several} blocks, one answer and the others' tokens need {needed}")
    name = f"blocks of {SAMPLES} answers of {ANSWER} to a prompt of {LONG_PROMPT}, over one's and the others' answers"
    yield bounded(name, "ratio", [several / needed], "limit", 1.15)


def _overcommitted(progress: Progress) -> Iterator[Row]:
    answer = 1_000
    each = -(-(PROMPT + answer) // BLOCK_SIZE)
    count = OVERCOMMIT * POOL_BLOCKS // each
    fitting = POOL_BLOCKS // (each + 1)
    alone = crowd(POOL_BLOCKS, fitting, answer, Preemption.AUTO)
    roomy = crowd(OVERCOMMIT * (POOL_BLOCKS + fitting), count, answer, Preemption.AUTO)
    assert not alone.preemptions + roomy.preemptions, "these are to be uncrowded"
    progress("uncrowded")
    rates = {}
    # The target is that of the way that is taken by itself; the others stand beside.
    for way in (Preemption.AUTO, Preemption.SWAP, Preemption.STORE, Preemption.CACHE, Preemption.RECOMPUTE):
        found, name = crowd(POOL_BLOCKS, count, answer, way), f"overcommitted {OVERCOMMIT} times, {way.value}"
        assert found.ended == count, f"{count - found.ended} sequences were lost"
        progress(
            f"{name}: {found.preemptions} preemptions, {found.swaps} swaps, {found.loaded} blocks loaded, "
            f"{found.recomputed} tokens computed again, none of {count} lost"
        )
        rates[way] = found.tokens_per_s
        target = WANTED_OF_UNCROWDED if way is Preemption.AUTO else None
        yield _beside(name, rates[way], "uncrowded: as many as fit", alone.tokens_per_s, target)
        yield _beside(name, rates[way], "uncrowded: a pool for all", roomy.tokens_per_s, target)
    swap, recompute = rates[Preemption.SWAP], rates[Preemption.RECOMPUTE]
    yield _beside(f"overcommitted {OVERCOMMIT} times, swap", swap, "recompute", recompute)


def _beside(name: str, rate: float, reference: str, other: float, target: float | None = None) -> Row:
    return Row(name, rate, "tokens/s", None, reference, other, rate / other, target)


if __name__ == "__main__":
    run("decode_memory", measure)
